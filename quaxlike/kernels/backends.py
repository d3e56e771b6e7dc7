"""Selects an operation's implementation, based only on the platform, shapes and dtypes.

The choice is made whilst tracing and then cached by JAX, so it can't depend on values. Users can also force a
particular backend. This is part of the JAX trace context: otherwise a function traced under one backend could
be reused under another.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.core
from jax.extend.core import no_effects
from jax.interpreters import mlir

from ..core import compat, recording
from ..primitives import DefinedPrimitive, Partitioning, define_primitive
from .multilinear import is_spread, vary_alike

Backend = Literal["reference", "native", "gpu", "tpu"]

# Part of the JAX trace context, and so of its cache keys: forcing another backend retraces.
_forced = jax.make_user_context(default_value=None)

_USUAL: dict[str, Backend] = {"cpu": "native", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


class KernelFallbackWarning(UserWarning):
    """Emitted if the requested backend doesn't support an operation. Another backend is used instead."""


class Choice(NamedTuple):
    """The backend selected for an operation.

    **Attributes:**

    - `backend`: `"reference"`, `"native"`, `"gpu"` or `"tpu"`.
    - `reason`: how the operation runs there, and why it doesn't run on another backend.
    - `run`: computes the operation from its operands and parameters.
    """

    backend: Backend
    reason: str
    run: Callable[..., jax.Array]


@contextlib.contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Runs every kernel inside this context on the backend `name`, if it supports the operation.

    This is useful for e.g. testing. Backends for other platforms are interpreted if possible: `"tpu"` on a
    CPU runs the TPU kernels in Pallas's (slow) interpret mode. Unsupported operations fall back to the next
    best backend, with a `KernelFallbackWarning`.

    !!! example

        ```python
        import jax.numpy as jnp
        from quaxlike import kernels
        from quaxlike.kernels.blockwise import NF4, quantize_codebook

        packed, absmax = quantize_codebook(jnp.ones((8, 64)), NF4, block_size=64)
        with kernels.backend("reference"):
            y = kernels.nf4_matmul(
                jnp.ones((2, 64)), packed, absmax, NF4, shape=(8, 64), block_size=64
            )
        ```

    **Arguments:**

    - `name`: `"reference"`, `"native"` (for CPUs), `"gpu"`, `"tpu"`, or None for the platform's default.

    **Raises:** `ValueError` for any other name.
    """
    if name is not None and name not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)} or None, got {name!r}")
    with _forced(name):
        yield


def requested() -> Backend | None:
    """Returns the name passed to the innermost `backend` context, if any."""
    return _forced.value


def chosen_backend(primitive: Any, *operands: Any, platform: str | None = None, **params: Any) -> Choice:
    """Returns the backend for a kernel primitive on the given operands, along with the reason why.

    **Arguments:**

    - `primitive`: a kernel primitive: `nf4_matmul_p`, `lora_matmul_p`, `block_sparse_matmul_p`, ...
    - `operands`: the primitive's inputs: arrays, or anything else with a shape and a dtype.
    - `platform`: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`. Defaults to the default device's platform.
    - `params`: the primitive's parameters.

    **Returns:** the [`Choice`][quaxlike.kernels.Choice] for these operands.
    """
    if not isinstance(primitive, DefinedPrimitive):
        raise TypeError(f"chosen_backend takes a primitive such as nf4_matmul_p; found {primitive!r}.")
    platform = device_platform() if platform is None else platform
    if not isinstance(platform, str):
        raise TypeError(f'chosen_backend takes the name of a platform, such as "cuda"; found {platform!r}.')
    return primitive.slot("backend")(platform, *operands, **params)


def kernel_primitive(
    name: str,
    choose: Callable[..., Choice],
    reference: Callable[..., jax.Array],
    *,
    result: Callable[..., jax.ShapeDtypeStruct] | None = None,
    partitioning: Callable[..., Partitioning | None] | None = None,
    local: Callable[..., dict[str, Any]] | None = None,
    **rules: Any,
) -> DefinedPrimitive:
    """Defines a primitive whose backend is selected by `choose`, separately for each platform.

    **Arguments:**

    - `choose`: a function `choose(platform, *operands, backend, partitioned, **params) -> Choice`. Here
        `partitioned` says whether XLA will partition the program across devices.
    - `reference`: computes the operation on any platform. Any rules not given are derived from this.
    - `result`: `result(*leaves, **params)` returns the output's shape and dtype. If `None`, these are
        obtained by tracing the reference, which is slower.
    - `partitioning`: `partitioning(*operands, **params)` returns how to partition the operation, with every
        device running the kernel on its own shard. It should return `None` if this isn't possible.
    - `local`: `local(*operands, **params)` returns the parameters for a single device, given its shards of
        the operands.
    - `rules`: hand-written rules, passed on to `define_primitive`.
    """

    def impl(*operands: Any, backend: Backend | None, **params: Any) -> jax.Array:
        del backend
        return reference(*operands, **params)

    def run_on(platform: str, partitioned: bool, *leaves: Any, **params: Any) -> jax.Array:
        tree = params.pop("in_tree", None)
        operands = leaves if tree is None else jax.tree.unflatten(tree, leaves)
        params = params if local is None else local(*operands, **params)
        choice = choose(platform, *operands, partitioned=partitioned, **params)
        forced = params.pop("backend")
        asked = _asked(platform, forced)
        # The native library is optional, so don't warn if it isn't available, unless it was explicitly
        # requested.
        if choice.backend != asked and (platform != "cpu" or forced):
            _tell_once(name, asked, choice)
        return choice.run(*operands, **params)

    def lower(platform: str, context: mlir.LoweringRuleContext, *leaves: Any, **params: Any) -> Any:
        params = primitive.plain_params(params)
        exported = context.module_context.lowering_parameters.for_export
        if exported and platform == "cpu" and params["backend"] is None:
            params["backend"] = "reference"  # The native library may not be installed on other machines.
        partitioned = is_partitioned(context)
        run = functools.partial(run_on, platform, partitioned)
        # Leave an explicitly requested reference as plain JAX, so that it can be exported.
        divided = partitioned and params["backend"] != "reference" and _has_mesh(context)
        if divided and partitioning is not None:
            run = functools.partial(_split, functools.partial(run_on, platform), partitioning)
        rule = mlir.lower_fun(run, multiple_results=False)
        return compat.lower_unvaried(rule, context, *leaves, **params)

    primitive = define_primitive(name, impl, **rules)
    for platform in ("cpu", "cuda", "rocm", "tpu"):
        mlir.register_lowering(primitive, functools.partial(lower, platform), platform=platform)
    if result is not None:
        _register_result(primitive, result)
    primitive.slot("backend").register(choose)
    if partitioning is not None:
        primitive.slot("partitioning").register(partitioning)
    if local is not None:
        primitive.slot("local").register(local)
    return primitive


def _register_result(primitive: DefinedPrimitive, result: Callable[..., jax.ShapeDtypeStruct]) -> None:
    """Uses `result` as the abstract evaluation rule if this only depends on shapes and dtypes.

    This avoids tracing the reference whenever the primitive is bound.
    """
    traced: Any = primitive.abstract_eval

    def abstract_eval(*avals: Any, **params: Any) -> Any:
        # Varying mesh axes and sharded types should also propagate to the output, but `result` doesn't
        # support this, so fall back to tracing.
        if any(aval != jax.core.ShapedArray(aval.shape, aval.dtype, aval.weak_type) for aval in avals):
            return traced(*avals, **params)
        out = result(*avals, **primitive.plain_params(params))
        return jax.core.ShapedArray(out.shape, out.dtype), no_effects

    primitive.def_effectful_abstract_eval(abstract_eval)


def _split(
    run: Callable[..., jax.Array],
    partitioning: Callable[..., Partitioning | None],
    *leaves: Any,
    **params: Any,
) -> jax.Array:
    """Runs the operation on each device's shard or, if this isn't possible, lets XLA partition it."""
    tree = params.get("in_tree")
    operands = leaves if tree is None else jax.tree.unflatten(tree, leaves)
    rule = partitioning(*operands, **params)
    if rule is None:
        return run(True, *leaves, **params)
    return rule.apply(lambda *leaves: [run(False, *leaves, **params)])(*leaves)[0]


def _has_mesh(context: mlir.LoweringRuleContext) -> bool:
    """Returns whether XLA partitions the program over a known mesh, with all its axes available."""
    axes = context.module_context.axis_context
    if not isinstance(axes, mlir.ShardingContext):
        return False
    return axes.device_assignment is not None and axes.abstract_mesh is not None


def _ask_for_devices(primitive: DefinedPrimitive) -> None:
    """Makes JAX resolve devices (and the mesh) before lowering, because `custom_partitioning` needs them.

    Not whilst lowering for unavailable devices: JAX would raise an error. A program already traced in this
    way is left to XLA to partition.
    """
    elsewhere = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) is not None
    compat.lower_with_devices(primitive, not elsewhere and _forced.value != "reference")


def is_partitioned(context: mlir.LoweringRuleContext) -> bool:
    """Returns whether XLA will partition the program across devices, i.e. outside any `shard_map`."""
    axes = context.module_context.axis_context
    if isinstance(axes, mlir.ShardingContext):
        return axes.num_devices != 1
    if isinstance(axes, mlir.SPMDAxisContext):  # A `shard_map`, which can leave some axes automatic.
        manual = {*axes.manual_axes, *axes.mesh.manual_axes}
        return any(size != 1 for axis, size in axes.mesh.shape.items() if axis not in manual)
    return False


def bind(primitive: DefinedPrimitive, *operands: Any, **params: Any) -> jax.Array:
    """Binds a kernel primitive with the requested backend, and records the choice for `explain`."""
    params["backend"] = _forced.value
    if recording.active() is not None:
        choice = chosen_backend(primitive, *operands, **params)
        recording.note(f"{primitive.name} on {choice.backend}: {choice.reason}")
    if primitive.slot("partitioning").registered:
        _ask_for_devices(primitive)
    leaves, tree = jax.tree.flatten(operands)
    rule = None
    if is_spread(leaves) and primitive.slot("partitioning").registered:
        rule = primitive.slot("partitioning")(*operands, **params)
    if rule is None:
        return primitive(*vary_alike(operands), **params)  # `shard_map` requires operands to vary alike.

    def part(*leaves: Any) -> list[jax.Array]:
        operands = jax.tree.unflatten(tree, leaves)
        return [primitive(*vary_alike(operands), **primitive.slot("local")(*operands, **params))]

    # The operands' types are explicitly sharded, so bind the primitive inside a `shard_map`, once per shard.
    return rule.apply_to_types(part)(*leaves)[0]


def first_choice(
    platform: str,
    forced: Backend | None,
    reference: Callable[..., jax.Array],
    kernels: Mapping[str, Callable[..., Choice | str]],
    *operands: Any,
    partitioned: bool,
    **params: Any,
) -> Choice:
    """Selects the platform's kernel if there is one, or otherwise the reference.

    **Arguments:**

    - `kernels`: for each backend, `choose(platform, *operands, partitioned, **params)` returns either its
        choice or why it doesn't support the operation.
    """
    asked = _asked(platform, forced)
    # Exported programs can have symbolic dimensions, for which kernels can't be compiled.
    shapes = [leaf.shape for leaf in jax.tree.leaves(operands)]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        return Choice("reference", "a kernel is made for shapes that are known; one is left open", reference)
    if asked in kernels:
        choice = kernels[asked](platform, *operands, partitioned=partitioned, **params)
        return choice if isinstance(choice, Choice) else Choice("reference", choice, reference)
    reason = f"there is no {forced} kernel" if forced else f"there is no kernel for platform {platform!r}"
    reason = "forced" if forced == "reference" else reason
    return Choice("reference", reason, reference)


def device_platform() -> str:
    """Returns the default device's platform: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.

    (In JAX, `Device.platform` doesn't distinguish between different kinds of GPU.)
    """
    device = jax.devices()[0]
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def _asked(platform: str, forced: Backend | None) -> Backend:
    return forced or _USUAL.get(platform, "reference")


PARTITIONED = (
    "XLA cannot divide a kernel between devices, as it does this program; call it within "
    "`jax.shard_map` for each device to run it on its part"
)


# For compute capability 12.0, Mosaic GPU emits PTX for sm_120a but fails to assemble it for sm_120, as of JAX
# 0.11.2.
_NEWEST = 10


def mosaic_gpu_refusal(platform: str, *, lowest: tuple[int, int], newest: int = _NEWEST) -> str | None:
    """Returns why a Mosaic GPU kernel can't be compiled, or `None` if it can.

    **Arguments:**

    - `lowest`: the lowest compute capability supported by the kernel.
    - `newest`: the highest major version supported by the kernel. Defaults to the highest for which Mosaic
        GPU's output can be assembled.
    """
    if platform != "cuda":
        return f"Mosaic GPU compiles for CUDA, not for platform {platform!r}"
    missing, looks_at_device = _mosaic_gpu()
    if missing is not None:
        return missing
    # Without a GPU, we must be lowering for another machine, possibly described by an abstract device.
    device: Any = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is None and jax.default_backend() == "gpu":
        device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "9.0")
    major, minor = map(int, capability.split("."))
    if not looks_at_device:  # On anything older than Hopper, LLVM would abort the process.
        lowest = max(lowest, (9, 0))
    if (major, minor) < lowest or major > newest:
        return f"the kernel is not for devices of compute capability {capability}"
    return None


@functools.cache
def _mosaic_gpu() -> tuple[str | None, bool]:
    """Returns what this version of Mosaic GPU lacks (if anything), and whether it checks its target device.

    In JAX 0.10 it doesn't: every kernel elects a thread using an instruction only found on Hopper and newer
    devices.
    """
    try:
        import jax.experimental.mosaic.gpu.utils as mosaic_utils
        import jax.experimental.pallas.mosaic_gpu as plgpu
    except ImportError as error:
        return f"this JAX has no Mosaic GPU: {error}", False
    missing = [n for n in ("kernel", "inline_mgpu", "LoweringSemantics") if not hasattr(plgpu, n)]
    if missing:
        return f"Mosaic GPU of JAX {jax.__version__} lacks {', '.join(missing)}", False
    return None, hasattr(mosaic_utils, "_infer_arch")


def pallas_tpu_refusal(platform: str) -> str | None:
    """Returns why TPU kernels can't run on a platform, or `None` if they can.

    On CPUs they are interpreted.
    """
    if platform not in ("tpu", "cpu"):
        return f"Pallas runs kernels for TPUs on TPUs and CPUs, not on platform {platform!r}"
    if platform == "tpu" and jax.default_backend() != "tpu":
        device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
        if device is None:
            return (
                "Pallas must know which TPU it compiles for; if none is available, lower within "
                "`jax.sharding.use_abstract_mesh` of a mesh with an `abstract_device`"
            )
    return None


@functools.cache
def _tell_once(name: str, asked: Backend, choice: Choice) -> None:
    warnings.warn(
        f"{name} runs on the {choice.backend} backend instead of the {asked} backend: {choice.reason}",
        KernelFallbackWarning,
        stacklevel=2,
    )

"""The choice of an implementation, by platform, shapes and dtypes only.

The choice must not depend on values: it is made during tracing, and cached by JAX. It is part of the trace
context, so a function traced under one forced backend is not reused under another.
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

# Part of JAX's trace context: a function traced under one choice is not reused under another.
_forced = jax.make_user_context(default_value=None)

_USUAL: dict[str, Backend] = {"cpu": "native", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


class KernelFallbackWarning(UserWarning):
    """The requested backend does not support an operation, so another one runs it."""


class Choice(NamedTuple):
    """The backend that runs an operation.

    **Attributes:**

    - `backend`: `"reference"`, `"native"`, `"gpu"` or `"tpu"`.
    - `reason`: how it runs there, and why not on another backend.
    - `run`: computes the operation from its operands and parameters.
    """

    backend: Backend
    reason: str
    run: Callable[..., jax.Array]


@contextlib.contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Runs every kernel inside this context on the backend `name`, if it supports the shapes.

    Another platform's backend is interpreted if possible: `"tpu"` on a CPU runs the TPU kernels in Pallas'
    interpret mode, which is slow. If the backend does not support an operation, the next best one runs it,
    with a `KernelFallbackWarning`.

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
    """Returns the name given by the innermost `backend` context."""
    return _forced.value


def chosen_backend(primitive: Any, *operands: Any, platform: str | None = None, **params: Any) -> Choice:
    """Tells which backend runs a kernel primitive on given operands, and why.

    **Arguments:**

    - `primitive`: a kernel primitive: `nf4_matmul_p`, `lora_matmul_p`, `block_sparse_matmul_p`, ...
    - `operands`: its inputs: arrays, or anything with a shape and a dtype.
    - `platform`: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`; the default device's if None.
    - `params`: its parameters.

    **Returns:** the [`Choice`][quaxlike.kernels.Choice].
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
    """Defines a primitive that lets `choose` pick its backend on each platform.

    **Arguments:**

    - `choose`: `choose(platform, *operands, backend, partitioned, **params) -> Choice`. An operation is
        `partitioned` if XLA divides its program between devices.
    - `reference`: computes the operation on any platform. Missing rules are derived from it.
    - `result`: `result(*leaves, **params)`: the result's shape and dtype. If None, we trace the reference.
    - `partitioning`: `partitioning(*operands, **params)`: how to split the operation over devices, so that
        each runs the kernel on its part; None if it cannot be split.
    - `local`: `local(*operands, **params)`: the parameters for a device's parts of the operands.
    - `rules`: hand-written rules, for `define_primitive`.
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
        if choice.backend != asked and (platform != "cpu" or forced):  # native products are optional
            _tell_once(name, asked, choice)
        return choice.run(*operands, **params)

    def lower(platform: str, context: mlir.LoweringRuleContext, *leaves: Any, **params: Any) -> Any:
        exported = context.module_context.lowering_parameters.for_export
        if exported and platform == "cpu" and params["backend"] is None:
            params["backend"] = "reference"  # other machines may lack the native library
        partitioned = is_partitioned(context)
        run = functools.partial(run_on, platform, partitioned)
        # A reference requested by name stays plain JAX, so it can be exported.
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
    """Makes JAX ask `result` for the result's type, if shapes and dtypes determine it."""
    traced: Any = primitive.abstract_eval

    def abstract_eval(*avals: Any, **params: Any) -> Any:
        # Operands that vary over mesh axes, or have sharded types, determine the same for the result.
        if any(aval != jax.core.ShapedArray(aval.shape, aval.dtype, aval.weak_type) for aval in avals):
            return traced(*avals, **params)
        out = result(*avals, **params)
        return jax.core.ShapedArray(out.shape, out.dtype), no_effects

    primitive.def_effectful_abstract_eval(abstract_eval)


def _split(
    run: Callable[..., jax.Array],
    partitioning: Callable[..., Partitioning | None],
    *leaves: Any,
    **params: Any,
) -> jax.Array:
    """Runs the operation on each device's part, or lets XLA divide it."""
    tree = params.get("in_tree")
    operands = leaves if tree is None else jax.tree.unflatten(tree, leaves)
    rule = partitioning(*operands, **params)
    if rule is None:
        return run(True, *leaves, **params)
    return rule.apply(lambda *leaves: [run(False, *leaves, **params)])(*leaves)[0]


def _has_mesh(context: mlir.LoweringRuleContext) -> bool:
    """Returns whether XLA divides the program over a known mesh, and may use all its axes."""
    axes = context.module_context.axis_context
    if not isinstance(axes, mlir.ShardingContext):
        return False
    return axes.device_assignment is not None and axes.abstract_mesh is not None


def _ask_for_devices(primitive: DefinedPrimitive) -> None:
    """Makes JAX choose devices, and a mesh, before it lowers the primitive, for `custom_partitioning`.

    JAX would refuse this when lowering for unavailable devices, so we do not do it then. If such a program
    was traced before, only XLA divides it.
    """
    elsewhere = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) is not None
    compat.lower_with_devices(primitive, not elsewhere and _forced.value != "reference")


def is_partitioned(context: mlir.LoweringRuleContext) -> bool:
    """Returns whether XLA will divide the whole program between devices, i.e. outside any `shard_map`."""
    axes = context.module_context.axis_context
    if isinstance(axes, mlir.ShardingContext):
        return axes.num_devices != 1
    if isinstance(axes, mlir.SPMDAxisContext):
        manual = {*axes.manual_axes, *axes.mesh.manual_axes}
        return any(size != 1 for axis, size in axes.mesh.shape.items() if axis not in manual)
    return False


def bind(primitive: DefinedPrimitive, *operands: Any, **params: Any) -> jax.Array:
    """Binds a kernel primitive for the requested backend. `explain` shows the choice for this device."""
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
        return primitive(*vary_alike(operands), **params)

    def part(*leaves: Any) -> list[jax.Array]:
        operands = jax.tree.unflatten(tree, leaves)
        return [primitive(*vary_alike(operands), **primitive.slot("local")(*operands, **params))]

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
    """Chooses a kernel for the platform, or else the reference (with the reason).

    **Arguments:**

    - `kernels`: for each backend, `choose(platform, *operands, partitioned, **params)`. It returns its
        choice, or the reason why it does not support the operation.
    """
    asked = _asked(platform, forced)
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
    """Returns the default device's platform: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`."""
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


# For 12.0, Mosaic GPU (in JAX 0.11.2) emits PTX for sm_120a, but assembles it for sm_120, which is an error.
_NEWEST = 10


def mosaic_gpu_refusal(platform: str, *, lowest: tuple[int, int], newest: int = _NEWEST) -> str | None:
    """Explains why a Mosaic GPU kernel cannot be compiled; None if it can.

    **Arguments:**

    - `lowest`: the lowest compute capability that the kernel supports.
    - `newest`: the highest supported major version. Default: the highest for which Mosaic GPU can assemble.
    """
    if platform != "cuda":
        return f"Mosaic GPU compiles for CUDA, not for platform {platform!r}"
    missing, looks_at_device = _mosaic_gpu()
    if missing is not None:
        return missing
    # Without a GPU, we lower for another machine, which an abstract device may describe.
    device: Any = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is None and jax.default_backend() == "gpu":
        device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "9.0")
    major, minor = map(int, capability.split("."))
    if not looks_at_device:  # LLVM would abort the process
        lowest = max(lowest, (9, 0))
    if (major, minor) < lowest or major > newest:
        return f"the kernel is not for devices of compute capability {capability}"
    return None


@functools.cache
def _mosaic_gpu() -> tuple[str | None, bool]:
    """Returns what is missing in this JAX's Mosaic GPU, if anything, and whether it checks its target device.

    JAX 0.10 does not: in every kernel, it elects a thread by an instruction that only Hopper has.
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
    """Explains why TPU kernels can neither be compiled for a platform nor interpreted on it; None if they
    can."""
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

"""Attention kernels from other libraries, and a table of the cases each doesn't support."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ...kernels.backends import KernelFallbackWarning, device_platform
from ...sharding.meshes import mesh_of
from .attention_blocks import Reach, Sight

_LANES = 128
_EVERYTHING = Reach(None, None)

# Part of JAX's trace context, so that functions are traced again if the backend changes.
_asked = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def attention_backend(name: str | None) -> Iterator[None]:
    """A context manager inside which models use an attention kernel from another library.

    If the kernel doesn't support its inputs, then this falls back to quaxlike's own attention and gives the
    reason in a [`quaxlike.kernels.KernelFallbackWarning`][]. Note that these kernels have their own backward
    kernels, and so only support reverse-mode autodifferentiation (`jax.grad`, `jax.vjp`).

    **Arguments:**

    - `name`: either `"cudnn"`, for the kernel in `jax.nn.dot_product_attention` (NVIDIA GPUs); `"splash"`,
        for JAX's splash attention (TPUs, or slowly interpreted on CPUs); or None for quaxlike's own
        attention.

    **Raises:** `ValueError` for any other name.

    !!! example

        ```python
        import jax, jax.numpy as jnp
        from quaxlike.lm.models import Decoder, DecoderConfig, attention_backend

        config = DecoderConfig.from_json(
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "vocab_size": 50,
            }
        )
        model = Decoder(config, key=jax.random.key(0))
        with attention_backend("splash"):
            logits = model(jnp.arange(128) % 50)
        ```
    """
    if name is not None and name not in _KERNELS:
        raise ValueError(f"attention_backend takes one of {tuple(_KERNELS)} or None; found {name!r}.")
    with _asked(name):
        yield


class Case(NamedTuple):
    """The inputs to an attention layer. Queries have shape `(tokens, heads, size)`.

    Note that none of the kernels apply if queries and keys belong to different tokens, e.g. with a cache.
    """

    query: Array
    key: Array
    value: Array
    sight: Sight
    scale: float
    softcap: float | int
    sinks: Any
    divided: bool
    """Whether the tokens are sharded over several devices."""

    @property
    def causal(self) -> bool:
        return self.sight.reach is not None and self.sight.reach.after == 0


def chosen(case: Case) -> Callable[[Case], Array] | None:
    """Returns the requested kernel if it supports these inputs, or None otherwise.

    Unsupported inputs also emit a warning, but only once per reason.
    """
    name = _asked.value
    if name is None:
        return None
    for holds, reason in (*_OF_ALL, *_REFUSALS[name]):
        if holds(case):
            _tell_once(name, reason)
            return None
    return _KERNELS[name]


@functools.cache
def _tell_once(name: str, reason: str) -> None:
    warnings.warn(
        f"Attention is computed by blocks instead of {name}: {reason}.", KernelFallbackWarning, stacklevel=2
    )


def _has_explicit_axes(case: Case) -> bool:
    mesh = mesh_of(case.query)
    return mesh is not None and bool(mesh.explicit_axes)


_Refusals = tuple[tuple[Callable[[Case], bool], str], ...]

#: First the cases no kernel supports, then those an individual kernel doesn't support.
_OF_ALL: _Refusals = (
    (lambda case: case.divided, "devices share the tokens, and pass keys on"),
    (
        lambda case: case.sight.reach is None,
        "how far tokens see must be known when the program is traced; windows of some of the layers that are "
        "scanned are not (unstack them), nor is a cache",
    ),
)
_REFUSALS: dict[str, _Refusals] = {
    "cudnn": (
        (
            lambda case: device_platform() != "cuda",
            "cuDNN is for NVIDIA's GPUs, and the default device is another",
        ),
        (
            lambda case: not {x.dtype.name for x in case[:3]} <= {"float16", "bfloat16"},
            "cuDNN takes float16 and bfloat16",
        ),
        (
            lambda case: case.query.shape[-1] % 8 != 0 or case.query.shape[-1] > 128,
            "cuDNN takes heads of a multiple of 8 up to 128",
        ),
        (lambda case: case.sight.texts is not None, "cuDNN does not tell texts in a row apart"),
        (lambda case: bool(case.softcap), "cuDNN does not squash scores"),
        (lambda case: case.sinks is not None, "cuDNN has no sinks"),
        (
            lambda case: not case.causal and case.sight.reach != _EVERYTHING,
            "cuDNN has windows before a token alone",
        ),
        (_has_explicit_axes, "axes of the mesh are explicit"),
    ),
    "splash": (
        (lambda case: device_platform() not in ("tpu", "cpu"), "splash attention is for TPUs"),
        (
            lambda case: len(case.query) % _LANES != 0,
            "splash attention takes a multiple of 128 tokens",
        ),
        (
            lambda case: mesh_of(case.query) is not None,
            "XLA cannot divide a kernel between devices",
        ),
    ),
}


def by_cudnn(case: Case, implementation: Literal["cudnn", "xla"] = "cudnn") -> Array:
    """Calls cuDNN's attention kernel.

    cuDNN accepts sequence lengths rather than a mask, so first move all padding to the end. Padding is set to
    zero both before and after, so that it affects neither the output nor the gradients.
    """
    sight, reach = case.sight, case.sight.reach
    assert reach is not None
    # A stable sort, so all other tokens stay in order.
    order = jnp.argsort(~sight.seen, stable=True)
    count = jnp.maximum(jnp.sum(sight.seen, dtype=jnp.int32), 1)[None]

    def front(x: Any) -> Any:
        return jnp.where(sight.seen[:, None, None], x, 0)[order][None]

    out = jax.nn.dot_product_attention(
        front(case.query), front(case.key), front(case.value), scale=case.scale, is_causal=case.causal,
        query_seq_lengths=count, key_value_seq_lengths=count, implementation=implementation,
        local_window_size=None if reach.before is None else (reach.before, 0),
    )[0]  # fmt: skip
    return jnp.where(sight.seen[:, None, None], out[jnp.argsort(order)], 0)


def by_splash(case: Case) -> Array:
    """Calls JAX's splash attention kernel. Padding gets its own segment id, so that no text attends to it."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    sight, reach, (tokens, heads, _) = case.sight, case.sight.reach, case.query.shape
    assert reach is not None
    mask: Any = splash.FullMask((tokens, tokens))
    if reach != _EVERYTHING:
        mask = splash.LocalMask((tokens, tokens), (reach.before, reach.after), offset=0)
    # Use the largest supported block size that divides the number of tokens.
    block = next(size for size in (512, 384, 256, 128) if tokens % size == 0)
    sides = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    blocks: Any = {f"block_{side}": block for side in sides}
    kernel: Any = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads), head_shards=1, q_seq_shards=1,
        block_sizes=splash.BlockSizes(**blocks),
        attn_logits_soft_cap=case.softcap or None, interpret=device_platform() == "cpu",
    )  # fmt: skip
    texts = jnp.zeros(tokens, jnp.int32) if sight.texts is None else sight.texts[0]
    texts = jnp.where(sight.seen, texts, -1)
    query, key, value = (jnp.swapaxes(x, 0, 1) for x in (case.query * case.scale, case.key, case.value))
    ids = splash.SegmentIds(texts, texts)
    return jnp.swapaxes(kernel(query, key, value, ids, sinks=case.sinks), 0, 1)


_KERNELS: dict[str, Callable[[Case], Array]] = {"cudnn": by_cudnn, "splash": by_splash}

"""`generate` and `Conversation`, for generating text with a decoder.

The invariant is that the cache contains the keys and values for exactly the tokens preceding the next one, as
computed with the current adapters and rotary frequencies. If any of these change then all affected tokens are
recomputed.

Shapes are rounded up to powers of two, so as not to recompile for every length.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from ..._checked import checked
from ...arrays.adapted import AdaptedArray, innermost
from ...core.quaxify import quaxify
from ...core.values import is_value
from ...surgery.adapters import activated, choose_adapter, invocations, is_stacked, last_occurrence
from ...surgery.trees import difference, named_arrays
from ..models.decoder import Decoder
from ..models.mixer import AbstractMemory


@checked
def generate(
    model: Decoder,
    ids: Int[Array | np.ndarray, "batch tokens"],
    *,
    max_new_tokens: int,
    mask: Shaped[Array | np.ndarray, "batch tokens"] | None = None,
    eos: int | Sequence[int] | None = None,
    temperature: float | int = 0.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    key: Any = None,
    on_token: Callable[[Int[np.ndarray, " batch"]], Any] | None = None,
    cache: str | None = None,
) -> Int[Array, "batch new"]:
    """Generates continuations of texts, one token at a time.

    The keys and values of previous tokens are cached, and this cache is updated in-place. To limit
    recompilation, lengths are rounded up to powers of two. Each length has two programs: one for processing
    the prompts and one for generating a single token. Both are compiled before the first token. (This happens
    in parallel unless the model is sharded over several devices.)

    **Arguments:**

    - `model`: the decoder. Its weights can be Values. If it has one stacked adapter per text
        ([`quaxlike.stack_adapters`][]), then each text uses its own adapter. Activated LoRAs apply from the
        last occurrence of their invocation tokens in the prompt, and otherwise not at all.
    - `ids`: the prompts, with any padding on the left.
    - `max_new_tokens`: the maximum number of tokens to generate.
    - `mask`: False for padding in `ids`. Default: no padding.
    - `eos`: the tokens that end a text. Default: none.
    - `temperature`: divides the logits before sampling. Default: 0, i.e. greedy decoding.
    - `top_k`: only sample from this many of the most likely tokens. Default: all tokens.
    - `top_p`: only sample from the most likely tokens with this total probability. Default: all tokens.
    - `key`: a PRNG key for sampling.
    - `on_token`: a function to call with all texts' new tokens, of shape `(batch,)`, after every step. You
        can use this for streaming. The device is already running the next step during this call.
    - `cache`: how to store keys and values: either `"bfloat16"` or a codec of [`quaxlike.BlockArray`][], e.g.
        `"q8_0"`, `"q4_0"`, `"nf4"`, or `"int8"` with one scale per token and head. If a codec has at most 4
        bits then keys are rotated first, so that a few outliers don't cost all other elements their
        precision. Default: the model's dtype.

    **Returns:** the new tokens, of shape `(batch, max_new_tokens)`. Ended texts are padded with the
    `pad_token_id` in `config.json`, or with the first of `eos` if this is unset.

    **Raises:** `ValueError` if arguments aren't consistent with each other, or with the model.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql


        def answer(directory, ids):
            model, config = ql.lm.load(directory, quantize="nf4")
            return ql.lm.generate(
                model, ids, max_new_tokens=32, eos=config["eos_token_id"]
            )
        ```

    Top-p sampling is due to Holtzman et al., The Curious Case of Neural Text Degeneration (2020).
    """
    ids = np.asarray(ids)
    seen = np.ones(ids.shape, bool) if mask is None else np.asarray(mask).astype(bool)
    sampling = _sampling(model, ids, seen, max_new_tokens, temperature, top_k, top_p, key)
    ends = np.atleast_1d(np.asarray([] if eos is None else eos))
    if ends.size and ends.dtype.kind not in "iu":
        raise TypeError(f"`eos` must be the number of a token, or several; found {eos!r}.")
    ends = ends.astype(np.int32)
    steps, done = list[Any](), np.zeros(len(ids), bool)
    fill = model.config.pad_token_id if model.config.pad_token_id >= 0 else int(ends[0]) if ends.size else 0
    for token in _tokens(model, ids.astype(np.int32), seen, max_new_tokens, sampling, cache):
        # Reading a token waits until it has been computed, so only do this if necessary.
        if ends.size or on_token is not None:
            token = np.where(done, np.int32(fill), np.asarray(token))
            done |= np.isin(token, ends)
        steps.append(token)
        if on_token is not None:
            on_token(token)
        if done.all():
            break
    steps += [np.full(len(ids), fill, np.int32)] * (max_new_tokens - len(steps))
    return jnp.stack([jnp.asarray(step) for step in steps], axis=1)


def _sampling(
    model: Any, ids: Any, seen: Any, new: int, temperature: Any, top_k: Any, top_p: Any, key: Any
) -> "_Sampling":
    """Checks all arguments and creates the sampler. Raises `ValueError` if they aren't consistent."""
    if not isinstance(model, Decoder):
        raise ValueError(f"generate takes a Decoder of `quaxlike.lm.models`; found {type(model).__name__}.")
    if ids.ndim != 2 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"`ids` must be integers of shape (batch, tokens); found {ids.dtype} of shape {ids.shape}."
        )
    if seen.shape != ids.shape or not seen[:, -1].all():
        ending = np.flatnonzero(~seen[..., -1]).tolist()
        raise ValueError(
            f"`mask` must be of the shape of `ids`, {ids.shape}, with padding on the left only, so that each "
            f"row ends with a token; found the shape {seen.shape}, where the rows {ending} end with padding."
        )
    c, first, last = model.config, ids[seen].min(), ids[seen].max()
    if first < 0 or last >= c.vocab_size:
        raise ValueError(f"`ids` must be from 0 to {c.vocab_size - 1}; found {first} to {last}.")
    if new < 1:
        raise ValueError(f"`max_new_tokens` must be at least 1; found {new}.")
    if not (temperature >= 0 and (top_k is None or top_k >= 1) and (top_p is None or 0 < top_p <= 1)):
        raise ValueError(
            "`temperature` must not be negative, `top_k` at least 1 and `top_p` above 0 and at most 1; found "
            f"{temperature}, {top_k} and {top_p}."
        )
    if temperature > 0 and key is None:
        raise ValueError("Tokens are sampled at a temperature above 0: pass a `key`.")
    needed, most = int(seen.sum(1).max()) + new, c.max_position_embeddings
    if c.family.learned_positions and needed > most:
        raise ValueError(f"The model has {most} positions; prompt and new tokens need {needed}.")
    if counts := {adapter.shape[0] for adapter in _stacked_adapters(model)} - {len(ids)}:
        raise ValueError(f"There are {len(ids)} texts and {min(counts)} adapters; each text takes one.")

    def as_array(x: Any) -> Any:
        return None if x is None else jnp.float32(x)

    return _Sampling(as_array(temperature or None), as_array(top_p), key, top_k)


class _Sampling(eqx.Module):
    """Samples the next token, or takes the most likely one if `temperature` is None."""

    temperature: Array | None
    top_p: Array | None
    key: Any
    top_k: int | None = eqx.field(static=True)

    def __call__(self, logits: Float[Array, "batch vocab"], step: Any) -> Int[Array, " batch"]:
        if self.temperature is None:
            return _likeliest(logits)
        logits = logits.astype(jnp.float32) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p is not None:
            order = jnp.sort(logits, axis=-1, descending=True)
            mass = jax.nn.softmax(order, axis=-1)
            # Keep a token if all tokens before it have a total probability of less than `top_p`. In
            # particular, this always keeps the most likely one.
            inside = jnp.cumsum(mass, axis=-1) - mass < self.top_p
            least = jnp.min(jnp.where(inside, order, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.random.categorical(jax.random.fold_in(self.key, step), logits).astype(jnp.int32)


def _tokens(
    model: Decoder, ids: np.ndarray, seen: np.ndarray, new: int, sampling: _Sampling, cache: str | None
) -> Iterator[Any]:
    """Yields the new tokens of each step, with shape `(batch,)`."""
    longest, reader = int(seen.sum(1).max()), _Reader(model, cache)
    since = _invoked_at(model, np.where(seen, ids, -1))
    made: list[Any] = []
    while len(made) < new:
        # Some rotary frequencies change once a text exceeds a certain length, invalidating the cache. So only
        # run up to that point, and then start again with all tokens so far.
        until = min([new, *(s - longest + 1 for s in model.config.switches if s >= longest + len(made))])
        part = np.concatenate([ids, *(np.asarray(token)[:, None] for token in made)], axis=1)
        start, room = 0, _rounded(part.shape[1]) + _rounded(until - len(made))
        behind = room - seen.shape[1]
        reader.begin(np.pad(seen, ((0, 0), (0, behind)), constant_values=True))
        # Dispatch the next step before reading the previous token, to keep the device busy.
        while len(made) < until:
            count = len(made)
            more = count + 1 < until
            token = reader.next(part, start, longest + count, since, sampling, count, more=more)
            if start:
                yield made[-1]
            made.append(token)
            start, part = start + (1 if start else part.shape[1]), token
        yield made[-1]


class _Structure:
    """A model's PyTree structure, with a cached hash. (JAX compares this at every step.)"""

    def __init__(self, of: Any) -> None:
        self.of, self._hash = of, hash(of)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Structure) and self.of == other.of)


@jax.tree_util.register_pytree_node_class
class _Leaves:
    """An already flattened model, so as not to flatten it for every token."""

    def __init__(self, model: Any) -> None:
        self._leaves, structure = jax.tree.flatten(model)
        self._structure = _Structure(structure)

    def whole(self) -> Any:
        return jax.tree.unflatten(self._structure.of, self._leaves)

    def tree_flatten(self) -> Any:
        return self._leaves, self._structure

    @classmethod
    def tree_unflatten(cls, structure: Any, leaves: Any) -> "_Leaves":
        out = object.__new__(cls)
        out._leaves, out._structure = leaves, structure
        return out


def _likeliest(logits: Array) -> Array:
    """As `argmax` over the last axis, but faster. (XLA doesn't vectorise its own implementation on CPUs.)"""
    # Return any NaN rather than the maximum, like `argmax`.
    found = (logits == jnp.max(logits, axis=-1, keepdims=True)) | jnp.isnan(logits)
    return jnp.min(jnp.where(found, jnp.arange(logits.shape[-1], dtype=jnp.int32), logits.shape[-1]), axis=-1)


class _Reader:
    """Runs a decoder incrementally on rows of tokens, using a key-value cache."""

    def __init__(self, model: Decoder, cache: str | None) -> None:
        self.model, self._leaves, self._cache = model, _Leaves(model), cache
        self.memory: Any = None
        self._seen: Any = None

    def begin(self, seen: Bool[np.ndarray, "rows room"]) -> None:
        """Clears the cache. The mask `seen` must also cover all tokens to come."""
        self.memory, self._seen = None, jnp.asarray(seen)

    def grow(self, room: int) -> None:
        """Ensures there is space for `room` tokens. Only use this for a single unpadded row."""
        if self.memory is None:
            self.memory = self.model.memory(room, self._cache)
        elif (more := room - _room(self.memory)) > 0:
            self.memory = jax.tree.map(lambda x: x.grown(more), self.memory, is_leaf=_is_memory)

    def next(
        self, ids: Any, start: int, length: int, since: Any, sampling: _Sampling, step: int, *, more: bool
    ) -> Int[Array, " rows"]:
        """Runs the decoder on `ids` and samples the next token.

        Here `ids` either has shape `(rows, tokens)`, or has one token per row. Note that the cache is
        donated, so an interrupt in here loses it.

        **Arguments:**

        - `start`: the position of `ids` in each row.
        - `length`: the length of the longest row, including `ids` itself.
        - `since`: the position in each row from which activated LoRAs apply.
        - `more`: whether there will be another step after this one.
        """
        count, memory = ids.size // len(ids), self.memory
        at, last, size, number = map(np.int32, (start, count - 1, length, step))
        rest = at, last, size, since, sampling, number, self._cache
        if ids.ndim == 2:
            ids = np.pad(ids, ((0, 0), (0, _rounded(count, least=8) - count)))
            if more:
                self._compile_both(ids, rest)
        # The memory is about to be donated, so make sure nobody uses it again after an interrupt.
        self.memory = None
        token, self.memory = _next(self._leaves, ids, self._seen, memory, *rest)
        return token

    def _compile_both(self, ids: Any, rest: Any) -> None:
        """Compiles the programs for the prompt and for a single token, in parallel.

        Calling the jitted function later on then hits JAX's cache. (With several devices, the second program
        depends on the sharding of the first one's output, so there it is only compiled once called.) Context
        managers are thread-local, so both are traced on this thread.
        """
        arrays = [leaf for leaf in jax.tree.leaves(self.model) if isinstance(leaf, jax.Array)]
        if any(len(array.sharding.device_set) > 1 for array in arrays):
            return
        first = _next.lower(self._leaves, ids, self._seen, self.memory, *rest)
        one, memory = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first.out_info)
        with ThreadPoolExecutor(1) as beside:
            second = beside.submit(_next.lower(self._leaves, one, self._seen, memory, *rest).compile)
            first.compile()
            second.result()


@functools.partial(jax.jit, donate_argnames="memory", static_argnames="cache")
def _next(
    leaves: _Leaves, ids: Any, seen: Any, memory: Any, start: Any, last: Any, length: Any, since: Any,
    sampling: _Sampling, step: Any, cache: str | None,
) -> tuple[Array, Any]:  # fmt: skip
    """Samples the token after position `last` of each row in `ids`, and updates the memory.

    `memory` is None for the first call. `seen` is None if there is no padding. Anything in `ids` after `last`
    is padding, to be overwritten by later tokens.

    Batched operations are slower than unbatched ones even if the batch has size one, so a single row has no
    batch axis (neither here nor in the memory).
    """
    model, ids = leaves.whole(), ids.reshape(len(ids), -1)
    rows, width = ids.shape
    stacked = bool(_stacked_adapters(model))
    if memory is None:
        memory = model.memory(seen.shape[1], cache)
        if rows > 1:
            memory = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), memory)

    def run(model: Decoder, ids: Any, seen: Any, memory: Any) -> Any:
        room = _room(memory)
        seen = jnp.ones(room, bool) if seen is None else seen
        if width > 1:  # mask out anything after `last`: recurrent layers would take it in
            seen = seen & (jnp.arange(room) <= start + last)
        hidden, memory = model.body(ids, seen, memory, start, length)
        return model.logits(jax.lax.dynamic_slice_in_dim(hidden, last, 1))[0], memory

    def row(i: Any, since: Any, *of_row: Any) -> Any:
        own = choose_adapter(model, i) if stacked else model
        own = activated(own, lambda _: start + jnp.arange(width) >= since)
        return quaxify(run)(own, *of_row)

    of_rows = jnp.arange(rows), since, ids, seen
    if rows == 1:
        logits, memory = row(*jax.tree.map(lambda x: x[0], of_rows), memory)
        logits = logits[None]
    else:
        logits, memory = jax.vmap(row)(*of_rows, memory)
    return sampling(logits, step), memory


class Conversation:
    """A text for a decoder to continue turn by turn, such as a chat.

    Keys and values stay cached between turns. If a text has a prefix in common with the previous one, then
    only the tokens after this prefix need to be processed. (Activated LoRAs don't affect the cache up to
    their invocation tokens, so this works for them too.)

    **Arguments:**

    - `model`: the decoder. It can have at most one adapter. Activated LoRAs apply as in
        [`quaxlike.lm.generate`][].
    - `cache`: as in [`quaxlike.lm.generate`][].

    !!! example

        ```python
        import quaxlike as ql


        def talk(model, encode, decode):
            conversation = ql.lm.Conversation(model)
            text = ""
            while True:
                text += input()
                text += decode(
                    list(conversation.answer(encode(text), max_new_tokens=64))
                )
        ```
    """

    def __init__(self, model: Decoder, *, cache: str | None = None) -> None:
        if not isinstance(model, Decoder) or _stacked_adapters(model):
            raise ValueError(
                "Conversation takes a Decoder of `quaxlike.lm.models` with one adapter at most; choose one "
                f"with `quaxlike.choose_adapter`; found {type(model).__name__}."
            )
        self._reader, self._cache = _Reader(model, cache), cache
        self._cached: list[int] = []  # the tokens with cached keys and values
        self._since = _NEVER  # the position from which activated LoRAs were applied to these

    @property
    def context(self) -> int:
        """The maximum number of tokens, including any yet to be generated."""
        return self._reader.model.config.max_position_embeddings

    def answer(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int,
        eos: Sequence[int] = (),
        temperature: float | int = 0.0,
        top_k: int | None = None,
        top_p: float | int | None = None,
        key: Any = None,
    ) -> Iterator[int]:
        """Continues a text, one token at a time. You can stop iterating at any point.

        **Arguments:** as in [`quaxlike.lm.generate`][], except that `ids` is a single text.

        **Returns:** an iterator over the new tokens. This ends just before the first token in `eos`.

        **Raises:** `ValueError` if arguments aren't consistent with each other, or with the model.
        """
        tokens = [int(token) for token in ids]
        row = np.asarray([tokens], np.int64)
        seen = np.ones(row.shape, bool)
        sampling = _sampling(self._reader.model, row, seen, max_new_tokens, temperature, top_k, top_p, key)
        return self._tokens(tokens, max_new_tokens, frozenset(eos), sampling)

    def fork(self, model: Decoder) -> "Conversation":
        """Continues with a different model on the same base, without recomputing the cache.

        This is useful for asking many questions about a long text: process the text just once, and then fork
        a conversation for each question. The cache is valid for all tokens up to the position where an
        activated LoRA starts to apply.

        **Arguments:**

        - `model`: either the base model, or the base model with activated LoRAs.

        **Raises:** `ValueError` if the base isn't the same, or if either model has an adapter applying to all
        tokens.

        !!! example

            ```python
            import quaxlike as ql


            def answers(base, adapted, text, questions):
                reader = ql.lm.Conversation(base)
                next(reader.answer(text, max_new_tokens=1))
                return [
                    list(reader.fork(adapted).answer(text + q, max_new_tokens=64))
                    for q in questions  # these invoke the adapter
                ]
            ```
        """
        other = Conversation(model, cache=self._cache)
        for each in (self._reader.model, model):
            adapters = named_arrays(each).items()
            if found := [name for name, x in adapters if isinstance(x, AdaptedArray) and not x.invocation]:
                raise ValueError(
                    f"A fork keeps what the base has cached; the adapter of {found[0]} acts on all tokens. "
                    "Activated LoRAs (`invocation_tokens`) leave those before them to the base."
                )
        bare = [jax.tree.map(innermost, each, is_leaf=is_value) for each in (self._reader.model, model)]
        if (found := difference(*bare)) is not None:
            raise ValueError(f"A fork takes a model on the same base: {found}.")
        kept = min(len(self._cached), self._since)
        whole = kept == len(self._cached) or _is_by_place(self._reader.memory)
        # With a switch in between, the cache was computed with different rotary frequencies.
        if self._cached and whole and not any(kept <= x < len(self._cached) for x in model.config.switches):
            # Each step donates its memory, so make a copy.
            other._cached = self._cached[:kept]
            other._reader.memory = jax.tree.map(jnp.copy, self._reader.memory)
        return other

    def _tokens(
        self, tokens: list[int], new: int, ends: frozenset[int], sampling: "_Sampling"
    ) -> Iterator[int]:
        since = int(_invoked_at(self._reader.model, np.asarray([tokens]))[0])
        for step in range(new):
            token = self._next(tokens, since, len(tokens) + new - step, sampling, step)
            if token in ends:
                return
            tokens.append(token)
            yield token

    def _next(self, tokens: list[int], since: int, most: int, sampling: "_Sampling", step: int) -> int:
        """Processes any tokens after the cached prefix, and samples the next token."""
        pairs = zip(self._cached, tokens[:-1], strict=False)
        start = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        # A LoRA becoming active (or inactive) at some position invalidates the cache from there on.
        if since != self._since:
            start = min(start, since, self._since)
        if any((len(self._cached) > x) != (len(tokens) > x) for x in self._reader.model.config.switches):
            start = 0  # a text of this length uses other rotary frequencies
        # A recurrent state can't be rewound, so start from scratch.
        if start < len(self._cached) and not _is_by_place(self._reader.memory):
            start, self._reader.memory = 0, None
        part, room = np.asarray(tokens[start:], np.int32), most
        if len(part) > 1:
            # Leave space for rounding up the number of tokens.
            part, room = part[None], max(most, start + _rounded(len(part)))
        self._reader.grow(_rounded(room))
        self._cached = []  # the memory is about to be donated, so an interrupt loses it
        places, more = np.asarray([since], np.int32), len(tokens) + 1 < most
        token = self._reader.next(part, start, len(tokens), places, sampling, step, more=more)
        token = np.asarray(token).item()
        self._cached, self._since = list(tokens), since
        return token


def _is_memory(x: Any) -> bool:
    return isinstance(x, AbstractMemory)


def _is_by_place(memory: Any) -> bool:
    """Returns whether the memory can be rewound to any position, to continue differently from there."""
    return all(part.by_place for part in jax.tree.leaves(memory, is_leaf=_is_memory))


def _room(memory: Any) -> int:
    (first, *_) = jax.tree.leaves(memory, is_leaf=_is_memory)
    return first.room


#: Larger than any position, for activated LoRAs which are never invoked.
_NEVER = int(np.iinfo(np.int32).max)


def _invoked_at(model: Decoder, ids: np.ndarray) -> np.ndarray:
    """Returns the position of each row's last invocation tokens, or `_NEVER`."""
    if len(found := invocations(model)) > 1:
        raise ValueError(
            "Texts are generated with adapters that the same tokens invoke; those of this model are invoked "
            f"by {' and '.join(str(list(tokens)) for tokens in sorted(found))}."
        )
    if not found:
        return np.full(len(ids), _NEVER, np.int32)
    (tokens,), most = found, ids.shape[1]
    starts = np.asarray([last_occurrence(row, tokens) for row in ids])
    return np.where(starts == most, _NEVER, starts).astype(np.int32)


def _stacked_adapters(model: Decoder) -> list[Any]:
    return [x for x in jax.tree.leaves(model, is_leaf=is_value) if is_stacked(x)]


def _rounded(n: int, least: int = 16) -> int:
    """Rounds up to a power of two, and to at least `least`."""
    return max(least, 1 << (n - 1).bit_length())

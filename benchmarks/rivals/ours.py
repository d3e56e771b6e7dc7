"""What quaxlike does: functions that prepare work, and return what runs it and tells the seconds."""

import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import quaxlike as ql
from quaxlike import kernels
from quaxlike._cache import keep_programs
from quaxlike.lm import generate
from quaxlike.lm._allocator import keep_memory
from quaxlike.lm.finetune.data import Example, collate
from quaxlike.lm.finetune.devices import Devices
from quaxlike.lm.finetune.settings import DataSettings, RunSettings, TrainSettings
from quaxlike.lm.finetune.tasks import task_for
from quaxlike.lm.finetune.train import State, TrainingProgram, optimiser_for

from .. import transformer
from .files import LENGTH, RANK, ROWS, Size, gguf, ids, sparse_weight

Run = Callable[[], float]


def _load(path: pathlib.Path, quantize: str | None, head: bool = False, **options: Any) -> Any:
    kernels.native.prepare(print)
    return ql.lm.load(path, quantize=quantize, head=head, **options)[0]


#: The model that rows one after the other share.
_kept = functools.lru_cache(maxsize=1)(_load)


def token(
    folder: pathlib.Path, size: Size, cores: int, *, batch: int = 1, dtype: str | None = None,
    quantize: str | None = None, head: bool = False, file: str | None = None, length: int | None = None,
    compute: str | None = None,
) -> Run:  # fmt: skip
    """The median time of a token, after the first two, of a text of `length` tokens."""
    path = folder if file is None else gguf(folder, file)
    model = _kept(path, quantize, head, dtype=dtype, compute=compute)

    def run() -> float:
        times: list[float] = []
        told = lambda token: times.append(time.perf_counter())
        generate(model, ids(size, batch, length or size.prompt), max_new_tokens=size.new, on_token=told)
        return statistics.median(np.diff(times)[1:])

    run()
    return run


def prefill(
    folder: pathlib.Path, size: Size, cores: int, *, length: int = 128, dtype: str | None = None,
    quantize: str | None = None, file: str | None = None, compute: str | None = None,
) -> Run:  # fmt: skip
    """The time of the first token after a text of `length` tokens."""
    path = folder if file is None else gguf(folder, file)
    model = _kept(path, quantize, False, dtype=dtype, compute=compute)
    prompt = ids(size, 1, length)
    run = lambda: _seconds(lambda: generate(model, prompt, max_new_tokens=1))
    run()
    return run


def start(folder: pathlib.Path, size: Size, cores: int, *, quantize: str | None = None) -> Run:
    """Loads the model and continues a text by 32 tokens, with the programs that an earlier start compiled."""
    keep_programs(str(folder.with_name("programs")), print)

    def run() -> float:
        model = _load(folder, quantize)
        return _seconds(lambda: generate(model, ids(size, 1, size.prompt), max_new_tokens=32))

    return run


def _trained(folder: pathlib.Path, size: Size, quantize: str | None) -> tuple[TrainingProgram, list[Any]]:
    """The program of a step as `quaxlike.lm.finetune` makes it, and what it takes."""
    keep_memory()
    settings = TrainSettings(folder, batch_size=ROWS)
    options: Any = None if quantize is None else {"scheme": quantize, "double_quant": True}
    if quantize is not None:
        kernels.native.prepare(print)
    model, _ = ql.lm.load(folder, quantize=options)
    model = ql.loraify(model, rank=RANK, alpha=2 * RANK, where="all-linear", key=jax.random.key(0)).stacked()
    params, frozen = eqx.partition(model, ql.trainable(model))
    optimiser, _ = optimiser_for(settings, 100)
    task = task_for(model, settings, DataSettings(folder))
    program = TrainingProgram(task, optimiser, settings, Devices(RunSettings(folder)))
    texts = [Example((row.tolist(),), [True] * LENGTH) for row in ids(size, ROWS, LENGTH)]
    terms = jnp.float32(ROWS * (LENGTH - 1))
    return program, [frozen, State(params, optimiser.init(params)), collate(texts, LENGTH), terms, None]


def step(folder: pathlib.Path, size: Size, cores: int, *, quantize: str | None = None) -> Run:
    program, arguments = _trained(folder, size, quantize)

    def run() -> float:
        def once() -> Any:
            arguments[1], value = program(*arguments)
            return arguments[1], value

        return _seconds(once)

    run()
    return run


def first_step(
    folder: pathlib.Path, size: Size, cores: int, *, quantize: str | None = None, kept: bool = False
) -> Run:
    """With everything that the first step needs: its compilation, or if `kept`, the program that an earlier
    start compiled."""
    if kept:
        keep_programs(str(folder.with_name("programs")), print)

    def run() -> float:
        program, arguments = _trained(folder, size, quantize)
        return _seconds(lambda: program(*arguments))

    return run


def compilation(folder: pathlib.Path, size: Size, cores: int, *, quantize: str | None = None) -> Run:
    def run() -> float:
        program, arguments = _trained(folder, size, quantize)
        program.compiled(*arguments)
        return program.seconds

    return run


def sparse(folder: pathlib.Path, size: Size, cores: int) -> Run:
    kernels.native.prepare(print)
    w, x = sparse_weight(size)
    ours, x = ql.SparseArray.from_dense(jnp.asarray(w)), jnp.asarray(x)
    return _repeated(jax.jit(ql.quaxify(lambda x, w: x @ w.T)), x, ours)


def product(folder: pathlib.Path, size: Size, cores: int, *, scheme: str | None = None) -> Run:
    """With 256 rows of float32; of the dense weight without a scheme."""
    w = jax.random.normal(jax.random.key(0), (size.matrix, size.matrix))
    x = jax.random.normal(jax.random.key(1), (256, size.matrix))
    if scheme is None:
        return _repeated(jax.jit(lambda x, w: x @ w.T), x, w)
    kernels.native.prepare(print)
    quantised = ql.Int8Array.quantize(w) if scheme == "int8" else ql.BlockArray.quantize(w, codec=scheme)
    return _repeated(jax.jit(ql.quaxify(lambda x, w: x @ w.T)), x, quantised)


def trace(folder: pathlib.Path, size: Size, cores: int, *, quantised: bool, by_hand: bool = False) -> Run:
    """A transformer of 12 layers."""
    blocks, x, run = transformer.traced(quantised=quantised, by_hand=by_hand)
    once = lambda: _seconds(lambda: jax.make_jaxpr(lambda blocks, x: run(blocks, x))(blocks, x))
    once()
    return once


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def _repeated(fn: Any, *arguments: Any, times: int = 20) -> Run:
    """The mean of several calls."""
    jax.block_until_ready(fn(*arguments))
    return lambda: _seconds(lambda: [fn(*arguments) for _ in range(times)]) / times

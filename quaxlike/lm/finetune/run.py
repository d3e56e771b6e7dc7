"""A single fine-tuning run, from reading the checkpoint to writing the adapter."""

import contextlib
import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from rich.console import Console

from ...arrays.adapted import AdaptedArray
from ...core.policy import on_materialise
from ...core.values import materialise
from ...files import safetensors
from ...files.errors import CheckpointError, listed
from ...kernels import native
from ...surgery.adapt import adapt
from ...surgery.adapters import with_dropout_key
from ...surgery.loraify import loraify
from ...surgery.merge import merge
from ...surgery.quantize import is_quantised, is_recipe, quantize, scheme_of
from ...surgery.summary import summary
from ...surgery.trainable import trainable
from ...surgery.trees import named_arrays, replace
from .. import peft
from .._interrupts import take_interrupt
from ..adapter_folder import OWN_FILE, other_tokenizer
from ..folders.model_config import UnsupportedConfigError
from ..gguf.mixtures import type_of
from ..loading import load, open_model, save
from ..models import AbstractClassifier, AbstractDecoder
from ..models.vocabulary import is_of_tokens
from ..peft.save import tensors_and_config
from ..to_gguf import described
from .adapter import config_of, continued, how_to_load, is_own, make_of, types_of
from .data import Example, Tokens, pack, read_examples, split
from .devices import Devices, Follower, is_main_process
from .report import Metrics, shown
from .settings import DataSettings, FinetuneError, RunSettings, Settings, TrainSettings, forget_streams
from .state import RunDirectory, Saved
from .tasks import AbstractTask, AbstractTextTask, begun, task_for
from .train import State, Training, steps_of, stored_for


def merged(run: RunSettings) -> Path:
    """Where to write the merged model: either a folder in the output directory or a GGUF file."""
    return run.output / ("merged.gguf" if run.format == "gguf" else "merged")


def adapter_file(train: TrainSettings, run: RunSettings) -> Path:
    """Where to write the adapter: either a folder in PEFT's format or a file in our own."""
    file = run.output / OWN_FILE
    return file if is_own(train) or file.exists() else run.output


def finetune(settings: Settings, console: Console, saved: Saved | None = None) -> dict[str, dict[str, float]]:
    """Fine-tunes a checkpoint and writes the adapter to `settings.run.output`.

    If this folder already has a stopped run with the same settings, then it is resumed. `saved` is kept
    up-to-date with the newest checkpoint on disk, in case the run is interrupted.

    **Returns:** the metrics on held-out data, both `"before"` and `"after"` training.

    **Raises:** `FileNotFoundError`, `FinetuneError`, `CheckpointError` or `UnsupportedConfigError` if the run
    can't start. Nothing is written in this case. `KeyboardInterrupt` if an interrupt was requested; the
    current step is first completed and saved.
    """
    with contextlib.ExitStack() as held:
        held.callback(forget_streams)
        return _finetune(settings, console, held, saved)


def _finetune(
    settings: Settings, console: Console, held: contextlib.ExitStack, saved: Saved | None
) -> dict[str, dict[str, float]]:
    devices = Devices(settings.run)
    settings, params, job, held_out = _prepare(settings, console, devices)
    train, data, run = settings.train, settings.data, settings.run
    directory = held.enter_context(
        contextlib.closing(RunDirectory(settings, saved) if is_main_process() else Follower())
    )
    metrics = Metrics(run.output, run.tensorboard) if is_main_process() else Follower()
    steps = job.steps
    state = devices.on_host(State(params, job.optimiser.init(params)))
    first, state = devices.broadcast_from_main(directory.restore(state))
    state = devices.place_along(state)
    if first:
        console.print(
            f"Resumes after step {first} of {steps}." if first < steps else f"All {steps} steps are done."
        )

    with on_materialise("error"):
        before = next((entry["held_out"] for entry in directory.entries() if "held_out" in entry), None)
        if not devices.broadcast_from_main(before is not None):
            before = job.measure(params, held_out)
            directory.note(step=0, held_out=before)
        # The previous run may have stopped after logging this step, but before evaluating it.
        missing = any(x["step"] == first and "held_out" not in x for x in directory.entries())
        if devices.broadcast_from_main(missing and _evaluates_after(first, steps, run)):
            measured = job.measure(state.params, held_out)
            directory.amend(first, held_out=measured)
            metrics.note(first, held_out=measured)
        if first < steps:
            memory = job.memory(state)
            console.print(f"A step takes {memory}; compiled in {job.program.seconds:.1f} s")
            metrics.note(first, memory=memory._asdict(), held_out=before if first == 0 else {})
        del params
        devices.take_interrupt()
        if first < steps:
            state = _train(job, state, first, held_out, run, console, directory, metrics)
        after = job.measure(state.params, held_out)
        metrics.note(steps, held_out=after)
    trained = eqx.combine(devices.on_host(state.params), job.frozen)
    trained = trained.unstacked() if train.scan_layers else trained  # all processes must call this
    if is_main_process():
        take_interrupt()
        _save(trained, train, run, job.task, console)
        if run.merge:
            take_interrupt()
            _merge(trained, train, data, run)
    devices.broadcast_from_main(True)  # a barrier, to wait until all files have been written
    return {"before": before or {}, "after": after}


def _prepare(
    settings: Settings, console: Console, devices: Devices
) -> tuple[Settings, PyTree, Training, list[Example]]:
    """Reads the checkpoint and the data, adds the adapters, and places the model. This writes nothing.

    **Returns:** the settings, completed by those depending on the data and the model; the arrays to train;
    the `Training` for them; and the held-out examples.
    """
    train, data, run = settings.train, settings.data, settings.run
    make = make_of(train.adapter) if isinstance(train.adapter, str) else None
    base, config = _base(train, devices)
    config = _with_sizes(config, base)
    base, data = begun(base, config, train, data)
    if isinstance(base, AbstractClassifier):
        config |= base.entries()
    if run.format == "gguf":
        described(named_arrays(base), config, train.model)  # raise any errors before hours of training
    take_interrupt()
    limit = config.get("max_position_embeddings") or config.get("n_positions", 2048)
    max_length = data.max_length or min(256, limit)
    if max_length > limit:
        raise FinetuneError(f"--max-length {max_length} is more than the model's {limit} positions.")
    tokens = Tokens(train.model, config, max_length)
    if tokens.marks.differ:
        console.print(tokens.marks.differ, markup=False)
    task = task_for(base, train, data)
    invocation = _invocation(train, run, task, tokens)
    training, held_out = read_data(train, data, task, tokens, console, invocation)
    if len(training) < train.batch_size:
        console.print(f"{data.data}: each batch holds all {len(training)} training examples.")
        train = dataclasses.replace(train, batch_size=len(training))
        # With a smaller batch, each row can have a larger share of --loss-chunk.
        task = task_for(base, train, data)
    if run.eval_every and not held_out:
        raise FinetuneError("--eval-every has nothing to evaluate: set --held-out above 0, or --eval-data.")
    devices.check_batch(train.batch_size, max_length)
    teacher = task.teacher(train, config, devices)
    if teacher is not None:
        teacher, _ = _scanned(teacher, train, console)
    model = _adapted(base, task, train, make, invocation)
    _check_written(model, train, task)
    added = named_arrays(model).keys() - named_arrays(base).keys() - {"lm_head.weight"}
    if run.merge and added:
        raise FinetuneError(
            f"--merge cannot be used with --adapter {train.adapter}, which adds {listed(sorted(added))}: "
            "merged checkpoints have no place for these."
        )
    if isinstance(train.adapter, Path):
        console.print(
            f"Goes on with the adapter in {train.adapter}; the optimiser starts anew.", markup=False
        )
        if warning := other_tokenizer(train.adapter, train.model):
            console.print(warning, markup=False)
        _check_tokens(model, [*training, *held_out], train.adapter)
    del base  # otherwise stacking needs memory for two copies of every layer
    model, scanned = _scanned(model, train, console)
    train = dataclasses.replace(train, scan_layers=scanned)
    model = devices.place(model)
    take_interrupt()
    table = summary(model)
    params, frozen = eqx.partition(model, trainable(model, freeze=["a"] if train.freeze_a else []))
    trained = sum(x.size for x in jax.tree.leaves(params))
    console.print(
        f"{type(model).__name__}: {table.size:,} parameters in {table.stored_bytes / 2**20:,.1f} MiB, "
        f"{trained:,} trained ({table.trainable_share * trained / max(1, table.trainable):.2%})"
    )
    if is_quantised(model):
        native.prepare(console.print)
    if isinstance(train.adapter, Path) and task.compares_with_start:
        # The teacher can share the frozen weights. The trained ones are donated by each step, so copy them.
        teacher = eqx.combine(jax.tree.map(jnp.copy, params), frozen)
    job = Training(
        task, frozen, training, train,
        steps=steps_of(train, len(training)), max_length=max_length, devices=devices, teacher=teacher,
    )  # fmt: skip
    return Settings(train, data, run), params, job, held_out


def _train(
    job: Training,
    state: State,
    first: int,
    held_out: list[Example],
    run: RunSettings,
    console: Console,
    directory: RunDirectory | Follower,
    metrics: Metrics | Follower,
) -> State:
    """Trains from the step after `first` to the last one, logging, evaluating and saving along the way.

    If the run is interrupted, then this saves the current step before raising `KeyboardInterrupt`.
    """
    latest = first
    for step in shown(job.run(state, first), console, first, job.steps):
        state = step.state
        entry: dict[str, Any] = {"loss": step.loss, "learning_rate": step.learning_rate}
        stop: KeyboardInterrupt | None = None
        try:
            job.devices.take_interrupt()
            if _evaluates_after(step.number, job.steps, run):
                entry["held_out"] = job.measure(state.params, held_out)
        except KeyboardInterrupt as error:  # first save; the resumed run will evaluate
            stop = error
        directory.note(step=step.number, **entry)
        metrics.note(step.number, **entry, tokens=step.tokens, tokens_per_second=step.tokens / step.seconds)
        if stop or step.number - latest >= run.checkpoint_every or step.number == job.steps:
            directory.save(step.number, job.devices.on_host(state))
            latest = step.number
        if stop:
            raise stop
    return state


def _evaluates_after(step: int, steps: int, run: RunSettings) -> bool:
    return bool(run.eval_every and 0 < step < steps and step % run.eval_every == 0)


def _base(train: TrainSettings, devices: Devices) -> tuple[PyTree, dict[str, Any]]:
    """Loads the checkpoint. It may not fit on a single device, so on a mesh it's quantised whilst reading."""
    if devices.mesh is None:
        return load(train.model)
    shapes, _, weights = open_model(train.model)
    quantise = weights.format == "safetensors" and train.quantize != "none"
    options = _quantisation(train, trained_in_full(shapes)) if quantise else None
    try:
        return load(train.model, quantize=options, mesh=devices.mesh, sharding=devices.rule)
    except (CheckpointError, UnsupportedConfigError):
        raise
    except ValueError as error:  # a weight can't be sharded evenly
        raise FinetuneError(f"{error} (--block-size, --mesh)") from error


def _with_sizes(config: dict[str, Any], model: PyTree) -> dict[str, Any]:
    """Adds any sizes missing from `config.json` (e.g. for Gemma 3), using the family's defaults."""
    missing = {name for name in ("vocab_size", "max_position_embeddings") if config.get(name) is None}
    own = vars(getattr(model, "config", None) or object)
    return config | {name: own[name] for name in missing if name in own}


def trained_in_full(model: PyTree) -> tuple[str, ...]:
    """Returns the parts of a model trained in full, in addition to any adapters."""
    return getattr(model, "head_parts", ())


def _quantisation(settings: TrainSettings, exclude: Sequence[str]) -> dict[str, Any]:
    scheme, options = scheme_of(settings.quantize), dict[str, Any]()
    if is_recipe(scheme):
        if settings.block_size is not None:
            raise FinetuneError(
                f"--block-size cannot be used with the recipe {settings.quantize}: its rules have options."
            )
    else:
        options |= {"double_quant": True} if scheme in ("nf4", "fp4", "int4") else {}
        if settings.block_size is not None:
            options["block_size"] = settings.block_size
    return {"scheme": scheme, "exclude": exclude, **options}


def _invocation(settings: TrainSettings, run: RunSettings, task: AbstractTask, tokens: Tokens) -> list[int]:
    """Returns the invocation tokens, or `[]` if adapters are always active."""
    of_file: list[int] = []
    if isinstance(settings.adapter, Path):
        config = config_of(settings.adapter, settings)
        of_file = (config and config.option("alora_invocation_tokens")) or []
    if settings.invocation is None and not of_file:
        return []
    if not task.invokes:
        raise FinetuneError("--invocation is for decoders that learn to continue texts.")
    if settings.invocation is None:
        if run.merge:  # a merged weight is the same for every token
            raise FinetuneError(
                f"--merge cannot be used with the adapter in {settings.adapter}, which has invocation tokens."
            )
        return of_file
    found = tokens.ids(settings.invocation)
    if not found:
        raise FinetuneError(f"--invocation {settings.invocation!r} has no tokens.")
    return found


def _with_invocation(
    path: Path, examples: list[Example], invocation: Sequence[int], console: Console
) -> list[Example]:
    """Drops examples without the invocation tokens: the adapter is never active in them."""
    n = len(invocation)

    def invokes(ids: Sequence[int]) -> bool:
        return any(ids[i : i + n] == [*invocation] for i in range(len(ids)))

    found = [example for example in examples if not n or invokes(example.texts[0])]
    if examples and not found:
        raise FinetuneError(
            f"{path}: no example has the tokens {[*invocation]} of --invocation, one after the other, from "
            "which on adapters act."
        )
    if len(found) < len(examples):
        console.print(
            f"{path}: {len(examples) - len(found)} of {len(examples)} examples do not have the tokens of "
            "--invocation, and were left out."
        )
    return found


def read_data(
    train: TrainSettings,
    data: DataSettings,
    task: AbstractTask,
    tokens: Tokens,
    console: Console,
    invocation: Sequence[int] = (),
) -> tuple[list[Example], list[Example]]:
    parts = []
    files = {"--data": data.data} | ({} if data.eval_data is None else {"--eval-data": data.eval_data})
    for option, path in files.items():
        examples, cut, empty, without_answer = read_examples(path, lambda fields: task.encode(fields, tokens))
        count = len(examples) + empty + without_answer
        if cut:
            left_out = f", {empty} of them left out, since nothing was left to learn" if empty else ""
            console.print(
                f"{path}: {cut} of {count} examples are longer than {tokens.max_length} tokens and were "
                f"cut{left_out}."
            )
        if without_answer:
            console.print(
                f"{path}: {without_answer} of {count} examples have nothing to learn, such as an answer of "
                "the assistant, and were left out."
            )
        if not examples:
            left_out = f": its {count} lines were left out, since nothing in them is learned" if count else ""
            raise FinetuneError(
                f"{path} ({option}) has no examples{left_out}. Add examples"
                f"{', or raise --max-length' if empty else ''}."
            )
        if isinstance(task, AbstractTextTask):
            _warn_of_endless(path, examples, tokens, console)
        parts.append(_with_invocation(path, examples, invocation, console))
    training, held_out = parts if len(parts) == 2 else split(parts[0], data.held_out, train.seed)
    if data.pack:
        if not task.packs:
            raise FinetuneError("--pack is for decoders, which can keep several texts in a row apart.")
        count = len(training)
        training, held_out = pack(training, tokens.max_length), pack(held_out, tokens.max_length)
        console.print(f"{count} training texts are packed into {len(training)} rows.")
    if min(len(training), train.batch_size) < task.least_batch:
        raise FinetuneError(
            f"{data.data} has {len(training)} training examples, and --batch-size is "
            f"{train.batch_size}; a batch must have at least {task.least_batch}."
        )
    if not held_out and data.held_out:
        raise FinetuneError(
            f"No examples of {data.data} are held out. Add examples, or set --eval-data, or --held-out 0 to "
            "train without evaluation."
        )
    return training, held_out


def _warn_of_endless(path: Path, examples: list[Example], tokens: Tokens, console: Console) -> None:
    """Warns about texts after which the model won't learn to stop, other than truncated ones."""
    ends = {*tokens.marks.ends, *tokens.marks.answer}

    def learns_end(example: Example) -> bool:
        return example.was_cut or any(
            own and token in ends
            for ids in example.texts
            for token, own in zip(ids, example.learned, strict=False)
        )

    if endless := sum(not learns_end(example) for example in examples):
        console.print(
            f"Warning: {path}: {endless} of {len(examples)} examples are learned without an end, so that "
            "generation does not stop: the files of the tokeniser name no eos_token, or the chat template "
            "writes none after an answer.",
            markup=False,
        )


def _check_tokens(model: PyTree, examples: list[Example], adapter: Path) -> None:
    """Raises an error if a token has no embedding because the adapter's vocabulary is smaller."""
    last = max(token for example in examples for text in example.texts for token in text)
    sizes = [x.shape[max(x.ndim - 2, 0)] for name, x in named_arrays(model).items() if is_of_tokens(name)]
    if sizes and last >= min(sizes):
        raise FinetuneError(
            f"--adapter {adapter} was trained with {min(sizes)} tokens, and the data has the token {last}: "
            "use the tokeniser that the adapter was trained with."
        )


def _adapted(
    model: PyTree, task: AbstractTask, settings: TrainSettings, make: Any, invocation: list[int]
) -> PyTree:
    if settings.quantize != "none" and not is_quantised(model):
        try:
            model = quantize(model, **_quantisation(settings, trained_in_full(model)))
        except ValueError as error:  # the block size doesn't divide some weight
            raise FinetuneError(str(error)) from error
    in_full = trained_in_full(model)
    # PEFT stores dense arrays for layers trained in full, so they can't remain quantised.
    heads = {name: x for name, x in named_arrays(model).items() if name.split(".")[0] in in_full}
    model = replace(model, {name: materialise(x) for name, x in heads.items()})
    tokens = {}
    if settings.train_tokens:
        if not isinstance(model, AbstractDecoder):
            raise FinetuneError("--train-tokens is for decoders.")
        tokens = {model.config.family.name("embed_tokens"): settings.train_tokens}
    target = () if settings.target == ("all-linear",) else settings.target
    options: dict[str, Any] = {
        "where": list(target) or "all-linear",
        "exclude": () if target else task.unused(model),
        "modules_to_save": in_full,
        "trainable_token_indices": tokens,
        "key": jax.random.key(settings.seed),
    }
    try:
        if isinstance(settings.adapter, Path):
            adapted = continued(model, settings.adapter)
        elif make is not None:
            adapted = adapt(model, make, **options)
        else:
            adapted = loraify(
                model, rank=settings.rank, alpha=settings.alpha, dropout=settings.dropout,
                rslora=settings.rslora, dora=settings.dora, invocation_tokens=invocation, **options,
            )  # fmt: skip
    except CheckpointError:
        raise
    except ValueError as error:  # no layer matches the names
        raise FinetuneError(str(error)) from error
    outside = named_arrays(eqx.tree_at(lambda model: model.layers, adapted, None))
    if found := [name for name, x in outside.items() if isinstance(x, AdaptedArray) and x.invocation]:
        raise FinetuneError(
            f"--invocation is for adapters of layers, which see all tokens at once: leave {found[0]} out of "
            "--target."
        )
    return stored_for(adapted, settings.compute_dtype)


def _scanned(model: PyTree, settings: TrainSettings, console: Console) -> tuple[PyTree, bool]:
    """Stacks the layers if the settings require this, or don't forbid it and it's possible.

    Also returns whether the layers were stacked.
    """
    wanted = settings.scan_layers
    if wanted is False or (wanted is None and not isinstance(model, AbstractDecoder)):
        return model, False
    if not isinstance(model, AbstractDecoder):
        raise FinetuneError(f"--scan-layers is for decoders; {settings.model} holds {type(model).__name__}.")
    try:
        stacked = model.stacked()
        _check_rows(stacked)
        return stacked, True
    except ValueError as error:  # the layers differ in structure, or a custom type can't be stacked
        if wanted:
            raise FinetuneError(f"--scan-layers: {error}") from error
        console.print(f"Layers are compiled one by one: {error}", markup=False)
        return model, False


def _check_rows(model: AbstractDecoder) -> None:
    """Raises `ValueError` if there are adapters which, once stacked, can't be split into rows again.

    This can happen for custom adapter types with a key for dropout.
    """
    for name, x in named_arrays(with_dropout_key(model, jax.random.key(0)).layers).items():
        if isinstance(x, AdaptedArray) and x.leading_axis() is NotImplemented:
            raise ValueError(
                f"{name}: a row of a stack of {type(x).__name__} with keys for dropout is not one of them, "
                "unless `part_axes` names all of its parts, such as 'key': ''."
            )


def _check_written(model: PyTree, train: TrainSettings, task: AbstractTask) -> None:
    """Raises an error if no file format can represent the adapter about to be trained."""
    if train.adapter is not None:  # `_save` can use our own format in this case
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # `_save` will warn instead
            tensors_and_config(model, task_type=task.peft_type)
    except ValueError as error:
        raise FinetuneError(str(error)) from error


def _save(
    model: PyTree, train: TrainSettings, run: RunSettings, task: AbstractTask, console: Console
) -> None:
    """Writes the adapter in PEFT's format, or in our own if PEFT's can't represent it."""
    if not is_own(train):
        try:
            name = str(train.model)
            peft.save_adapter(run.output, model, base_model=name, task_type=task.peft_type)
            return
        except ValueError as error:
            if train.adapter is None:
                raise
            console.print(f"PEFT's files do not hold this adapter: {error}", markup=False)
    file, types = run.output / OWN_FILE, types_of(model)
    safetensors.save_adapters(file, model, types=types)
    console.print(f"Load it with {how_to_load(file, types)}", markup=False)


def _merge(model: PyTree, train: TrainSettings, data: DataSettings, run: RunSettings) -> None:
    if run.merge == "dense":
        base, _ = begun(*load(train.model), train, data)
        base, file = materialise(base), adapter_file(train, run)
        if file.is_dir():
            model = peft.load_adapter(file, base)
        else:
            model = safetensors.load_adapters(file, base, types=types_of(model))
    options: dict[str, Any] = {
        "format": run.format,
        "quantize": None if run.outtype is None else type_of(run.outtype),
    }
    save(merged(run), merge(model), train.model, **options)

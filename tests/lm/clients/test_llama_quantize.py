"""The block formats of llama.cpp: our codes beside its own quantiser's, the types of its presets, and its
greedy tokens on our files and adapters."""

import ctypes
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.lm import convert, generate, load, peft, save
from quaxlike.lm.gguf import mixtures, writer
from quaxlike.lm.gguf.blocks import BLOCK_TYPES, read_blocks
from quaxlike.lm.gguf.config import metadata_of, rope_tensors
from quaxlike.lm.models import Decoder, DecoderConfig
from quaxlike.lm.models.decoder_config import completed
from quaxlike.lm.text import TextTokenizer
from quaxlike.surgery.trees import named_arrays
from tests.lm.clients import test_llama_cpp as others
from tests.lm.clients.suite import client
from tests.lm.clients.test_llama_cpp import LEARNED, checkpoint, llama_cpp  # noqa: F401 (fixtures)

pytestmark = [*client("llama_cpp", "gguf"), pytest.mark.timeout(3600)]

NUMBERS = {name.lower(): number for number, (name, _) in BLOCK_TYPES.items()}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}


def _ggml():
    import llama_cpp as package

    (library,) = Path(package.__file__).parent.glob("lib/libggml-base.*so")
    ggml, size, pointer = ctypes.CDLL(str(library)), ctypes.c_int64, ctypes.c_void_p
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]
    return ggml


def _theirs(name, w, importance):
    """The numbers that llama.cpp's quantiser makes of a matrix."""
    number, ggml = NUMBERS[name], _ggml()
    kind = BLOCK_TYPES[number][1]
    raw = np.zeros(w.size // kind.elements * kind.nbytes, np.uint8)
    ggml.ggml_quantize_init(number)
    weights = None if importance is None else importance.ctypes.data
    ggml.ggml_quantize_chunk(number, w.ctypes.data, raw.ctypes.data, 0, *w.shape, weights)
    return np.asarray(read_blocks(kind, raw, w.shape).materialise())


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_errors_beside_its_quantiser(name, weighted, compare):
    rng = np.random.default_rng(0)
    importance = np.exp(2 * rng.normal(size=512)).astype(np.float32) if weighted else None
    if name == "q8_0" and weighted:
        pytest.skip("its scales cover the range, whatever the importance")
    for draw in (rng.normal, partial(rng.standard_t, 4), lambda size: rng.normal(0.7, 1, size)):
        w = np.float32(0.02) * draw(size=(64, 512)).astype(np.float32)
        ours = ql.BlockArray.quantize(w, codec=name, importance=importance).materialise()
        weights = 1 if importance is None else importance
        errors = [np.mean(weights * (x - w) ** 2) ** 0.5 for x in (ours, _theirs(name, w, importance))]
        what = "errors beyond its quantiser's" + (" with an importance matrix" if weighted else "")
        compare(
            "llama.cpp", "GGUF, all types", "single weights", what, max(errors[0] / errors[1] - 1, 0), 0, 0.02
        )


PRESETS = {
    **{"q4_k_m": 15, "q5_k_m": 17, "mxfp4_moe": 38, "q8_0": 7, "q6_k": 18, "q5_0": 8, "q5_1": 9, "q4_0": 2},
    **{"q4_1": 3, "q2_k": 10, "iq4_nl": 25, "iq4_xs": 30},
}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen2", {}),
        ("qwen2", {"num_key_value_heads": 2, "num_hidden_layers": 16}),  # the first eighth is not empty
        ("phi3", {}),
        ("phi3", {"num_key_value_heads": 1}),
        ("mistral", {"hidden_size": 64, "intermediate_size": 96}),
        ("mixtral", {"num_local_experts": 8, "intermediate_size": 256}),
        ("mixtral", {"num_local_experts": 8, "intermediate_size": 256, "num_key_value_heads": 2}),
        ("qwen3_moe", {"moe_intermediate_size": 256}),
        ("gpt_oss", {"rope_scaling": None}),
        ("qwen3_5_text", {"linear_key_head_dim": 128, "linear_value_head_dim": 128}),
        ("qwen3_next", {"linear_key_head_dim": 128, "linear_value_head_dim": 128}),
        ("gemma4_text", {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 64}),
    ],
)
def test_types_of_presets(name, sizes, tmp_path, compare, monkeypatch):
    """Each tensor has the type that `llama-quantize` gives it, and so has the file. Numbers don't matter."""
    from gguf import GGUFReader
    from llama_cpp import llama_cpp as program

    own = (others.FAMILIES | others.OTHERS)[name][1]
    config = {**others.SIZES, **own, **WIDE, "vocab_size": 64, "num_hidden_layers": 5, "model_type": name}
    config = {**config, "tie_word_embeddings": name != "gpt_oss", **sizes}
    model = Decoder(DecoderConfig.from_json(config), key=jax.random.key(0))
    if name == "gpt_oss":
        config["layer_types"] = ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
    arrays, metadata = named_arrays(model), metadata_of(completed(config))
    tensors = {**arrays, **rope_tensors(completed(config))}
    writer.write(tmp_path / "f32.gguf", tensors, metadata)

    def no_blocks(path, name, value, kind, rows, columns):
        kind = writer._KINDS[kind]
        return np.zeros((*value.shape[:-1], value.shape[-1] // kind.elements * kind.nbytes), np.uint8)[
            ..., rows, :
        ]

    monkeypatch.setattr(writer, "_blocks", no_blocks)

    def types(path):
        file = GGUFReader(path)
        found = {tensor.name: tensor.tensor_type.name for tensor in file.tensors}
        return {**found, "file": int(file.fields["general.file_type"].contents())}

    for preset, number in PRESETS.items():
        options = program.llama_model_quantize_default_params()
        options.ftype, options.nthread = number, 2
        paths = [str(tmp_path / file).encode() for file in ("f32.gguf", "theirs.gguf")]
        assert program.llama_model_quantize(*paths, ctypes.byref(options)) == 0
        writer.write(tmp_path / "ours.gguf", tensors, metadata, mixtures.mixture_of(model, preset))
        found, wanted = types(tmp_path / "ours.gguf"), types(tmp_path / "theirs.gguf")
        assert found == wanted, preset
        compare("llama.cpp", "GGUF, its presets", name, "types of tensors", found == wanted, True)


@pytest.mark.parametrize("name", ["mistral", "mixtral", "qwen3_5_text"])
def test_greedy_tokens_in_every_type(name, checkpoint, llama_cpp, compare, tmp_path, monkeypatch):  # noqa: F811
    """Of a model that has learned a text: what llama.cpp writes is what our model of the same file writes."""
    monkeypatch.setattr(others, "SIZES", others.SIZES | WIDE)
    source, model = checkpoint(name)
    tokenizer = TextTokenizer(source)
    ids = tokenizer.encode(LEARNED).ids
    lm.write(source / "model.safetensors", named_arrays(others._taught(model, ids)))
    chosen = [x for x in writer.TYPES if x not in ("f32", "bf16")]
    for quantize in ["q4_k_m", "q5_k_m", *chosen, *(["mxfp4_moe"] if name == "mixtral" else [])]:
        file = tmp_path / f"{quantize}.gguf"
        assert convert.main([str(source), str(file), "--quantize", quantize]) == 0
        ours, _ = load(file)
        new = generate(ours, jnp.asarray([ids[:4]]), max_new_tokens=len(ids) - 4)[0].tolist()
        theirs, text = llama_cpp(file), [*ids[:4], *new]
        theirs.eval(text)
        # For products, llama.cpp rounds the other factor, which decides between almost equal logits. It also
        # decides between almost equal experts, and another expert changes the logits by more: at one place.
        logits = others._logits(ours, text)[3:-1]
        second, first = np.sort(logits)[:, -2:].T
        sure = first - second > (0.4 if name == "mixtral" else 0.2) * np.std(logits)
        found = theirs.scores[3 : len(text) - 1].argmax(-1)
        differ = np.flatnonzero(sure & (found != np.asarray(new)))
        if name == "mixtral" and len(differ) == 1:
            sure[differ] = False
        # With 2 or 3 bits, more of them are almost equal.
        assert np.mean(sure) > (0.6 if quantize in ("q2_k", "q3_k") else 0.8)
        what = "learned texts"
        compare("llama.cpp", "GGUF, all types and presets", name, what, found[sure], np.asarray(new)[sure])


def test_adapters(checkpoint, llama_cpp, compare, tmp_path, monkeypatch):  # noqa: F811
    """On a GGUF file, apart or merged into it."""
    from llama_cpp import Llama

    monkeypatch.setattr(others, "SIZES", others.SIZES | WIDE)
    for name in ("mistral", "mixtral", "qwen3_5_text", "qwen3_next", "gemma4_text, experts"):
        source, model = checkpoint(name)
        save(tmp_path / "base.gguf", model, source, format="gguf")
        base, _ = load(tmp_path / "base.gguf")
        where = r"model\.layers\..*" if name.startswith("gemma4") else "all-linear"
        adapted = ql.loraify(base, rank=4, alpha=6, where=where, key=jax.random.key(0))
        leaves = lambda x: x.replace(b=0.02 * jax.random.normal(jax.random.key(1), x.b.shape))
        is_lora = lambda x: isinstance(x, ql.LoraArray)
        adapted = jax.tree.map(lambda x: leaves(x) if is_lora(x) else x, adapted, is_leaf=is_lora)
        peft.save_adapter(tmp_path / "adapter", adapted)
        files = [str(tmp_path / x) for x in ("base.gguf", "lora.gguf", "merged.gguf", "adapter")]
        assert convert.main([files[0], files[1], "--adapter", files[3], "--adapter-only"]) == 0
        assert convert.main([files[0], files[2], "--adapter", files[3], "--quantize", "f32"]) == 0
        ids = TextTokenizer(source).encode(LEARNED).ids
        options = {"n_ctx": 256, "n_threads": 2, "verbose": False, "logits_all": True, "flash_attn": False}
        apart = Llama(files[0], lora_path=files[1], type_k=0, type_v=0, **options)
        wanted, check = (
            others._logits(adapted, ids),
            partial(compare, "llama.cpp", "GGUF adapters", name.partition(",")[0]),
        )
        for theirs in (apart, llama_cpp(files[2])):
            theirs.eval(ids)
            atol = 4e-2 if name.startswith("gemma") else 2e-3  # its GELU is a table of float16
            check("logits", theirs.scores[: len(ids)], wanted, atol)
        new = generate(adapted, jnp.asarray([ids[:8]]), max_new_tokens=12)[0].tolist()
        check("greedy tokens", others._continued(apart, ids[:8], 12), new)
        apart.close()
        for path in (tmp_path / "base").iterdir():
            path.unlink()
        (tmp_path / "base").rmdir()

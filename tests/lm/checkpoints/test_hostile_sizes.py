"""Files whose settings ask for much more time or memory than the files weigh."""

import contextlib
import gc
import json
import shutil
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.files import CheckpointError
from quaxlike.files.errors import ErrorAboutFiles
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import UnsupportedConfigError, peft
from quaxlike.lm.gguf import config as gguf_config
from quaxlike.lm.text import TextTokenizer
from tests.fixtures import fixture

resource = pytest.importorskip("resource")

# The tests before these may have imported and compiled less: the limits are far above what is needed.
_SECONDS, _BYTES, _CHARACTERS = 3, 200 << 20, 5_000


@pytest.fixture(autouse=True)
def _without_collections():
    """What many tests before these have left takes the collector seconds."""
    gc.disable()
    yield
    gc.enable()


def _most_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Refused:
    """Expects one of the library's errors, soon, with little memory and a short message."""

    def __init__(self, message, error=CheckpointError):
        self.message, self.error = message, error

    def __enter__(self):
        self.raises = pytest.raises(self.error, match=f"(?s){self.message}")
        self.info = self.raises.__enter__()
        self.most = _most_memory()
        self.start = time.thread_time()

    def __exit__(self, *error):
        seconds = time.thread_time() - self.start
        self.raises.__exit__(*error)
        assert seconds < _SECONDS
        assert _most_memory() - self.most < _BYTES
        assert len(str(self.info.value)) < _CHARACTERS
        return True


@pytest.fixture
def edited(tmp_path):
    """A copy of a fixture with other entries in its config.json."""

    def edit(name, **entries):
        folder = tmp_path / "model"
        shutil.copytree(fixture(name), folder, copy_function=shutil.copyfile)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))
        return folder

    return edit


BASES = ["peft_llama/base", "peft_gpt2/base", "peft_bert/base", "models/qwen2/base", "models/qwen3_moe/base",
         "models/gpt_oss/base", "models/mixtral/base", "models/gemma3/base"]  # fmt: skip
SIZES = ["head_dim", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads",
         "num_key_value_heads", "num_hidden_layers"]  # fmt: skip
READ = {
    "peft_gpt2/base": ["n_embd", "n_inner", "n_head", "n_layer", "vocab_size"],
    "peft_bert/base": [entry for entry in SIZES if entry not in ("head_dim", "num_key_value_heads")],
}
MOE = {
    "models/qwen3_moe/base": ["num_experts", "num_local_experts", "moe_intermediate_size"],
    "models/gpt_oss/base": ["num_experts", "num_local_experts"],
    "models/mixtral/base": ["num_experts", "num_local_experts"],
}


@pytest.mark.quick(15)
@pytest.mark.parametrize("size", [10**6, 2**31 - 1])
@pytest.mark.parametrize(
    ("base", "entry"),
    [(base, entry) for base in BASES for entry in READ.get(base, SIZES)],
)
def test_sizes_beyond_the_tensors(base, entry, size, edited):
    folder = edited(base, **{entry: size})
    with Refused(f"config.json has {entry}={size}; no more than [0-9,]+ fit"):
        ql.lm.load(folder)


@pytest.mark.quick(7)
@pytest.mark.parametrize("size", [10**3, 10**6, 2**31 - 1])
@pytest.mark.parametrize(
    ("base", "entry"),
    [(base, entry) for base, entries in MOE.items() for entry in entries],
)
def test_experts_beyond_the_tensors(base, entry, size, edited):
    with Refused(f"config.json has {entry}=|does not fit the model|must be of .*shape"):
        ql.lm.load(edited(base, **{entry: size}))


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["safetensors", "an empty tensor"])
def test_layers_beyond_the_tensors(beside, edited):
    """However many empty tensors there are, and whatever their axes."""
    folder = edited("models/qwen2/base", num_hidden_layers=4_000, head_dim=10**8)
    tensors = dict(open_tensors(folder / "model.safetensors"))
    if beside == "an empty tensor":
        tensors["long"] = np.zeros((2**40, 0), np.float32)
    tensors |= {f"model.layers.{i}.x": np.zeros(0, np.float32) for i in range(5_000)}
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    with Refused(r"config.json has (head_dim|num_hidden_layers)=\d+; no more than"):
        ql.lm.load(folder)


@pytest.mark.slow
def test_the_sizes_of_a_gguf_file(tmp_path):
    model, config = ql.lm.load(fixture("peft_llama/base"))
    arrays = dict(lm.open_checkpoint(fixture("peft_llama/base")))
    del model
    for key, message in [("attention.key_length", "head_dim"), ("block_count", "num_hidden_layers"),
                         ("embedding_length", "hidden_size")]:  # fmt: skip
        metadata = gguf_config.metadata_of(config) | {f"llama.{key}": 2**31 - 1}
        lm.write(tmp_path / "x.gguf", arrays, "gguf", config=config, metadata=metadata)
        with Refused(f"{message}=2147483647; no more than"):
            ql.lm.load(tmp_path / "x.gguf")


HOSTILE = ["(a+)+$", r"(([a-z0-9_.]+)+)+!", "a{99999999999999999999}", "(" * 5000 + ")" * 5000, "(",
           "(?:){2000000000}", "((?:){2000}){2000000}", ".*" * 900 + "x", "(?i)" + r"[\x00-\U0010ffff]" * 500,
           "(?=" * 300 + "a" + ")" * 300, "a" * 10**6]  # fmt: skip


@pytest.mark.quick(4)
@pytest.mark.parametrize("pattern", HOSTILE, ids=lambda pattern: pattern[:16])
def test_expressions_of_quantised_files(pattern, edited):
    gptq = edited("formats/gptq/dynamic_mixed")
    settings = json.loads((gptq / "config.json").read_text())["quantization_config"]
    for exclude in ("-:", "+:", ""):
        entry = {"quantization_config": settings | {"dynamic": {exclude + pattern: {}}}}
        (gptq / "config.json").write_text(json.dumps(entry))
        _within_limits(lambda: lm.read(gptq))
    folder = next(path for path in fixture("formats/compressed_tensors").iterdir() if path.is_dir())
    for path in folder.iterdir():
        shutil.copyfile(path, gptq / path.name)
    config = json.loads((gptq / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["targets"] = [f"re:{pattern}"]
    (gptq / "config.json").write_text(json.dumps(config))
    _within_limits(lambda: lm.read(gptq))


@pytest.mark.quick("(?:){2000000000}")
@pytest.mark.parametrize("pattern", HOSTILE, ids=lambda pattern: pattern[:16])
def test_expressions_of_adapters(pattern, tmp_path):
    layers = {"layers": [{"a" * 30: {"weight": jnp.ones((4, 4))}} for _ in range(8)]}
    peft.save_adapter(tmp_path, ql.loraify(layers, rank=2, where="all-linear", key=jax.random.key(1)))
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    for entries in (
        {"target_modules": pattern}, {"exclude_modules": pattern}, {"modules_to_save": [pattern]},
        {"rank_pattern": {pattern: 2}}, {"alpha_pattern": {pattern: 2}},
        {"layers_pattern": pattern, "layers_to_transform": [0]},
    ):  # fmt: skip
        path.write_text(json.dumps(config | entries))
        _within_limits(lambda: peft.load_adapter(tmp_path, layers))


def _within_limits(read):
    start = time.thread_time()
    with contextlib.suppress(CheckpointError):
        read()
    assert time.thread_time() - start < _SECONDS


def sentencepiece(tokens):
    keys = {
        "model": "llama", "tokens": tokens, "scores": [-float(i) for i in range(len(tokens))],
        "token_type": [2, *[1] * (len(tokens) - 1)], "bos_token_id": 0,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def test_long_tokens_of_gguf(tmp_path):
    usual = ["<unk>", "a", "b", "ab", "aab"]
    lm.write(tmp_path / "x.gguf", {"a": jnp.ones(32)}, "gguf", metadata=sentencepiece([*usual, "b" * 10**6]))
    with Refused(r"'tokenizer.ggml.tokens': number 5 has 1,000,000 characters; at most 1,024"):
        lm.read_tokenizer(tmp_path / "x.gguf")
    # Cuts are tried at the lengths that tokens have.
    many = [*usual, *(f"{i:01000}" for i in range(1_000))]
    lm.write(tmp_path / "x.gguf", {"a": jnp.ones(32)}, "gguf", metadata=sentencepiece(many))
    start = time.thread_time()
    described = json.loads(lm.read_tokenizer(tmp_path / "x.gguf"))
    assert time.thread_time() - start < _SECONDS
    assert described["model"]["merges"] == [["a", "b"], ["a", "ab"]]


@pytest.mark.quick(7)
@pytest.mark.parametrize("levels", [70, 900, 1_500, 5_000, 9_000, 100_000])
@pytest.mark.parametrize("kind", ["[", '{"a":'])
def test_nesting(kind, levels, tmp_path):
    deep = kind * levels + "1" + ("]" if kind == "[" else "}") * levels
    folder = tmp_path / "adapter"
    peft.save_adapter(folder, ql.loraify({"a": {"weight": jnp.ones((4, 4))}}, rank=2, key=jax.random.key(0)))
    path = folder / "adapter_config.json"
    config = path.read_text()
    for entry in ("trainable_token_indices", "rank_pattern", "eva_config", "unknown"):
        path.write_text(
            config.strip()[:-1] + f', "{entry}_": 1, "{entry}": {deep}}}'
            if entry == "unknown"
            else json.dumps({**json.loads(config), entry: 0}).replace(f'"{entry}": 0', f'"{entry}": {deep}')
        )
        with Refused("levels|not JSON"):
            peft.load_adapter(folder, {})
    write_tensors(
        tmp_path / "x.safetensors", {"a": np.zeros(2)}, {"quaxlike": f'{{"version": 1, "values": {deep}}}'}
    )
    with Refused("levels|not JSON"):
        lm.read(tmp_path / "x.safetensors")


def test_a_nested_header(tmp_path):
    write_tensors(tmp_path / "x.safetensors", {"a": np.zeros(2, np.uint8)}, {})
    header = b'{"a": {"dtype": "U8", "shape": ' + b"[" * 4_000 + b"]" * 4_000 + b', "data_offsets": [0, 2]}}'
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with Refused("levels|the header is not JSON"):
        lm.read(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Prepend", "prepend": "x" * 10**7},
        {"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"String": "l"}, "content": "l" * 10}] * 30},
        {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"Regex": ""}, "content": "l" * 10}] * 30}]},
    ],
)  # fmt: skip
def test_normalisers_that_blow_texts_up(normalizer, tmp_path):
    described = json.loads((fixture("models/chat/gemma") / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(described | {"normalizer": normalizer}))
    with Refused("normalisers make texts up to .* times as long"):
        TextTokenizer(tmp_path)


LONG = "x" * 10**6


@pytest.mark.quick("entries0", "entries2", "entries5")
@pytest.mark.parametrize(
    "entries",
    [
        {"hidden_act": LONG}, {"num_hidden_layers": LONG}, {"architectures": [LONG]},
        {"rope_parameters": {"rope_theta": LONG}}, {"rope_parameters": {"rope_type": LONG}},
        {"rope_parameters": {"rope_type": "default", LONG: 1, "rope_theta": 0}},
        {"quantization_config": LONG}, {"quantization_config": {"quant_method": LONG}},
        {"quantization_config": {"quant_method": "gptq", "checkpoint_format": LONG}},
        {"layer_types": [LONG] * 3, "use_sliding_window": True, "sliding_window": 4},
        {"head_dim": [[0] * 1000] * 1000}, {"rope_parameters": [0] * 10**6},
    ],
)  # fmt: skip
def test_messages_are_short(entries, edited):
    folder = edited("models/qwen2/base", **entries)
    with Refused("", (CheckpointError, UnsupportedConfigError)):
        ql.lm.load(folder)


def test_messages_of_adapters_are_short(tmp_path):
    peft.save_adapter(
        tmp_path, ql.loraify({"a": {"weight": jnp.ones((4, 4))}}, rank=2, key=jax.random.key(0))
    )
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    for name in [*config, LONG]:
        if name not in ("auto_mapping", "base_model_name_or_path", "inference_mode", "revision", "task_type"):
            path.write_text(json.dumps(config | {name: {LONG: LONG}}))
            with Refused(""):
                peft.load_adapter(tmp_path, {})
    with pytest.raises(ErrorAboutFiles) as error:
        raise CheckpointError("begin" + LONG + "end")
    assert (str(error.value)[:5], str(error.value)[-3:]) == ("begin", "end")
    assert len(str(error.value)) < _CHARACTERS

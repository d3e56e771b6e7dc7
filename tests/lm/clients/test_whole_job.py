"""A model whose vocabulary was resized learns conversations, from an adapter of PEFT on whose output layer is
trained in full; it is merged and written, and answers in every program with the same tokens:
`quaxlike.lm.generate --chat`, llama.cpp and transformers."""

import json
import shutil

import pytest
from tokenizers import AddedToken, Tokenizer

from quaxlike import lm
from quaxlike.lm.chat import ChatTemplate
from quaxlike.lm.finetune.__main__ import main as finetune
from quaxlike.lm.generate.__main__ import main as generate
from quaxlike.lm.generate.run import Stream
from quaxlike.lm.text import TextTokenizer
from quaxlike.surgery.trees import named_arrays
from tests.lm.clients.suite import client
from tests.lm.clients.test_llama_cpp import FAMILIES, SIZES, random_model

pytestmark = [
    *client("torch", "transformers", "peft", "llama_cpp"),
    pytest.mark.timeout(3600),  # published vocabularies are large
]

#: The tokens that end an answer, as in the `generation_config.json` of the published models.
_ENDS = {
    "qwen3": ["<|im_end|>", "<|endoftext|>"],
    "llama": ["<|end_of_text|>", "<|eot_id|>"],
    "gemma3_text": ["<eos>", "<end_of_turn>"],
    "gpt_oss": ["<|return|>", "<|endoftext|>", "<|call|>"],
}
_NEW = "<fox>"
_QUESTION, _ANSWER = "Who jumps?", f"The quick brown {_NEW}, over the lazy dog."
_ASKED = [{"role": "user", "content": _QUESTION}]


@pytest.fixture
def base(tmp_path, published_tokenizer, published_template):
    """Makes the folder of a small random model, with a published tokeniser and its chat template."""

    def make(name):
        tokenizer, config = FAMILIES[name]
        folder = tmp_path / "base"
        folder.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(published_tokenizer(tokenizer) / file, folder)
        if name == "gpt_oss":  # whose tokeniser is published without
            (folder / "chat_template.jinja").write_text(published_template("openai-gpt-oss-120b"))
        config = {**SIZES, **config, "num_hidden_layers": 2, "model_type": name}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": _ends(name, folder)}))
        lm.write(folder / "model.safetensors", named_arrays(random_model(config)))
        return folder

    return make


def _resized(folder):
    """The model with a new token, in a folder beside it."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(_NEW, special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    model, _ = lm.load(folder)
    rows = max(model.config.vocab_size, tokenizer.token_to_id(_NEW) + 1) + 3
    lm.save(folder.parent / "resized", lm.resize_vocabulary(model, rows), folder)
    return folder.parent / "resized"


def _started_by_peft(folder, out):
    """An adapter as it starts, with an output layer of its own."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "modules_to_save": ["lm_head"]}
    get_peft_model(model, LoraConfig(r=16, lora_alpha=16, task_type="CAUSAL_LM", **options)).save_pretrained(
        out
    )


def _ends(name, folder):
    encode = TextTokenizer(folder).encode
    ids = [encode(token, special=False).ids for token in _ENDS[name]]
    assert all(len(tokens) == 1 for tokens in ids)
    return [token for (token,) in ids]


def _by_quaxlike(path, monkeypatch, capsys):
    """The tokens of the prompt and of the answer, in `quaxlike.lm.generate --chat`, and its text."""
    typed, streams = iter([_QUESTION]), []

    def read(prompt):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    add = Stream.add
    with monkeypatch.context() as patch:
        patch.setattr("builtins.input", read)
        patch.setattr(Stream, "add", lambda self, token: (streams.append(token), add(self, token))[1])
        capsys.readouterr()
        assert generate([f"--model={path}", "--chat", "--max-new-tokens=24"]) == 0
    text = ChatTemplate(path).render(_ASKED, add_generation_prompt=True).text
    return TextTokenizer(path).encode(text, special=False).ids, streams, capsys.readouterr().out.strip()


def _by_transformers(path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    inputs = tokenizer.apply_chat_template(
        _ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    prompt = inputs["input_ids"][0].tolist()
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
    return prompt, tokens, tokenizer.decode(tokens, skip_special_tokens=True).strip()


def _by_llama_cpp(path):
    from llama_cpp import Llama

    model, seen = Llama(str(path), n_ctx=256, n_threads=2, verbose=False), []
    run = model.generate

    def noted(tokens, *args, **options):
        seen.append(list(tokens))
        for token in run(tokens, *args, **options):
            seen.append(token)
            yield token

    model.generate = noted
    answer = model.create_chat_completion(_ASKED, temperature=0, max_tokens=24)
    model.close()
    prompt, *tokens = seen
    assert answer["choices"][0]["finish_reason"] == "stop"
    return prompt, tokens, answer["choices"][0]["message"]["content"].strip()


@pytest.mark.parametrize("name", _ENDS)
def test_the_same_answer_in_every_program(name, base, compare, tmp_path, monkeypatch, capsys):
    folder = _resized(base(name))
    answered = [*_ASKED, {"role": "assistant", "content": _ANSWER}]
    (tmp_path / "data.jsonl").write_text(8 * (json.dumps({"messages": answered}) + "\n"))
    _started_by_peft(folder, tmp_path / "0")

    def goes_on(before, after, steps, *options):
        command = [f"--model={folder}", f"--data={tmp_path / 'data.jsonl'}", f"--steps={steps}", *options]
        command += ["--batch-size=2", "--learning-rate=0.01", "--quantize=none"]
        folders = [f"--adapter={tmp_path / before}", f"--output={tmp_path / after}"]
        assert finetune([*command, *folders]) == 0

    goes_on("0", "1", 10)
    goes_on("1", "2", 60, "--merge")
    merged, ends = tmp_path / "2" / "merged", _ends(name, folder)
    prompt, answer, text = _by_quaxlike(merged, monkeypatch, capsys)
    assert text.endswith(_ANSWER)

    def check(program, form, found):
        their_prompt, their_answer, their_text = found
        while their_answer[-1] in ends:
            their_answer.pop()
        # transformers leaves tokens out that were added to the tokeniser's file alone.
        assert their_text.replace(_NEW, "").endswith(_ANSWER.replace(_NEW, ""))
        compare(program, form, name, "prompts of conversations", their_prompt, prompt)
        compare(program, form, name, "answers", their_answer, answer)

    check("transformers", "safetensors", _by_transformers(merged))
    # The run is done: the same command writes another file.
    goes_on("1", "2", 60, "--merge", "--format=gguf", "--outtype=q8_0")
    file = tmp_path / "2" / "merged.gguf"
    assert _by_quaxlike(file, monkeypatch, capsys) == (prompt, answer, text)
    check("llama.cpp", "GGUF q8_0", _by_llama_cpp(file))

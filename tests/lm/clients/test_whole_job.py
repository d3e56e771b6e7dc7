"""A model is fine-tuned on conversations, merged and written, and answers in every program with the same
tokens: `quaxlike.lm.generate --chat`, llama.cpp and transformers."""

import json
import shutil

import pytest

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
    *client("torch", "transformers", "llama_cpp"),
    pytest.mark.timeout(3600),  # published vocabularies are large
]

#: The tokens that end an answer, as in the `generation_config.json` of the published models.
_ENDS = {
    "qwen3": ["<|im_end|>", "<|endoftext|>"],
    "llama": ["<|end_of_text|>", "<|eot_id|>"],
    "gemma3_text": ["<eos>", "<end_of_turn>"],
    "gpt_oss": ["<|return|>", "<|endoftext|>", "<|call|>"],
}
_QUESTION, _ANSWER = "Who jumps?", "The quick brown fox, over the lazy dog."
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
    folder = base(name)
    answered = [*_ASKED, {"role": "assistant", "content": _ANSWER}]
    (tmp_path / "data.jsonl").write_text(8 * (json.dumps({"messages": answered}) + "\n"))
    command = [f"--model={folder}", f"--data={tmp_path / 'data.jsonl'}", f"--output={tmp_path / 'out'}"]
    command += ["--steps=60", "--batch-size=2", "--rank=16", "--learning-rate=0.01", "--quantize=none"]
    assert finetune([*command, "--merge"]) == 0
    merged, ends = tmp_path / "out" / "merged", _ends(name, folder)
    prompt, answer, text = _by_quaxlike(merged, monkeypatch, capsys)
    assert text.endswith(_ANSWER)

    def check(program, form, found):
        their_prompt, their_answer, their_text = found
        while their_answer[-1] in ends:
            their_answer.pop()
        assert their_text.endswith(_ANSWER)
        compare(program, form, name, "prompts of conversations", their_prompt, prompt)
        compare(program, form, name, "answers", their_answer, answer)

    check("transformers", "safetensors", _by_transformers(merged))
    # The run is done: the same command writes another file.
    assert finetune([*command, "--merge", "--format=gguf", "--outtype=q8_0"]) == 0
    file = tmp_path / "out" / "merged.gguf"
    assert _by_quaxlike(file, monkeypatch, capsys) == (prompt, answer, text)
    check("llama.cpp", "GGUF q8_0", _by_llama_cpp(file))

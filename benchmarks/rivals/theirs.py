"""What the others do: functions that prepare work, and return what runs it and tells the seconds."""

import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .files import LENGTH, RANK, ROWS, Size, gguf, ids, sparse_weight

Run = Callable[[], float]


def _load(folder: pathlib.Path, cores: int, dtype: str, quantize: str | None) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    torch.set_num_threads(cores)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if quantize is not None:
        import bitsandbytes  # noqa: F401 (its absence is told by its name)

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=quantize, bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


#: The model that rows one after the other share.
_kept = functools.lru_cache(maxsize=1)(_load)


def _continued(model: Any, prompt: np.ndarray, new: int) -> list[float]:
    """The times of the tokens, the likeliest each, with a cache."""
    import torch

    times, memory, rows = [], None, torch.as_tensor(prompt).long()
    with torch.inference_mode():
        for _ in range(new):
            out = model(rows, past_key_values=memory, use_cache=True, logits_to_keep=1)
            memory, rows = out.past_key_values, out.logits[:, -1].argmax(-1)[:, None]
            rows.tolist()
            times.append(time.perf_counter())
    return times


def token(
    folder: pathlib.Path, size: Size, cores: int, *, batch: int = 1, dtype: str = "bfloat16",
    quantize: str | None = None, length: int | None = None,
) -> Run:  # fmt: skip
    model, prompt = _kept(folder, cores, dtype, quantize), ids(size, batch, length or size.prompt)
    run = lambda: statistics.median(np.diff(_continued(model, prompt, size.new))[1:])
    run()
    return run


@functools.lru_cache(maxsize=1)
def _llama(folder: pathlib.Path, cores: int, file: str) -> Any:
    from llama_cpp import Llama

    return Llama(str(gguf(folder, file)), n_ctx=1024, n_threads=cores, n_threads_batch=cores, verbose=False)


def llama_prefill(folder: pathlib.Path, size: Size, cores: int, *, file: str, length: int) -> Run:
    model, prompt = _llama(folder, cores, file), ids(size, 1, length)[0].tolist()

    def run() -> float:
        model.reset()
        return _seconds(lambda: (model.eval(prompt), model.sample(temp=0.0)))

    run()
    return run


def llama_token(folder: pathlib.Path, size: Size, cores: int, *, file: str, length: int | None = None) -> Run:
    model = _llama(folder, cores, file)

    def run() -> float:
        model.reset()
        rows, times = ids(size, 1, length or size.prompt)[0].tolist(), []
        for _ in range(size.new):
            model.eval(rows)
            rows = [model.sample(temp=0.0)]
            times.append(time.perf_counter())
        return statistics.median(np.diff(times)[1:])

    run()
    return run


def prefill(folder: pathlib.Path, size: Size, cores: int, *, quantize: str | None = None) -> Run:
    model, prompt = _kept(folder, cores, "bfloat16", quantize), ids(size, 1, 128)
    run = lambda: _seconds(lambda: _continued(model, prompt, 1))
    run()
    return run


def start(folder: pathlib.Path, size: Size, cores: int, *, quantize: str | None = None) -> Run:
    def run() -> float:
        model = _load(folder, cores, "bfloat16", quantize)
        return _seconds(lambda: _continued(model, ids(size, 1, size.prompt), 32))

    return run


def _trained(folder: pathlib.Path, size: Size, cores: int, quantize: str | None) -> Callable[[], float]:
    import torch
    from peft import LoraConfig, get_peft_model

    model = _load(folder, cores, "bfloat16", quantize)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).train()
    trained = [x for x in model.parameters() if x.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0)
    rows = torch.as_tensor(ids(size, ROWS, LENGTH)).long()

    def step() -> float:
        loss = model(rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        return float(loss.detach())

    return step


def step(folder: pathlib.Path, size: Size, cores: int, *, quantize: str | None = None) -> Run:
    once = _trained(folder, size, cores, quantize)
    once()
    return lambda: _seconds(once)


def first_step(folder: pathlib.Path, size: Size, cores: int, *, quantize: str | None = None) -> Run:
    return lambda: _seconds(lambda: _trained(folder, size, cores, quantize)())


def sparse(folder: pathlib.Path, size: Size, cores: int) -> Run:
    from scipy.sparse import csr_array

    w, x = sparse_weight(size)
    matrix, row = csr_array(w), x[0]

    def run(times: int = 20) -> float:
        return _seconds(lambda: [matrix @ row for _ in range(times)]) / times

    run()
    return run


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin

"""Runs of `python -m quaxlike.lm.finetune --merge=dense` that are stopped, and go on until they end."""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from quaxlike.lm.finetune.__main__ import main
from tests.lm.finetune.test_finetune import LINES, checkpoint, write

_TIMED = "metrics.jsonl"  # holds the time of each step
_TOLD = "told"
_STOPPED = re.compile(
    r"Stopped\. The same command resumes from the last checkpoint, after step (\d+): |"
    r"Stopped\. Nothing was saved yet|Stopped before the run began; (?P<before>.*) is as it was"
)


def _run(folder: Path, output: Path, started: Any) -> None:
    """The process that is stopped. It compiles nothing that an earlier one compiled."""
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    with open(folder / _TOLD, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    started.set()
    raise SystemExit(main(_options(folder, output)))


def _options(folder: Path, output: Path) -> list[str]:
    return [
        f"--model={folder / 'model'}", f"--data={folder / 'data.jsonl'}", f"--output={output}", "--rank=4",
        "--batch-size=8", "--held-out=0.2", "--steps=12", "--checkpoint-every=2", "--merge=dense",
        "--max-length=512", "--eval-every=3",
    ]  # fmt: skip


def kills_of_runs(count: int, seed: int = 0) -> list[str]:
    """Kills runs so many times in all; what is wrong with what they leave.

    A run goes on after each kill, and must end with the files of one that was not killed, to the byte.
    """
    return _stopped(count, seed, signal.SIGKILL)


def interrupts_of_runs(count: int, seed: int = 0) -> list[str]:
    """The same with Ctrl-C, or SIGTERM, and with long steps, in which the process waits for the device: each
    time, the run must say that it was stopped, and have saved the last step that it did."""
    return _stopped(count, seed, signal.SIGINT, signal.SIGTERM, longer=60)


def _stopped(count: int, seed: int, *signals: signal.Signals, longer: int = 1) -> list[str]:
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.kills.runs"])  # so that each process need not import JAX
    draw, problems, stopped = random.Random(seed), list[str](), 0
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        checkpoint(folder / "model", "llama", eos_token_id=3, max_position_embeddings=512)
        lines = [{"text": " ".join([line["text"]] * longer)} for line in LINES["text"]]
        write(folder / "data.jsonl", lines)

        def started(output: Path) -> Any:
            start = context.Event()
            child = context.Process(target=_run, args=(folder, output, start), daemon=True)
            child.start()
            start.wait()
            time.sleep(0.01)
            return child

        whole, output = folder / "whole", folder / "output"
        for _ in range(2):  # the second has nothing to compile
            shutil.rmtree(whole, ignore_errors=True)
            start = time.monotonic()
            started(whole).join()
            seconds = time.monotonic() - start
        expected = _files(whole)
        while stopped < count:
            shutil.rmtree(output, ignore_errors=True)
            while True:
                child = started(output)
                # The end is short, and there is most to be written.
                child.join(draw.triangular(0, 1.3 * seconds, seconds) if stopped < count else None)
                if child.exitcode is not None:
                    break
                how = signals[stopped % len(signals)]
                os.kill(child.pid, how)
                child.join()
                if how != signal.SIGKILL and child.exitcode == 0 and (output / "merged").exists():
                    break  # it had just ended
                stopped += 1
                found = _files(output)
                models = [x for x in found if x.endswith("model.safetensors")]
                torn = [x for x in models if found[x] != expected[x]]
                if torn:
                    problems.append(f"finetune, {how.name} {stopped}: {torn} is not what a whole run writes")
                told = (folder / _TOLD).read_text()
                said = _STOPPED.search(told)
                taken = child.exitcode == 128 + how and said and "Error" not in told
                kept = said and (said["before"] or int(said[1] or 0) == _last_step(output))
                if how != signal.SIGKILL and not (taken and kept):
                    problems.append(f"finetune, {how.name} {stopped}: status {child.exitcode}, told {told!r}")
            if child.exitcode:
                problems.append(f"finetune, after stop {stopped}: ended with status {child.exitcode}")
            found = _files(output)
            differing = sorted(x for x in found.keys() | expected.keys() if found.get(x) != expected.get(x))
            if differing != [_TIMED]:
                problems.append(
                    f"finetune, after stop {stopped}: {differing} differ from those of a whole run"
                )
    return problems


def _last_step(output: Path) -> int:
    """The last step of which the log tells."""
    log = output / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

"""`python -m quaxlike.lm.finetune` on meshes, of one process and of several."""

import json
import signal
import time
from pathlib import Path

import jax
import pytest

from quaxlike.files.tensors import open_tensors
from quaxlike.lm.finetune.__main__ import main
from quaxlike.lm.finetune.devices import Devices
from quaxlike.lm.finetune.settings import FinetuneError, RunSettings
from quaxlike.lm.generate.__main__ import main as generate
from quaxlike.sharding.meshes import mesh_from_text
from tests.lm.finetune.test_finetune import LINES, checkpoint, write
from tests.sharding.processes import free_address, start

pytestmark = pytest.mark.usefixtures("default_promotion")


@pytest.mark.parametrize("text", ["data", "data=0", "data=2,data=2", "", "data=4;model=1"])
def test_texts_that_are_no_mesh(text):
    with pytest.raises(ValueError, match=r"such as data=2,model=4"):
        mesh_from_text(text)


def test_meshes_as_text():
    assert dict(mesh_from_text("data=2, model=2").shape) == {"data": 2, "model": 2}
    with pytest.raises(ValueError, match="data=3 is of 3 devices; there are 4"):
        mesh_from_text("data=3")


def test_meshes_of_other_devices_than_all():
    """Of those of a described machine, for instance."""
    some = jax.devices()[1:3]
    assert mesh_from_text("data=2", some).devices.tolist() == some
    assert Devices(RunSettings(Path(), mesh="data=2"), some).mesh.devices.tolist() == some
    with pytest.raises(FinetuneError, match="data=4 is of 4 devices; there are 2"):
        Devices(RunSettings(Path(), mesh="data=4"), some)


@pytest.fixture
def command(tmp_path):
    """The arguments of a small run."""
    model = checkpoint(tmp_path / "model", "llama")
    write(tmp_path / "data.jsonl", LINES["text"])
    return [
        "--model", str(model), "--data", str(tmp_path / "data.jsonl"), "--rank", "2", "--steps", "3",
        "--batch-size", "4", "--max-length", "16", "--learning-rate", "1e-2",
    ]  # fmt: skip


@pytest.mark.slow
def test_what_cannot_start(command, tmp_path, capsys):
    out = ["--output", str(tmp_path / "out")]
    assert main([*command, *out, "--block-size", "16"]) == 2
    assert "a power of two from 32" in capsys.readouterr().err
    assert main([*command, *out, "--fsdp"]) == 2
    assert "pass --mesh too" in capsys.readouterr().err
    assert main([*command, *out, "--mesh", "data=3"]) == 2
    assert "there are 4" in capsys.readouterr().err
    assert main([*command, *out, "--mesh", "model=4"]) == 2
    assert "number of devices has to divide" in capsys.readouterr().err
    assert main([*command, *out, "--mesh", "data=4", "--batch-size", "6"]) == 2
    assert "a multiple of 4" in capsys.readouterr().err
    assert main([*command, *out, "--mesh", "data=2,seq=2", "--max-length", "15"]) == 2
    assert "15 tokens cannot be shared evenly along seq" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, *out, "--coordinator", "127.0.0.1:1"])
    assert "must be used together" in capsys.readouterr().err
    assert not (tmp_path / "out" / "run.json").exists()


def losses(folder):
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The rank is above both sizes")  # of which states take blocks
@pytest.mark.parametrize(
    "mesh",
    [
        "--mesh data=2,model=2 --block-size 32",
        "--mesh data=4 --fsdp",
        "--mesh data=2,model=2 --block-size 32 --optimizer-bits 8 --rank 256",
        "--mesh data=2,model=2 --block-size 32 --no-scan-layers",
        "--mesh data=4 --fsdp --no-scan-layers --remat",
        "--mesh data=2,seq=2 --fsdp --loss-chunk 16",
        "--mesh seq=2,model=2 --block-size 32 --pack --remat",
    ],
)
def test_the_losses_of_one_device(command, tmp_path, mesh):
    rounds, mesh = "--optimizer-bits" in mesh, mesh.split()
    of_one = mesh[2:] if rounds else mesh[2 : 4 if "32" in mesh else 2] + ["--pack"] * ("--pack" in mesh)
    assert main([*command, "--output", str(tmp_path / "one"), *of_one]) == 0
    assert main([*command, "--output", str(tmp_path / "many"), *mesh]) == 0
    rel = 1e-3 if rounds else 1e-5
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=rel)


@pytest.mark.slow
def test_experts_of_their_own_devices(command, tmp_path):
    command[1] = str(checkpoint(tmp_path / "experts", "mixtral"))
    assert main([*command, "--output", str(tmp_path / "one")]) == 0
    assert main([*command, "--output", str(tmp_path / "many"), "--mesh", "data=2,expert=2"]) == 0
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.slow
def test_generation_on_a_mesh(command, capsys):
    arguments = ["--model", command[1], "--prompt", "one two", "--max-new-tokens", "4"]
    written = []
    for more in ([], ["--mesh", "data=2,model=2"]):
        assert generate([*arguments, *more]) == 0
        written.append(capsys.readouterr().out)
    assert written[0] == written[1]


@pytest.mark.slow
def test_one_of_two_processes_is_asked_to_stop(command, tmp_path):
    """Both end after the same step, which is saved."""
    output, address = tmp_path / "out", free_address()
    several = ["--coordinator", address, "--num-processes", "2", "--mesh", "data=2", "--steps", "100000"]
    arguments = ["-m", "quaxlike.lm.finetune", *command, *several, "--output", str(output)]
    processes = [start(*arguments, "--process-id", str(i), devices=1) for i in range(2)]
    log = output / "log.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < 4:
        if any(process.poll() is not None for process in processes):
            pytest.fail("\n\n".join(process.communicate(timeout=60)[0] for process in processes))
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)
    printed = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [143, 143], printed
    step = int(open_tensors(output / "checkpoint.safetensors")["step"])
    assert len(log.read_bytes().splitlines()) == step + 1  # with a line for the start
    assert f"resumes from the last checkpoint, after step {step}: " in printed[0]


@pytest.mark.slow
def test_each_of_two_processes_is_killed(command, tmp_path):
    """The other ends soon; the same commands go on to what an unbroken run comes to. The first process is the
    one that they all meet at."""
    alone = [*command, "--steps", "60", "--checkpoint-every", "2"]
    command = [*alone, "--mesh", "data=2"]
    checkpoint = tmp_path / "broken" / "checkpoint.safetensors"

    def begin(out):
        several = ["--coordinator", free_address(), "--num-processes", "2"]
        arguments = ["-m", "quaxlike.lm.finetune", *command, "--output", str(out), *several]
        return [start(*arguments, "--process-id", str(i), devices=1) for i in range(2)]

    def finish(started):
        printed = [process.communicate(timeout=300)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0], printed

    def written():
        return checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0

    for victim in (1, 0):
        before, processes = written(), begin(tmp_path / "broken")
        killed, other = processes[victim], processes[1 - victim]
        while written() == before:
            if any(process.poll() is not None for process in processes):
                printed = [process.communicate(timeout=60)[0] for process in processes]
                pytest.fail("\n\n".join(printed))
            time.sleep(0.05)
        killed.kill()
        printed = other.communicate(timeout=60)[0]
        assert other.returncode not in (0, 2), printed
        assert "heartbeat" in printed or victim == 0  # JAX names a process that it has lost
        killed.communicate()
    finish(begin(tmp_path / "broken"))
    finish(begin(tmp_path / "whole"))
    adapters = [tmp_path / name / "adapter_model.safetensors" for name in ("broken", "whole")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()

    assert main([*alone, "--output", str(tmp_path / "alone")]) == 0
    found, expected = (losses(tmp_path / name)[:10] for name in ("whole", "alone"))
    assert found == pytest.approx(expected, rel=1e-6)

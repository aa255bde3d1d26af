"""The main job as a user runs it: on virtual devices, under torchrun, interrupted, and with bad input."""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import vescale_fn as vf

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "examples" / "train_gpt.py")
SMALL = ["--layers", "1", "--width", "128", "--seq", "32", "--batch", "4", "--data", str(ROOT / "LICENSE")]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*args: str, launcher: list[str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *(launcher or []), SCRIPT, *SMALL, *args], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def losses(out: str) -> list[str]:
    return re.findall(r"^step +\d+/\d+ +loss (\S+)", out, re.MULTILINE)


def test_small_run_equals_one_device() -> None:
    out = run("--steps", "3", "--check")
    for shown in (
        r"^\d\.\d\d M parameters, 0\.0 MB of text$",
        r"^mesh dp=2,tp=2$",
        r"^blocks\.0\.w_qkv +\[128, 384\]",
        r"^  all_reduce +tp +forward +\d+ +\d+\.\d{3}$",
        r"^step +2/3 +loss \d\.\d{4} +[\d,]+ tokens/s +0:\d\d left$",
        r"^train loss \d\.\d+ +held-out loss \d\.\d+ ",
        r"^def ",
    ):
        assert re.search(shown, out, re.MULTILINE), f"{shown} is not in\n{out}"
    apart = re.search(r"^largest difference from one device: loss (\S+), parameters (\S+)$", out, re.MULTILINE)
    assert apart is not None
    assert all(float(x) < 1e-10 for x in apart.groups())


def test_two_processes_give_the_losses_of_two_virtual_devices() -> None:
    virtual = run("--steps", "3", "--mesh", "dp=2")
    processes = run("--steps", "3", "--mesh", "dp=2", launcher=TORCHRUN)
    assert len(losses(virtual)) == 3
    assert losses(virtual) == losses(processes)


def test_interrupt_ends_cleanly() -> None:
    command = [sys.executable, SCRIPT, *SMALL, "--steps", "100000"]

    def heed_interrupts() -> None:  # a job that was started in the background inherits that they are ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed_interrupts) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith("step"):
                break
        job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=60)
    assert job.returncode == 130
    assert out.endswith("stopped\n")
    assert "Traceback" not in err


def test_text_too_short(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("not much")
    done = subprocess.run([sys.executable, SCRIPT, "--data", str(short)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == f"{short} has 8 bytes; --seq 128 needs at least 2600."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "dp=2,pp"], "argument --mesh: 'pp' is not dp=N or tp=N"),
        (["--resume"], "--resume needs --save DIR, and does not go with --check"),
        (["--width", "100"], "--width 100 is not a multiple of 64, the size of an attention head"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"train_gpt.py: error: {message}"


def test_stages_of_zero_are_the_same_step(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "zero_stages.py"), "--picture", str(tmp_path / "bars.png")]
    sizes = ["--layers", "1", "--width", "128", "--batch", "16", "--steps", "2", "--ranks", "2"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = {line[:28].strip(): line[28:].split() for line in done.stdout.splitlines()}
    assert rows["per rank"] == ["stage", "0", "stage", "1", "stage", "2", "stage", "3"]
    assert all(float(cell) < 1e-12 for cell in rows["largest difference"])
    memory = [[float(cell) for cell in rows[f"{kind}, MiB"]] for kind in ("parameters", "gradients", "optimizer state")]
    assert [len(set(row)) for row in memory] == [2, 2, 2]  # each is halved once, at its stage
    assert [row.index(min(row)) for row in memory] == [3, 2, 1]


@pytest.mark.deep
def test_default_run_learns() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    held_out = re.search(r"held-out loss (\S+)", done.stdout)
    assert held_out is not None
    assert float(held_out[1]) < 1.8


# ---- checkpoints


def bits(folder: Path) -> dict[str, bytes]:
    """Every leaf of a checkpoint."""
    tensors = {p: x for p, x in vf.load(folder).items() if isinstance(x, torch.Tensor)}
    return {p: x.flatten().view(torch.uint8).numpy().tobytes() for p, x in tensors.items()}


def test_a_resumed_run_is_the_run(tmp_path: Path, deep: bool) -> None:
    """Bit for bit on the same mesh, in the losses that are shown on another one, of two processes."""
    whole = run("--steps", "6", "--mesh", "dp=2", "--save", str(tmp_path / "whole"), "--every", "6")
    assert len(losses(whole)) == 6
    end_at(4, tmp_path / "part")
    shutil.copytree(tmp_path / "part", tmp_path / "other")
    rest = run("--steps", "6", "--mesh", "dp=2", "--save", str(tmp_path / "part"), "--every", "6", "--resume")
    assert re.search(r"part goes on after step 4$", rest, re.MULTILINE)
    assert losses(rest) == losses(whole)[4:]
    assert bits(tmp_path / "part") == bits(tmp_path / "whole")
    if deep:
        other = run("--steps", "6", "--mesh", "tp=2", "--save", str(tmp_path / "other"), "--resume", launcher=TORCHRUN)
        assert losses(other) == losses(whole)[4:]


def end_at(step: int, folder: Path) -> None:
    """Train with a checkpoint after `step`, of six, and no later one; kill the job when it is there."""
    command = [sys.executable, SCRIPT, *SMALL, "--steps", "6", "--mesh", "dp=2", "--save", str(folder)]
    with subprocess.Popen([*command, "--every", str(step)], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith("step") and (folder / "checkpoint.json").exists():
                break
        job.kill()


@pytest.mark.deep
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Killed at random moments, 20 times: every fourth while it starts, the others while it trains and saves."""
    rng, found, manifest = random.Random(0), [], tmp_path / "run" / "checkpoint.json"
    command = [sys.executable, SCRIPT, *SMALL, "--steps", "100000", "--save", str(tmp_path / "run"), "--every", "1"]
    for i in range(20):
        again = ["--resume"] if manifest.exists() else []
        with subprocess.Popen([*command, *again], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None
            assert job.stderr is not None
            if i % 4 != 3:
                next(line for line in job.stdout if line.startswith("step") and manifest.exists())
            time.sleep(2 * rng.random())
            job.kill()
            assert not job.stderr.read()
        found.append(vf.load(tmp_path / "run")["step"])
    assert found == sorted(found)
    assert found[-1] > found[0] > 0


def test_resume_from_nothing(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, *SMALL, "--resume", "--save", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"There is no checkpoint in {tmp_path}: it has no checkpoint.json. Give the path that was given to vf.save."
    )

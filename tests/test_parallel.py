"""Several processes: torchrun with two ranks over gloo, on the CPU."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime.checkpoint import find, newest, read_weights, verified
from runtime.config import UserError
from runtime.ranks import placed
from tests.test_train import QUICK, ROOT, config, metrics, row

ALL = [word for word in QUICK if not word.startswith(("train.checkpoint_every", "train.batch_size"))]
ALL += [
    "train.batch_size=2",
    "train.max_steps=8",
    "train.eval_every=4",
    "train.eval_batches=3",
    "train.sample_tokens=8",
]
SLOW = 120  # seconds


def torchrun(tmp_path, *arguments, script=ROOT / "train.py", ranks=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command += [*arguments, f"data.cache={tmp_path}/tokens"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SLOW, env=environment)
    return done.returncode, done.stdout, done.stderr


def figures(folder):
    """Losses, gradient norms and validation losses, step by step."""
    keys = ("train/loss", "train/grad_norm", "val/loss")
    return torch.tensor([line[key] for line in metrics(folder) for key in keys if key in line], dtype=torch.float64)


@pytest.fixture
def alone(hotswap):
    """The same run in one process: two micro-steps of 2 sequences where two ranks make one each."""
    code, _, err = hotswap(*ALL, "out_dir=alone")
    assert (code, err) == (0, "")
    return figures("alone")


def test_ddp_is_the_same_run(hotswap, tmp_path, alone):
    """Losses and norms to fp32 rounding; one folder, written by rank 0; a job's throughput and a device's."""
    code, out, err = torchrun(tmp_path, *ALL)
    assert code == 0, err
    torch.testing.assert_close(figures("run"), alone, rtol=1e-5, atol=0)
    assert out.count("step 00008/00008 | loss") == 1
    assert "512 tokens: 2 processes (ddp) with 1 micro-steps of 2 sequences of 128" in out
    assert out.count("done     run/result.json") == 1
    result = row()
    assert (result["status"], result["world_size"], result["steps"]) == ("ok", 2, 8)
    assert result["name"] == "0M-eager-sdpa-fp32-ddp2"
    assert result["perf/tokens_per_sec_per_device"] == pytest.approx(result["perf/tokens_per_sec"] / 2)
    assert result["perf/mfu_measured_peak"] == pytest.approx(
        result["perf/tokens_per_sec_per_device"] * result["flops_per_token"] / result["measured_peak_flops"]
    )
    assert result["mem/job_peak_gib"] > 1.5 * result["mem/peak_rss_gib"]
    assert result["command"].startswith("torchrun --standalone --nproc_per_node=2 ")
    assert Path("run/sample.txt").read_text() == Path("alone/sample.txt").read_text()


def test_fsdp_is_the_same_run_and_goes_on_elsewhere(hotswap, tmp_path, alone):
    """Sharded checkpoints resume in one process, and one process's on two ranks; read_weights() reads both kinds."""
    code, out, err = torchrun(tmp_path, *ALL, "parallel=fsdp", "train.sharded_checkpoints=true", "train.stop_after=3")
    assert code == 0, err
    assert "torchrun --standalone --nproc_per_node=2 " in out
    folder = newest(Path("run/checkpoints"))
    assert len([*folder.glob("shards/*.distcp")]) == 2
    assert hotswap(*ALL, "train.resume=auto", "train.stop_after=2")[0] == 0
    assert (newest(Path("run/checkpoints")) / "model.safetensors").exists()
    code, _, err = torchrun(tmp_path, *ALL, "parallel=fsdp", "train.resume=auto")
    assert code == 0, err
    torch.testing.assert_close(figures("run"), alone, rtol=1e-5, atol=0)
    assert Path("run/sample.txt").read_text() == Path("alone/sample.txt").read_text()
    ours, theirs = (checkpoint_weights(folder) for folder in ("run", "alone"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)  # AdamW: small gradients' signs


def checkpoint_weights(folder):
    return read_weights(find(folder))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_dropout_goes_on_exactly_on_every_rank(tmp_path, monkeypatch, parallel):
    """Each rank has its own random numbers, and gets them back: bit-equal losses. Rank 1's are not rank 0's."""
    monkeypatch.chdir(tmp_path)
    settings = *ALL, "model.dropout=0.2", f"parallel={parallel}", "train.sharded_checkpoints=true"
    settings += "train.eval_every=0", "train.sample_tokens=0"
    for arguments in (("out_dir=whole",), ("train.stop_after=4",), ("train.resume=auto",)):
        code, _, err = torchrun(tmp_path, *settings, *arguments)
        assert code == 0, err
    assert torch.equal(figures("run"), figures("whole"))
    saved = torch.load("run/checkpoints/step-000008/training.pt", weights_only=True)
    assert not torch.equal(saved["random"][0]["torch"], saved["random"][1]["torch"])


def test_a_full_disk_has_its_reason(tmp_path, monkeypatch):
    """Of sharded checkpoints, where every rank writes: no file may be larger than 200 KiB."""
    monkeypatch.chdir(tmp_path)
    assert torchrun(tmp_path, *ALL, "train.max_steps=1", "out_dir=first")[0] == 0  # writes the tokens
    script = tmp_path / "small.py"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200 * 1024,) * 2)\n"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{limit}import train; train.main()\n")
    settings = *ALL, "parallel=fsdp", "train.sharded_checkpoints=true", "train.checkpoint_every=4"
    code, out, err = torchrun(tmp_path, *settings, script=script)
    assert code == 1
    assert "step 00008/00008 | loss" in out
    assert "warning: run/checkpoints/step-000004 could not be written: " in err
    assert "error: run/checkpoints/step-000008 could not be written: " in err
    assert "CheckpointException" not in err


def test_a_sweep_is_for_one_process(tmp_path):
    code, _, err = torchrun(tmp_path, "-m", *ALL, "seed=1,2")
    assert code == 1
    assert "error: a sweep (-m) of several processes does not work: run torchrun once a job" in err


def test_fsdp_in_bf16_keeps_fp32_masters(hotswap, tmp_path):
    """The same as one process in bf16, within bf16's rounding; compiled block by block."""
    settings = *ALL, "precision=bf16", "train.sample_tokens=0"
    assert hotswap(*settings, "out_dir=alone")[0] == 0
    code, _, err = torchrun(tmp_path, *settings, "parallel=fsdp", "kernels=compile")
    assert code == 0, err
    torch.testing.assert_close(figures("run"), figures("alone"), rtol=2**-6, atol=0)
    held = verified(newest(Path("run/checkpoints")))
    assert held["config"]["precision"] == "bf16"
    assert {w.dtype for w in checkpoint_weights("run").values()} == {torch.float32}


FAILING = """
import os, signal, sys
sys.path.insert(0, {root!r})
import train
from runtime.config import UserError
step = train.train_step
def failing(model, optimizer, batches, lr):
    if optimizer.ranks.rank == 1 and optimizer.steps == 4:
        {fault}
    return step(model, optimizer, batches, lr)
train.train_step = failing
train.main()
"""


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise UserError('the disk of rank 1 is full')", "rank 1 failed: the disk of rank 1 is full"),
        ("raise ZeroDivisionError('a bug')", "rank 1 failed: a bug"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "another rank died without a word (killed?): torchrun's report names it",
        ),
    ],
)
def test_a_rank_that_dies_ends_the_job_with_its_reason(tmp_path, monkeypatch, fault, reason):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(root=str(ROOT), fault=fault))
    code, _, err = torchrun(tmp_path, *ALL, script=script)
    assert code == 1
    assert f"error: {reason}\n" in err
    assert row()["status"] == f"failed: {reason}"


def test_a_signal_saves_once_for_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "train.py"]
    command += [*ALL, "train.max_steps=100000", f"data.cache={tmp_path}/tokens"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 00004"):
            process.send_signal(signal.SIGTERM)
            break
    out, _ = process.communicate(timeout=SLOW)
    step = int(re.search(r"^stopped  after step (\d+); go on with: torchrun --standalone --np", out, re.MULTILINE)[1])
    assert verified(newest(Path("run/checkpoints")))["step"] == step
    assert row()["status"] == f"stopped: SIGTERM after step {step}"
    assert json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["step"] == step


def test_what_several_processes_cannot_have(monkeypatch):
    """A step that does not divide over them, one GPU for all, more processes than GPUs."""
    for key, value in {
        "MASTER_ADDR": "localhost",
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
    }.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=r"train.block_size 128 x 3 processes = 768 tokens: try 768$"):
        config(*ALL)
    with pytest.raises(UserError, match=r"device=cuda:1 under torchrun: each process takes its own; say device=cuda"):
        placed("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"torchrun started 3 processes here, and there are 2 GPU\(s\): lower --nproc"):
        placed("cuda")
    assert placed("cpu") == "cpu"


@pytest.mark.parametrize("parallel", ["data", ""])
def test_ways_that_do_not_exist(parallel):
    with pytest.raises(UserError, match=r"parallel=.*: choose ddp or fsdp"):
        config(*ALL, f"parallel={parallel}")

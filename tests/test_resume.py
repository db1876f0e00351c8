"""Runs that end early, by a signal, a kill or an error, and resume."""

import functools
import json
import math
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import data
from data.loader import Loader, Windows
from kernels.registry import OPS, contract, impls, unavailable
from model import capture, generate
from model.config import GPTConfig
from model.optim import OptimConfig
from runtime import resume
from runtime.checkpoint import checkpoint_folders, newest_valid, read_manifest, verify
from runtime.config import UserError, field_defaults
from runtime.resume import schedule_changes
from tests.runtime.test_signals import ANSWER
from tests.runtime.test_unreadable import break_paths
from tests.test_train import CPU, QUICK, ROOT, config, metrics, row, set_clock

BASE = [word for word in QUICK if "checkpoint_every" not in word]  # QUICK, but with checkpoints
RESUME = "train.resume=auto"


def curve(folder="run"):
    """Step -> its loss and its gradient norm."""
    return {line["step"]: (line["train/loss"], line["train/grad_norm"]) for line in metrics(folder)}


def program(tmp_path, *arguments, sigint=signal.SIG_DFL):
    """Start train.py in a process of its own."""
    command = [sys.executable, str(ROOT / "train.py"), *arguments, f"data.cache={tmp_path}/tokens"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=tmp_path, **pipes, preexec_fn=lambda: signal.signal(signal.SIGINT, sigint))


def read_until(process, beginning):
    """Read the output of the process up to a line with this beginning."""
    for line in process.stdout:
        if line.startswith(beginning):
            return
    raise AssertionError(f"no {beginning!r}: {process.stderr.read()}")


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.exhaustive)])
@pytest.mark.usefixtures("quick_python")
def test_a_killed_and_resumed_run_is_bit_equal(hotswap, tmp_path, precision):
    """A SIGKILL after step 23 of 40: losses and gradient norms equal an uninterrupted run's, with dropout."""
    settings = *BASE, "train.max_steps=40", "train.checkpoint_every=20", "model.dropout=0.1", f"precision={precision}"
    settings += "train.batch_size=2", "train.eval_every=15", "train.eval_batches=1"
    settings += "model.n_embd=64", "model.n_head=2"  # a CPU without AVX-512 computes bf16 slowly
    assert hotswap(*settings, "out_dir=whole")[0] == 0
    process = program(tmp_path, *settings)
    read_until(process, "step 00023/00040")
    process.kill()
    process.communicate()  # until the program has closed its files
    newest = checkpoint_folders(Path("run/checkpoints"))[0].name
    # The evaluations after steps 15 and 30 may have made best checkpoints, and a kill may come before step 20 is saved
    assert newest in ("step-000015", "step-000020", "step-000030")
    code, out, err = hotswap(*settings, RESUME)
    assert (code, err) == (0, "")
    assert f"step {int(newest[-6:]) + 1:05}/00040" in out
    assert list(curve()) == list(range(1, 41))
    assert curve() == curve("whole")
    assert row()["val/loss"] == row("whole")["val/loss"]
    assert row()["val/loss/min"] == row("whole")["val/loss/min"]
    assert row()["resumed_from"] == f"run/checkpoints/{newest}"


# Each choice has another backend of every op that GPT-2 calls, as long as there are others
BACKENDS = {
    "attn" if op == "attention" else f"kernels.{op}": [name for name in impls(op) if not unavailable(op, name, CPU)]
    for op in OPS
    if not hasattr(contract(op), "MODEL")
}
CHOICES = [
    [f"{key}={names[number % len(names)]}" for key, names in BACKENDS.items()]
    for number in range(max(map(len, BACKENDS.values())))
]
CHOICES += [["kernels=compile"]]


@pytest.mark.exhaustive
def test_a_run_resumes_with_any_other_choice_of_kernels(hotswap, monkeypatch):
    """A run that changes its choice at every step has the losses of a run with the first one, to fp32 rounding.

    Each choice reads the checkpoint of another one, and writes one for the next. That covers all pairs, because only a
    checkpoint connects two runs.
    """
    compiled = torch.nn.Module.compile  # without Inductor, whose C++ takes 10 s
    monkeypatch.setattr(torch.nn.Module, "compile", functools.partialmethod(compiled, backend="aot_eager"))
    # The measurement would take half the time of so short a run
    monkeypatch.setattr("runtime.device.measured_flops", lambda device, dtype: 1e9)
    small = "train.batch_size=1", "train.block_size=16", "train.tokens_per_step=16"  # for Triton's interpreter
    small += "model.n_embd=32", "model.n_head=2"
    steps = [*CHOICES, CHOICES[0]]
    settings = *BASE, *small, f"train.max_steps={len(steps)}"
    assert hotswap(*settings, *CHOICES[0], "out_dir=whole")[0] == 0
    whole = {line["step"]: line["train/loss"] for line in metrics("whole") if "train/loss" in line}
    for step, choice in enumerate(steps, start=1):
        resume = [f"train.resume=run{step - 1}"] if step > 1 else []
        code, _, err = hotswap(*settings, *choice, *resume, "train.stop_after=1", f"out_dir=run{step}")
        assert (code, err) == (0, "")
        [line] = metrics(f"run{step}")
        assert line["step"] == step
        assert line["train/loss"] == pytest.approx(whole[step], rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_with_muon_is_bit_equal_and_adamw_refuses_its_checkpoint(hotswap, precision):
    """training.pt has the momentum of the matrices, and AdamW's moments of the other weights."""
    settings = *BASE, "train.max_steps=6", f"precision={precision}", "optim=muon"
    assert hotswap(*settings, "out_dir=whole")[0] == 0
    assert hotswap(*settings, "train.stop_after=3")[0] == 0
    saved = torch.load("run/checkpoints/step-000003/training.pt", weights_only=True)
    matrices = set(saved["momentum"])
    assert {name.split(".")[2] for name in matrices} == {"attn", "mlp"}
    assert saved["exp_avg"].keys() == saved["exp_avg_sq"].keys()
    assert {"wte.weight", "wpe.weight", "h.0.ln_1.weight", "h.0.mlp.c_fc.bias"} <= saved["exp_avg"].keys()
    assert not matrices & saved["exp_avg"].keys()
    code, _, err = hotswap(*settings, "optim=adamw", RESUME)
    assert code == 1
    assert "is of another run: optim.name=adamw (checkpoint: muon)" in err
    assert hotswap(*settings, RESUME)[0] == 0
    assert curve() == curve("whole")


def test_precisions_share_checkpoints(hotswap):
    """A checkpoint holds fp32 weights, so a bf16 run resumes in fp32. The losses differ by bf16's rounding."""
    assert hotswap(*BASE, "train.max_steps=8", "precision=bf16", "train.stop_after=4")[0] == 0
    assert hotswap(*BASE, "train.max_steps=8", "precision=fp32", RESUME)[0] == 0
    assert hotswap(*BASE, "train.max_steps=8", "precision=bf16", "out_dir=whole")[0] == 0
    for step in range(1, 9):
        assert curve()[step][0] == pytest.approx(curve("whole")[step][0], rel=2**-8)


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("SIGTERM", "SIGUSR1")), "SIGINT"]
)
@pytest.mark.usefixtures("quick_python")
def test_a_signal_saves_a_checkpoint_and_prints_how_to_resume(hotswap, tmp_path, name):
    """The run ends after its step with exit code 75. The printed command resumes it at the next step."""
    process = program(tmp_path, *QUICK, "train.max_steps=100000", "train.log_every=1")
    read_until(process, "step 00004")
    process.send_signal(signal.Signals[name])
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (75, ANSWER if name == "SIGINT" else "")
    [line] = [line for line in out.splitlines() if line.startswith("stopped  ")]
    step, command = re.fullmatch(r"stopped  after step (\d+); resume with: (.*)", line).groups()
    assert row()["status"] == f"stopped: {name} after step {step}"
    assert verify(newest_valid(Path("run/checkpoints")))["step"] == int(step) == metrics()[-1]["step"]
    words = shlex.split(command)
    assert words[0] == "python"
    assert hotswap(*words[2:-3], *words[-2:], "train.stop_after=2")[0] == 0  # without data.cache, which hotswap() adds
    assert [line["step"] for line in metrics()] == list(range(1, int(step) + 3))
    assert row()["status"] == "ok"


@pytest.mark.exhaustive
def test_a_background_job_stops_on_sigint(hotswap, tmp_path):
    """A shell starts `train.py &` with SIGINT ignored. `timeout -s INT` around it must stop it after a step."""
    process = program(tmp_path, *QUICK, "train.max_steps=100000", "train.log_every=1", sigint=signal.SIG_IGN)
    read_until(process, "step 00004")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (75, ANSWER)
    assert row()["status"].startswith("stopped: SIGINT after step ")


def test_the_second_ctrl_c_ends_at_once(hotswap, monkeypatch):
    def twice(*_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(capture, "train_step", twice)
    assert hotswap(*QUICK)[0] == 130
    assert row()["status"] == "stopped: SIGINT twice"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_before_the_first_step_ends_the_run_at_once(hotswap, monkeypatch, name, code):
    """A signal during the tokenization: there is a row and no traceback, and another run may use the folder."""
    open_dataset = data.open_dataset

    def interrupted(config):
        os.kill(os.getpid(), signal.Signals[name])
        return open_dataset(config)

    monkeypatch.setattr(data, "open_dataset", interrupted)
    assert hotswap(*BASE) == (code, "", "interrupted\n" if name == "SIGINT" else "")
    assert row()["status"] == f"stopped: {name}"
    monkeypatch.setattr(data, "open_dataset", open_dataset)
    assert hotswap(*BASE, "train.max_steps=1")[0] == 0


def test_a_signal_during_the_sample_is_ignored(hotswap, monkeypatch):
    """The row already has its figures, so the sample is completed and the run is ok."""
    original = generate.generate

    def interrupted(*arguments, **options):
        assert (row()["status"], row()["steps"]) == ("stopped: before its end", 1)
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    monkeypatch.setattr(generate, "generate", interrupted)
    code, out, _ = hotswap(*BASE, "train.max_steps=1", "train.sample_tokens=4")
    assert (code, row()["status"]) == (0, "ok")
    assert "sample   " in out


def test_stop_after_counts_the_steps_of_a_process(hotswap):
    """The same command, run again and again as in a queue of jobs, ends the run. After that it does nothing."""
    settings = *BASE, "train.max_steps=8", "train.stop_after=3", RESUME
    for last in (3, 6, 8):
        code, out, err = hotswap(*settings)
        assert (code, err) == (0, "")
        assert metrics()[-1]["step"] == last
        assert ("stopped  after step" in out) == (last < 8)
    assert hotswap(*BASE, "train.max_steps=8", "out_dir=whole")[0] == 0
    assert curve() == curve("whole")
    before = row()
    code, out, _ = hotswap(*settings)
    done = "done     already: run/checkpoints/step-000008 is of the run's last step"
    assert (code, out) == (0, f"{done}\n")
    assert row() == before


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ("model.n_layer=2", "model.n_layer=2 (checkpoint: 1)"),
        ("model.pos=rope", "model.pos=rope (checkpoint: learned)"),
        ("seed=7", "seed=7 (checkpoint: 1337)"),
        ("train.tokens_per_step=1024", "train.tokens_per_step=1024 (checkpoint: 512)"),
        ("train.overfit=true", "train.overfit=True (checkpoint: False)"),
        ("data.mask_documents=true", "data.mask_documents=True (checkpoint: False)"),
        ("data=text", "data.name=text (checkpoint: stdlib)"),
    ],
)
def test_a_run_does_not_resume_with_another_config(hotswap, change, differs):
    """The error names what differs, and nothing in the folder changes."""
    Path("book.txt").write_text("All work and no play makes Jack a dull boy.\n" * 400)
    assert hotswap(*BASE, "train.max_steps=1")[0] == 0
    before = row()
    more = ["data.path=book.txt"] if change == "data=text" else []
    code, _, err = hotswap(*BASE, "train.max_steps=2", RESUME, change, *more)
    assert code == 1
    assert err.startswith("error: train.resume=run/checkpoints/step-000001 is of another run: ")
    assert (row(), yaml.safe_load(Path("run/config.yaml").read_text())) == (before, before["config"])
    assert differs in err
    assert err.endswith("or start a new run from its weights: init_from=run/checkpoints/step-000001\n")
    assert err.count("\n") == 1


def test_a_changed_schedule_is_a_line_when_a_run_resumes(hotswap):
    """So is a changed optimizer."""
    assert hotswap(*BASE, "train.max_steps=30", "train.stop_after=1")[0] == 0
    _, out, _ = hotswap(*BASE, "train.max_steps=30", "train.stop_after=1", RESUME)
    assert out.startswith("device ")
    changes = "train.max_steps=8", "optim.weight_decay=0.2", "train.max_minutes=5"
    code, out, err = hotswap(*BASE, *changes, RESUME)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == (
        "changed  from here on: optim.weight_decay=0.2 (checkpoint: 0.1), train.max_steps=8 (checkpoint: 30), "
        "train.max_minutes=5.0 (checkpoint: None)"
    )


def test_a_run_does_not_resume_on_another_text(hotswap):
    """Another modification time is allowed. Another text in the same file is not."""
    text = *BASE, "data=text", "data.path=book.txt", RESUME
    Path("book.txt").write_text("All work and no play makes Jack a dull boy.\n" * 400)
    assert hotswap(*text, "train.max_steps=1")[0] == 0
    os.utime("book.txt", (0, 0))
    assert hotswap(*text, "train.max_steps=2")[0] == 0
    Path("book.txt").write_text("All play and no work makes Jack a dull boy.\n" * 400)
    code, _, err = hotswap(*text, "train.max_steps=3")
    assert code == 1
    assert "is of another run: data.train=" in err


def test_a_damaged_checkpoint_is_skipped_with_a_warning(hotswap):
    """train.resume=auto takes the checkpoint before it, or fails if all are damaged. Naming a damaged one fails.

    The damaged one gets another name.
    """
    settings = *BASE, "train.checkpoint_every=2", "train.stop_after=4", "train.max_steps=8"
    assert hotswap(*settings)[0] == 0
    path = Path("run/checkpoints/step-000004/training.pt")
    path.write_bytes(path.read_bytes()[:-1])
    code, _, err = hotswap(*settings, "train.resume=run/checkpoints/step-000004")
    assert code == 1
    assert err.startswith("error: run/checkpoints/step-000004 is damaged: training.pt has ")
    code, _, err = hotswap(*settings, RESUME)
    assert code == 0
    skipped, moved = err.splitlines()
    assert skipped.startswith("warning: run/checkpoints/step-000004 is damaged: training.pt has ")
    aside = "run/checkpoints/damaged-step-000004"
    assert moved == f"warning: run/checkpoints/step-000004 is damaged and is now {aside}; delete it if nobody needs it"
    assert Path(aside, "manifest.json").exists()
    assert row()["resumed_from"] == "run/checkpoints/step-000002"
    assert [line["step"] for line in metrics()] == [1, 2, 3, 4, 5, 6]
    for folder in checkpoint_folders(Path("run/checkpoints")):
        (folder / "manifest.json").write_text("")
    before = metrics()
    code, _, err = hotswap(*settings, RESUME)
    assert code == 1
    assert err.splitlines()[-1].startswith("error: train.resume=auto: no checkpoint in run is valid")
    assert metrics() == before


def test_a_run_does_not_resume_if_its_newest_checkpoint_cannot_be_read(hotswap, monkeypatch):
    """It may be good, and an older one would let a later save delete it. Nothing in the folder changes."""
    settings = *BASE, "train.checkpoint_every=2", "train.stop_after=4", "train.max_steps=8"
    assert hotswap(*settings)[0] == 0
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    line = "error: run/checkpoints/step-000004/manifest.json cannot be read: Input/output error; make it readable, or "
    line += "name another checkpoint by its path and, to resume, another out_dir\n"
    for word in ("auto", "run", "run/checkpoints/step-000004", "run/checkpoints/step-000002"):
        with monkeypatch.context() as patch:
            break_paths(patch, Path("run/checkpoints/step-000004/manifest.json"), "EIO")
            code, out, err = hotswap(*settings, f"train.resume={word}")
        assert (code, out, err) == (1, "", line)
        assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before
    assert hotswap(*settings, RESUME)[0] == 0
    assert row()["steps"] == 8


def test_a_resumed_run_counts_the_minutes_before_it(hotswap, monkeypatch):
    """A step takes 1 s, and max_minutes=0.5. A resumed run has the learning rates of an uninterrupted one: 30 steps."""
    set_clock(monkeypatch, seconds=1.0)
    settings = *BASE, "train.max_steps=null", "train.max_minutes=0.5", "optim.warmup_steps=2"
    assert hotswap(*settings, "out_dir=whole")[0] == 0
    assert hotswap(*settings, "train.stop_after=12")[0] == 0
    assert hotswap(*settings, "train.checkpoint_every=500", RESUME)[0] == 0
    rates, whole = ([line["train/lr"] for line in metrics(folder)] for folder in ("run", "whole"))
    assert rates == whole
    assert len(rates) == 30
    assert rates[-1] == row()["config"]["optim"]["min_lr"] < max(rates)
    code, out, _ = hotswap(*settings, RESUME)
    assert code == 0
    assert out.startswith("done     already: ")


def test_one_process_does_not_shard_its_checkpoints(hotswap):
    assert hotswap(*BASE, "train.max_steps=1", "train.sharded_checkpoints=true")[0] == 0
    assert Path("run/checkpoints/step-000001/model.safetensors").exists()


def test_the_folder_of_checkpoints_may_be_a_link(hotswap):
    """A checkpoint in it is still of the run in the folder, so the run does not resume from an older one."""
    Path("scratch").mkdir()
    Path("run").mkdir()
    Path("run/checkpoints").symlink_to(Path("scratch").resolve())
    settings = *BASE, "train.max_steps=8", "train.checkpoint_every=2", "train.keep_checkpoints=3"
    assert hotswap(*settings, "train.stop_after=6", RESUME)[0] == 0
    elsewhere = [word for word in settings if not word.startswith("out_dir")]
    code, _, err = hotswap(*elsewhere, "train.resume=run/checkpoints/step-000002")
    assert code == 1
    assert "is older than run/checkpoints/step-000006" in err
    assert hotswap(*elsewhere, "train.resume=run")[0] == 0
    assert metrics()[-1]["step"] == 8


def test_the_command_that_resumes_is_quoted(hotswap):
    """A folder's name with a comma and parentheses is quoted for the shell and for Hydra."""
    elsewhere = [word for word in BASE if not word.startswith("out_dir")]
    code, out, _ = hotswap(*elsewhere, "train.max_steps=2", "train.stop_after=1", "out_dir='my, (run)'")
    assert code == 0
    [command] = re.findall(r"resume with: python \S+ (.*)", out)
    words = [word for word in shlex.split(command) if not word.startswith(("train.stop_after", "data.cache"))]
    assert hotswap(*words)[0] == 0
    assert metrics("my, (run)")[-1]["step"] == 2


def test_a_folder_of_configs_is_in_the_command_that_resumes(hotswap):
    """Hydra's flag may stand between the overrides."""
    Path("my (1)/model").mkdir(parents=True)
    Path("my (1)/model/own.yaml").write_text("defaults: [tiny]\nn_layer: 1\nn_embd: 64\n")
    first = "+experiment=smoke", "model=own", "train.max_steps=2", "--config-dir", "my (1)", "train.stop_after=1"
    code, out, err = hotswap(*first, "train.eval_every=0", "out_dir=run")
    assert (code, err) == (0, "")
    assert row()["config"]["model"]["n_embd"] == 64
    words = shlex.split(out.partition("resume with: ")[2].splitlines()[0])
    assert words[:3] == ["python", words[1], "--config-dir=my (1)"]
    assert hotswap(*words[2:], "train.stop_after=null")[0] == 0
    assert metrics()[-1]["step"] == 2
    assert shlex.split(row()["command"])[2:-1] == [*words[2:], "train.stop_after=null"]


def test_weights_for_a_model_from_a_folder_of_configs(hotswap):
    """A choice may take defaults from another one. A shape that the weights do not have is refused."""
    assert hotswap(*BASE, "train.max_steps=1", "out_dir=source")[0] == 0
    Path("mine/model").mkdir(parents=True)
    Path("mine/model/own.yaml").write_text("defaults: [tiny, _self_]\nn_layer: 1\n")
    Path("mine/model/other.yaml").write_text("defaults: [own]\n")
    words = *(word for word in BASE if not word.startswith("model.")), "init_from=source", "train.max_steps=1"
    assert hotswap(*words, "model=own", "--config-dir=mine", "out_dir=small")[0] == 0
    Path("mine/model/own.yaml").write_text("defaults: [tiny, _self_]\nn_layer: 3\n")
    code, _, err = hotswap(*words, "--config-dir=mine", "model=other", "out_dir=large")
    assert (code, err) == (1, "error: model.n_layer=3, but source at step 1 has 1: leave model.n_layer out\n")


def test_a_run_resumes_without_the_source_of_its_weights(hotswap):
    assert hotswap(*BASE, "train.max_steps=1", "out_dir=source", "model.n_embd=64")[0] == 0
    settings = *BASE, "init_from=source", "train.max_steps=3"
    assert hotswap(*settings, "train.stop_after=1")[0] == 0
    Path("source").rename("gone")
    assert hotswap(*settings, RESUME)[0] == 0
    assert row()["config"]["model"]["n_embd"] == 64


def test_the_folder_of_a_resumed_run(hotswap):
    """It is out_dir, or else the checkpoint's run. An older checkpoint and a folder with another run are refused."""
    settings = *BASE, "train.max_steps=8"
    assert hotswap(*settings, "train.checkpoint_every=2", "train.stop_after=4")[0] == 0
    elsewhere = [word for word in settings if not word.startswith("out_dir")]
    assert hotswap(*elsewhere, "train.resume=run", "train.stop_after=1")[0] == 0  # in the run's own folder
    assert metrics()[-1]["step"] == 5
    code, _, err = hotswap(*elsewhere, "train.resume=run/checkpoints/step-000004")
    assert code == 1
    assert err.startswith("error: train.resume=run/checkpoints/step-000004 is older than ")
    assert hotswap(*elsewhere, "train.resume=run/checkpoints/step-000004", "out_dir=branch")[0] == 0
    assert [line["step"] for line in metrics("branch")] == [5, 6, 7, 8]
    code, _, err = hotswap(*elsewhere, "train.resume=run/checkpoints/step-000004", "out_dir=branch")
    assert code == 1
    assert err.startswith("error: out_dir=branch already holds a run (metrics.jsonl, result.json, checkpoints); choose")
    code, _, err = hotswap(*elsewhere, RESUME)
    assert (code, err) == (1, "error: train.resume=auto needs out_dir=..., the folder of the run to resume\n")
    code, _, err = hotswap(*elsewhere, "train.resume=nowhere")
    assert (code, err) == (
        1,
        "error: nowhere holds no valid checkpoint; name a run's folder or one of its checkpoints\n",
    )


def test_a_finished_run_without_checkpoints_does_not_resume(hotswap):
    assert hotswap(*QUICK, "train.max_steps=2")[0] == 0
    before = metrics()
    code, _, err = hotswap(*QUICK, "train.max_steps=3", RESUME)
    what = "train.resume=auto: run holds a finished run without a checkpoint; choose another out_dir"
    assert (code, err) == (1, f"error: {what}\n")
    assert metrics() == before


def test_best_is_the_lowest_validation_loss(hotswap):
    """A step with the lowest validation loss so far is saved, whatever checkpoint_every is; others are not."""
    settings = *BASE, "train.max_steps=40", "train.eval_every=8", "train.eval_batches=1", "train.checkpoint_every=30"
    assert hotswap(*settings, "train.keep_checkpoints=9")[0] == 0
    val_losses = {line["step"]: line["val/loss"] for line in metrics() if "val/loss" in line}
    best = min(val_losses, key=val_losses.get)
    saved = sorted(verify(folder)["step"] for folder in checkpoint_folders(Path("run/checkpoints")))
    lowest, expected = math.inf, {30, 40}
    for step, loss in val_losses.items():
        if loss < lowest:
            expected.add(step)
            lowest = loss
    assert saved == sorted(expected)
    assert verify(Path("run/checkpoints/best"))["step"] == best
    assert row()["val/loss/min"] == val_losses[best]
    assert all(line["checkpoint/pause_ms"] > 0 for line in metrics() if line["step"] in expected)
    assert row()["checkpoint/pause_ms"] > 0


@pytest.mark.usefixtures("quick_python")
def test_a_folder_is_locked_by_its_run(hotswap, tmp_path):
    """A second run on the folder is refused, and changes nothing. A killed run leaves no lock."""
    assert hotswap(*BASE, "train.max_steps=1")[0] == 0
    process = program(tmp_path, *BASE, RESUME, "train.max_steps=100000")
    read_until(process, "step 00003")
    before = Path("run/config.yaml").read_text()
    code, _, err = hotswap(*BASE, "train.max_steps=2", RESUME)
    assert (code, err) == (1, "error: out_dir=run is in use by a running process; choose another folder\n")
    assert Path("run/config.yaml").read_text() == before
    process.kill()
    process.communicate()  # until the program has closed its files
    assert hotswap(*BASE, "train.max_steps=2", RESUME)[0] == 0


def test_a_disk_that_is_full_from_step_5_on(hotswap, monkeypatch):
    """No file may grow beyond 20 kB. A checkpoint then fails with a warning, and the last one with an error."""
    step, before = capture.train_step, resource.getrlimit(resource.RLIMIT_FSIZE)

    def filling(model, optimizer, batches, lr):
        if optimizer.steps == 4:
            while not Path("run/checkpoints/step-000003").exists():  # a thread writes it
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        return step(model, optimizer, batches, lr)

    monkeypatch.setattr(capture, "train_step", filling)
    try:
        code, out, err = hotswap(*BASE, "train.checkpoint_every=3", "train.max_steps=9")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        monkeypatch.setattr(capture, "train_step", step)
    assert err.count("\n") == 2, err
    first, last = err.splitlines()
    assert first.startswith("warning: run/checkpoints/step-000006 could not be written: ")
    assert last.startswith("error: run/checkpoints/step-000009 could not be written: ")
    assert code == 1
    assert "step 00009/00009" in out
    assert row()["status"].startswith("failed: run/checkpoints/step-000009 could not be written")
    assert [folder.name for folder in Path("run/checkpoints").iterdir()] == ["step-000003"]
    assert hotswap(*BASE, RESUME, "train.max_steps=9")[0] == 0
    assert row()["resumed_from"] == "run/checkpoints/step-000003"


def test_a_folder_that_cannot_be_written(hotswap):
    """Not even root can write to /proc."""
    code, _, err = hotswap(*BASE, "out_dir=/proc/hotswap")
    assert code == 1
    assert re.match(r"error: out_dir=/proc/hotswap cannot be written: .*; choose another folder\n$", err)


def poison(monkeypatch, *bad):
    """Make a gradient of each of these steps NaN."""
    step = capture.train_step

    def poisoned(model, optimizer, batches, lr):
        handle = None
        if int(optimizer.steps) + 1 in bad:
            handle = model.ln_f.weight.register_hook(lambda gradient: gradient * math.nan)
        figures = step(model, optimizer, batches, lr)
        if handle:
            handle.remove()
        return figures

    monkeypatch.setattr(capture, "train_step", poisoned)


def kept_batch(step):
    """The only batch of this step of a run with the settings BASE."""
    cfg = config(*BASE, f"data.cache={Path('tokens').resolve()}")
    windows = Windows(data.open_dataset(cfg.data).train, cfg.train.block_size, "training")
    [batch] = Loader(windows, 4, 512, cfg.seed)(step)
    return batch


def test_a_gradient_that_is_not_finite_stops_the_run(hotswap, monkeypatch):
    """The run stops at the next logged step. The step changed no weight, and its batch is in a file."""
    poison(monkeypatch, 5)
    settings = *BASE, "train.log_every=4", "train.checkpoint_every=4"
    code, _, err = hotswap(*settings)
    assert code == 1
    path = "run/nonfinite-step-000005.pt"
    assert err == (
        "error: the run has diverged: loss or gradient norm of step 5 is not finite, and its update was not made "
        f"(batch in {path}): python -m scripts.blame run names the op; lower optim.learning_rate, or pass over such "
        "steps with train.on_nonfinite=skip\n"
    )
    assert row()["status"].startswith("failed: the run has diverged")
    assert all("NaN" not in line for line in Path("run/metrics.jsonl").read_text().splitlines())
    assert [folder.name for folder in checkpoint_folders(Path("run/checkpoints"))] == ["step-000004"]
    kept = torch.load(path, weights_only=True)
    x, y = kept_batch(5)
    assert kept["step"] == 5
    assert torch.equal(kept["batches"][0][0], x)
    assert torch.equal(kept["batches"][0][1], y)


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_norm_that_knows_why_a_gradient_is_nan_stops_the_run(hotswap, monkeypatch, on_nonfinite):
    poison(monkeypatch, 5)
    monkeypatch.setattr("model.divergence.why_nan", lambda model: "in ln_f, a weight is 0")
    assert hotswap(*BASE, f"train.on_nonfinite={on_nonfinite}")[2] == (
        "error: loss or gradient norm of step 5 is not finite, and its update was not made "
        "(batch in run/nonfinite-step-000005.pt): in ln_f, a weight is 0\n"
    )


def test_a_gradient_that_is_not_finite_is_skipped(hotswap, monkeypatch):
    """Step 5 is not logged, and only this step and step 12 make no update."""
    poison(monkeypatch, 5, 12)
    settings = *BASE, "train.max_steps=12", "train.log_every=4", "train.checkpoint_every=12"
    code, _, err = hotswap(*settings, "train.on_nonfinite=skip")
    assert code == 0
    what = "warning: loss or gradient norm of step {0} is not finite; skipped ({1} so far); "
    line = what + "batch in run/nonfinite-step-{0:06}.pt"
    assert err.splitlines() == [line.format(5, 1), line.format(12, 2)]
    assert {line["step"]: line["train/grad_norm"] is None for line in metrics()} == {
        step: step == 12 for step in (1, 2, 3, 4, 8, 12)
    }
    assert row()["train/refused_steps"] == 2
    saved = torch.load("run/checkpoints/step-000012/training.pt", weights_only=True)
    assert saved["updates"] == 10


def test_skipping_gives_up_after_max_skips_in_a_row(hotswap, monkeypatch):
    """Steps 3 and 5 to 16: the run fails at the 12th in a row. Ten batches are kept."""
    poison(monkeypatch, 3, *range(5, 99))
    settings = *BASE, "train.on_nonfinite=skip", "train.max_skips=12", "train.max_steps=40"
    code, _, err = hotswap(*settings, "train.checkpoint_every=4")
    assert code == 1
    *warnings, error = err.splitlines()
    assert error == (
        "error: the run has diverged: the last 12 steps had a loss or gradient norm that is not finite, and "
        "train.max_skips=12: python -m scripts.blame run names the op, or lower optim.learning_rate"
    )
    assert row()["status"].startswith("failed: the run has diverged")
    assert [line.endswith("; its batch is not kept, after 10 others") for line in warnings] == [False] * 10 + [True] * 2
    assert len([*Path("run").glob("nonfinite-step-*.pt")]) == 10
    assert metrics()[-1]["step"] == 15


def test_the_batch_of_a_spike_is_kept(hotswap, monkeypatch):
    """The loss of step 14, which is not logged, is 3 times as high as it was. The run goes on."""
    step = capture.train_step
    scales = {14: 3.0}

    def spiking(model, optimizer, batches, lr):
        number = int(optimizer.steps) + 1
        original = optimizer.step
        optimizer.step = lambda lr, loss: original(lr, loss * scales.get(number, 1.0))
        figures = step(model, optimizer, batches, lr)
        optimizer.step = original
        return figures

    monkeypatch.setattr(capture, "train_step", spiking)
    settings = *BASE, "train.max_steps=20", "train.log_every=10", "train.spike_factor=2"
    code, _, err = hotswap(*settings)
    assert code == 0
    [line] = err.splitlines()
    pattern = (
        r"warning: loss (\S+) of step 14 is beyond 2 times (\S+), the recent median; gradient norm \S+; batch in (.*)"
    )
    loss, median, path = re.fullmatch(pattern, line).groups()
    assert float(loss) > 2 * float(median)
    kept = torch.load(path, weights_only=True)
    assert (path, kept["step"]) == ("run/spike-step-000014.pt", 14)
    assert kept["loss"] == pytest.approx(float(loss), rel=1e-3)
    assert kept["grad_norm"] > 0
    assert torch.equal(kept["batches"][0][0], kept_batch(14)[0])


def test_a_resumed_run_keeps_the_counts_of_updates_and_refused_steps(hotswap, monkeypatch):
    """Two steps are skipped, one before the resume and one after. Losses and counts are as without a resume."""
    settings = *BASE, "train.max_steps=12", "train.on_nonfinite=skip"
    poison(monkeypatch, 5, 9)
    assert hotswap(*settings, "out_dir=whole")[0] == 0
    assert hotswap(*settings, "train.stop_after=6")[0] == 0
    assert hotswap(*settings, RESUME)[0] == 0
    assert curve() == curve("whole")
    counts = [line["train/refused_steps"] for line in metrics()]
    assert counts == [line["train/refused_steps"] for line in metrics("whole")] == [0] * 4 + [1] * 4 + [2] * 4


def test_a_too_high_learning_rate_stops_the_run(hotswap):
    code, _, err = hotswap(*QUICK, "optim.learning_rate=1e30", "optim.warmup_steps=0", "optim.grad_clip=0")
    assert code == 1
    assert re.match(
        r"error: the run has diverged: loss or gradient norm of step \d is not finite, and its update was", err
    )


def test_a_shard_that_changes_during_a_run_is_an_error(hotswap, monkeypatch):
    step = capture.train_step

    def changing(model, optimizer, batches, lr):
        if optimizer.steps == 3:
            [path] = Path("tokens").glob("*/train/*.bin")
            os.utime(path, (0, 0))
        return step(model, optimizer, batches, lr)

    monkeypatch.setattr(capture, "train_step", changing)
    code, _, err = hotswap(*QUICK)
    assert code == 1
    assert re.match(r"error: .*/train/000000.bin has changed|error: .* changed while it was being read", err)
    assert err.count("\n") == 1
    assert row()["status"].startswith("failed: ")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_holds_the_weights_of_its_step(hotswap, device, precision):
    """It equals the checkpoint of a run that stops at this step, although the training continues during the save."""
    settings = *BASE, "attn=eager", f"device={device}", f"precision={precision}", "train.max_steps=9"
    assert hotswap(*settings, "train.checkpoint_every=3", "train.keep_checkpoints=9")[0] == 0
    assert hotswap(*settings, "train.stop_after=6", "out_dir=stopped")[0] == 0
    (ours, our_rest), (theirs, their_rest) = (
        (load_file(folder / "model.safetensors"), torch.load(folder / "training.pt", weights_only=True))
        for folder in (Path(name, "checkpoints/step-000006") for name in ("run", "stopped"))
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for moment in ("exp_avg", "exp_avg_sq"):
        assert all(torch.equal(our_rest[moment][name], their_rest[moment][name]) for name in theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["eager", "triton"])
def test_a_resumed_run_is_bit_equal_on_a_gpu(hotswap, kernels):
    """It needs deterministic kernels. cuDNN's attention is not deterministic, and neither is torch.compile.

    torch.compile sums the embedding's gradient with atomics: on an H200, the norms of two runs differed in their last
    bits at step 7.
    """
    settings = *BASE, "device=cuda", f"kernels={kernels}", f"attn={kernels}", "train.max_steps=40", "model.dropout=0.1"
    assert hotswap(*settings, "out_dir=whole")[0] == 0
    assert hotswap(*settings, "train.stop_after=20")[0] == 0
    assert hotswap(*settings, RESUME)[0] == 0
    assert curve() == curve("whole")


def test_a_resumed_run_says_how_many_lines_are_lost(hotswap):
    """Once: the next checkpoint counts the lines that are left. A run in a new folder has lost none.

    The line of the checkpoint's step is written again, because the checkpoint has its figures.
    """
    assert hotswap(*BASE, "train.max_steps=8", "train.stop_after=3")[0] == 0
    path = Path("run/metrics.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:9])
    again = "train.resume=run/checkpoints/step-000003", "out_dir=new", "train.stop_after=1"
    assert hotswap(*BASE, "train.max_steps=8", *again)[::2] == (0, "")
    code, _, err = hotswap(*BASE, "train.max_steps=8", "train.stop_after=2", RESUME)
    assert (code, err) == (0, "warning: run/metrics.jsonl has lost 1 line up to step 3\n")
    assert read_manifest(Path("run/checkpoints/step-000005"))["metrics_lines"] == 4
    assert read_manifest(Path("new/checkpoints/step-000004"))["metrics_lines"] == 1
    for folder in ("run", "new"):
        assert hotswap(*BASE, "train.max_steps=8", f"out_dir={folder}", RESUME)[::2] == (0, "")
    assert [line["step"] for line in metrics()] == [1, 3, 4, 5, 6, 7, 8]


def test_a_resumed_run_cuts_the_lines_after_its_checkpoint(hotswap):
    """The lines after the checkpoint are dropped, and so is a line that a kill has cut."""
    assert hotswap(*BASE, "train.max_steps=8", "train.stop_after=3")[0] == 0
    with Path("run/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "train/loss": 1.0}) + '\n{"step": 5, "train')
    assert hotswap(*BASE, "train.max_steps=8", RESUME)[0] == 0
    assert [line["step"] for line in metrics()] == list(range(1, 9))


def test_the_old_name_of_the_optimizer_is_no_change():
    """An old checkpoint's config has optim.impl, and no kernels.adamw."""
    optim = {"learning_rate": 1.0, "warmup_steps": 1}
    saved, now = ({"optim": optim | {"impl": impl}, "train": {"max_steps": 2}} for impl in ("torch", None))
    assert schedule_changes(saved, now | {"train": {"max_steps": 2, "max_minutes": None}}) == ""


def test_a_checkpoint_from_before_a_field_existed_is_of_a_run_with_its_default(capsys):
    train = {"block_size": 1, "tokens_per_step": 1, "overfit": False, "max_steps": 1, "max_minutes": None}
    config = {"model": {"n_layer": 1}, "train": train, "data": {"mask_documents": False}, "optim": {}, "seed": 1}
    defaults = {"model": field_defaults(GPTConfig), "optim": field_defaults(OptimConfig)}
    saved, options = {"config": config, "data": {}}, {"defaults": defaults}
    now = {"model": {**field_defaults(GPTConfig), "n_layer": 1}, "optim": field_defaults(OptimConfig)}
    resume.check_same_run(saved, config | now, {}, Path("run"), **options)
    assert capsys.readouterr().out == ""
    for group, key, value, then in (("model", "norm", "rmsnorm", "layernorm"), ("optim", "name", "muon", "adamw")):
        changed = config | now | {group: now[group] | {key: value}}
        with pytest.raises(UserError, match=rf"of another run: {group}\.{key}={value} \(checkpoint: {then}\); pass"):
            resume.check_same_run(saved, changed, {}, Path("run"), **options)


@pytest.mark.parametrize(
    ("saved", "now", "changed"),
    [
        ({"norm": "eager"}, {"norm": "eager", "rms_norm": "triton"}, False),
        ({"norm": "eager"}, {"norm": "triton", "rms_norm": "triton"}, True),
        ("bf16", "fp32", True),
        ("bf16", "bf16", False),
    ],
)
def test_an_op_that_an_old_run_did_not_have_is_no_change(saved, now, changed):
    assert resume.has_changed(saved, now) == changed

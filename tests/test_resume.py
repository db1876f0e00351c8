"""Runs that end early, in whatever way, and go on."""

import json
import math
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import train
from kernels.registry import impls, unavailable
from runtime.checkpoint import newest, steps, verified
from tests.test_train import CPU, QUICK, ROOT, config, metrics, row

ALL = [word for word in QUICK if "checkpoint_every" not in word]
RESUME = "train.resume=auto"


def curve(folder="run"):
    return {line["step"]: (line["train/loss"], line["train/grad_norm"]) for line in metrics(folder)}


def program(tmp_path, *arguments):
    """train.py in a process of its own, to be sent signals."""
    command = [sys.executable, str(ROOT / "train.py"), *arguments, f"data.cache={tmp_path}/tokens"]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(process, line):
    """Read on until a line begins like this."""
    for said in process.stdout:
        if said.startswith(line):
            return
    raise AssertionError(f"no {line!r}: {process.stderr.read()}")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_twenty_kill_and_twenty_is_forty(hotswap, tmp_path, precision):
    """Bit-equal losses and gradient norms, with dropout and two micro-steps, after a SIGKILL some steps later."""
    settings = *ALL, "train.max_steps=40", "train.checkpoint_every=20", "model.dropout=0.1", f"precision={precision}"
    settings += "train.batch_size=2", "train.eval_every=15", "train.eval_batches=1"
    assert hotswap(*settings, "out_dir=whole")[0] == 0
    process = program(tmp_path, *settings)
    until(process, "step 00023/00040")
    process.kill()
    process.wait()
    done = steps(Path("run/checkpoints"))[0].name
    assert done in ("step-000020", "step-000030")  # the evaluation after 30 may have been the best by then
    code, out, err = hotswap(*settings, RESUME)
    assert (code, err) == (0, "")
    assert "step 00021/00040" in out or done == "step-000030"
    assert list(curve()) == list(range(1, 41))
    assert curve() == curve("whole")
    assert row()["val/loss"] == row("whole")["val/loss"]
    assert row()["resumed_from"] == f"run/checkpoints/{done}"


CHOICES = [f"attn={name}" for name in impls("attention") if not unavailable("attention", name, CPU)]
CHOICES += [f"kernels.{op}={name}" for op in ("norm", "mlp", "loss") for name in impls(op) if name != "eager"]
CHOICES = [
    c for c in CHOICES if not c.startswith("kernels.") or not unavailable(c[8:].split("=")[0], c.split("=")[1], CPU)
]
CHOICES += ["kernels=compile"]


def test_saved_under_any_choice_it_resumes_under_any_other(hotswap, monkeypatch):
    """2 steps under each choice and 2 under the first, and the other way round: the losses of 4 steps under the first,
    to fp32 rounding. A checkpoint is all that goes from one to the other, so that is true of any two."""
    monkeypatch.setattr("runtime.device.measured_flops", lambda device, dtype: 1e9)  # half the time of so short a run
    small = "train.batch_size=1", "train.block_size=16", "train.tokens_per_step=16"  # for Triton's interpreter
    small += "model.n_embd=32", "model.n_head=2"
    settings = *ALL, *small, "train.max_steps=4"
    assert hotswap(*settings, CHOICES[0], "out_dir=whole")[0] == 0
    whole = torch.tensor([line["train/loss"] for line in metrics("whole")], dtype=torch.float64)
    for i, first in enumerate(CHOICES):
        saved = f"saved{i}"
        assert hotswap(*settings, first, "train.stop_after=2", f"out_dir={saved}")[0] == 0
        for j, second in enumerate(CHOICES if i == 0 else CHOICES[:1]):
            folder = f"{saved}-{j}"
            code, _, err = hotswap(*settings, second, f"train.resume={saved}", f"out_dir={folder}")
            assert (code, err) == (0, "")
            assert [line["step"] for line in metrics(folder)] == [3, 4]
            resumed = torch.tensor([line["train/loss"] for line in metrics(folder)], dtype=torch.float64)
            torch.testing.assert_close(resumed, whole[2:], rtol=1e-4, atol=0)


def test_precisions_share_checkpoints(hotswap):
    """They hold the fp32 weights, whatever the model computes in."""
    assert hotswap(*ALL, "train.max_steps=8", "precision=bf16", "train.stop_after=4")[0] == 0
    assert hotswap(*ALL, "train.max_steps=8", "precision=fp32", RESUME)[0] == 0
    assert hotswap(*ALL, "train.max_steps=8", "precision=bf16", "out_dir=whole")[0] == 0
    for step in range(1, 9):
        assert curve()[step][0] == pytest.approx(curve("whole")[step][0], rel=2**-8)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_saves_and_says_how_to_go_on(hotswap, tmp_path, name):
    process = program(tmp_path, *QUICK, "train.max_steps=100000", "train.log_every=1")
    until(process, "step 00004")
    process.send_signal(signal.Signals[name])
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (75, "")
    [line] = [line for line in out.splitlines() if line.startswith("stopped  ")]
    step, command = re.fullmatch(r"stopped  after step (\d+); go on with: (.*)", line).groups()
    assert row()["status"] == f"stopped: {name} after step {step}"
    assert verified(newest(Path("run/checkpoints")))["step"] == int(step) == metrics()[-1]["step"]
    words = shlex.split(command)
    assert words[0] == "python"
    assert hotswap(*words[2:-3], *words[-2:], "train.stop_after=2")[0] == 0  # without the cache, which is the fixture's
    assert [line["step"] for line in metrics()] == list(range(1, int(step) + 3))
    assert row()["status"] == "ok"


def test_the_second_ctrl_c_ends_at_once(hotswap, monkeypatch):
    def twice(*_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(train, "train_step", twice)
    assert hotswap(*QUICK)[0] == 130
    assert row()["status"] == "stopped: SIGINT twice"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_before_the_first_step(hotswap, monkeypatch, name, code):
    """While the text is tokenized, say: there is a row, no traceback, and the folder may be used again."""
    opened = train.open_dataset

    def stopped(config):
        os.kill(os.getpid(), signal.Signals[name])
        return opened(config)

    monkeypatch.setattr(train, "open_dataset", stopped)
    assert hotswap(*ALL) == (code, "", "")
    assert row()["status"] == f"stopped: {name}"
    monkeypatch.setattr(train, "open_dataset", opened)
    assert hotswap(*ALL, "train.max_steps=1")[0] == 0


def test_a_signal_in_the_sample_is_too_late(hotswap, monkeypatch):
    """The row is written by then; the sample ends, and the run is complete."""
    made = train.generate

    def late(*arguments, **options):
        assert row()["status"] == "ok"
        os.kill(os.getpid(), signal.SIGTERM)
        return made(*arguments, **options)

    monkeypatch.setattr(train, "generate", late)
    code, out, _ = hotswap(*ALL, "train.max_steps=1", "train.sample_tokens=4")
    assert (code, row()["status"]) == (0, "ok")
    assert "sample   " in out


def test_stop_after_counts_the_steps_of_a_process(hotswap):
    """The same command again and again, as in a queue of jobs; at the end there is nothing left to do."""
    settings = *ALL, "train.max_steps=8", "train.stop_after=3", RESUME
    for last in (3, 6, 8):
        code, out, err = hotswap(*settings)
        assert (code, err) == (0, "")
        assert metrics()[-1]["step"] == last
        assert ("stopped  after step" in out) == (last < 8)
    assert curve() == {step + 1: value for step, value in enumerate(whole_curve(hotswap))}
    before = row()
    code, out, _ = hotswap(*settings)
    assert (code, out) == (0, "done     already: run/checkpoints/step-000008 is of the run's last step\n")
    assert row() == before


def whole_curve(hotswap):
    assert hotswap(*ALL, "train.max_steps=8", "out_dir=whole")[0] == 0
    return curve("whole").values()


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ("model.n_layer=2", "model.n_layer=2 (there 1)"),
        ("model.pos=rope", "model.pos=rope (there learned)"),
        ("seed=7", "seed=7 (there 1337)"),
        ("train.tokens_per_step=1024", "train.tokens_per_step=1024 (there 512)"),
        ("data=text", "data.name=text (there stdlib)"),
    ],
)
def test_another_run_is_refused_by_name(hotswap, change, differs):
    Path("book.txt").write_text("All work and no play makes Jack a dull boy.\n" * 400)
    assert hotswap(*ALL, "train.max_steps=1")[0] == 0
    before = row()
    more = ["data.path=book.txt"] if change == "data=text" else []
    code, _, err = hotswap(*ALL, "train.max_steps=2", RESUME, change, *more)
    assert code == 1
    assert err.startswith("error: train.resume=run/checkpoints/step-000001 is of another run: ")
    assert (row(), yaml.safe_load(Path("run/config.yaml").read_text())) == (before, before["config"])
    assert differs in err
    assert err.endswith("or begin a new run from its weights: init_from=run/checkpoints/step-000001\n")
    assert err.count("\n") == 1


def test_other_text_under_the_same_name_is_refused(hotswap):
    text = *ALL, "data=text", "data.path=book.txt", RESUME
    Path("book.txt").write_text("All work and no play makes Jack a dull boy.\n" * 400)
    assert hotswap(*text, "train.max_steps=1")[0] == 0
    os.utime("book.txt", (0, 0))  # another time is not another text
    assert hotswap(*text, "train.max_steps=2")[0] == 0
    Path("book.txt").write_text("All play and no work makes Jack a dull boy.\n" * 400)
    code, _, err = hotswap(*text, "train.max_steps=3")
    assert code == 1
    assert "is of another run: data.train=" in err


def test_damage_falls_back_with_a_warning(hotswap):
    settings = *ALL, "train.checkpoint_every=2", "train.stop_after=4", "train.max_steps=8"
    assert hotswap(*settings)[0] == 0
    path = Path("run/checkpoints/step-000004/training.pt")
    path.write_bytes(path.read_bytes()[:-1])
    code, _, err = hotswap(*settings, "train.resume=run/checkpoints/step-000004")
    assert (code, err.startswith("error: run/checkpoints/step-000004 is damaged: training.pt has ")) == (1, True)
    code, _, err = hotswap(*settings, RESUME)
    assert code == 0
    assert err.startswith("warning: run/checkpoints/step-000004 is damaged: training.pt has ")
    assert err.count("\n") == 1
    assert row()["resumed_from"] == "run/checkpoints/step-000002"
    assert [line["step"] for line in metrics()] == [1, 2, 3, 4, 5, 6]
    for folder in steps(Path("run/checkpoints")):
        (folder / "manifest.json").write_text("")
    before = metrics()
    code, _, err = hotswap(*settings, RESUME)
    assert code == 1
    assert err.splitlines()[-1].startswith("error: train.resume=auto: no checkpoint in run is good")
    assert metrics() == before


def test_the_clock_goes_on(hotswap):
    """With max_minutes the rate falls over both parts together, and a run whose time is over has nothing left to do."""
    settings = (
        *ALL,
        "train.max_steps=null",
        "train.max_minutes=0.05",
        "optim.warmup_steps=2",
        "train.checkpoint_every=500",
    )
    assert hotswap(*settings, "train.stop_after=60")[0] == 0
    assert hotswap(*settings, RESUME)[0] == 0
    rates = [line["train/lr"] for line in metrics()]
    assert rates[60] < 0.99 * max(rates)  # not the peak's again, while the speed is measured anew
    assert rates[-1] < 0.5 * max(rates)
    code, out, _ = hotswap(*settings, RESUME)
    assert (code, out.startswith("done     already: ")) == (0, True)


def test_one_process_has_nothing_to_shard(hotswap):
    assert hotswap(*ALL, "train.max_steps=1", "train.sharded_checkpoints=true")[0] == 0
    assert Path("run/checkpoints/step-000001/model.safetensors").exists()


def test_checkpoints_on_another_disk(hotswap):
    """`checkpoints` may be a link: the run is still the folder's, and older ones are refused as ever."""
    Path("scratch").mkdir()
    Path("run").mkdir()
    Path("run/checkpoints").symlink_to(Path("scratch").resolve())
    settings = *ALL, "train.max_steps=8", "train.checkpoint_every=2", "train.keep_checkpoints=3"
    assert hotswap(*settings, "train.stop_after=6", RESUME)[0] == 0
    elsewhere = [word for word in settings if not word.startswith("out_dir")]
    code, _, err = hotswap(*elsewhere, "train.resume=run/checkpoints/step-000002")
    assert (code, "is older than run/checkpoints/step-000006" in err) == (1, True)
    assert hotswap(*elsewhere, "train.resume=run")[0] == 0
    assert metrics()[-1]["step"] == 8


def test_names_that_hydra_would_not_take(hotswap):
    """The line that goes on is quoted for the shell and for Hydra."""
    elsewhere = [word for word in ALL if not word.startswith("out_dir")]
    code, out, _ = hotswap(*elsewhere, "train.max_steps=2", "train.stop_after=1", "out_dir='my, (run)'")
    assert code == 0
    [command] = re.findall(r"go on with: python \S+ (.*)", out)
    words = [word for word in shlex.split(command) if not word.startswith(("train.stop_after", "data.cache"))]
    assert hotswap(*words)[0] == 0
    assert metrics("my, (run)")[-1]["step"] == 2


def test_going_on_without_the_weights_that_it_began_from(hotswap):
    assert hotswap(*ALL, "train.max_steps=1", "out_dir=source", "model.n_embd=64")[0] == 0
    settings = *ALL, "init_from=source", "train.max_steps=3"
    assert hotswap(*settings, "train.stop_after=1")[0] == 0
    Path("source").rename("gone")
    assert hotswap(*settings, RESUME)[0] == 0
    assert row()["config"]["model"]["n_embd"] == 64


def test_where_a_run_goes_on(hotswap):
    settings = *ALL, "train.max_steps=8"
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
    assert err.startswith("error: out_dir=branch already holds a run (metrics.jsonl, result.json, checkpoints); give")
    code, _, err = hotswap(*elsewhere, RESUME)
    assert (code, err) == (1, "error: train.resume=auto needs out_dir=..., the folder of the run that is to go on\n")
    code, _, err = hotswap(*elsewhere, "train.resume=nowhere")
    assert (code, err) == (
        1,
        "error: nowhere holds no good checkpoint; name a run's folder (out/RUN) or one of its checkpoints\n",
    )


def test_a_finished_run_without_checkpoints_stays(hotswap):
    assert hotswap(*QUICK, "train.max_steps=2")[0] == 0
    before = metrics()
    code, _, err = hotswap(*QUICK, "train.max_steps=3", RESUME)
    what = "train.resume=auto: run holds a finished run without a checkpoint; choose another out_dir"
    assert (code, err) == (1, f"error: {what}\n")
    assert metrics() == before


def test_best_is_the_lowest_validation_loss(hotswap):
    """An evaluation that is the best so far is saved, whatever checkpoint_every says; the others are not."""
    settings = *ALL, "train.max_steps=40", "train.eval_every=8", "train.eval_batches=1", "train.checkpoint_every=30"
    assert hotswap(*settings, "train.keep_checkpoints=9")[0] == 0
    judged = {line["step"]: line["val/loss"] for line in metrics() if "val/loss" in line}
    best = min(judged, key=judged.get)
    saved = sorted(verified(folder)["step"] for folder in steps(Path("run/checkpoints")))
    lowest, expected = math.inf, {30, 40}
    for step, loss in judged.items():
        expected |= {step} if loss < lowest else set()
        lowest = min(lowest, loss)
    assert saved == sorted(expected)
    assert verified(Path("run/checkpoints/best"))["step"] == best
    assert all(line["checkpoint/pause_ms"] > 0 for line in metrics() if line["step"] in expected)
    assert row()["checkpoint/pause_ms"] > 0


def test_two_runs_on_one_folder(hotswap, tmp_path):
    assert hotswap(*ALL, "train.max_steps=1")[0] == 0
    process = program(tmp_path, *ALL, RESUME, "train.max_steps=100000")
    until(process, "step 00003")
    before = Path("run/config.yaml").read_text()
    code, _, err = hotswap(*ALL, "train.max_steps=2", RESUME)
    assert (code, err) == (1, "error: out_dir=run is in use by a run that goes on; choose another folder\n")
    assert Path("run/config.yaml").read_text() == before
    process.kill()
    process.wait()
    assert hotswap(*ALL, "train.max_steps=2", RESUME)[0] == 0  # the lock went with the process


def test_a_full_disk_in_mid_run(hotswap, monkeypatch):
    """From step 5 on no file may grow beyond 20 kB: a checkpoint fails with a warning, the last one with an error."""
    step, before = train.train_step, resource.getrlimit(resource.RLIMIT_FSIZE)

    def filling(model, optimizer, batches, lr):
        if optimizer.steps == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        return step(model, optimizer, batches, lr)

    monkeypatch.setattr(train, "train_step", filling)
    try:
        code, out, err = hotswap(*ALL, "train.checkpoint_every=3", "train.max_steps=9")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        monkeypatch.setattr(train, "train_step", step)
    assert err.count("\n") == 2, err
    first, last = err.splitlines()
    assert first.startswith("warning: run/checkpoints/step-000006 could not be written: ")
    assert last.startswith("error: run/checkpoints/step-000009 could not be written: ")
    assert code == 1
    assert "step 00009/00009" in out
    assert row()["status"].startswith("failed: run/checkpoints/step-000009 could not be written")
    assert [folder.name for folder in Path("run/checkpoints").iterdir()] == ["step-000003"]
    assert hotswap(*ALL, RESUME, "train.max_steps=9")[0] == 0
    assert row()["resumed_from"] == "run/checkpoints/step-000003"


def test_a_folder_that_cannot_be_written(hotswap):
    """/proc refuses root as well."""
    code, _, err = hotswap(*ALL, "out_dir=/proc/hotswap")
    assert code == 1
    assert re.match(r"error: out_dir=/proc/hotswap cannot be written: .*; choose another folder\n$", err)


def poison(monkeypatch, *bad):
    """The gradients of these steps are NaN."""
    step = train.train_step

    def poisoned(model, optimizer, batches, lr):
        handle = None
        if optimizer.steps + 1 in bad:
            handle = model.ln_f.weight.register_hook(lambda gradient: gradient * math.nan)
        figures = step(model, optimizer, batches, lr)
        if handle:
            handle.remove()
        return figures

    monkeypatch.setattr(train, "train_step", poisoned)


def test_a_gradient_that_is_not_finite_stops_the_run(hotswap, monkeypatch):
    """Found at the next logged step; the weights are still those before it, and its batch is kept."""
    poison(monkeypatch, 5)
    settings = *ALL, "train.log_every=4", "train.checkpoint_every=4"
    code, _, err = hotswap(*settings)
    assert code == 1
    path = "run/nonfinite-step-000005.pt"
    assert err == (
        "error: the run has diverged: loss or gradient norm of step 5 is not finite, and its update was not made "
        f"(batch in {path}); lower optim.learning_rate, or pass over such steps with train.on_nonfinite=skip\n"
    )
    assert row()["status"].startswith("failed: the run has diverged")
    assert all("NaN" not in line for line in Path("run/metrics.jsonl").read_text().splitlines())
    assert [folder.name for folder in steps(Path("run/checkpoints"))] == ["step-000004"]
    kept = torch.load(path, weights_only=True)
    cfg = config(*ALL, f"data.cache={Path('tokens').resolve()}")
    windows = train.Windows(train.open_dataset(cfg.data).train, cfg.train.block_size, "training")
    [(x, y)] = train.Loader(windows, 4, 512, cfg.seed)(5)
    assert kept["step"] == 5
    assert torch.equal(kept["batches"][0][0], x)
    assert torch.equal(kept["batches"][0][1], y)


def test_a_gradient_that_is_not_finite_is_skipped(hotswap, monkeypatch):
    poison(monkeypatch, 5, 9)
    code, _, err = hotswap(*ALL, "train.max_steps=12", "train.on_nonfinite=skip", "train.checkpoint_every=12")
    assert code == 0
    what = "warning: loss or gradient norm of step {0} is not finite; skipped ({1} so far); "
    line = what + "batch in run/nonfinite-step-{0:06}.pt"
    assert err.splitlines() == [line.format(5, 1), line.format(9, 2)]
    assert [line["train/grad_norm"] is None for line in metrics()] == [step in (5, 9) for step in range(1, 13)]
    assert row()["train/refused_steps"] == 2
    saved = torch.load("run/checkpoints/step-000012/training.pt", weights_only=True)
    assert saved["updates"] == 10


def test_going_on_after_a_skip(hotswap, monkeypatch):
    """AdamW's count of updates, and that of refused steps, go on as if nothing had been."""
    settings = *ALL, "train.max_steps=12", "train.on_nonfinite=skip"
    poison(monkeypatch, 5, 9)
    assert hotswap(*settings, "out_dir=whole")[0] == 0
    assert hotswap(*settings, "train.stop_after=6")[0] == 0
    assert hotswap(*settings, RESUME)[0] == 0
    assert curve() == curve("whole")
    counts = [line["train/refused_steps"] for line in metrics()]
    assert counts == [line["train/refused_steps"] for line in metrics("whole")] == [0] * 4 + [1] * 4 + [2] * 4


def test_a_run_that_diverges_by_itself(hotswap):
    code, _, err = hotswap(*QUICK, "optim.learning_rate=1e30", "optim.warmup_steps=0", "optim.grad_clip=0")
    assert code == 1
    assert re.match(
        r"error: the run has diverged: loss or gradient norm of step \d is not finite, and its update was", err
    )


def test_a_shard_that_changes_under_a_run(hotswap, monkeypatch):
    step = train.train_step

    def changing(model, optimizer, batches, lr):
        if optimizer.steps == 3:
            [path] = Path("tokens").glob("*/train/*.bin")
            os.utime(path, (0, 0))
        return step(model, optimizer, batches, lr)

    monkeypatch.setattr(train, "train_step", changing)
    code, _, err = hotswap(*QUICK)
    assert code == 1
    assert re.match(r"error: .*/train/000000.bin has changed|error: .* changed while it was being read", err)
    assert err.count("\n") == 1
    assert row()["status"].startswith("failed: ")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_is_of_its_step(hotswap, device, precision):
    """Saved while the run goes on, it holds what a run that stops there holds: the next update waits for the copy."""
    settings = *ALL, "attn=eager", f"device={device}", f"precision={precision}", "train.max_steps=9"
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
def test_gpu_runs_go_on_exactly(hotswap, kernels):
    """Bit-equal with deterministic kernels. cuDNN's attention is none, nor is torch.compile: what it makes of the
    embedding's gradient adds by atomics (two runs on an H200 differed in the last bits of a norm at step 7)."""
    settings = *ALL, "device=cuda", f"kernels={kernels}", f"attn={kernels}", "train.max_steps=40", "model.dropout=0.1"
    assert hotswap(*settings, "out_dir=whole")[0] == 0
    assert hotswap(*settings, "train.stop_after=20")[0] == 0
    assert hotswap(*settings, RESUME)[0] == 0
    assert curve() == curve("whole")


def test_the_lines_of_a_killed_run_are_whole(hotswap):
    """A line that was being written when the run was killed is dropped, and so is what came after the checkpoint."""
    assert hotswap(*ALL, "train.max_steps=8", "train.stop_after=3")[0] == 0
    with Path("run/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "train/loss": 1.0}) + '\n{"step": 5, "train')
    assert hotswap(*ALL, "train.max_steps=8", RESUME)[0] == 0
    assert [line["step"] for line in metrics()] == list(range(1, 9))

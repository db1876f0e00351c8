"""train.py from end to end: what it prints and writes, and whether it computes what its config says."""

import functools
import itertools
import json
import math
import os
import pty
import re
import shlex
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from torch.nn import functional as F

import train
from data import open_dataset
from data.loader import Loader, Windows, prefetch
from kernels import registry, speeds
from lab.judge import sandbox, supervise
from lab.proof import memory
from lab.recipe import Recipe
from model import capture
from model.executed import call_shapes, slower_kernels
from model.gpt import GPT
from model.optimizers import make_optimizer
from model.step import evaluate, train_step
from model.vocabulary import take_vocabulary
from runtime.config import UserError, parse
from runtime.meter import Meter
from runtime.ranks import Ranks
from runtime.schedule import OVERFIT_LOSS, Due, check_overfit, predict_last_step

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
# One layer and 512 tokens a step, without evaluations, samples and checkpoints
QUICK = ("+experiment=smoke", "model.n_layer=1", "train.batch_size=4", "train.tokens_per_step=512", "train.log_every=1")
QUICK += ("train.eval_every=0", "train.sample_tokens=0", "out_dir=run")
QUICK += ("train.checkpoint_every=0",)
LINE = re.compile(
    r"^step (\d{5})/(\d{5}) \| loss \d+\.\d{4} \| norm \d+\.\d\d \| lr \d\.\d\de-\d\d \| \d+\.\d\d ms \| "
    r"[\d,]+ tok/s \| mfu (--|\d+\.\d%) \| mem \d+\.\d\d GiB( \| warm-up)?$"
)


def config(*overrides):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("config", overrides=list(overrides))
    take_vocabulary(cfg, "data.tokenizer")
    return parse(cfg, train.Config)


def recipe(cfg):
    """The recipe of this config, as main() makes it."""
    groups = cfg.model, cfg.kernels, cfg.attn, cfg.optim, cfg.precision, cfg.seed
    return Recipe(*groups, documents=cfg.data.mask_documents)


def metrics(folder="run"):
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def row(folder="run"):
    return json.loads(Path(folder, "result.json").read_text())


def losses(hotswap, *overrides):
    """The training losses of a quick run of 8 steps."""
    folder = f"run{len(list(Path.cwd().glob('run*')))}"
    code, _, err = hotswap(*QUICK, "train.max_steps=8", *overrides, f"out_dir={folder}")
    assert (code, err) == (0, "")
    return torch.tensor([line["train/loss"] for line in metrics(folder)], dtype=torch.float64)


def set_clock(monkeypatch, seconds):
    """Replace the clock of the run: each training step takes `seconds`, and everything else takes no time."""
    clock, step = SimpleNamespace(now=0.0), train_step
    clock.perf_counter = lambda: clock.now

    def timed_step(*arguments):
        clock.now += seconds
        return step(*arguments)

    monkeypatch.setattr("runtime.meter.time", clock)
    monkeypatch.setattr(capture, "train_step", timed_step)


SMOKE = "train.max_steps=30", "train.eval_every=15", "train.log_every=5"


@pytest.mark.exhaustive
def test_smoke(hotswap):
    """30 steps of `make smoke`: the loss falls, lines have their format, and the folder holds metrics and the row."""
    code, out, err = hotswap("+experiment=smoke", *SMOKE)
    assert (code, err) == (0, "")
    [folder] = Path("out").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-1M-eager-sdpa-fp32", folder.name)
    steps = [line for line in out.splitlines() if line.startswith("step ") and "val" not in line and "|" in line]
    assert all(LINE.match(line) for line in steps)
    assert len(steps) == 3 + 6
    assert [line.endswith("warm-up") for line in steps] == [True] * 3 + [False] * 6
    assert "kernels  norm eager (torch" in out
    assert "attention sdpa (flash_for_cpu, torch" in out
    assert "mfu      (6 x 0.8M + 12 x 4 x 128 x 128) FLOP a token" in out
    assert out.splitlines()[-1] == f"done     {folder}/result.json"
    assert (folder / "sample.txt").stat().st_size > 50

    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, *range(5, 31, 5)]
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] / 1.5
    assert [line["step"] for line in lines if "val/loss" in line] == [15, 30]
    assert all(("perf/tokens_per_sec" in line) == (line["step"] > 3) for line in lines)

    result = row(folder)
    assert result["status"] == "ok"
    assert result["steps"] == 30
    assert result["tokens"] == 30 * 2048
    assert result["config"] == yaml.safe_load((folder / "config.yaml").read_text())
    assert result["config"]["train"]["max_steps"] == 30
    assert result["kernels"]["compile"] is False
    assert result["env"]["torch"] == torch.__version__
    assert result["val/loss"] == lines[-1]["val/loss"]
    assert result["perf/tokens_per_sec/p20"] <= result["perf/tokens_per_sec"] <= result["perf/tokens_per_sec/p80"]
    assert result["perf/mfu"] is None  # no peak is known for a CPU
    speed = result["perf/tokens_per_sec"] * result["flops_per_token"] / result["measured_peak_flops"]
    assert result["perf/mfu_measured_peak"] == pytest.approx(speed)
    assert speed > 0


def test_a_run_without_generation_is_complete(hotswap, monkeypatch):
    """An attention that takes no `lengths` cannot generate. The run prints the reason in place of the sample."""
    module = registry.backend("attention", "sdpa")
    attention = module.attention

    def plain(q, k, v, *, causal=True, scale=None):
        return attention(q, k, v, causal=causal, scale=scale)

    monkeypatch.setattr(module, "attention", plain)
    code, out, err = hotswap(*QUICK, "train.max_steps=1", "train.sample_tokens=4")
    assert (code, err) == (0, "")
    assert re.search(r"^sample   none: generation reads a cache, and .* takes no lengths", out, re.MULTILINE)
    assert row()["status"] == "ok"


def test_a_sample_whose_logits_are_not_finite_ends_the_run_with_one_line(hotswap):
    """The positions from 16 on, which the training does not use, have NaN. A sample begins with one token."""
    made = recipe(config(*QUICK))
    weights = made.build(CPU).state_dict()
    weights["wpe.weight"][16:] = torch.nan
    sizes = {
        key: getattr(made.model, key) for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")
    }
    torch.save({"model": weights, "model_args": sizes}, "ckpt.pt")
    code, out, err = hotswap(
        *QUICK, "init_from=ckpt.pt", "train.block_size=16", "train.max_steps=1", "train.sample_tokens=40"
    )
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("error: the logits of new token 17 are not finite, ")
    assert "sample  " not in out
    assert row()["status"].startswith("wrong: the logits of new token 17 are not finite, ")


def test_a_run_is_complete_if_its_attention_refuses_a_single_key(hotswap, monkeypatch):
    """cuDNN's attention refuses a single key, and a sample begins with one. The run prints the reason."""
    module = registry.backend("attention", "sdpa")
    attention = module.attention

    @functools.wraps(attention)
    def refusing(q, k, v, **rest):
        if k.shape[1] == 1:
            raise registry.Unavailable("it refuses a single key\x1b[31m")
        return attention(q, k, v, **rest)

    monkeypatch.setattr(module, "attention", refusing)
    code, out, err = hotswap(*QUICK, "train.max_steps=1", "train.sample_tokens=4")
    assert (code, err) == (0, "")
    assert re.search(r"^sample   none: it refuses a single key\\x1b\[31m$", out, re.MULTILINE)
    assert row()["status"] == "ok"


@pytest.mark.exhaustive
def test_attention_stays_inside_documents(hotswap):
    """With data.mask_documents, the second document of a row does not depend on the first one, which changes here."""
    cfg = config(*QUICK, "data.mask_documents=true", "train.batch_size=4", "train.block_size=64", "data.cache=tokens")
    dataset = open_dataset(cfg.data)
    model = recipe(cfg).build(CPU)
    masked = Windows(dataset.train, 64, "training", eot=dataset.tokenizer.eot)
    windows = (masked.batch(np.array([i])) for i in range(len(masked)))
    x, _, starts = next(window for window in windows if dataset.tokenizer.eot in window[0][0, 8:56].tolist())
    [cut] = {int(start) for start in starts[0]} - {0}  # where the second document of the row begins
    first, second = model(x, starts=starts)[0].split((cut, 64 - cut))
    torch.testing.assert_close(first, model(x[:, :cut])[0], rtol=1e-4, atol=1e-5)
    other = x.clone()
    other[0, :cut] = (other[0, :cut] + 1) % 256
    torch.testing.assert_close(second, model(other, starts=starts)[0, cut:], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(second, model(x)[0, cut:], rtol=1e-2, atol=1e-3)
    code, _, err = hotswap(*QUICK, "train.max_steps=2", "data.mask_documents=true", "train.sample_tokens=4")
    assert (code, err) == (0, "")
    assert row()["config"]["data"]["mask_documents"] is True


def test_the_same_seed_gives_the_same_losses(hotswap):
    first, again, other = (losses(hotswap, "model.dropout=0.1", f"seed={seed}") for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_overfit_drives_the_loss_of_one_batch_to_near_zero(hotswap):
    """After too few steps the run fails, and says what to do."""
    code, out, err = hotswap("+experiment=overfit", "model.n_layer=2", "train.max_steps=60", "out_dir=run")
    assert (code, err) == (0, "")
    assert "overfit  the loss of the only batch is 0.0" in out
    assert row()["train/loss"] < OVERFIT_LOSS
    code, _, err = hotswap("+experiment=overfit", "model.n_layer=2", "train.max_steps=4", "out_dir=short")
    assert code == 1
    assert err.startswith("error: train.overfit=true: after 4 steps the loss of the only batch is 4.")
    assert row("short")["status"].startswith("failed: train.overfit=true: after 4 steps")


def test_a_loss_that_is_not_a_number_is_no_success_of_overfit():
    settings, last = config(*QUICK, "train.overfit=true").train, Due(*[True] * 5, interrupted=False)
    with pytest.raises(UserError, match=r"the loss of the only batch is nan, not below 0\.1"):
        check_overfit(settings, last, 60, math.nan)


def test_the_number_of_micro_steps_does_not_change_the_loss(hotswap):
    """1, 2 and 4 micro-steps use the same samples, and log their mean loss. Only the order of fp32 sums differs."""
    whole = losses(hotswap)
    for size in (2, 1):
        torch.testing.assert_close(losses(hotswap, f"train.batch_size={size}"), whole, rtol=1e-4, atol=0)


@pytest.mark.usefixtures("quick_python")
def test_kernels_of_files_outside_the_repo_are_checked_and_train_as_eager(hotswap, tmp_path):
    """Relative paths start at the current folder, also in the process of the check. The row has them as typed."""
    (tmp_path / "my kernels").mkdir()
    (tmp_path / "my kernels/plain.py").write_text("from kernels.attention import reference as attention\n")
    (tmp_path / "plain.py").write_text("from kernels.norm import reference as norm\n")
    eager = losses(hotswap, "attn=eager")
    own = losses(hotswap, "attn='my kernels/plain.py'", "kernels.norm=./plain.py")
    torch.testing.assert_close(own, eager, rtol=1e-4, atol=0)
    version = f"(torch {torch.__version__})"
    assert row("run1")["kernels"]["attention"] == f"my kernels/plain.py {version}"
    assert row("run1")["kernels"]["norm"] == f"./plain.py {version}"
    assert row("run1")["checks"] == dict.fromkeys(("norm", "attention"), f"ok: torch {torch.__version__}")


@pytest.mark.usefixtures("quick_python")
def test_a_wrong_file_outside_the_repo_stops_the_run(hotswap, tmp_path):
    (tmp_path / "wrong.py").write_text(
        "from kernels.norm import reference\n\n\ndef norm(x, residual, weight, bias, eps=1e-5):\n"
        "    return reference(x, residual, weight, bias, eps=0.3)\n"
    )
    code, _, err = hotswap(*QUICK, "kernels.norm=wrong.py")
    assert code == 1
    assert err.startswith("error: wrong.py breaks the contract norm(x, residual, weight, bias, eps=1e-5) -> ")
    assert "(y, new_residual) of kernels/norm/__init__.py (wrong: out0: error " in err
    assert "python -m scripts.doctor op=norm impl=wrong.py tells more" in err


@pytest.mark.exhaustive
@pytest.mark.parametrize("attn", sorted({*registry.impls("attention")} - {"eager"}))
def test_every_attention_gives_the_losses_of_eager(hotswap, attn):
    """With 2 sequences of 48 tokens: with 4 of 128, Triton's interpreter takes 4 s for each step."""
    if why := registry.unavailable("attention", attn, CPU):
        pytest.skip(why)
    small = "train.batch_size=2", "train.block_size=48", "train.tokens_per_step=96"
    own, eager = (losses(hotswap, *small, f"attn={impl}") for impl in (attn, "eager"))
    torch.testing.assert_close(own, eager, rtol=1e-4, atol=0)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_torch_compile_gives_the_losses_of_eager_and_compiles_once(hotswap, backend):
    """Evaluations compile graphs of their own, which are not counted as recompiles.

    Inductor's C++ takes 3 s of CPU time a kernel if its cache is empty, so that run has no evaluations.
    """
    evaluations = ["train.eval_every=3", "train.eval_batches=1"] if backend == "aot_eager" else []
    with torch.compiler.set_stance("default", force_backend=backend):
        compiled = losses(hotswap, "kernels=compile", *evaluations)
    assert row("run0")["perf/recompiles"] == 0
    assert row("run0")["kernels"]["compile"] is True
    assert row("run0")["perf/compile_s"] > 0
    torch.testing.assert_close(compiled, losses(hotswap), rtol=1e-4, atol=0)


@pytest.mark.parametrize("precision", ["amp", "bf16", "fp8"])
def test_precisions_give_the_losses_of_fp32(hotswap, precision):
    """The losses of 8 steps differ by at most 2^-8, the relative error of a bf16 logit; errors of fp8 average out."""
    torch.testing.assert_close(losses(hotswap, f"precision={precision}"), losses(hotswap), rtol=2**-8, atol=0)


def test_each_precision_has_its_dtypes():
    """The dtypes of the parameters, and the compute dtype of the last norm."""
    dtypes = {}
    for precision in ("fp32", "amp", "bf16"):
        model = recipe(config(*QUICK, f"precision={precision}")).build(CPU)
        dtypes[precision] = {w.dtype for w in model.parameters()} | {model.ln_f.dtype}
    assert dtypes == {
        "fp32": {torch.float32},
        "amp": {torch.float32, torch.bfloat16},
        "bf16": {torch.bfloat16},
    }


def test_the_default_batch_size(monkeypatch):
    """It is the largest that divides the step and has at most 65,536 tokens, or 4,096 on a CPU.

    With eight processes, as in the README, each has 8 of the 64 sequences.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert config().train.batch_size == 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [config(f"train.tokens_per_step={64 * 1024 * n}").train.batch_size for n in (1, 2, 3)] == [64, 64, 64]
    assert config("train.tokens_per_step=67584").train.batch_size == 33  # 66 = 2 x 33
    assert config("model.block_size=16384").train.batch_size == 4
    assert config("model.block_size=131072", "train.tokens_per_step=131072").train.batch_size == 1
    for name, value in {"WORLD_SIZE": "8", "RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    assert config().train.batch_size == 8


def test_validation_loss_is_the_mean_over_fixed_batches(tmp_path):
    """It equals the cross-entropy of each sample's logits. A second evaluation uses the same samples."""
    cfg = config(*QUICK, "model.dropout=0.5", "train.eval_batches=3", f"data.cache={tmp_path}")
    windows = Windows(open_dataset(cfg.data).val, cfg.train.block_size, "validation")
    model = recipe(cfg).build(CPU)
    t = cfg.train
    loss = evaluate(model, windows, t.batch_size, t.eval_samples, CPU)
    assert model.training
    model.eval()
    expected = []
    for sample in (i * len(windows) // 12 for i in range(12)):
        x, y = windows.batch(np.array([sample]))
        expected.append(F.cross_entropy(model(x)[0], y[0]).item())
    assert loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    model.train()
    assert evaluate(model, windows, t.batch_size, t.eval_samples, CPU) == loss


@pytest.mark.parametrize("samples", [13, 10**6])
def test_validation_loss_depends_on_neither_the_batch_size_nor_the_number_of_processes(tmp_path, samples):
    """13 samples, or all of a split, rarely fill the last batch. The losses of the samples differ."""
    cfg = config(*QUICK, f"data.cache={tmp_path}")
    windows = Windows(open_dataset(cfg.data).val, cfg.train.block_size, "validation")
    windows.sample_ends = np.minimum(windows.sample_ends, 29)  # a small split
    model = recipe(cfg).build(CPU)
    loss = evaluate(model, windows, 1, samples, CPU)
    for batch_size, processes in itertools.product((2, 3, 8, 29, 64), (1, 2, 3, 5)):
        parts = []
        for rank in range(processes):
            ranks = Ranks(rank, processes)
            ranks.mean = lambda total: total
            parts.append(evaluate(model, windows, batch_size, samples, CPU, ranks))
        assert sum(parts) / processes == pytest.approx(loss, rel=1e-5)


def test_an_incomplete_batch_of_an_evaluation_compiles_nothing_more(tmp_path):
    """It has the shape of the other batches, also if the whole split is smaller than a batch."""
    cfg = config(*QUICK, f"data.cache={tmp_path}")
    windows = Windows(open_dataset(cfg.data).val, cfg.train.block_size, "validation")
    model, compiled = recipe(cfg).build(CPU), []

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    torch.compiler.reset()
    model.compile(fullgraph=True, backend=count)
    for samples in (8, 7, 2):
        evaluate(model, windows, 4, samples, CPU)
    assert len(compiled) == 1


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_leaves_the_model_in_its_mode_after_an_error(training):
    model, windows = recipe(config(*QUICK)).build(CPU).train(training), SimpleNamespace()
    with pytest.raises((AttributeError, TypeError)):  # these are no windows
        evaluate(model, windows, 2, 4, CPU)
    assert all(module.training == training for module in model.modules())


def test_max_minutes_ends_a_run(hotswap, monkeypatch):
    """A run of 0.1 minutes, whose steps take 1 second each, ends after step 6."""
    set_clock(monkeypatch, seconds=1.0)
    code, out, _ = hotswap(*QUICK, "train.max_steps=null", "train.max_minutes=0.1")
    assert code == 0
    assert (row()["status"], row()["steps"]) == ("ok", 6)
    assert re.search(r"^step 00001 \| loss", out, re.MULTILINE)  # the line names no last step
    assert "ended  " not in out


@pytest.mark.parametrize("steps", [6, 7])
def test_a_run_says_that_max_minutes_ended_it_before_max_steps(hotswap, monkeypatch, steps):
    set_clock(monkeypatch, seconds=1.0)
    code, out, _ = hotswap(*QUICK, f"train.max_steps={steps}", "train.max_minutes=0.1")
    assert (code, row()["status"], row()["steps"]) == (0, "ok", 6)
    assert ("ended    after step 6 of 7, by train.max_minutes=0.1\n" in out) == (steps == 7)


def test_the_last_step_is_predicted_from_the_speed(monkeypatch):
    """In 2 minutes, a first step of 20 s and then steps of 1 s: 101 steps. The first 3 steps give no speed yet."""
    monkeypatch.setattr("runtime.meter.time", SimpleNamespace(perf_counter=lambda: 0.0))
    cfg = config(*QUICK, "train.max_steps=null", "train.max_minutes=2").train

    def last_step(step, cfg=cfg, steps_before=0, seconds_before=0.0):
        """The prediction at the start of `step`."""
        meter = Meter(CPU, 1, None, steps_before=steps_before, seconds_before=seconds_before)
        meter.first_step_s = 20.0
        meter.start = -(20.0 + step - steps_before - 2)
        return predict_last_step(cfg, step, meter)

    assert [last_step(step) for step in (1, 2, 3)] == [math.inf] * 3
    assert {last_step(step) for step in (4, 50, 101)} == {101}
    assert last_step(50, config(*QUICK, "train.max_steps=80", "train.max_minutes=2").train) == 80
    assert last_step(50, config(*QUICK, "train.max_steps=200", "train.max_minutes=2").train) == 101
    assert last_step(50, config(*QUICK, "train.max_steps=80").train) == 80
    # An earlier process made 30 steps in 60 s. This one made 3 steps in 22 s, so 38 s are left
    assert last_step(34, steps_before=30, seconds_before=60.0) == 33 + 38


@pytest.mark.parametrize("full_in", ["model.capture.train_step", "runtime.device.measured_flops"])
def test_out_of_memory_is_a_line_and_a_row(hotswap, monkeypatch, full_in):
    """The error of a GPU with 8 GiB names what was tried, and the predicted batch size that fits."""
    monkeypatch.setattr(memory, "usable_gib", lambda device: 8.0)
    monkeypatch.setattr(memory, "largest_batch_size", lambda *_: 2)

    def full(*_):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 6.1 GiB. GPU 0 has a total of 8 GiB. See ..."
        )

    monkeypatch.setattr(full_in, full)
    code, _, err = hotswap(*QUICK, "device=cpu")  # not auto, which measures the CPU before the run begins
    assert code == 1
    assert err.startswith("error: out of GPU memory with train.batch_size=4 x 128 tokens, eager-sdpa-fp32: ")
    assert ": Tried to allocate 6.1 GiB. GPU 0 has a total of 8 GiB; lower train.batch_size" in err
    assert err.endswith("precision=bf16; train.batch_size=2 is predicted to fit\n")
    assert err.count("\n") == 1
    assert row()["status"] == "oom"


def test_an_unavailable_kernel_is_a_line_and_a_row(hotswap, monkeypatch, tmp_path):
    """It is found before the data is prepared."""
    why = "it needs an NVIDIA GPU"
    monkeypatch.setattr(registry.backend("norm", "eager"), "unavailable", lambda device: why, raising=False)
    Path("run").mkdir()  # as a sweep does
    code, _, err = hotswap(*QUICK)
    assert (code, err) == (1, f"error: norm=eager cannot run here: {why}\n")
    assert row()["status"] == f"unavailable: norm=eager cannot run here: {why}"
    assert not (tmp_path / "tokens").exists()


def test_checkpoints_on_the_host_are_not_compiled(hotswap):
    Path("run").mkdir()
    code, _, err = hotswap(*QUICK, "model.checkpointing=host", "kernels.compile=true")
    why = "kernels.compile=true cannot run with model.checkpointing=host: choose block, or no compile"
    assert (code, err, row()["status"]) == (1, f"error: {why}\n", f"unavailable: {why}")


def test_a_folder_holds_one_run(hotswap, tmp_path):
    assert hotswap(*QUICK, "train.max_steps=1")[0] == 0
    before = row()
    code, _, err = hotswap(*QUICK, "train.max_steps=1")
    taken = (
        "already holds a run (config.yaml); choose another folder, delete it, or resume the run: train.resume=auto\n"
    )
    assert (code, err) == (1, f"error: out_dir=run {taken}")
    assert row() == before
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("precious")
    code, _, err = hotswap(*QUICK, "out_dir=mine")
    assert (code, err) == (1, f"error: out_dir=mine {taken}")
    assert Path("mine/config.yaml").read_text() == "precious"
    Path("file").write_text("")
    code, _, err = hotswap(*QUICK, "out_dir=file/run")
    assert (code, err) == (1, "error: out_dir=file/run cannot be written: Not a directory; choose another folder\n")


def test_a_run_that_failed_before_its_first_step_is_overwritten(hotswap):
    """A run in a new folder leaves nothing. The folder of a sweep's job is there before, and gets a row."""
    for folder in (["out_dir=new/run"], ["out_dir=null"]):
        assert hotswap(*QUICK, "data=text", "data.path=typo.txt", *folder)[0] == 1
        assert [*Path().iterdir()] == []
    Path("run").mkdir()
    assert hotswap(*QUICK, "data=text", "data.path=typo.txt")[0] == 1
    assert row()["status"] == "failed: data.path=typo.txt: no such file or folder, and nothing matches it as a glob"
    assert row()["env"]["torch"] == torch.__version__
    eager = dict.fromkeys(("norm", "linear", "mlp", "loss"), "eager")
    assert row()["kernels"] == eager | {"attention": "sdpa", "adamw": "auto", "compile": False}
    assert hotswap(*QUICK, "train.max_steps=1")[0] == 0
    assert row()["status"] == "ok"


@pytest.mark.usefixtures("quick_python")
def test_the_row_and_the_header_name_the_backend_of_the_optimizer(hotswap):
    """The profile of a step has its kernels. The old key optim.impl is renamed in the row's config."""
    words = *QUICK, "train.max_steps=3", "precision=bf16"
    code, out, err = hotswap(*words, "proof=true")
    assert (code, err) == (0, "")
    assert "| adamw auto (eager)\n" in out
    assert row()["kernels"]["adamw"] == "auto (eager)"
    assert "adamw" not in row()["receipt"]["unchecked"]
    code, out, err = hotswap(*words, "optim.impl=torch", "out_dir=old")
    assert code == 0
    [warning] = err.splitlines()
    assert warning.startswith("warning: optim.impl=torch is the old name of kernels.adamw=eager, and the next release")
    assert f"| adamw eager (torch {torch.__version__})\n" in out
    config = row("old")["config"]
    assert (config["kernels"]["adamw"], config["optim"]["impl"]) == ("eager", None)
    assert "+adamw.eager-" in row("old")["name"]
    assert row("old")["train/loss"] == row()["train/loss"]
    code, _, err = hotswap(*words, "optim.impl=torch", "kernels.adamw=triton", "out_dir=both")
    assert (code, err.count("\n")) == (1, 1)
    assert "but kernels.adamw=triton: remove optim.impl" in err


def test_muon_trains_and_has_a_proof(hotswap):
    """The references of the proof train with Muon, too. The row names both optimizers, and so does a resumed run's."""
    words = *QUICK, "train.max_steps=4", "precision=bf16", "optim=muon"
    code, out, err = hotswap(*words, "proof=true")
    assert (code, err) == (0, "")
    assert "| adamw auto (eager) | muon auto (eager)\n" in out
    result = row()
    assert result["name"].endswith("M-eager-sdpa-bf16-muon")
    assert (result["config"]["optim"]["name"], result["config"]["optim"]["momentum"]) == ("muon", 0.95)
    assert result["parity"]["ok"] is True
    assert 0 < result["parity"]["loss_error"] < 0.01
    Path("mine.py").write_text("from kernels.muon._template import muon")
    assert hotswap(*words, "kernels.muon=mine.py", "out_dir=mine")[0] == 0
    assert row("mine")["kernels"]["muon"].startswith("mine.py (torch")
    assert row("mine")["checks"]["muon"].startswith("ok: torch")
    assert row("mine")["train/loss"] == result["train/loss"]
    assert "+muon.mine.py-" in row("mine")["name"]
    code, _, err = hotswap(*words, "kernels.muon=mine.py", "proof=true", "out_dir=proof")
    assert (code, err.count("\n")) == (1, 1)
    assert "optim=muon is not repeated, only AdamW; pass proof=false" in err


@pytest.mark.usefixtures("quick_python")
def test_a_new_backend_of_the_optimizer_is_checked_and_trains(hotswap, monkeypatch):
    """With proof=true it trains in a worker, after all of its cases; here, after the first one."""
    case_probes = supervise.case_probes
    monkeypatch.setattr(supervise, "case_probes", lambda *of: dict(list(case_probes(*of).items())[:1]))
    monkeypatch.setattr(sandbox, "isolation", lambda: sandbox.PROCESSES)  # the fork server is in no namespace
    words = *QUICK, "train.max_steps=3", "precision=bf16", "kernels.adamw=mine.py"
    Path("mine.py").write_text("from kernels.adamw._template import adamw")
    assert hotswap(*words, "proof=true")[0] == 0
    assert row()["kernels"]["adamw"].startswith("mine.py (torch")
    assert row()["checks"] == {"adamw": "ok in 1 of 1 cases"}
    assert hotswap(*words, "out_dir=plain")[0] == 0
    assert row("plain")["checks"]["adamw"].startswith("ok: torch")
    Path("mine.py").write_text("def adamw(master, *rest, **named):\n    master.mul_(0.9)")
    code, _, err = hotswap(*words, "out_dir=wrong")
    assert code == 1
    assert err.startswith("error: mine.py breaks the contract")


def test_a_row_has_the_command_of_its_run(hotswap):
    """In a sweep, each row has its own command, quoted for the shell. Runs of the same second get different folders."""
    quick = [word for word in QUICK if not word.startswith("out_dir")]
    Path("a b.txt").write_text("All work and no play makes Jack a dull boy.\n" * 100)
    quick += ["hydra/launcher=basic", "train.max_steps=1", "data=text", "data.path='a b.txt'"]
    code, _, err = hotswap("-m", *quick, "seed=1,2,3")
    assert (code, err) == (0, "")
    rows = sorted((row(folder) for folder in Path("out").glob("2*")), key=lambda row: row["config"]["seed"])
    assert [shlex.split(row["command"])[-2] for row in rows] == ["seed=1", "seed=2", "seed=3"]
    assert all("data.path='a b.txt'" in shlex.split(row["command"]) for row in rows)
    assert {row["name"] for row in rows} == {"0M-eager-sdpa-fp32"}


@pytest.mark.exhaustive
def test_a_sweep_may_compile_many_models(hotswap, monkeypatch):
    """With Hydra's own launcher, jobs share a process. Dynamo would stop at the ninth version of GPT.forward.

    Only Dynamo counts the versions, so this is without Inductor, whose C++ takes 35 s to compile for these models.
    """
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", functools.partialmethod(compiled, backend="eager"))
    quick = ["hydra/launcher=basic", *(word for word in QUICK if not word.startswith("out_dir"))]
    code, _, err = hotswap(
        "-m", *quick, "train.max_steps=1", "kernels=compile", "train.eval_every=1", "model.n_embd=32,48,64,80,96"
    )
    assert (code, err) == (0, "")
    assert len(list(Path("out").glob("2*"))) == 5


def test_an_interrupted_run_has_a_row(hotswap, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(capture, "train_step", interrupt)
    code, _, err = hotswap(*QUICK)
    assert (code, err) == (130, "interrupted\n")
    assert row()["status"] == "failed: KeyboardInterrupt"


def test_a_large_model_on_a_cpu_must_be_asked_for(hotswap, monkeypatch):
    """Without a GPU, `python train.py` would announce a step of many minutes. device=cpu trains nevertheless."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("runtime.device.measured_flops", lambda *_: 1e12)
    code, out, err = hotswap()
    assert (code, out) == (1, "")
    assert err == (
        "error: PyTorch sees no GPU, and a step of 65,536 tokens takes at least 56 s on this CPU: try python train.py "
        "+experiment=smoke, or pass device=cpu to train this model all the same\n"
    )
    assert [*Path().iterdir()] == []
    small = [word for word in QUICK if not word.startswith("device")]
    assert hotswap(*small, "device=auto", "train.max_steps=1")[0] == 0
    monkeypatch.setattr("runtime.device.measured_flops", lambda *_: 1e6)
    assert hotswap(*small, "device=auto", "train.max_steps=1", "out_dir=two")[0] == 1
    assert hotswap(*small, "device=cpu", "train.max_steps=1", "out_dir=two")[0] == 0


def test_a_cpu_out_of_memory_is_a_line(hotswap):
    Path("run").mkdir()
    large = "model.n_embd=65536", "model.block_size=2000000000", "train.block_size=128"  # its positions take 500 TB
    code, _, err = hotswap(*QUICK, *large)
    assert code == 1
    assert re.match(r"error: out of memory with train.batch_size=4 .*: tried to allocate \d+ bytes; lower", err)
    assert err.count("\n") == 1
    assert row()["status"] == "oom"


def test_a_run_on_a_text_file(hotswap):
    Path("book.txt").write_text("All work and no play makes Jack a dull boy.\n" * 400)
    code, out, _ = hotswap(*QUICK, "train.max_steps=2", "data=text", "data.path=book.txt")
    assert code == 0
    assert "data     text, bytes: 15,841 training tokens, 1,761 validation tokens" in out
    few = "train.max_steps=3", "train.eval_every=1"
    code, _, err = hotswap(*QUICK, *few, "data=text", "data.path=book.txt", "out_dir=two")
    assert code == 0, err
    Path("line.txt").write_text("All work and no play makes Jack a dull boy.\n")
    code, _, err = hotswap(*QUICK, "data=text", "data.path=line.txt", "out_dir=three")
    assert code == 1
    assert err.startswith("error: the training text has 40 tokens, and one sample takes 129 (train.block_size + 1)")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_a_terminal_gets_a_progress_bar(tmp_path):
    terminal, inside = pty.openpty()
    termios.tcsetwinsize(inside, (24, 100))
    command = [sys.executable, str(ROOT / "train.py"), *QUICK, "train.max_steps=6"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=inside, stderr=inside, env={**os.environ, "TERM": "xterm"})
    os.close(inside)
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
    assert process.wait() == 0
    assert re.search(rb"\| [1-6]/6 \[", shown)  # tqdm's count
    assert re.search(rb"step 00006/00006 \| loss", shown)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu_between_logged_steps(tmp_path):
    """PyTorch raises an error at any synchronisation inside a step, such as .item() or a copy from pageable memory."""
    cfg = config(*QUICK, "device=cuda", "precision=bf16", f"data.cache={tmp_path}", "train.batch_size=2")
    device = torch.device("cuda")
    model = recipe(cfg).build(device)
    optimizer = make_optimizer(model, cfg.optim)
    windows = Windows(open_dataset(cfg.data).train, cfg.train.block_size, "training")
    batches = prefetch(Loader(windows, 2, 512, seed=1), 1, device)
    train_step(model, optimizer, next(batches)[0], 1e-3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            train_step(model, optimizer, next(batches)[0], 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernels", "precision"),
    [("eager", "amp"), ("eager", "bf16"), ("compile", "fp32"), ("compile", "amp"), ("compile", "bf16")],
)
def test_gpu_choices_give_the_losses_of_eager_fp32(hotswap, kernels, precision):
    """The losses of 8 steps differ by at most 2^-7 in bf16, and by 1e-4 in fp32, where the order of sums differs."""
    gpu = losses(hotswap, "device=cuda", f"kernels={kernels}", f"precision={precision}")
    eager = losses(hotswap, "device=cuda", "precision=fp32")
    torch.testing.assert_close(gpu, eager, rtol=1e-4 if precision == "fp32" else 2**-7, atol=0)
    assert row("run0")["mem/peak_allocated_gib"] > 0


@pytest.mark.gpu
def test_a_gpu_out_of_memory_is_a_line(hotswap):
    code, _, err = hotswap(
        "model.n_layer=1", "train.batch_size=4096", "train.tokens_per_step=4194304", "out_dir=run", "device=cuda"
    )
    assert code == 1
    assert err.startswith("error: out of GPU memory with train.batch_size=4096 x 1024 tokens, eager-sdpa-amp: ")
    assert err.count("\n") == 1
    assert row()["status"] == "oom"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_backend_that_is_known_to_be_slower_is_named_in_header_and_row(hotswap, tables, compiled, monkeypatch):
    """In a compiled model it stands beside compiled eager. A broken table is a warning, and the run goes on."""
    monkeypatch.setattr(GPT, "compile", lambda *_, **__: None)  # Inductor would take 25 s
    cfg = config(*QUICK)
    step = cfg.train.batch_size, cfg.train.block_size
    arguments = call_shapes(cfg.model, cfg.kernels, "fp32", step)["attention"]
    times = {"eager": 3.42, "sdpa": 7.29, "compile": 3.1}
    rows = [
        {"impl": impl, "both/ms": ms, "both/ms/p20": ms - 0.01, "both/ms/p80": ms + 0.01} for impl, ms in times.items()
    ]
    inputs = registry.contract("attention").inputs(**arguments, dtype=torch.float32)
    speeds.store_speeds("attention", inputs, rows, CPU)
    words = "device=cpu", "precision=fp32", "attn=sdpa", f"kernels.compile={compiled}".lower(), "train.max_steps=1"
    code, out, err = hotswap(*QUICK, *words)
    assert (code, err) == (0, "")
    baseline, beside = ("compiled eager", "3.1") if compiled else ("eager", "3.42")
    kernels = re.search("^kernels  (.*)$", out, re.MULTILINE)[1].split(" | ")
    assert [text.endswith(f"), slower than {baseline} here: 7.29 ms beside {beside}") for text in kernels[:5]] == [
        text.startswith("attention sdpa (") for text in kernels[:5]
    ]
    row = json.loads(Path("run/result.json").read_text())
    assert list(row["slower"]) == ["attention"]
    assert row["slower"]["attention"]["ms"] == 7.29
    assert row["slower"]["attention"]["baseline"] == ("compile" if compiled else "eager")
    if compiled:
        return
    speeds.table_paths(CPU)[0].write_text("{")
    code, out, err = hotswap(*QUICK, *words, "out_dir=other")
    assert (code, err.count("\n"), "slower than" in out) == (0, 1, False)
    assert err.startswith("warning: ")
    assert "is not a table of speeds" in err
    assert json.loads(Path("other/result.json").read_text())["slower"] == {}


def test_a_run_says_nothing_about_a_call_that_was_not_measured(tables):
    """Neither about another version of attention, whose times are not those of the version that the backend chooses."""
    cfg = config(*QUICK)
    arguments = call_shapes(cfg.model, cfg.kernels, "fp32", (4, 128))["attention"]
    inputs = registry.contract("attention").inputs(**arguments, dtype=torch.float32)
    rows = [
        {"impl": impl, "both/ms": ms, "both/ms/p20": ms, "both/ms/p80": ms} for impl, ms in (("eager", 1), ("flash", 2))
    ]
    speeds.store_speeds("attention", inputs, rows, CPU)

    def slower(version=None, **changes):
        attn = registry.AttnConfig("flash", version)
        settings = {"precision": "fp32", "shape": (4, 128), "trains": True} | changes
        return list(slower_kernels(cfg.model, cfg.kernels, attn, **settings, device=CPU))

    assert slower() == slower(shape=(16, 128)) == ["attention"]
    others = {"shape": (17, 128)}, {"precision": "bf16"}, {"trains": False}, {"documents": True}, {"keys": 128}
    assert [slower(**changes) for changes in others] == [[]] * 5
    assert slower(version="fa2") == []

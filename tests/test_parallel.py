"""Several processes: torchrun with two ranks over gloo, on the CPU."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from model.parallel import PARALLEL, warn_of_one_process
from runtime.checkpoint import find_checkpoint, newest_valid, read_weights, verify
from runtime.config import UserError
from runtime.ranks import Ranks, rank_device, unused_store
from runtime.signals import Signals, Stopped
from tests.test_train import QUICK, ROOT, config, metrics, row

BASE = [word for word in QUICK if not word.startswith(("train.checkpoint_every", "train.batch_size"))]
BASE += [
    "train.batch_size=2",
    "train.max_steps=8",
    "train.eval_every=4",
    "train.eval_batches=3",
    "train.sample_tokens=8",
]
SLOW = 300  # seconds


def torchrun(tmp_path, *arguments, script=ROOT / "train.py", ranks=2, restarts=0):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command += [f"--max-restarts={restarts}", str(script)]
    command += [*arguments, f"data.cache={tmp_path}/tokens"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SLOW, env=environment)
    return done.returncode, done.stdout, done.stderr


def figures(folder):
    """Losses, gradient norms and validation losses, step by step."""
    keys = ("train/loss", "train/grad_norm", "val/loss")
    return torch.tensor([line[key] for line in metrics(folder) for key in keys if key in line], dtype=torch.float64)


@pytest.fixture
def one_process(hotswap):
    """Return the figures of one process. In each step it makes two micro-steps, and two ranks make one each."""
    code, _, err = hotswap(*BASE, "out_dir=alone")
    assert (code, err) == (0, "")
    return figures("alone")


@pytest.mark.parametrize("python", ["quick_python", pytest.param("python", marks=pytest.mark.exhaustive)])
def test_ddp_gives_the_figures_of_one_process(hotswap, tmp_path, one_process, request, python):
    """Losses and norms are equal to fp32 rounding. Rank 0 writes the folder and the row, with the job's throughput.

    make test-all also starts the ranks without the fork server, which takes 6 s more of CPU time.
    """
    if python == "quick_python":
        request.getfixturevalue("quick_python")
    code, out, err = torchrun(tmp_path, *BASE)
    assert code == 0, err
    torch.testing.assert_close(figures("run"), one_process, rtol=1e-5, atol=0)
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


@pytest.mark.usefixtures("quick_python")
def test_fsdp_gives_the_figures_of_one_process_and_resumes_in_one(hotswap, tmp_path, one_process):
    """A sharded checkpoint resumes in one process, an unsharded one on two ranks (zero2). read_weights() reads both."""
    code, out, err = torchrun(tmp_path, *BASE, "parallel=fsdp", "train.sharded_checkpoints=true", "train.stop_after=3")
    assert code == 0, err
    assert "torchrun --standalone --nproc_per_node=2 " in out
    folder = newest_valid(Path("run/checkpoints"))
    assert len([*folder.glob("shards/*.distcp")]) == 2
    assert hotswap(*BASE, "train.resume=auto", "train.stop_after=2")[0] == 0
    assert (newest_valid(Path("run/checkpoints")) / "model.safetensors").exists()
    code, _, err = torchrun(tmp_path, *BASE, "parallel=zero2", "train.resume=auto")
    assert code == 0, err
    torch.testing.assert_close(figures("run"), one_process, rtol=1e-5, atol=0)
    assert Path("run/sample.txt").read_text() == Path("alone/sample.txt").read_text()
    ours, theirs = (checkpoint_weights(folder) for folder in ("run", "alone"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_muon_gives_the_figures_of_one_process_and_refuses_sharded_weights(hotswap, tmp_path):
    """Each rank orthogonalises half of the matrices, with parallel=ddp and with parallel=context."""
    settings = *BASE, "optim=muon", "train.sample_tokens=0"
    assert hotswap(*settings, "out_dir=alone")[0] == 0
    for parallel in ("ddp", "context"):
        code, _, err = torchrun(tmp_path, *settings, f"parallel={parallel}", f"out_dir={parallel}")
        assert code == 0, err
        torch.testing.assert_close(figures(parallel), figures("alone"), rtol=1e-4, atol=0)
    for parallel in ("fsdp", "zero2"):
        code, _, err = torchrun(tmp_path, *settings, f"parallel={parallel}", f"out_dir={parallel}")
        assert code == 1
        assert "error: optim=muon needs whole matrices: choose parallel=ddp or context, or optim=adamw\n" in err


@pytest.mark.usefixtures("quick_python")
def test_context_gives_the_figures_of_one_process(hotswap, tmp_path, one_process):
    """Each rank has 64 tokens of every sequence of 128. The row counts a sequence once, and parity holds."""
    code, out, err = torchrun(tmp_path, *BASE, "parallel=context", "proof=true")
    assert code == 0, err
    torch.testing.assert_close(figures("run"), one_process, rtol=1e-5, atol=0)
    assert "512 tokens: 2 processes (context) with 2 micro-steps of 2 sequences of 128 in 2 parts" in out
    assert Path("run/sample.txt").read_text() == Path("alone/sample.txt").read_text()
    result = row()
    assert (result["name"], result["world_size"]) == ("0M-eager-sdpa-fp32-context2", 2)
    assert (result["tokens"], row("alone")["tokens"]) == (8 * 512, 8 * 512)
    assert result["parity"]["ok"]


def checkpoint_weights(folder):
    return read_weights(find_checkpoint(Path(folder)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.usefixtures("quick_python")
def test_a_resumed_job_draws_the_same_dropout_on_every_rank(tmp_path, monkeypatch, parallel):
    """After step 4 the losses are bit-equal to the uninterrupted job's. The states of rank 0 and rank 1 differ."""
    monkeypatch.chdir(tmp_path)
    settings = *BASE, "model.dropout=0.2", f"parallel={parallel}", "train.sharded_checkpoints=true"
    settings += "train.eval_every=0", "train.sample_tokens=0", "train.checkpoint_every=4"
    code, _, err = torchrun(tmp_path, *settings)
    assert code == 0, err
    whole = figures("run")
    shutil.rmtree("run/checkpoints/step-000008")  # so that step 4 is the newest
    lines = Path("run/metrics.jsonl").read_text().splitlines(keepends=True)
    Path("run/metrics.jsonl").write_text("".join(lines[:4]))  # so that the others are the resumed job's
    code, out, err = torchrun(tmp_path, *settings, "train.resume=auto")
    assert code == 0, err
    assert "step 00005/00008" in out
    assert "step 00004/00008" not in out
    assert torch.equal(figures("run"), whole)
    saved = torch.load("run/checkpoints/step-000008/training.pt", weights_only=True)
    assert not torch.equal(saved["random"][0]["torch"], saved["random"][1]["torch"])


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_a_full_disk_is_a_warning_and_then_an_error(hotswap, tmp_path):
    """Every rank writes sharded checkpoints. No file may be larger than 200 KiB."""
    assert hotswap(*BASE, "train.max_steps=1", "out_dir=first")[0] == 0  # writes the tokens
    script = tmp_path / "small.py"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200 * 1024,) * 2)\n"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{limit}import train; train.main()\n")
    settings = *BASE, "parallel=fsdp", "train.sharded_checkpoints=true", "train.checkpoint_every=4"
    code, out, err = torchrun(tmp_path, *settings, script=script)
    assert code == 1
    assert "step 00008/00008 | loss" in out
    assert "warning: run/checkpoints/step-000004 could not be written: " in err
    assert "error: run/checkpoints/step-000008 could not be written: " in err
    assert "CheckpointException" not in err


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_a_sweep_needs_a_single_process(tmp_path):
    code, _, err = torchrun(tmp_path, "-m", *BASE, "seed=1,2")
    assert code == 1
    assert "error: a sweep (-m) cannot run under torchrun: run torchrun once for each job" in err


COMPILED = """
import functools, sys
sys.path.insert(0, {root!r})
import torch
torch.compile = functools.partial(torch.compile, backend="aot_eager")  # Inductor's C++ takes 15 s
import train
train.main()
"""


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_fsdp_in_bf16_keeps_fp32_masters(hotswap, tmp_path):
    """The figures are those of one process, up to the rounding of bf16. The checkpoints keep the weights in fp32."""
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED.format(root=str(ROOT)))
    settings = *BASE, "precision=bf16", "train.sample_tokens=0", "train.eval_every=0", "model.n_embd=64"
    assert hotswap(*settings, "out_dir=alone")[0] == 0
    code, _, err = torchrun(tmp_path, *settings, "parallel=fsdp", "kernels=compile", script=script)
    assert code == 0, err
    torch.testing.assert_close(figures("run"), figures("alone"), rtol=2**-6, atol=0)
    held = verify(newest_valid(Path("run/checkpoints")))
    assert held["config"]["precision"] == "bf16"
    assert {w.dtype for w in checkpoint_weights("run").values()} == {torch.float32}


AVERAGING = """
import sys
sys.path.insert(0, {root!r})
import torch
from torch import nn
from model import optim, parallel
from kernels.adamw import triton
from model.flat_adamw import FlatAdamW
from runtime.ranks import Ranks, join_ranks

parallel.BUCKET = 1  # a bucket for each matrix
CONFIG = optim.OptimConfig(
    learning_rate=1e-2, min_lr=1e-3, warmup_steps=0, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0
)
events = []
start_average = Ranks.start_average
Ranks.start_average = lambda ranks, tensor: events.append(tensor.numel()) or start_average(ranks, tensor)

def train(kind, dtype, backend, ranks):
    "The norms and the weights of three steps, each with four micro-steps over all ranks."
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(dtype)
    net[0].weight.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))
    optimizer, norms = kind(net, CONFIG, *backend, ranks=ranks), []
    micro_steps = range(4)[ranks.rank :: ranks.world_size]
    for step in range(3):
        events.append("step")
        for micro_step in micro_steps:
            x = torch.randn(7, 16, generator=torch.Generator().manual_seed(10 * step + micro_step)).to(dtype)
            optimizer.backward(net(x).square().sum() / len(micro_steps), last=micro_step == micro_steps[-1])
        norms.append(optimizer.step(1e-2, torch.tensor(1.0)))
    return [*norms, *net.parameters()]

with join_ranks(torch.device("cpu")) as ranks:
    cases = [(optim.TorchAdamW, torch.float32), (optim.TorchAdamW, torch.bfloat16)]
    for kind, dtype, *backend in [*cases, (FlatAdamW, torch.float16, triton.adamw)]:
        events.clear()
        ours, again, alone = (train(kind, dtype, backend, job) for job in (ranks, ranks, Ranks()))
        tolerance = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=2**-6, atol=2**-9)
        for a, b, c in zip(ours, again, alone, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, **tolerance)
        # Only the second micro-step averages: first the last layer's matrix, before the first layer has its gradient
        assert events[:5] == ["step", "first layer", 32, "first layer", 128], events
        assert events[:6] * 6 == events[:36], events
"""


@pytest.mark.usefixtures("quick_python")
def test_the_ranks_average_gradients_while_the_backward_runs(tmp_path):
    """Three optimizers make the steps of one process, and twice the same bits."""
    script = tmp_path / "averaging.py"
    script.write_text(AVERAGING.format(root=str(ROOT)))
    code, out, err = torchrun(tmp_path, script=script)
    assert (code, out) == (0, ""), err


CONTEXT = """
import functools, sys
sys.path.insert(0, {root!r})
from dataclasses import replace
import torch
from kernels.attention import document_starts
from kernels.registry import AttnConfig, KernelsConfig, resolve
from model import parallel
from model.config import GPTConfig
from model.gpt import GPT
from model.optim import OptimConfig, TorchAdamW
from model.step import train_step
from runtime.ranks import Ranks, join_ranks

CPU = torch.device("cpu")
OPTIM = OptimConfig(
    learning_rate=1e-2, min_lr=1e-3, warmup_steps=0, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0
)
LEARNED = GPTConfig(2, 4, 32, block_size=32, vocab_size=97, pos="learned", bias=True, dropout=0.0)
ROPE = replace(LEARNED, pos="rope")
CASES = {{
    "learned": LEARNED,
    "rope": replace(ROPE, n_kv_head=2),
    "window": replace(ROPE, window=9),
    "checkpoint": replace(LEARNED, checkpointing="block"),
    "kept": replace(LEARNED, checkpointing="block", keep_attention=True),
    "chunks": replace(ROPE, checkpointing="chunks"),
}}
STARTS = torch.tensor([document_starts(documents) for documents in ((5, 20, 7), (32,), (15, 1, 16))])

def gradients(config, documents, ranks, compiled=False):
    "The loss and the gradients of a step of two micro-steps. Most of the first targets do not count."
    torch.manual_seed(0)
    model = GPT(config, resolve(KernelsConfig(), AttnConfig("sdpa"), CPU))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    tokens = torch.randint(97, (2, 3, 33))
    targets = tokens[..., 1:].where(torch.arange(32) > torch.tensor([[20], [3], [0]]), -1)
    batches = [(x, y, STARTS) if documents else (x, y) for x, y in zip(tokens[..., :-1], targets)]
    parallel.prepare(model, "context", KernelsConfig(compile=compiled), seed=0, ranks=ranks)
    optimizer, found = TorchAdamW(model, OPTIM, ranks), {{}}
    optimizer.observer = lambda name, gradient: found.update({{name: gradient.clone()}})
    loss, norm = train_step(model, optimizer, batches, 1e-2)
    return found | {{"loss": loss, "norm": norm}}

torch.compile = functools.partial(torch.compile, backend="aot_eager")  # Inductor's C++ takes 50 s
with join_ranks(CPU, "context") as ranks:
    for name in {cases}:
        documents, compiled = "documents" in name, "compiled" in name
        config = CASES[name.split()[0]]
        ours = gradients(config, documents, ranks, compiled)
        for key, truth in gradients(config, documents, Ranks()).items():
            # The unit of fp32, 2^-24, times the square root of the 2^6 tokens and 2^5 channels that a number sums
            error = (ours[key] - truth).norm() / truth.norm()
            assert error < 2**-24 * 2**5.5, (name, key, error)
"""


@pytest.mark.parametrize(
    "cases",
    [
        ["learned", "rope", "window documents", "checkpoint documents", "kept", "chunks documents"],
        pytest.param(["checkpoint documents compiled"], marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.usefixtures("quick_python")
def test_split_sequences_have_the_loss_and_gradients_of_one_process(tmp_path, cases):
    """Positions, documents, the window and the mean over the targets of both ranks are right."""
    script = tmp_path / "context.py"
    script.write_text(CONTEXT.format(root=str(ROOT), cases=cases))
    code, out, err = torchrun(tmp_path, script=script)
    assert (code, out) == (0, ""), err


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "zero2", "context"])
@pytest.mark.usefixtures("quick_python")
def test_replayed_steps_of_two_gpus_equal_uncaptured_steps(tmp_path, monkeypatch, parallel):
    """With deterministic kernels, every bit is the same. The evaluation after each step sees the newest weights."""
    monkeypatch.chdir(tmp_path)
    settings = *BASE, "device=cuda", "precision=bf16", "kernels=triton", "attn=triton", f"parallel={parallel}"
    settings += "model.n_layer=3", "train.batch_size=1", "train.eval_every=1"
    for folder, captured in (("plain", "false"), ("captured", "true")):
        code, _, err = torchrun(tmp_path, *settings, f"train.cuda_graph={captured}", f"out_dir={folder}")
        assert code == 0, err
    assert row("captured")["cuda_graph"] == "captured"
    assert torch.equal(figures("captured"), figures("plain"))


FAILING = """
import os, signal, sys
sys.path.insert(0, {root!r})
import train
from model import capture
from runtime.config import UserError
step = capture.train_step
def failing(model, optimizer, batches, lr):
    if optimizer.ranks.rank == 1 and optimizer.steps == 4:
        {fault}
    return step(model, optimizer, batches, lr)
capture.train_step = failing
train.main()
"""


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise UserError('the disk of rank 1 is full')", "rank 1 failed: the disk of rank 1 is full"),
        pytest.param("raise ZeroDivisionError('a bug')", "rank 1 failed: a bug", marks=pytest.mark.exhaustive),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL)",
            "another rank ended without a message (killed?); torchrun's report names it",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
@pytest.mark.usefixtures("quick_python")
def test_a_rank_that_dies_ends_the_job_with_its_reason(tmp_path, monkeypatch, fault, reason):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(root=str(ROOT), fault=fault))
    code, _, err = torchrun(tmp_path, *BASE, script=script)
    assert code == 1
    assert f"error: {reason}\n" in err
    assert row()["status"] == f"failed: {reason}"


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_a_rank_that_waits_for_a_killed_rank_says_so(rank, other, capsys):
    """torchrun sends SIGTERM to the other ranks, here while they wait in the job's store."""
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    with Signals(), pytest.raises(Stopped) as stopped:
        unused_store(dist.HashStore(), rank, 2)
    assert stopped.value.code == 128 + signal.SIGTERM
    expected = f"rank {rank} got SIGTERM before rank {other} had joined the job (killed?); torchrun's report names it"
    assert capsys.readouterr().err == f"warning: {expected}\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_when_torchrun_ends_says_so(rank):
    def check(keys):
        raise dist.DistNetworkError("Connection reset by peer")

    store = SimpleNamespace(set=lambda *_: None, check=check)
    with pytest.raises(UserError, match=f"rank {rank}: torchrun, which holds the job's store, has ended"):
        unused_store(store, rank, 2)


def test_a_rank_that_never_joins_is_named(monkeypatch):
    """A short runtime.hang_minutes leaves it a minute to start."""
    clock = iter(range(0, 600, 10))
    monkeypatch.setattr("runtime.ranks.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("runtime.ranks.time.sleep", lambda _: None)
    with pytest.raises(UserError, match="rank 1: rank 0 did not join the job within 1 minutes: it is stopped, or"):
        unused_store(dist.HashStore(), 1, 2, hang_minutes=0.05)
    assert next(clock) == 70  # it ended at 60


STOPPED_IN_START = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
import torch.distributed as dist
import train
from runtime import watchdog
watchdog.GRACE = 1.0
exit_process = os._exit
def kill_and_exit(code):
    "Kill the stopped rank, as torchrun does after 30 seconds."
    os.kill(int(Path("stopped").read_text()), signal.SIGKILL)
    exit_process(code)
def stop(*_, **options):
    Path("stopped").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
if os.environ["RANK"] == "0":
    dist.init_process_group = stop
else:
    os._exit = kill_and_exit
train.main()
"""


@pytest.mark.usefixtures("quick_python")
def test_a_rank_that_is_stopped_before_gloo_connects_ends_the_job(tmp_path, monkeypatch):
    """While gloo connects, the other rank answers no signal, and gloo's own time-out comes five minutes later."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED_IN_START.format(root=str(ROOT)))
    code, _, err = torchrun(tmp_path, *BASE, "runtime.hang_minutes=0.05", script=script)
    assert code == 1
    assert re.search(
        r"error: the job made no progress for 0.05 minutes: rank 0 on \S+ is stopped, or its machine is down; "
        r"rank 1 on \S+ is at train.py:\d+ \(run_recipe\); resume it with ",
        err,
    )


# Imports train.py for a script in which a rank stops itself
STOPPABLE = """
import os, resource, shutil, signal, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
import train
from model import capture
from runtime import watchdog
watchdog.GRACE = 1.0
write_records = watchdog.write_records
def write_records_and_kill(*arguments):
    "Kill the stopped rank, as torchrun does after 30 seconds."
    write_records(*arguments)
    os.kill(int(Path("stopped").read_text()), signal.SIGKILL)
watchdog.write_records = write_records_and_kill
"""

RESTARTED = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
step = capture.train_step
def failing(model, optimizer, batches, lr):
    fault = {{0: 7, 1: 10}}.get(attempt)
    if optimizer.ranks.is_main and (attempt, int(optimizer.steps)) == (2, 10):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))  # a full disk
    if optimizer.ranks.rank == 1 and optimizer.steps == fault:
        shutil.copytree("run", f"before{{attempt}}", ignore=shutil.ignore_patterns("checkpoints"))
        newest = Path(f"run/checkpoints/step-{{fault - 1:06}}")
        while not newest.exists():
            time.sleep(0.1)
        if attempt == 0:
            os.truncate(newest / "training.pt", 1000)
        Path("stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP if attempt else signal.SIGKILL)
    return step(model, optimizer, batches, lr)
capture.train_step = failing
train.main()
"""


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_torchrun_restarts_a_job_after_a_kill_a_stop_and_a_full_disk(tmp_path, monkeypatch):
    """It goes on by itself from the last good checkpoint. The repeated steps have the same figures, bit for bit.

    Rank 1 damages the newest checkpoint, and is killed. After the first restart it is stopped, and a line says so.
    After the second one the last checkpoint does not fit on the disk.
    """
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "restarted.py"
    script.write_text((STOPPABLE + RESTARTED).format(root=str(ROOT)))
    settings = *BASE, "train.max_steps=12", "train.checkpoint_every=3", "train.eval_every=0", "train.sample_tokens=0"
    settings += "train.resume=auto", "runtime.hang_minutes=0.15"  # a busy machine may take 3 s for a step
    code, out, err = torchrun(tmp_path, *settings, script=script, restarts=3)
    assert code == 0, err
    assert "warning: run/checkpoints/step-000006 is damaged: training.pt has 1000 of " in err
    assert re.search(
        r"error: the job made no progress for 0.15 minutes: rank 1 on \S+ is stopped, or its machine is down; "
        r"rank 0 on \S+ waits for gloo:all_reduce number \d+ at model/\w+.py:\d+ \(\w+\); resume it with ",
        err,
    )
    assert "error: run/checkpoints/step-000012 could not be written: " in err
    assert [out.count(f"step {step:05}/00012") for step in (3, 4, 7, 9, 10, 12)] == [1, 2, 2, 1, 3, 2]
    assert row()["resumed_from"] == "run/checkpoints/step-000009"
    for before, steps in (("before0", 7), ("before1", 10)):
        assert torch.equal(figures(before), figures("run")[: 2 * steps])
    assert Path("run/collectives/gloo-rank0").exists()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_slurms_warning_saves_one_checkpoint_of_all_ranks_and_requeues_the_job(tmp_path, monkeypatch):
    """SIGUSR1 to torchrun, which passes it on. A stub of scontrol writes down its arguments."""
    monkeypatch.chdir(tmp_path)
    Path("scontrol").write_text("#!/bin/sh\necho $* >> requeued\n")
    Path("scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["--signals-to-handle=SIGTERM,SIGUSR1", ROOT / "train.py", *BASE, "train.max_steps=100000"]
    command += ["runtime.requeue=true", f"data.cache={tmp_path}/tokens"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 00004"):
            process.send_signal(signal.SIGUSR1)
            break
    out, _ = process.communicate(timeout=SLOW)
    step = int(re.search(r"^stopped  after step (\d+); resume with: torchrun --standalone --np", out, re.MULTILINE)[1])
    assert verify(newest_valid(Path("run/checkpoints")))["step"] == step
    assert row()["status"] == f"stopped: SIGUSR1 after step {step}"
    assert json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["step"] == step
    assert Path("requeued").read_text() == "requeue 42\n"


def test_impossible_settings_of_several_processes(monkeypatch):
    """A step or heads that the processes cannot divide, one GPU for all processes, and more processes than GPUs."""
    for key, value in {
        "MASTER_ADDR": "localhost",
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
    }.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=r"128 x 3 processes = 768 tokens: try 768, or a smaller train.block_size$"):
        config(*BASE)
    with pytest.raises(UserError, match=r"parallel=context divides model.n_head=4 among 3 processes: choose a mul"):
        config(*BASE, "parallel=context")
    with pytest.raises(UserError, match=r"parallel=context divides model.n_kv_head=2 among 3 processes: choose a"):
        config(*BASE, "parallel=context", "model.n_head=6", "model.n_embd=126", "model.n_kv_head=2")
    with pytest.raises(UserError, match=r"device=cuda:1 under torchrun: each process takes a GPU; use device=cuda"):
        rank_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"torchrun started 3 processes for 2 GPU\(s\): lower"):
        rank_device("cuda")
    assert rank_device("cpu") == "cpu"


def test_a_preset_with_more_positions_than_a_step_has_tokens_names_a_shorter_sequence():
    for model, steps in {"qwen3_0_6b": "40960 or 81920", "llama3_2_1b": "131072"}.items():
        with pytest.raises(UserError, match=rf"try train.block_size=1024, or steps of {steps} tokens$"):
            config(f"model={model}")
        assert config(f"model={model}", "train.block_size=1024").train.block_size == 1024


@pytest.mark.parametrize("parallel", ["data", ""])
def test_an_unknown_value_of_parallel(parallel):
    with pytest.raises(UserError, match=r"parallel=.*: choose ddp, fsdp, zero2, context"):
        config(*BASE, f"parallel={parallel}")


def test_one_process_has_nothing_to_divide(capsys):
    for name in PARALLEL:
        warn_of_one_process(name, Ranks())
        err, start = capsys.readouterr().err, f"warning: parallel={name} has no effect, because this job has one proc"
        assert err.startswith(start) if name != "ddp" else err == ""
        warn_of_one_process(name, Ranks(rank=0, world_size=2))
        assert capsys.readouterr().err == ""

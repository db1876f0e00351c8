"""Sweeps: a process and a row a job, whatever happens to it; and what is done is not done again."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

import train
from kernels.registry import chosen, impls
from runtime import jobs
from runtime.run import lock
from tests.test_train import QUICK, ROOT, config

# In the place of train.py: what becomes of a job is in its seed; the row says in which process, on which GPU, and when
FAKE = """
import json, os, shlex, signal, sys, time
began, words = time.time(), dict(word.split("=", 1) for word in sys.argv[1:])
seed, status = int(words["seed"]), "ok"
print("step 00001")
if seed == 10:
    os.kill(os.getpid(), signal.SIGSEGV)
if seed == 11:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
if seed == 12:
    sys.exit("error: seed=12: no such luck")
if seed == 13:
    raise RuntimeError("a bug")
if seed == 14:
    status = "unavailable: norm=mine cannot run here: it needs a GPU"
if seed == 15:
    status = "oom"
if seed == 16 and "train.resume" not in words and not os.path.exists("stopped-once"):
    open("stopped-once", "w")
    signal.signal(signal.SIGINT, lambda *_: None)
    open(words["out_dir"] + "/config.yaml", "w").write("proof: " + words.get("proof", "false"))
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()
    status = "stopped: SIGINT after step 1"
if seed < 10:
    time.sleep(0.1 if seed < 5 else 1.0)
row = {"command": shlex.join(["python", *sys.argv]), "status": status, "pid": os.getpid(), "began": began}
row |= {"caches": [os.environ.get(f"{name}_CACHE_DIR") for name in ("TORCHINDUCTOR", "TRITON")]}
row |= {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "ended": time.time(), "config": {"precision": "amp"}}
if status == "ok":
    row |= {f"perf/tokens_per_sec{p}": 1000.0 * seed + d for p, d in (("", 0), ("/p20", -600), ("/p80", 600))}
    row |= {"env": {}, "perf/laps_s": [1 / seed, 1 / seed]}
    row |= {"perf/mfu": 0.5, "mem/peak_allocated_gib": 1.0, "perf/first_step_s": 1.0, "train/loss": 3.0}
json.dump(row, open(words["out_dir"] + "/result.json", "w"))
"""


@pytest.fixture
def sweep(hotswap, tmp_path, monkeypatch):
    """sweep("seed=1,2") -> (exit code, stdout, stderr), in the folder `sweep`, with FAKE in the place of train.py."""
    Path("train.py").write_text(FAKE)
    monkeypatch.setattr(jobs, "GRACE", 0.3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return lambda *arguments: hotswap("-m", *arguments, "out_dir=sweep")


def rows(folder="sweep"):
    """Job -> row."""
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*/result.json"))}


def test_a_row_for_every_end(sweep):
    """A job may fail in any way: the others run, and its row says why."""
    code, out, err = sweep("seed=3,10,11,12,13,14,15,4", "sweep.timeout=0.04")
    assert (code, err) == (1, "")
    assert {name: row["status"] for name, row in rows().items()} == {
        "1-seed.3": "ok",
        "2-seed.10": "failed: exit code -11 (Segmentation fault)",
        "3-seed.11": "failed: more than 0.04 minutes",
        "4-seed.12": "failed: seed=12: no such luck",
        "5-seed.13": "failed: exit code 1: RuntimeError: a bug",
        "6-seed.14": "unavailable: norm=mine cannot run here: it needs a GPU",
        "7-seed.15": "oom",
        "8-seed.4": "ok",
    }
    assert "Fatal Python error: Segmentation fault" in Path("sweep/2-seed.10/log.txt").read_text()
    lines = out.splitlines()
    assert lines[0] == "sweep    8 jobs, 0 of them done before; one at a time"
    assert [line.split("  ")[:2] for line in lines[2:5]] == [
        ["[1/8] 1-seed.3", "3,000 tok/s"],
        ["[2/8] 2-seed.10", "failed: exit code -11 (Segmentation fault)"],
        ["[3/8] 3-seed.11", "failed: more than 0.04 minutes"],
    ]
    table = [line.split() for line in lines[10:-1]]
    assert " ".join(table[1]) == "8-seed.4 4,000 1.333x (1.327 to 1.340, 1 run) 3,400 to 4,600 50.0% 1.0 1.0 s 3.000"
    assert table[2][:4] == ["1-seed.3", "3,000", "2,400", "to"]
    assert [cells[0] for cells in table[3:]] == [f"{n}-seed.{8 + n}" for n in range(2, 8)]


def test_a_first_job_without_a_speed(sweep):
    """It has not even a config, and the others stand in the table without a ratio."""
    code, out, err = sweep("seed=12,4")
    assert (code, err) == (1, "")
    assert [line.split()[:3] for line in out.splitlines()[-3:-1]] == [
        ["2-seed.4", "4,000", "3,400"],
        ["1-seed.12", "failed:", "seed=12:"],
    ]


def test_each_job_is_a_process_of_its_own(sweep):
    """One after the other; and neither unavailable nor out of memory is a failure of the sweep."""
    code, _, err = sweep("seed=1,2,14,15")
    assert (code, err) == (0, "")
    assert len({os.getpid(), *(row["pid"] for row in rows().values())}) == 5
    assert all(row["gpu"] == os.environ.get("CUDA_VISIBLE_DEVICES") for row in rows().values())
    spans = [(row["began"], row["ended"]) for row in rows().values()]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_repeats_go_there_and_back(sweep):
    """A B B A: so a drift of the machine is in both alike; compile caches are a job's own, and empty at first."""
    code, out, err = sweep("seed=4,3", "sweep.repeats=2")
    assert (code, err) == (0, "")
    began = {name: row["began"] for name, row in rows().items()}
    assert sorted(began, key=began.get) == ["1-seed.4", "2-seed.3", "2-seed.3.2", "1-seed.4.2"]
    for name in ("1-seed.4", "2-seed.3"):
        caches = Path("sweep", name, "caches/0").resolve()
        assert rows()[name]["caches"] == rows()[f"{name}.2"]["caches"]
        assert rows()[name]["caches"] == [str(caches / "torchinductor"), str(caches / "triton")]
    assert [line.split()[:3] for line in out.splitlines()[-3:-1]] == [
        ["1-seed.4", "4,000", "3,400"],
        ["2-seed.3", "3,000", "0.750x"],
    ]


def test_a_turn_is_of_one_gpu(sweep, monkeypatch):
    """Runs that are compared are of the same GPU, though the first GPU is done sooner; each GPU compiles for itself."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert sweep("seed=1,5,4", "sweep.repeats=3")[0] == 0
    for name, row in rows().items():
        lane = int(name.endswith(".2"))
        assert row["gpu"] == "45"[lane]
        assert Path(row["caches"][0]).parts[-2:] == (str(lane), "torchinductor")
    assert rows()["3-seed.4.2"]["began"] < rows()["2-seed.5"]["ended"]  # the GPUs work at the same time


def test_no_repeats_are_an_error(sweep):
    code, _, err = sweep("seed=4,3", "sweep.repeats=0")
    assert (code, err) == (1, "error: sweep.repeats=0: it must be at least 1\n")


def test_one_job_a_gpu(sweep, monkeypatch):
    """Four jobs share two of the three visible GPUs: never two on one, and both are in use."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5,6")
    code, out, _ = sweep("seed=5,6,7,8")
    assert code == 0
    assert "2 at a time, each on a GPU of its own" in out
    spans = {}
    for row in rows().values():
        spans.setdefault(row["gpu"], []).append((row["began"], row["ended"]))
    assert spans.keys() == {"4", "GPU-5"}
    for each in map(sorted, spans.values()):
        assert all(end <= begin for (_, end), (begin, _) in pairwise(each))
    assert spans["GPU-5"][0][0] < spans["4"][0][1]  # the second began before the first had ended
    assert jobs.slots("cpu") == jobs.slots("cuda:1") == [None]


def test_an_interrupted_sweep_goes_on(sweep):
    """Ctrl-C in the second of three jobs; the command that is then printed does what is left."""
    code, out, err = sweep("seed=1,16,3")
    assert (code, err) == (75, "")
    assert {name: row["status"] for name, row in rows().items()} == {
        "1-seed.1": "ok",
        "2-seed.16": "stopped: SIGINT after step 1",
    }
    assert "SIGINT: waiting for what runs to end after its step" in out
    [going_on] = [line for line in out.splitlines() if line.startswith("stopped  with 1 of 3 jobs done")]
    command = shlex.split(going_on.partition("go on with: ")[2])
    assert command[:3] == ["python", "train.py", "-m"]
    first = rows()["1-seed.1"]
    code, out, err = sweep(*command[3:-1])
    assert (code, err) == (0, "")
    assert out.startswith("sweep    3 jobs, 1 of them done before")
    assert rows().keys() == {"1-seed.1", "2-seed.16", "3-seed.3"}
    assert {row["status"] for row in rows().values()} == {"ok"}
    assert rows()["1-seed.1"] == first
    assert rows()["2-seed.16"]["command"].endswith(" out_dir=sweep/2-seed.16 train.resume=auto")
    before = rows()
    assert sweep(*command[3:-1])[0] == 0
    assert rows() == before


def test_a_proof_that_was_cut_short_begins_anew(sweep):
    """It is of a run's first steps, which a run that goes on from a checkpoint has not made."""
    assert sweep("seed=16,3", "proof=true")[0] == 75
    (checkpoints := Path("sweep/1-seed.16/checkpoints")).mkdir()
    assert sweep("seed=16,3", "proof=true")[0] == 0
    assert rows()["1-seed.16"]["command"].endswith(" out_dir=sweep/1-seed.16")
    assert not checkpoints.exists()


def test_a_sweep_that_cannot_begin_is_one_line(sweep):
    Path("sweep").touch()
    taken = "error: out_dir=sweep cannot be written: File exists; choose another folder\n"
    assert sweep("seed=1,2") == (1, "", taken)
    Path("sweep").unlink()
    assert sweep("seed=1,2")[0] == 0
    before = rows()
    other = "error: sweep/1-seed.1 has the row of another command; give this sweep an out_dir of its own\n"
    assert sweep("seed=1,2", "precision=bf16") == (1, "", other)
    with lock(Path("sweep")):
        busy = "error: out_dir=sweep is in use by a run that goes on; choose another folder\n"
        assert sweep("seed=1,2") == (1, "", busy)
    assert sweep("seed=1,2", "kernels=fast")[2].startswith("error: kernels=fast: no such choice; kernels is one of: ")
    assert sweep("seed=1,2", "sweep.timeout=0")[2].startswith("error: sweep.timeout=0.0: minutes above 0")
    assert (
        sweep("sweep.repeats=1,2")[2] == "error: sweep.repeats cannot vary in a sweep: it is that of all of its jobs\n"
    )
    assert sweep("seed=interval(1,2)")[2].startswith("error: Can only enumerate CHOICE and RANGE sweeps")
    assert rows() == before


@pytest.mark.parametrize("name", ["ablation", "attention", "batch", "kernels"])
def test_the_sweeps_of_the_repo(hotswap, name):
    """Without -m; every job is one that train.py takes, and the first is what the others are held against."""
    Path("train.py").write_text(FAKE.replace('int(words["seed"])', "1"))
    code, _, err = hotswap(f"+sweep={name}", "train.max_steps=70", "logger=wandb")
    assert (code, err) == (0, "")
    [folder] = Path("out").iterdir()
    assert folder.name.endswith(f"-sweep-{name}")
    words = [shlex.split(row["command"])[2:] for row in rows(folder).values()]
    composed = [config(*each) for each in words]
    assert all(cfg.train.max_steps == 70 and cfg.train.eval_every == 0 for cfg in composed)
    assert all(cfg.logger.group == folder.name for cfg in composed)
    picked = [chosen(cfg.kernels, cfg.attn) | {"compile": cfg.kernels.compile} for cfg in composed]
    if name == "attention":
        assert [cfg.attn.impl for cfg in composed] == ["sdpa", *(impl for impl in impls("attention") if impl != "sdpa")]
    if name == "ablation":
        swapped = [{(op, impl) for op, impl in each.items() if impl != picked[0][op]} for each in picked]
        others = [{(op, impl)} for op in ("norm", "mlp", "loss", "attention") for impl in impls(op)]
        assert swapped == [set(), *(each for each in others if not each <= set(picked[0].items()))]


def test_a_sweep_of_wandb(monkeypatch, tmp_path):
    """What W&B's agent runs for the values that W&B's server picks is a command of ours."""
    agents = pytest.importorskip("wandb.wandb_agent")
    ran = []
    monkeypatch.setattr(agents, "AgentProcess", lambda command, **_: ran.append(command) or type("", (), {})())
    for variable in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH", "WANDB_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    sweep = yaml.safe_load((ROOT / "configs/sweep/wandb.yaml").read_text())
    agent = agents.Agent(None, None)
    agent._sweep_command = sweep["command"]
    for kernels in sweep["parameters"]["kernels"]["values"]:
        for attn in sweep["parameters"]["attn"]["values"]:
            picked = {"attn": {"value": attn}, "kernels": {"value": kernels}}
            agent._command_run({"run_id": "a1", "program": sweep["program"], "args": picked})
            assert ran[-1][:3] == ["/usr/bin/env", "python", "train.py"]
            cfg = config(*ran[-1][3:])
            assert (cfg.logger.name, cfg.logger.mode, cfg.attn.impl) == ("wandb", "online", attn)
            assert cfg.kernels.compile == (kernels == "compile")
    assert set(ran[0][3:]) >= {"kernels=eager", f"attn={sweep['parameters']['attn']['values'][0]}"}


def test_a_sweep_of_real_runs(called, monkeypatch, tmp_path):
    """Stopped in its first job, gone on: that job from its step, a kernel that cannot run, and a step that does not
    divide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # no Triton without a GPU
    quick = [word for word in QUICK if not word.startswith("out_dir")]
    alone = 'hydra.sweeper.alone=["kernels.norm=triton","train.tokens_per_step=1000"]'
    words = "-m", *quick, "train.max_steps=200", "kernels=eager", alone, "out_dir=sweep", "device=cpu"
    words += (f"data.cache={tmp_path / 'tokens'}",)
    metrics = Path("sweep/1-base/metrics.jsonl")

    def interrupt():
        while not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    code, out, err = called(str(ROOT / "train.py"), train.main, *words)
    assert (code, err) == (75, "")
    assert rows().keys() == {"1-base"}
    stopped = rows()["1-base"]
    assert stopped["status"].startswith("stopped: SIGINT after step ")
    assert 0 < stopped["steps"] < 200

    code, out, err = called(str(ROOT / "train.py"), train.main, *words)
    assert (code, err) == (1, "")
    base, mistake, unavailable = (rows()[f"{name}"] for name in ("1-base", "3-tokens_per_step.1000", "2-norm.triton"))
    assert (base["status"], base["steps"]) == ("ok", 200)
    assert base["resumed_from"].startswith("sweep/1-base/checkpoints/step-")
    assert unavailable["status"].startswith("unavailable: norm=triton cannot run here: ")
    assert mistake["status"].startswith("failed: train.tokens_per_step=1000 does not divide into micro-steps of ")
    assert "[3/3] 3-tokens_per_step.1000  failed: train.tokens_per_step=1000 does not divide" in out
    assert len(metrics.read_text().splitlines()) == 200


CLOCK = """
import random, sys, time
from kernels.norm.eager import norm as eager

draw = random.Random(next(word for word in sys.argv if word.startswith("out_dir=")))
process, now = draw.gauss(1, 0.005), 0.0
time.perf_counter = lambda: now

def norm(x, residual, weight, bias, eps=1e-5):
    global now
    now += {seconds} * process * draw.gauss(1, 0.02)
    return eager(x, residual, weight, bias, eps)
"""


def test_the_same_is_a_tie_and_five_percent_are_slower(checkout):
    """Three processes each, in turn: a kernel, its double, and one that makes the step 5% longer.

    The kernels' seconds are all that their clocks see, with a noise of 0.5% a process and 2% a call: by a real clock,
    sleeping 80 ms, 5% were a tie on a busy machine.
    """
    for name, seconds in (("first", 0.100), ("same", 0.100), ("more", 0.105)):
        (checkout / f"kernels/norm/{name}.py").write_text(CLOCK.format(seconds=seconds))
    words = [word for word in QUICK if not word.startswith("out_dir")]
    words += ["train.batch_size=1", "train.tokens_per_step=128", "train.max_steps=19", "train.log_every=2"]
    words += ["kernels.norm=first,same,more", "sweep.repeats=3", "out_dir=out/turns"]
    done = subprocess.run(
        [sys.executable, "train.py", "-m", *words], cwd=checkout, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    table = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith(("1-", "2-", "3-"))}
    assert "tie (" in table["2-norm.same"]
    [value] = [float(word[:-1]) for word in table["3-norm.more"].split() if word.endswith("x")]
    assert 0.92 < value < 0.97
    rows = {path.parent.name: json.loads(path.read_text()) for path in (checkout / "out/turns").glob("*/result.json")}
    order = [name for name, _ in sorted(rows.items(), key=lambda item: (item[1]["started"], item[0]))]
    turns = ["1-norm.first", "2-norm.same", "3-norm.more"]
    assert order == [*turns, *(f"{name}.2" for name in reversed(turns)), *(f"{name}.3" for name in turns)]
    assert "sweep.repeats" not in shlex.split(rows["1-norm.first"]["command"])

"""Sweeps: every job is a process and leaves a row, however it ends, and a continued sweep repeats no finished job."""

import errno
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
from types import SimpleNamespace

import pytest
import torch
import yaml
from omegaconf import OmegaConf

import train
from kernels.registry import impl_by_op, impls
from lab.sweep import jobs, launcher
from lab.sweep.table import read_sort
from model.executed import called_ops
from runtime.config import UserError
from runtime.row import lock_folder
from tests.test_train import QUICK, ROOT, config

# Replaces train.py. The seed decides how the job ends. The row has the process, the GPU and the times of the job
FAKE_TRAIN = """
import hashlib, json, os, shlex, signal, sys, time


def write_manifest(folder, proof):
    os.makedirs(folder)
    files = {name: {"size": 1, "sha256": "0" * 64} for name in ("training.pt", "model.safetensors")}
    facts = {"version": 1, "step": 1, "elapsed": 1.0, "config": {"proof": proof}, "data": {}, "files": files}
    facts |= {"val_loss": None, "metrics_lines": 0, "figures": {}, "pauses": {"last_ms": 1.0, "median_ms": 1.0}}
    rest = "," + json.dumps(facts)[1:]
    digest = hashlib.sha256(rest.encode()).hexdigest()
    open(folder + "/manifest.json", "w").write('{"sha256": "' + digest + '"' + rest)


started_at, words = time.time(), dict(word.split("=", 1) for word in sys.argv[1:])
seed, status = int(words["seed"]), "ok"
print("step 00001")
if seed == 10:
    os.kill(os.getpid(), signal.SIGSEGV)
if seed == 11:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
if seed == 12:
    sys.exit("error: seed=12: it must be another one")
if seed == 13:
    raise RuntimeError("a bug")
if seed == 14:
    status = "unavailable: norm=mine cannot run here: it needs a GPU"
if seed == 15:
    status = "oom"
if seed == 16 and "train.resume" not in words and not os.path.exists("stopped-once"):
    open("stopped-once", "w")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # it may come before sigwait
    write_manifest(words["out_dir"] + "/checkpoints/step-000001", words.get("proof") == "true")
    os.kill(os.getppid(), signal.SIGINT)
    signal.sigwait([signal.SIGINT])
    status = "stopped: SIGINT after step 1"
if seed == 17:
    row = {"command": shlex.join(["python", *sys.argv]), "status": "stopped: killed after step 1", "config": {}}
    json.dump(row, open(words["out_dir"] + "/result.json", "w"))
    os.kill(os.getpid(), signal.SIGKILL)
if seed == 18:
    status = "wrong: norm=mine in bfloat16 failed: RuntimeError: a bug"
if seed < 10:
    time.sleep(0.1 if seed < 5 else 1.0)
row = {"command": shlex.join(["python", *sys.argv]), "status": status, "pid": os.getpid(), "start": started_at}
compilers = "TORCHINDUCTOR", "TRITON", "FLASH_ATTENTION_CUTE_DSL"
row |= {"caches": [os.environ.get(f"{name}_CACHE_DIR") for name in compilers]}
row |= {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "end": time.time(), "config": {"precision": "amp"}}
if status == "ok":
    row |= {f"perf/tokens_per_sec{p}": 1000.0 * seed + d for p, d in (("", 0), ("/p20", -600), ("/p80", 600))}
    row |= {"env": {}, "perf/laps_s": [1 / seed, 1 / seed]}
    if "train.eval_every" in words:
        row |= {"val/loss": 9.0, "val/loss/min": abs(seed - 3) + 2.0}
    row |= {"perf/mfu": 0.5, "mem/peak_allocated_gib": 1.0, "perf/first_step_s": 1.0, "train/loss": 3.0}
json.dump(row, open(words["out_dir"] + "/result.json", "w"))
"""


@pytest.fixture
def sweep(hotswap, tmp_path, monkeypatch):
    """sweep("seed=1,2") -> (exit code, stdout, stderr). FAKE_TRAIN replaces train.py, and the folder is `sweep`."""
    Path("train.py").write_text(FAKE_TRAIN)
    monkeypatch.setattr(jobs, "GRACE", 0.3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return lambda *arguments: hotswap("-m", *arguments, "out_dir=sweep")


def read_rows(folder="sweep"):
    """Return job -> row."""
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*/result.json"))}


def test_a_job_leaves_a_row_however_it_ends(sweep):
    """The row has the reason, and the other jobs run."""
    code, out, err = sweep("seed=3,10,11,12,13,14,15,4", "sweep.timeout=0.04")
    assert (code, err) == (1, "")
    assert {name: row["status"] for name, row in read_rows().items()} == {
        "1-seed.3": "ok",
        "2-seed.10": "failed: exit code -11 (Segmentation fault)",
        "3-seed.11": "failed: more than 0.04 minutes",
        "4-seed.12": "failed: seed=12: it must be another one",
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
    assert [lines[number].split("  ")[3:] for number in (2, 3, 6, 7)] == [
        [],
        ["sweep/2-seed.10/log.txt"],
        ["sweep/5-seed.13/log.txt"],
        [],  # `unavailable` is no failure
    ]
    table = [line.split() for line in lines[10:-1]]
    assert [cells[-1] for cells in table[3:7]] == [f"sweep/{n}-seed.{8 + n}/log.txt" for n in range(2, 6)]
    assert lines[-2].split() == ["7-seed.15", "oom"]
    assert " ".join(table[1]) == "8-seed.4 4,000 1.333x (1.327 to 1.340, 1 run) 3,400 to 4,600 50.0% 1.0 1.0 s 3.000"
    assert table[2][:4] == ["1-seed.3", "3,000", "2,400", "to"]
    assert [cells[0] for cells in table[3:]] == [f"{n}-seed.{8 + n}" for n in range(2, 8)]


def test_a_sweep_is_sorted_by_validation_loss(sweep):
    """The same command with another order prints the table again, and runs no job. The report reads the last order."""
    evaluate = "train.eval_every=5"
    code, out, err = sweep("seed=1,2,3,4", evaluate, "sweep.sort=val/loss")
    assert (code, err) == (0, "")
    table = [line.split() for line in out.splitlines()[-5:-1]]
    order = [(cells[0], cells[-2:]) for cells in table]
    assert order == [
        ("3-seed.3", ["best", "2.0000"]),
        ("4-seed.4", ["3.000", "3.0000"]),  # as low as that of the second job, and faster
        ("2-seed.2", ["3.000", "3.0000"]),
        ("1-seed.1", ["3.000", "4.0000"]),
    ]
    assert read_sort(Path("sweep"), read_rows().values()) == "val/loss"
    code, out, err = sweep("seed=1,2,3,4", evaluate)
    assert (code, err) == (0, "")
    assert out.startswith("sweep    4 jobs, 4 of them done before")
    assert [line.split()[0][0] for line in out.splitlines()[-5:-1]] == ["4", "3", "2", "1"]
    assert read_sort(Path("sweep"), read_rows().values()) == "speed"
    Path("sweep/sweep.json").write_text("{}")  # a damaged file
    assert read_sort(Path("sweep"), []) == "speed"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["sweep.sort=loss"], "sweep.sort=loss: choose speed or val/loss"),
        (
            ["sweep.sort=val/loss", "train.eval_every=0"],
            "sweep.sort=val/loss: no job of this sweep evaluates; set train.eval_every, the steps between evaluations",
        ),
        (["sweep.sort=speed,val/loss"], "sweep.sort cannot vary in a sweep, because all of its jobs share it"),
    ],
)
def test_an_order_that_is_not_possible_is_one_line_before_the_first_job(sweep, words, reason):
    assert sweep("seed=1,2", *words) == (1, "", f"error: {reason}\n")
    assert not Path("sweep").exists()


def test_a_sweeper_that_needs_results_is_refused_before_the_first_job():
    """As Optuna's, which divides by the number of results. It need not be installed."""
    target = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"
    hydra = {"sweeper": {"_target_": target}, "runtime": {"choices": {"hydra/sweeper": "optuna"}}}
    config = OmegaConf.create({"hydra": hydra})
    context = SimpleNamespace(config_loader=None)
    reason = r"hydra/sweeper=optuna: OptunaSweeper needs a result from each job, and .*; leave it out to run every"
    with pytest.raises(UserError, match=reason):
        launcher.Launcher().setup(hydra_context=context, task_function=None, config=config)


def test_a_sweeper_that_is_not_installed_is_refused_with_the_same_reason(sweep):
    """Installing Optuna's plugin would not help."""
    code, out, err = sweep("seed=1,2", "hydra/sweeper=optuna")
    reason = "needs a result from each job, and sweeps here give it none (see lab/README.md); leave it out to run every"
    assert (code, out) == (1, "")
    assert err.startswith("error: hydra/sweeper=optuna: only basic and hotswap run here, because a sweeper such as Opt")
    assert err.endswith(f"{reason} combination\n")
    assert err.count("\n") == 1
    assert not Path("sweep").exists()


def test_one_job_that_evaluates_is_enough_for_the_order(sweep):
    code, _, err = sweep("seed=1,2", "train.eval_every=0,5", "sweep.sort=val/loss")
    assert (code, err) == (0, "")
    assert len(read_rows()) == 4


def test_the_log_of_a_job_elsewhere_has_its_whole_path(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert jobs.SweepJob(tmp_path / "1-x", [], [], [None]).log == f"{tmp_path}/1-x/log.txt"
    assert jobs.SweepJob(tmp_path / "here/1-x", [], [], [None]).log == "1-x/log.txt"


def test_a_sweep_in_the_home_folder(sweep, hotswap, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    code, out, err = hotswap("-m", "seed=3,4", 'out_dir="~/mine"')
    assert (code, err) == (0, "")
    assert f"done     {tmp_path}/home/mine;" in out
    assert {row["status"] for row in read_rows(tmp_path / "home" / "mine").values()} == {"ok"}
    assert not Path("~").exists()


def test_the_rows_that_the_sweep_writes_go_to_the_tracker(sweep, monkeypatch):
    """The other jobs send their rows themselves, and a continued sweep sends no row again."""
    sent = []
    monkeypatch.setattr(launcher, "track_ended_run", lambda logger, folder, row: sent.append((logger, folder, row)))
    for _ in range(2):
        assert sweep("seed=4,10,14,17", "logger=wandb")[0] == 1
    before, during = sent  # a job that died before it had a config, and one that died in its first steps
    logger, folder, row = before
    assert (logger.name, logger.group, folder) == ("wandb", "sweep", Path("sweep/2-seed.10"))
    assert row["status"] == "failed: exit code -11 (Segmentation fault)"
    assert (during[1], during[2]["status"]) == (Path("sweep/4-seed.17"), "failed: exit code -9 (Killed)")


def test_table_has_no_ratios_if_the_first_job_has_no_speed(sweep):
    """The row of the first job does not even have a config."""
    code, out, err = sweep("seed=12,4")
    assert (code, err) == (1, "")
    assert [line.split()[:3] for line in out.splitlines()[-3:-1]] == [
        ["2-seed.4", "4,000", "3,400"],
        ["1-seed.12", "failed:", "seed=12:"],
    ]


def test_a_job_with_a_wrong_kernel_names_its_log(sweep):
    """A kernel that raises in the check of its contract is `wrong`, and the sweep exits with 1."""
    code, out, err = sweep("seed=18,3")
    assert (code, err) == (1, "")
    status, path = "wrong: norm=mine in bfloat16 failed: RuntimeError: a bug", "sweep/1-seed.18/log.txt"
    assert read_rows()["1-seed.18"]["status"] == status
    lines = [line for line in out.splitlines() if status in line]
    assert [line.endswith(f"  {path}") for line in lines] == [True, True]  # as the job ends, and in the table


def test_jobs_are_processes_that_run_one_at_a_time(sweep):
    """The sweep exits with 0, because `unavailable` and `oom` are no failures."""
    code, _, err = sweep("seed=1,2,14,15")
    assert (code, err) == (0, "")
    assert len({os.getpid(), *(row["pid"] for row in read_rows().values())}) == 5
    assert all(row["gpu"] == os.environ.get("CUDA_VISIBLE_DEVICES") for row in read_rows().values())
    spans = [(row["start"], row["end"]) for row in read_rows().values()]
    assert all(end <= next_start for (_, end), (next_start, _) in pairwise(spans))


def test_repeats_run_in_the_order_abba(sweep):
    """Both runs of a job share compile caches, which no other job uses."""
    code, out, err = sweep("seed=4,3", "sweep.repeats=2")
    assert (code, err) == (0, "")
    starts = {name: row["start"] for name, row in read_rows().items()}
    assert sorted(starts, key=starts.get) == ["1-seed.4", "2-seed.3", "2-seed.3.2", "1-seed.4.2"]
    for name in ("1-seed.4", "2-seed.3"):
        caches = Path("sweep", name, "caches/0").resolve()
        folders = [str(caches / compiler) for compiler in ("torchinductor", "triton", "flash_attention_cute_dsl")]
        assert read_rows()[name]["caches"] == read_rows()[f"{name}.2"]["caches"]
        assert read_rows()[name]["caches"] == folders
    assert [line.split()[:3] for line in out.splitlines()[-3:-1]] == [
        ["1-seed.4", "4,000", "3,400"],
        ["2-seed.3", "3,000", "0.750x"],
    ]


def test_single_runs_have_caches_of_their_own_if_asked(sweep):
    assert sweep("seed=4,3", "sweep.own_caches=true")[0] == 0
    folders = [Path(row["caches"][1]) for row in read_rows().values()]
    assert folders == [Path("sweep", name, "caches/0/triton").resolve() for name in ("1-seed.4", "2-seed.3")]


def test_single_runs_share_the_users_caches(sweep, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    assert sweep("seed=4,3")[0] == 0
    assert [row["caches"][1] for row in read_rows().values()] == ["mine", "mine"]


def test_repeats_share_the_users_caches_if_asked(sweep, monkeypatch):
    """A key of the sweep is no argument of its jobs."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    assert sweep("seed=4,3", "sweep.repeats=2", "sweep.own_caches=false")[0] == 0
    rows = read_rows()
    assert len(rows) == 4
    assert {row["caches"][1] for row in rows.values()} == {"mine"}
    assert not any("own_caches" in row["command"] for row in rows.values())
    assert not list(Path("sweep").glob("*/caches"))


@pytest.mark.exhaustive
def test_each_repeat_of_all_jobs_takes_one_gpu(sweep, monkeypatch):
    """Compared runs are then on the same GPU, although one GPU is done sooner. Each GPU has its own compile caches."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert sweep("seed=1,5,4", "sweep.repeats=3")[0] == 0
    for name, row in read_rows().items():
        gpu, number = ("5", "1") if name.endswith(".2") else ("4", "0")
        assert row["gpu"] == gpu
        assert Path(row["caches"][0]).parts[-2:] == (number, "torchinductor")
    assert read_rows()["3-seed.4.2"]["start"] < read_rows()["2-seed.5"]["end"]  # the GPUs work at the same time


def test_the_folder_of_a_job_has_the_last_two_parts_of_a_path():
    words = [["attn=sdpa", f"kernels.norm={impl}"] for impl in ("eager", "/a/very/long/one/mine.py", "two/mine.py")]
    assert jobs.job_names(words) == ["1-norm.eager", "2-norm.one_mine.py", "3-norm.two_mine.py"]


def test_zero_repeats_are_an_error(sweep):
    code, _, err = sweep("seed=4,3", "sweep.repeats=0")
    assert (code, err) == (1, "error: sweep.repeats=0: it must be at least 1\n")


def test_each_gpu_runs_one_job_at_a_time(sweep, monkeypatch):
    """Four jobs share two of the three visible GPUs, and both GPUs are in use."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5,6")
    code, out, _ = sweep("seed=5,6,7,8")
    assert code == 0
    assert "2 at a time, each on a GPU of its own" in out
    spans = {}
    for row in read_rows().values():
        spans.setdefault(row["gpu"], []).append((row["start"], row["end"]))
    assert spans.keys() == {"4", "GPU-5"}
    for spans_of_gpu in map(sorted, spans.values()):
        assert all(end <= next_start for (_, end), (next_start, _) in pairwise(spans_of_gpu))
    assert spans["GPU-5"][0][0] < spans["4"][0][1]  # the second job starts before the first one ends
    assert jobs.gpu_slots("cpu") == jobs.gpu_slots("cuda:1") == [None]


def test_an_interrupted_sweep_continues_with_the_printed_command(sweep):
    """Ctrl-C comes in the second of three jobs."""
    code, out, err = sweep("seed=1,16,3")
    assert (code, err) == (75, "")
    assert {name: row["status"] for name, row in read_rows().items()} == {
        "1-seed.1": "ok",
        "2-seed.16": "stopped: SIGINT after step 1",
    }
    assert "SIGINT: waiting for the running jobs to end after their step" in out
    [last_line] = [line for line in out.splitlines() if line.startswith("stopped  with 1 of 3 jobs done")]
    command = shlex.split(last_line.partition("resume with: ")[2])
    assert command[:3] == ["python", "train.py", "-m"]
    first = read_rows()["1-seed.1"]
    code, out, err = sweep(*command[3:-1])
    assert (code, err) == (0, "")
    assert out.startswith("sweep    3 jobs, 1 of them done before")
    assert read_rows().keys() == {"1-seed.1", "2-seed.16", "3-seed.3"}
    assert {row["status"] for row in read_rows().values()} == {"ok"}
    assert read_rows()["1-seed.1"] == first
    assert read_rows()["2-seed.16"]["command"].endswith(" out_dir=sweep/2-seed.16 train.resume=auto")
    before = read_rows()
    assert sweep(*command[3:-1])[0] == 0
    assert read_rows() == before


def test_a_log_that_is_a_fifo_is_one_line(sweep):
    Path("sweep/1-seed.1").mkdir(parents=True)
    os.mkfifo("sweep/1-seed.1/log.txt")
    code, _, err = sweep("seed=1,2")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(
        "error: out_dir=sweep/1-seed.1 cannot be written: log.txt: it is a FIFO, and must be a regular"
    )


def test_a_stopped_job_with_a_proof_starts_again(sweep):
    """A proof compares the first steps of a run, which a resumed run does not make."""
    assert sweep("seed=16,3", "proof=true")[0] == 75
    assert (checkpoints := Path("sweep/1-seed.16/checkpoints")).exists()
    assert sweep("seed=16,3", "proof=true")[0] == 0
    assert read_rows()["1-seed.16"]["command"].endswith(" out_dir=sweep/1-seed.16")
    assert not checkpoints.exists()


def test_a_job_that_was_killed_before_its_first_checkpoint_starts_again(sweep):
    """The files of the first attempt are gone, because train.py would refuse their folder."""
    assert sweep("seed=1,2")[0] == 0
    folder = Path("sweep/1-seed.1")
    (folder / "result.json").unlink()
    for name in ("config.yaml", "metrics.jsonl"):
        (folder / name).write_text("proof: false")
    assert sweep("seed=1,2")[0] == 0
    assert read_rows()["1-seed.1"]["command"].endswith(" out_dir=sweep/1-seed.1")
    assert {path.name for path in folder.iterdir()} == {"log.txt", "result.json"}


def test_a_sweep_that_cannot_start_prints_one_line(sweep):
    Path("sweep").touch()
    taken = "error: out_dir=sweep cannot be written: File exists; choose another folder\n"
    assert sweep("seed=1,2") == (1, "", taken)
    Path("sweep").unlink()
    assert sweep("seed=1,2")[0] == 0
    before = read_rows()
    other = "error: sweep/1-seed.1 has the row of another command; give this sweep an out_dir of its own\n"
    assert sweep("seed=1,2", "precision=bf16") == (1, "", other)
    with lock_folder(Path("sweep")):
        busy = "error: out_dir=sweep is in use by a running process; choose another folder\n"
        assert sweep("seed=1,2") == (1, "", busy)
    assert sweep("seed=1,2", "kernels=fast")[2].startswith("error: kernels=fast: no such choice; kernels is one of: ")
    assert sweep("seed=1,2", "sweep.timeout=0")[2].startswith("error: sweep.timeout=0.0: it must be minutes above 0")
    shared = "error: sweep.repeats cannot vary in a sweep, because all of its jobs share it\n"
    assert sweep("sweep.repeats=1,2")[2] == shared
    assert sweep("seed=interval(1,2)")[2].startswith("error: Can only enumerate CHOICE and RANGE sweeps")
    assert read_rows() == before


def test_an_ablation_swaps_only_ops_that_the_model_calls(hotswap):
    """A backend of another op would make a job that changes nothing. The user's own words stay."""
    Path("train.py").write_text(FAKE_TRAIN.replace('int(words["seed"])', "1"))
    for number, words in enumerate((["model.norm=rmsnorm", "kernels.norm=auto"], ["model.norm=layernorm"])):
        ablations = 'hydra.sweeper.ablations=["kernels.norm=eager,triton","kernels.rms_norm=eager,triton"]'
        code, _, err = hotswap("-m", *words, "model=tiny", ablations, f"out_dir=sweep{number}")
        assert (code, err) == (0, "")
    jobs = [shlex.split(row["command"])[2:] for folder in ("sweep0", "sweep1") for row in read_rows(folder).values()]
    swapped = [[word for word in job if word.startswith("kernels.")] for job in jobs]
    assert swapped == [
        ["kernels.norm=auto"],
        ["kernels.norm=auto", "kernels.rms_norm=eager"],
        ["kernels.norm=auto", "kernels.rms_norm=triton"],
        [],
        ["kernels.norm=eager"],
        ["kernels.norm=triton"],
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["ablation", "attention", "batch", "kernels"])
def test_sweeps_of_the_repo_have_jobs_that_compose(hotswap, name):
    """They run without -m. Every fourth job is composed as train.py does it. The first is the others' baseline."""
    Path("train.py").write_text(FAKE_TRAIN.replace('int(words["seed"])', "1"))
    code, _, err = hotswap(f"+sweep={name}", "train.max_steps=70", "logger=wandb")
    assert (code, err) == (0, "")
    [folder] = Path("out").iterdir()
    assert folder.name.endswith(f"-sweep-{name}")
    words = [shlex.split(row["command"])[2:] for row in read_rows(folder).values()][::4]
    composed = [config(*overrides) for overrides in words]
    assert all(cfg.train.max_steps == 70 and cfg.train.eval_every == 0 for cfg in composed)
    assert all(cfg.logger.group == folder.name for cfg in composed)
    choices = [impl_by_op(cfg.kernels, cfg.attn) | {"compile": cfg.kernels.compile} for cfg in composed]
    if name == "attention":
        expected = ["sdpa", *(impl for impl in impls("attention") if impl != "sdpa")]
        assert [cfg.attn.impl for cfg in composed] == expected[::4]
    if name == "ablation":
        swaps = [{(op, impl) for op, impl in choice.items() if impl != choices[0][op]} for choice in choices]
        called = called_ops(composed[0].model)
        ops = [*(op for op in called if op != "attention"), "attention"]
        backends = [{(op, impl)} for op in ops for impl in impls(op)]
        assert swaps == [set(), *(backend for backend in backends if not backend <= set(choices[0].items()))][::4]


def test_commands_of_a_wandb_agent_compose(monkeypatch, tmp_path):
    """The agent builds a command from configs/sweep/wandb.yaml and the values that W&B's server picks."""
    agents = pytest.importorskip("wandb.wandb_agent")
    commands = []
    monkeypatch.setattr(agents, "AgentProcess", lambda command, **_: commands.append(command) or SimpleNamespace())
    for variable in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH", "WANDB_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    sweep = yaml.safe_load((ROOT / "configs/sweep/wandb.yaml").read_text())
    agent = agents.Agent(None, None)
    agent._sweep_command = sweep["command"]
    for kernels in sweep["parameters"]["kernels"]["values"]:
        for attn in sweep["parameters"]["attn"]["values"]:
            values = {"attn": {"value": attn}, "kernels": {"value": kernels}}
            agent._command_run({"run_id": "a1", "program": sweep["program"], "args": values})
            assert commands[-1][:3] == ["/usr/bin/env", "python", "train.py"]
            cfg = config(*commands[-1][3:])
            assert (cfg.logger.name, cfg.logger.mode, cfg.attn.impl) == ("wandb", "online", attn)
            assert cfg.kernels.compile == (kernels == "compile")
    assert set(commands[0][3:]) >= {"kernels=eager", f"attn={sweep['parameters']['attn']['values'][0]}"}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_a_sweep_of_real_runs_is_stopped_and_continues(called, monkeypatch, tmp_path):
    """The first job resumes from its step. Another has a kernel that cannot run, and a third one a config error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # no Triton without a GPU
    quick = [word for word in QUICK if not word.startswith("out_dir")]
    ablations = 'hydra.sweeper.ablations=["kernels.norm=triton","train.tokens_per_step=1000"]'
    words = "-m", *quick, "train.max_steps=100", "kernels=eager", ablations, "out_dir=sweep", "device=cpu"
    words += (f"data.cache={tmp_path / 'tokens'}",)
    metrics = Path("sweep/1-base/metrics.jsonl")

    def interrupt():
        while not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    code, out, err = called(str(ROOT / "train.py"), train.main, *words)
    assert (code, err) == (75, "")
    assert read_rows().keys() == {"1-base"}
    stopped = read_rows()["1-base"]
    assert stopped["status"].startswith("stopped: SIGINT after step ")
    assert 0 < stopped["steps"] < 100

    code, out, err = called(str(ROOT / "train.py"), train.main, *words)
    assert (code, err) == (1, "")
    base, unavailable, mistake = (read_rows()[job] for job in ("1-base", "2-norm.triton", "3-tokens_per_step.1000"))
    assert (base["status"], base["steps"]) == ("ok", 100)
    assert base["resumed_from"].startswith("sweep/1-base/checkpoints/step-")
    assert unavailable["status"].startswith("unavailable: norm=triton cannot run here: ")
    assert mistake["status"].startswith("failed: train.tokens_per_step=1000 does not divide into micro-steps of ")
    assert "[3/3] 3-tokens_per_step.1000  failed: train.tokens_per_step=1000 does not divide" in out
    assert len(metrics.read_text().splitlines()) == 100


KERNEL_WITH_FAKE_CLOCK = """
import random, sys, time
from kernels.norm.eager import norm as eager

draw = random.Random(next(word for word in sys.argv if word.startswith("out_dir=")))
process, now = draw.gauss(1, 0.005), None

def norm(x, residual, weight, bias, eps=1e-5):
    global now
    if now is None:  # not at the import, because a run measures the machine after it
        now = time.perf_counter()
        time.perf_counter = lambda: now
    now += {seconds} * process * draw.gauss(1, 0.02)
    return eager(x, residual, weight, bias, eps)
"""


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_an_equal_kernel_is_a_tie_and_five_percent_are_slower(checkout):
    """A kernel, a copy of it, and a kernel that makes the step 5% longer have three runs each, in turns.

    Only the kernels advance the clock, with a noise of 0.5% a process and 2% a call. With a real clock and a sleep of
    80 ms, 5% was a tie on a busy machine.
    """
    for name, seconds in (("first", 0.100), ("same", 0.100), ("slow", 0.105)):
        (checkout / f"kernels/norm/{name}.py").write_text(KERNEL_WITH_FAKE_CLOCK.format(seconds=seconds))
    words = [word for word in QUICK if not word.startswith("out_dir")]
    words += ["train.batch_size=1", "train.tokens_per_step=128", "train.max_steps=19", "train.log_every=2"]
    words += ["kernels.norm=first,same,slow", "kernels.check=false", "sweep.repeats=3", "out_dir=out/turns"]
    done = subprocess.run(
        [sys.executable, "train.py", "-m", *words], cwd=checkout, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    table = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith(("1-", "2-", "3-"))}
    assert "tie (" in table["2-norm.same"]
    [value] = [float(word[:-1]) for word in table["3-norm.slow"].split() if word.endswith("x")]
    assert 0.92 < value < 0.97
    results = (checkout / "out/turns").glob("*/result.json")
    order = [path.parent.name for path in sorted(results, key=lambda path: path.stat().st_mtime_ns)]
    jobs_in_turn = ["1-norm.first", "2-norm.same", "3-norm.slow"]
    second_turn, third_turn = [f"{job}.2" for job in reversed(jobs_in_turn)], [f"{job}.3" for job in jobs_in_turn]
    assert order == [*jobs_in_turn, *second_turn, *third_turn]
    row = json.loads((checkout / "out/turns/1-norm.first/result.json").read_text())
    assert "sweep.repeats" not in shlex.split(row["command"])


def test_a_job_whose_checkpoints_cannot_be_listed_resumes_and_says_why(tmp_path, monkeypatch):
    """An error here would end the whole sweep, and a new start would delete the checkpoints."""

    def fail(folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr("runtime.checkpoint.os.listdir", fail)
    assert jobs.can_resume(tmp_path)


@pytest.mark.parametrize("harm", ["cut", "FIFO"])
def test_a_row_that_cannot_be_read_stops_a_sweep_before_it_starts(tmp_path, harm):
    """It may be of a finished job, which would be trained again."""
    result = tmp_path / "result.json"
    result.write_text('{"status": "o')
    if harm == "FIFO":
        result.unlink()
        os.mkfifo(result)
    with pytest.raises(UserError, match=r"result\.json is damaged or cannot be read: restore the file, or delete it"):
        jobs.SweepJob(tmp_path, [], [], [None])

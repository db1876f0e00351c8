"""logger=wandb and logger=tensorboard in the commands that measure and write no run."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import bench_attention, bench_kernels, judge
from tests.lab.judge.test_judge import verdict_of

NORM = "op=norm", "shape=narrow", "dtype=float32", "rounds=1"
ATTENTION = "impl=[eager]", "lengths=[16]", "heads=2", "head_dim=8", "dtype=float32", "rounds=1"
COMMANDS = {  # command -> its arguments, and one of its figures
    "bench_kernels": ([*NORM, "impl=[eager]"], "norm/narrow/eager/both/ms"),
    "bench_attention": (ATTENTION, "attention/16/eager/both/ms"),
    "tune": ([*NORM, "auto=true"], "norm float32/ms/5/eager"),
    "doctor": (["op=norm", "impl=eager"], "answers/ok"),
    "judge": (["op=norm", "impl=triton", "against=eager"], "norm/triton/ratio/value"),
}


@pytest.fixture
def run(called, monkeypatch, tables, tmp_path):
    """Run a command in this process: run("tune", "logger=wandb") -> its output.

    The probes, the ceilings and the verdict are fakes, and no figure is drawn.
    """
    monkeypatch.chdir(tmp_path)

    def probe(groups, device, limit):
        return [["ok: torch" if probe.impl == "eager" else "unavailable: no"] for [probe] in groups]

    for room in ("lab.bench.speed", "scripts.doctor"):
        monkeypatch.setattr(f"{room}.run_probes", probe)
    monkeypatch.setattr(judge, "settle", lambda *_: verdict_of(90))
    for name in ("measured_bandwidth", "measured_flops"):
        monkeypatch.setattr(bench_kernels, name, lambda *_: 1e10)
    for command in (bench_kernels, bench_attention):
        monkeypatch.setattr(command, "find_spec", lambda name: None)

    def run(name, *words):
        main = importlib.import_module(f"scripts.{name}").main
        code, out, err = called(f"{name}.py", main, *COMMANDS[name][0], "device=cpu", *words)
        assert (code, err) == (0, "")
        return out

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_tensorboard_gets_the_figures_and_the_texts(run, name, tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run(name, "logger=tensorboard").splitlines()[-1].startswith("board    tensorboard --logdir out/")
    [folder] = tmp_path.glob("out/*/tensorboard")
    events = EventAccumulator(str(folder)).Reload()
    [figure] = events.Scalars(COMMANDS[name][1])
    assert figure.value > 0
    [table] = events.Tensors("rows/text_summary")[0].tensor_proto.string_val
    assert f"| {COMMANDS[name][1].split('/')[0]}".encode() in table


def test_wandb_gets_the_figures(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="W&B is not installed")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    out = run("bench_kernels", "logger=wandb", "logger.tags=[a]", "out_dir=mine")
    assert out.splitlines()[-1] == "wandb    offline; to upload: wandb sync mine/wandb/offline-run-*"
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", "--summary", "mine/wandb"]
    run = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    row = json.loads((tmp_path / "mine/kernels.jsonl").read_text())
    assert (run["name"], run["tags"], run["summary"]["status"]) == ("bench-norm", ["a"], "ok")
    assert run["summary"]["norm/narrow/eager/both/ms"] == pytest.approx(row["both/ms"])
    assert run["config"]["shape"] == ["narrow"]

"""profile=true: the files of three steps, and that they change nothing in the run."""

import gzip
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.registry import AttnConfig, KernelsConfig, resolve
from lab.proof import trace
from model.optim import Optimizer
from tests.test_train import QUICK, row


def step_names(path):
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    return {event["name"] for event in events if event.get("name", "").startswith("training step")}, events


def test_a_profile_is_a_trace_of_three_steps_after_the_run(hotswap, monkeypatch):
    """The steps have the learning rate 0, and the row has only the figures of the run."""
    rates = []
    step = Optimizer.step
    monkeypatch.setattr(Optimizer, "step", lambda self, lr, loss: rates.append(float(lr)) or step(self, lr, loss))
    code, out, err = hotswap(*QUICK, "train.max_steps=5", "profile=true")
    assert (code, err) == (0, "")
    names, events = step_names("run/trace.json.gz")
    assert names == {"training step 1", "training step 2", "training step 3"}
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert (rates[5:], min(rates[:5]) > 0) == ([0.0] * 3, True)
    assert (row()["steps"], row()["status"]) == (5, "ok")
    assert out.splitlines()[-2] == (
        "profile  run/trace.json.gz: the time of 3 steps; open it in https://ui.perfetto.dev"
    )
    assert not Path("run/memory.pickle").exists()


def test_the_programs_of_xla_are_written_for_the_ops_that_it_computes(hotswap):
    """What XLA compiled for them: the names of our functions, and the fusions that XLA made."""
    pytest.importorskip("jax")
    code, out, err = hotswap(*QUICK, "train.max_steps=2", "profile=true", "kernels.norm=xla")
    assert (code, err) == (0, "")
    assert "profile  run/hlo/norm.txt: the HLO of kernels.norm.xla after XLA's fusion\n" in out
    assert [path.name for path in Path("run/hlo").iterdir()] == ["norm.txt"]
    text = Path("run/hlo/norm.txt").read_text()
    for name in ("differentiate", "backward"):
        assert f"// norm: {name}\nHloModule jit_{name}" in text
    assert "fusion(" in text


def test_the_receipt_of_a_proof_comes_before_the_graph_is_freed(hotswap, monkeypatch):
    """The graph is freed for the memory snapshot, so a receipt after it would be of uncaptured steps."""
    order = []
    monkeypatch.setattr("lab.proof.write_trace", lambda *_: order.append("trace"))
    monkeypatch.setattr("lab.proof.prove", lambda *_: order.append("proof"))
    monkeypatch.setattr("lab.proof.write_memory_snapshot", lambda *_: order.append("memory"))
    monkeypatch.setattr("lab.proof.make_references", lambda *_, **__: ([], {"ok": None, "why": "a test"}))
    assert hotswap(*QUICK, "train.max_steps=1", "profile=true", "proof=true")[0] == 0
    assert order == ["trace", "proof", "memory"]


def test_no_profile_is_written_unless_it_is_asked_for(hotswap):
    assert hotswap(*QUICK, "train.max_steps=1")[0] == 0
    assert not Path("run/trace.json.gz").exists()


class FakeStep:
    """A StepRunner on a GPU that writes down its calls."""

    def __init__(self, graph):
        self.graph, self.device, self.calls = graph, torch.device("cuda"), []
        self.model = SimpleNamespace(ops=resolve(KernelsConfig(), AttnConfig("eager"), torch.device("cpu")))
        self.optimizer = type("Optimizer", (), {"ranks": type("Ranks", (), {"is_main": True})})

    def __call__(self, batches, lr):
        self.calls.append("replay" if self.graph else "step")

    def release(self):
        self.graph = None
        self.calls.append("release")


@pytest.mark.parametrize("graph", [None, "a graph"])
def test_the_trace_has_replays_and_the_memory_snapshot_has_none(tmp_path, monkeypatch, capsys, graph):
    """A CUDA graph cannot be captured in a profile, and its replay allocates nothing."""
    monkeypatch.setattr(trace, "synchronize", lambda _: None)
    monkeypatch.setattr("torch.cuda.memory._record_memory_history", lambda **_: None)
    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", lambda path: Path(path).touch())
    step = FakeStep(graph)
    trace.write_trace(step, [], tmp_path)
    trace.write_memory_snapshot(step, [], tmp_path)
    assert step.calls == (["replay"] * 3 if graph else ["release", *["step"] * 3]) + ["release", *["step"] * 3]
    assert (tmp_path / "memory.pickle").exists()
    assert f"{tmp_path}/memory.pickle: the memory of 3 steps; open it in https://pytorch.org/memory_viz" in (
        capsys.readouterr().out
    )


@pytest.mark.gpu
def test_captured_steps_have_kernels_in_the_trace_and_allocations_in_the_snapshot(hotswap):
    gpu = "device=cuda", "train.cuda_graph=true", "train.max_steps=6", "profile=true"
    code, _, err = hotswap(*QUICK, *gpu)
    assert (code, err) == (0, "")
    assert row()["cuda_graph"] == "captured"
    _, events = step_names("run/trace.json.gz")
    assert any(event.get("cat") == "kernel" for event in events)
    snapshot = pickle.loads(Path("run/memory.pickle").read_bytes())
    assert sum(entry["action"] == "alloc" for entry in snapshot["device_traces"][0]) > 10

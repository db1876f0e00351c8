import json

import pytest
import torch

from kernels.registry import contract, load
from scripts import bench_attention, bench_kernels
from scripts.figures import context_plot
from scripts.report import context_table

CPU = torch.device("cpu")


def config(**changes):
    settings = {"impl": ["eager", "sdpa"], "lengths": [24, 48], "batch": 1, "heads": 2, "kv_heads": None, "head_dim": 8}
    settings |= {
        "window": None,
        "documents": None,
        "dtype": "float32",
        "device": "cpu",
        "rounds": 3,
        "auto": False,
        "keep": False,
        "out_dir": None,
    }
    return bench_attention.Config(**settings | changes)


def test_rows_and_what_does_not_fit(monkeypatch, tmp_path):
    """With a clock of our own: 2 ms forward, 5 ms both. The one that is out of memory is a row, and has no turn."""

    def in_turn(works, device, rounds):
        assert {name.split()[0] for name in works} == {"eager"}
        for work in works.values():
            work()
        return {name: [{"forward": 2e-3, "both": 5e-3, "decode": 1e-3}[name.split()[1]]] * rounds for name in works}

    def full(**inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 48.00 GiB")

    monkeypatch.setattr(bench_attention, "in_turn", in_turn)
    contestants = {"eager": load("attention", "eager", CPU), "sdpa": full}
    fits, not_ = bench_attention.measure(config(window=7), 24, contestants, CPU)
    cost = contract("attention").cost((1, 24, 2, 8), window=7, dtype=torch.float32)
    assert (fits["forward/ms"], fits["both/ms"], fits["status"], not_["status"]) == (2, 5, "ok", "oom")
    assert fits["both/tflops"] == pytest.approx((cost["forward"][0] + cost["backward"][0]) / 5e-3 / 1e12)
    assert fits["decode/ms"] == 1
    assert fits["error/out"] < 1e-6
    assert "both/ms" not in not_
    fits["both/peak_gib"] = 0.25
    assert context_table([fits, not_]).splitlines()[-1] == "| 24 | 5.00 ms, 0.25 GiB | oom |"
    assert context_plot([fits, not_], tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize("limits", [{}, {"window": 5}, {"documents": (20, 4, 16)}, {"kv_heads": 1}])
def test_the_error_of_the_last_queries_is_seen_everywhere(limits):
    """float32 is as good as float32; values that are 0.1% off show in the output and in their gradient."""
    module, shape = contract("attention"), {"shape": (2, 40, 2, 8), **limits}
    attention = load("attention", "eager", CPU)

    def wrong(q, k, v, **rest):
        return attention(q, k, 1.001 * v, **rest)

    right = bench_kernels.error(attention, module, shape, torch.float32, CPU)
    off = bench_kernels.error(wrong, module, shape, torch.float32, CPU)
    assert max(right.values()) < 1e-6
    assert off == pytest.approx({"error/out": 1e-3, "error/gradients": 1e-3}, rel=0.05)


def test_what_is_wrong_or_cannot_has_no_speed():
    """A kernel that forgets the scale, and one that knows no documents."""
    eager = load("attention", "eager", CPU)
    functions = {"eager": eager, "sdpa": lambda q, k, v, **rest: eager(2 * q, k, v, **rest)}
    right, off = bench_attention.measure(config(rounds=1, documents=9), 24, functions, CPU)
    assert right["both/ms"] > 0
    assert off["status"].startswith("wrong: error/out is ")
    assert not [key for key in off if key.endswith("/ms")]


@pytest.mark.parametrize(("length", "limits"), [(1, {}), (24, {"window": 1}), (24, {"documents": 1})])
def test_gradients_that_are_zero_are_right(length, limits):
    """Where a query sees one key, its softmax is 1: dq and dk are zero, but for rounding."""
    functions = {name: load("attention", name, CPU) for name in ("eager", "sdpa")}
    for row in bench_attention.measure(config(rounds=1, **limits), length, functions, CPU):
        assert (row["impl"], row["status"]) == (row["impl"], "ok")


def test_nothing_to_plot(called, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_attention, "wrong", lambda *_: "it is")
    arguments = "impl=[eager]", "lengths=[16]", "heads=2", "head_dim=8", "dtype=float32", "rounds=1", "device=cpu"
    code, out, err = called("bench_attention.py", bench_attention.main, *arguments)
    assert (code, err) == (0, "")
    assert "wrong" in out


def test_only_the_newest_shape_is_in_the_table():
    shape = {
        "batch": 1,
        "heads": 2,
        "kv_heads": None,
        "head_dim": 8,
        "window": None,
        "documents": None,
        "dtype": "float32",
    }
    row = {"T": 64, "impl": "eager", "both/ms": 1.0, "status": "ok", **shape}
    rows = [{**row, "T": 128}, {**row, "batch": 4}, row, {**row, "both/ms": 2.0}]
    assert context_table(rows).splitlines()[2:] == ["| 64 | 2.00 ms |", "| 128 | 1.00 ms |"]


def test_from_the_command_line(called, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = "impl=[eager,sdpa]", "lengths=[16,32]", "heads=2", "head_dim=8", "dtype=float32", "rounds=2"
    code, out, _ = called("bench_attention.py", bench_attention.main, *arguments, "device=cpu")
    assert code == 0
    assert out.count(" ms |") == 4
    [file] = tmp_path.glob("out/*-bench-attention/attention.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["T"], row["impl"]) for row in rows] == [(16, "eager"), (16, "sdpa"), (32, "eager"), (32, "sdpa")]
    assert rows[0]["env"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("impl=mine", "impl=mine: attention has "),
        ("lengths=[0]", "lengths=0: it takes whole numbers from 1 on"),
        ("lengths=[many]", "lengths=many: it takes whole numbers"),
        ("lengths=64", "lengths=64: it takes a list: lengths='[64]'"),
        ("kv_heads=5", "kv_heads=5: heads=12 must be a multiple of it"),
        ("window=0", "window=0: it must be at least 1, or null"),
        ("documents=0", "documents=0: it must be at least 1, or null"),
        ("heads=0", "heads=0: it must be at least 1"),
        ("dtype=int8", "dtype=int8: choose bfloat16, float16, float32"),
        ("out_dir=/dev/null/x", "out_dir=/dev/null/x cannot be written: Not a directory; choose another folder"),
    ],
)
def test_mistakes(called, arguments, message):
    code, _, err = called("bench_attention.py", bench_attention.main, arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"error: {message}")

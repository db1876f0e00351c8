"""`python -m scripts.bench_kernels` as a command."""

import json
import math
import re
import sys

import pytest
import torch

from kernels.registry import OPS, contract, impls
from lab import rows as lab_rows
from lab.bench.op import OpConfig
from lab.proof.source_lines import kernel_lines
from lab.report.tables import kernel_benchmarks
from scripts import bench_kernels


def test_the_command_writes_rows_and_prints_a_table(called, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = "op=norm", "impl=[eager]", "shape=narrow", "dtype=float32", "rounds=2"
    code, out, _ = called("bench_kernels.py", bench_kernels.main, *arguments)
    assert code == 0
    assert re.search(r"\| narrow +\| eager +\| \d+\.\d{3} +\| \*\*\d+\.\d{3}\*\* \(", out, re.MULTILINE)
    [file] = tmp_path.glob("out/*-bench-norm/kernels.jsonl")
    row = json.loads(file.read_text())
    assert (row["op"], row["impl"], row["env"]["torch"]) == ("norm", "eager", torch.__version__)
    assert (row["status"], row["lines"], row["first_call_s"]) == ("ok", 0, None)


def test_the_kept_rows_have_first_calls_lines_and_reasons(called, monkeypatch, tmp_path):
    """A backend that cannot run, whose first call fails, or that refuses the shape has a row with its status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lab_rows, "RESULTS", tmp_path / "results")
    absent = {"quack": "unavailable: it needs QuACK"}
    monkeypatch.setattr(bench_kernels, "absent_backends", lambda op, device: absent)
    calls, timed = [], bench_kernels.measure

    def first_calls(op, names, shape, dtype, device):
        calls.extend(names)
        return dict.fromkeys(names, (1.5, "ok")) | {"helion": (None, "failed: no such tile")}

    def measure(op, name, shape, names, *rest, left_out):
        assert set(left_out) == {"quack", "helion"}
        rows, _ = timed(op, name, shape, ["eager"], *rest)
        return [*rows, rows[0] | {"impl": "triton"}], {"liger": "unavailable: it takes no fp32"}

    monkeypatch.setattr(bench_kernels, "first_calls", first_calls)
    monkeypatch.setattr(bench_kernels, "measure", measure)
    words = "op=norm", "shape=narrow", "dtype=float32", "rounds=1", "first_call=true", "keep=true", "suffix=mine"
    code, out, _ = called("bench_kernels.py", bench_kernels.main, *words)
    assert code == 0
    assert calls == [*(impl for impl in impls("norm") if impl != "quack"), "compile"]
    [folder] = [path.name for path in lab_rows.RESULTS.glob("*-mine")]
    rows = {row["impl"]: row for row in lab_rows.read_rows(folder, "kernels")}
    statuses = {impl: row["status"] for impl, row in rows.items()}
    reasons = absent | {"helion": "failed: no such tile", "liger": "unavailable: it takes no fp32"}
    assert statuses == {"eager": "ok", "triton": "ok"} | reasons
    assert all(f"narrow       without {impl}: {reason}" in out for impl, reason in reasons.items())
    assert rows["triton"]["lines"] == kernel_lines({"norm": "triton"})["norm"] > 0 == rows["eager"]["lines"]
    assert rows["eager"]["first_call_s"] == 1.5
    assert "both/ms" not in rows["helion"]
    assert len({row["started"] for row in rows.values()}) == 1
    assert kernel_benchmarks(folder).count("\n") == 3  # a head, a line, and the two that were timed


def test_a_cpu_measures_one_small_shape_by_default(called, monkeypatch, tmp_path):
    """The model's shapes took minutes there. A line names the shape before its measurement."""
    monkeypatch.chdir(tmp_path)
    lines = []

    def measure_nothing(*_, **__):
        lines.append(sys.stdout.getvalue())
        return [], {"eager": "it has a day off"}

    monkeypatch.setattr(bench_kernels, "measure", measure_nothing)
    code, _, err = called("bench_kernels.py", bench_kernels.main, "op=norm", "device=cpu", "rounds=2")
    assert lines == ["768          2 x 16 x 768, bfloat16, 2 rounds\n"]
    assert (code, err) == (1, "error: op=norm: no backend takes these shapes; the lines above say why\n")
    assert [*tmp_path.iterdir()] == []
    for op in OPS:
        [name] = OpConfig(op, None, "float32", "cpu", 1, False).shape
        assert math.prod(contract(op).CASES[name]["shape"]) < 2**16
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert OpConfig(op, None, "float32", "auto", 1, False).shape == list(contract(op).SHAPES)
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("op=gemm", f"op=gemm: choose {', '.join(OPS)}"),
        ("impl=mine", "impl=mine: no file kernels/norm/mine.py; there are auto, cutile, eager, "),
        ("impl=[eager,to/mine.py]", "impl=to/mine.py: no file to/mine.py in "),
        ("shape=huge", "shape=huge: norm has 124m, "),
        ("dtype=int8", "dtype=int8: choose bfloat16, float16, float32"),
        ("rounds=0", "rounds=0: it must be at least 1"),
        ("suffix=mine", "suffix=mine has no effect: add keep=true"),
    ],
)
def test_a_mistake_prints_one_line(called, arguments, message):
    code, _, err = called("bench_kernels.py", bench_kernels.main, arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"error: {message}")

"""`python -m scripts.bench_kernels` as a command."""

import json
import math
import re
import sys

import pytest
import torch

from kernels.registry import OPS, contract
from lab.bench.op import OpConfig
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


def test_a_cpu_measures_one_small_shape_by_default(called, monkeypatch, tmp_path):
    """The model's shapes took minutes there. A line names the shape before its measurement."""
    monkeypatch.chdir(tmp_path)
    lines = []

    def measure_nothing(*_):
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
        ("impl=mine", "impl=mine: no file kernels/norm/mine.py; there are auto, eager, "),
        ("impl=[eager,to/mine.py]", "impl=to/mine.py: no file to/mine.py in "),
        ("shape=huge", "shape=huge: norm has 124m, "),
        ("dtype=int8", "dtype=int8: choose bfloat16, float16, float32"),
        ("rounds=0", "rounds=0: it must be at least 1"),
    ],
)
def test_a_mistake_prints_one_line(called, arguments, message):
    code, _, err = called("bench_kernels.py", bench_kernels.main, arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"error: {message}")

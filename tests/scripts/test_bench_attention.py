"""`python -m scripts.bench_attention` as a command."""

import json
import re

import pytest
import torch

from lab.bench import attention
from scripts import bench_attention


def test_no_plot_is_drawn_when_every_answer_is_wrong(called, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(attention, "describe_excess", lambda *_: "it is")
    arguments = "impl=[eager]", "lengths=[16]", "heads=2", "head_dim=8", "dtype=float32", "rounds=1", "device=cpu"
    code, out, err = called("bench_attention.py", bench_attention.main, *arguments)
    assert (code, err) == (0, "")
    assert "wrong" in out


def test_the_command_writes_rows_and_prints_a_table(called, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = "impl=[eager,sdpa]", "lengths=[16,32]", "heads=2", "head_dim=8", "dtype=float32", "rounds=2"
    code, out, _ = called("bench_attention.py", bench_attention.main, *arguments, "device=cpu")
    assert code == 0
    assert len(re.findall(r" ms +\|", out)) == 4
    [file] = tmp_path.glob("out/*-bench-attention/attention.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["T"], row["impl"]) for row in rows] == [(16, "eager"), (16, "sdpa"), (32, "eager"), (32, "sdpa")]
    assert rows[0]["env"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("impl=mine", "impl=mine: no file kernels/attention/mine.py; there are "),
        ("lengths=[0]", "lengths=0: each must be an integer of at least 1"),
        ("lengths=[many]", "lengths=many: each must be an integer"),
        ("lengths=64", "lengths=64: it must be a list: lengths='[64]'"),
        ("kv_heads=5", "kv_heads=5: heads=12 must be a multiple of it"),
        ("window=0", "window=0: it must be at least 1, or null"),
        ("documents=0", "documents=0: it must be at least 1, or null"),
        ("heads=0", "heads=0: it must be at least 1"),
        ("dtype=int8", "dtype=int8: choose bfloat16, float16, float32"),
        ("out_dir=/dev/null/x", "out_dir=/dev/null/x cannot be written: Not a directory; choose another folder"),
    ],
)
def test_a_mistake_prints_one_line(called, arguments, message):
    code, _, err = called("bench_attention.py", bench_attention.main, arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"error: {message}")

import pytest
import torch

from kernels.registry import contract, load
from lab import rows as lab_rows
from lab.bench import attention
from lab.bench.attention import AttentionShape, measure
from lab.report.bench_panels import attention_command, draw_attention
from lab.report.tables import attention_benchmarks, attention_table

CPU = torch.device("cpu")


def shape(**changes):
    fields = {"batch": 1, "heads": 2, "kv_heads": None, "head_dim": 8, "window": None, "documents": None}
    return AttentionShape(**fields | {"dtype": "float32"} | changes)


def test_a_backend_that_does_not_fit_has_a_row_without_times(monkeypatch, tmp_path):
    """The clock is fake: 2 ms forward, 5 ms both ways. A backend that is out of memory takes no turns."""

    def fake_times(works, device, rounds):
        assert {name.split()[0] for name in works} == {"eager"}
        for work in works.values():
            work()
        return {name: [{"forward": 2e-3, "both": 5e-3, "decode": 1e-3}[name.split()[1]]] * rounds for name in works}

    def out_of_memory(**inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 48.00 GiB")

    monkeypatch.setattr(attention, "time_in_turns", fake_times)
    functions = {"eager": load("attention", "eager", CPU), "sdpa": out_of_memory}
    fits, full = measure(shape(window=7), 24, functions, 3, CPU)
    cost = contract("attention").cost((1, 24, 2, 8), window=7, dtype=torch.float32)
    assert (fits["forward/ms"], fits["both/ms"], fits["status"], full["status"]) == (2, 5, "ok", "oom")
    assert fits["both/tflops"] == pytest.approx((cost["forward"][0] + cost["backward"][0]) / 5e-3 / 1e12)
    assert fits["decode/ms"] == 1
    assert fits["error/out"] < 1e-6
    assert "both/ms" not in full
    fits["both/peak_gib"] = 0.25
    last_line = attention_table([fits, full]).splitlines()[-1]
    assert [cell.strip() for cell in last_line.strip("|").split("|")] == ["24", "5.00 ms, 0.25 GiB", "oom"]
    [path] = draw_attention([fits, full], tmp_path / "plot.png")
    assert path.stat().st_size > 1000


def test_a_wrong_answer_has_no_speed():
    """The wrong kernel doubles q."""
    eager = load("attention", "eager", CPU)
    functions = {"eager": eager, "sdpa": lambda q, k, v, **rest: eager(2 * q, k, v, **rest)}
    right, wrong = measure(shape(documents=9), 24, functions, 1, CPU)
    assert right["both/ms"] > 0
    assert wrong["status"].startswith("wrong: error/out is ")
    assert not [key for key in wrong if key.endswith("/ms")]


@pytest.mark.parametrize(("length", "limits"), [(1, {}), (24, {"window": 1}), (24, {"documents": 1})])
def test_gradients_that_are_zero_are_right(length, limits):
    """If a query sees one key, its softmax is 1, and dq and dk are zero but for rounding."""
    functions = {name: load("attention", name, CPU) for name in ("eager", "sdpa")}
    for row in measure(shape(**limits), length, functions, 1, CPU):
        assert row["status"] == "ok", row


def test_a_table_for_each_shape(tmp_path, monkeypatch):
    """The shape with the most T comes first. The others name what differs, as on the command line."""
    row = {"T": 64, "impl": "eager", "both/ms": 1.0, "status": "ok", **vars(shape())}
    rows = [{**row, "T": 128}, {**row, "batch": None}, row, {**row, "both/ms": 2.0}, {**row, "documents": 8}]
    lab_rows.append_rows(tmp_path / "gpu/attention.jsonl", rows)
    monkeypatch.setattr(lab_rows, "RESULTS", tmp_path)
    first, documents, table, batch, _ = attention_benchmarks("gpu").split("\n\n")
    assert first == attention_table(rows)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in first.splitlines()[2:]]
    assert cells == [["64", "2.00 ms"], ["128", "1.00 ms"]]
    assert (documents, batch) == ("With `documents=8`:", "With `batch=null`:")
    assert table.splitlines()[2].split() == ["|", "64", "|", "1.00", "ms", "|"]
    assert attention_command(rows[1]).split()[-1] == "batch=null"

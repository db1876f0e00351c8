"""The table of the longest contexts shows the searches of scripts.max_context."""

import json

from lab import rows as lab_rows
from lab.report.describe import newest_searches, search_settings
from lab.report.max_context_table import max_context, max_context_table
from lab.report.readmes import fill
from tests.lab.report.sample_rows import make_context_row


def test_newest_row_of_each_choice_longest_first(monkeypatch, tmp_path):
    """The rows have a window, a prediction, a search that time ended, and a search that found no length.

    The second row is older than the third in training alone.
    """
    choice = {"kernels": {"norm": "triton", "mlp": "triton", "loss": "triton", "compile": False}, "precision": "bf16"}
    row = {"config": choice | {"model": {"pos": "rope", "checkpointing": "none"}}, "parameters": 123_689_472}
    row |= {"kernels": {"attention": "sdpa (cudnn, torch 2.11.0)"}, "memory_gib": 139.8}
    row |= {"context/max_train": None, "context/train/limit": "oom", "context/max_generate": 4096}
    other = json.loads(json.dumps(row))
    other["config"]["model"]["checkpointing"] = "block"
    other |= {"context/max_train": 2**19, "context/train/seconds": 1.234, "context/train/peak_gib": 130.0}
    slow = other | {"context/train/window": 4096, "context/train/seconds_of_full_attention": 12.3456}
    slow |= {"context/train/prediction": {"peak_gib": 129}, "context/max_generate": None}
    attention_kept = json.loads(json.dumps(other)) | {"context/max_train": 2**18}
    attention_kept["config"]["model"]["keep_attention"] = True
    attention_kept |= {"context/generate/limit": "timeout", "context/generate/computed": 1024}
    windowed = json.loads(json.dumps(row)) | {"status": "stopped: SIGINT"}
    del windowed["context/max_generate"]  # a search that was stopped in training has no figures of generation
    windowed["config"]["model"] |= {"window": 64, "n_kv_head": 4}
    monkeypatch.setattr(lab_rows, "RESULTS", tmp_path)
    assert "No rows yet" in max_context("h200")
    lab_rows.append_rows(tmp_path / "h200" / "context.jsonl", [row, other, slow, attention_kept, windowed])
    lines = fill("<!-- max_context: h200 -->\n<!-- end -->").splitlines()[3:-1]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    who = ["124M", "bf16", "triton", "sdpa (cudnn)"]
    seconds = "12.3, by shorter ones; 1.23 with window 4096"
    slow_generation = "4,096 or more (its last 1,024 computed)"
    assert cells == [
        [*who, "rope", "block", "139.8", "**524,288**", seconds, "130.00 (129.00)", ""],
        [*who, "rope", "block, attention kept", "139.8", "**262,144**", "1.23", "130.00", slow_generation],
        [*who, "rope", "none", "139.8", "oom", "", "", "4,096"],
        [*who, "rope", "block", "139.8", "", "", "", "4,096"],
        [*who, "rope, window 64, 4 K/V heads", "none", "139.8", "oom", "", "", "stopped"],
    ]


def test_a_newer_search_of_one_mode_hides_no_length_of_the_other(monkeypatch, tmp_path):
    """Rows of generation alone came after rows of training, as on the H200. One of both modes is replaced in one."""
    train, generate = make_context_row("compile", "sdpa", 352_256, None), make_context_row("compile", "sdpa", 0, 4096)
    both, newer = make_context_row("eager", "sdpa", 2048, 8192), make_context_row("eager", "sdpa", 1024, None)
    stopped = make_context_row("triton", "sdpa", 512, None) | {"status": "stopped: SIGINT"}
    later = make_context_row("triton", "sdpa", None, 6144)
    for row, mode in ((train, "generate"), (generate, "train"), (newer, "generate"), (stopped, "generate")):
        del row[f"context/max_{mode}"]
    shown = newest_searches([train, stopped, both, newer, generate, later])
    lengths = [(row.get("context/max_train"), row.get("context/max_generate")) for row in shown]
    assert lengths == [(352_256, None), (1024, None), (512, None), (None, 8192), (None, 4096), (None, 6144)]
    monkeypatch.setattr(lab_rows, "RESULTS", tmp_path)
    lab_rows.append_rows(tmp_path / "h200" / "context.jsonl", [stopped, later])
    table = max_context("h200")
    assert "stopped" not in table
    assert table.count("| gpt2_124m ") == 2


def test_a_replaced_length_takes_its_other_figures_along():
    """The tokens that a generation computed are compared with its longest, which is gone."""
    both = make_context_row("eager", "sdpa", 2048, 8192) | {"context/generate/computed": 1024}
    newer = make_context_row("eager", "sdpa", None, 4096)
    del newer["context/max_train"]
    table = max_context_table([both, newer])
    assert "2,048" in table
    assert "computed" not in table


def test_a_search_with_an_fp8_cache_does_not_hide_one_without():
    """It holds twice as many tokens. A decoder is another choice, too."""
    rows = [make_context_row("triton", "triton", None, length) for length in (4096, 8192, 6144)]
    rows[1]["config"]["generate"] = {"kv": "fp8", "speculate": None}
    rows[2]["config"]["kernels"]["decode"] = "persistent"
    assert [search_settings(row)[2] for row in newest_searches(rows)] == [
        "triton",
        "triton, fp8 cache",
        "triton, decode persistent",
    ]

"""Rows of the time when `triton` ran Gluon on Hopper are read with the names of what computed."""

import json

import pytest

from kernels.registry import impls
from lab.old_rows import rename_gluon
from lab.report.describe import choice_key, choice_name
from lab.rerun import rerun_words
from lab.rows import RESULTS, read_run, read_whole

IN_GLUON = "triton (triton 3.6.0, Gluon)"
TRAINING = {
    "name": "124M-triton-triton-bf16",
    "command": "python train.py kernels=triton attn=triton 'kernels.fp8=[mlp]' kernels.mlp=triton_recompute",
    "config": {
        "kernels": {
            "norm": "triton",
            "linear": "triton",
            "mlp": "triton_recompute",
            "loss": "triton",
            "compile": False,
        },
        "attn": {"impl": "triton", "version": None},
    },
    "kernels": {
        "norm": "triton (triton 3.6.0)",
        "linear": "triton (triton 3.6.0)",
        "attention": "triton (triton 3.6.0, tuned on h200, Gluon forward and backward)",
        "mlp": "triton_recompute (triton 3.6.0, Gluon)",
        "loss": "triton (triton 3.6.0, Gluon softmax)",
        "compile": False,
    },
}


def test_a_run_names_gluon_where_triton_ran_it():
    before = json.dumps(TRAINING)
    [row] = rename_gluon(TRAINING)
    assert json.dumps(TRAINING) == before  # the caller's row stays
    assert row["config"]["kernels"] == {
        "norm": "triton",
        "linear": "triton",
        "mlp": "gluon_recompute",
        "loss": "gluon",
        "compile": False,
    }
    assert row["config"]["attn"] == {"impl": "gluon", "version": None}
    assert row["kernels"]["attention"] == "gluon (triton 3.6.0, tuned on h200, Gluon forward and backward)"
    assert row["kernels"]["norm"] == "triton (triton 3.6.0)"
    assert row["name"] == TRAINING["name"]  # it names the file of its curve
    words = ["kernels=triton", "kernels.fp8=[mlp]", "attn=gluon", "kernels.mlp=gluon_recompute", "kernels.loss=gluon"]
    assert rerun_words(row) == ["python", "train.py", *words]
    assert choice_key(row)[1] == "gluon"
    assert rename_gluon(row) == [row]


def test_a_run_of_kernels_triton_that_ran_gluon_is_shown_as_gluon():
    config = {**TRAINING["config"], "kernels": {**TRAINING["config"]["kernels"], "mlp": "triton"}}
    row = {**TRAINING, "config": config, "kernels": {**TRAINING["kernels"], "mlp": IN_GLUON}}
    assert choice_name(rename_gluon(row)[0]) == "gluon · gluon"
    assert choice_name({"config": config}) == "triton · triton"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"op": "mlp", "impl": "triton", "executed": IN_GLUON}, "gluon"),
        ({"op": "loss", "impl": "triton_whole", "executed": "triton_whole (triton 3.6.0, Gluon)"}, "gluon_whole"),
        ({"op": "mlp", "impl": "triton", "executed": "triton (triton 3.6.0)"}, "triton"),
    ],
)
def test_a_benchmark_names_gluon(row, expected):
    [renamed] = rename_gluon(row)
    assert renamed["impl"] == expected
    assert renamed["executed"].startswith(f"{expected} (")


def test_a_verdict_about_gluon_names_it():
    sides = {"liger": {"ms": 2}, "triton": {"ms": 1}}
    command = "python -m scripts.judge op=loss impl=triton against=liger -- kernels=triton"
    row = {"op": "loss", "impl": "triton", "against": "liger", "cases": {"bf16 training": "ok: triton 3.6.0, Gluon"}}
    [renamed] = rename_gluon({**row, "benchmark": sides, "training": sides, "command": command})
    assert (renamed["impl"], renamed["against"]) == ("gluon", "liger")
    assert renamed["benchmark"] == renamed["training"] == {"liger": {"ms": 2}, "gluon": {"ms": 1}}
    assert renamed["command"] == command.replace("impl=triton", "impl=gluon")


def test_a_support_row_is_split_into_triton_and_gluon():
    answers = {"fp32": {"64": "ok: triton 3.6.0"}, "bf16": {"64": "ok: triton 3.6.0, Gluon", "769": "ok: triton 3.6.0"}}
    triton, gluon = rename_gluon({"op": "mlp", "impl": "triton", "answers": answers})
    assert (triton["impl"], triton["answers"]) == (
        "triton",
        {"fp32": answers["fp32"], "bf16": {"769": "ok: triton 3.6.0"}},
    )
    assert (gluon["impl"], gluon["answers"]) == ("gluon", {"bf16": {"64": "ok: triton 3.6.0, Gluon"}})


@pytest.mark.parametrize("value", [None, 1, "Gluon", [], {"mlp": None}, {"mlp": IN_GLUON}])
@pytest.mark.parametrize("key", ["kernels", "config", "answers", "executed", "cases", "command", "impl"])
def test_a_damaged_row_stays_readable(key, value):
    assert rename_gluon({"note": "Gluon", **TRAINING, key: value})
    assert rename_gluon({"note": "Gluon", key: value})


def test_every_row_of_results_names_backends_that_exist():
    """No row that is read says triton for what ran Gluon, and each name of gluon is a backend."""
    renamed = 0
    for path in RESULTS.glob("*/*.jsonl"):
        for row in read_whole(path):
            kernels, config = row.get("kernels", {}), row.get("config", {}).get("kernels", {})
            for op, description in [*kernels.items(), (row.get("op"), row.get("executed", ""))]:
                if "Gluon" in str(description):
                    name = description.split(" ")[0]
                    assert name in impls(op)
                    assert name.startswith("gluon")
                    assert op not in config or config[op] == name
                    renamed += 1
    assert renamed > 0


def test_the_row_in_a_folder_of_a_run_is_read_with_the_names_of_today(tmp_path):
    (tmp_path / "result.json").write_text(json.dumps(TRAINING | {"status": "ok"}))
    assert read_run(tmp_path)["config"]["attn"]["impl"] == "gluon"
    assert read_run(tmp_path / "nothing") is None

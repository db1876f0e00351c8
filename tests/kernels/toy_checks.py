"""Every program finds the op toy and the new backends. test_new_op.py runs these tests in a copy of the repo with them.

They do not run in the repo itself, which has no op toy.
"""

import json
from pathlib import Path

import pytest
import torch

import train
from kernels.names import OPS, TRAINING_OPS, config_groups, impls
from kernels.registry import family_patterns
from lab.bench import probe
from lab.proof.receipt import family_of
from lab.report.bench_panels import OP_COLOURS
from lab.report.describe import choice_name
from scripts import bench_kernels, doctor

CPU = torch.device("cpu")


def test_train_lists_and_runs_the_backends(hotswap):
    """--help lists them. The run and the report name them."""
    code, out, _ = hotswap("--help")
    assert code == 0
    for op in ("toy", "norm", "attention"):
        assert f" {op} {', '.join(impls(op))} " in " ".join(out.split())  # a long list has several lines
        assert "mine" in impls(op)
    assert f"attn: {', '.join(impls('attention'))}\n" in out

    smoke = "+experiment=smoke", "train.max_steps=1", "train.eval_every=0", "train.sample_tokens=0", "model.n_layer=1"
    choice = "kernels.toy=mine", "kernels.norm=mine", "attn=mine"
    code, out, err = hotswap(*smoke, *choice, "device=cpu", "out_dir=run")
    assert code == 0
    assert err.startswith("warning: kernels.toy=mine has no effect, because this run does not call toy; ")
    assert "norm mine (mine, 1.0) | " in out
    assert " | attention mine" in out
    row = json.loads(Path("run/result.json").read_text())
    assert row["config"]["kernels"]["toy"] == "mine"
    assert choice_name(row) == "eager, norm mine · mine"  # no model calls toy


def test_a_preset_takes_the_backend_for_each_op_that_has_it():
    assert config_groups()["kernels"]["mine"] == {
        **dict.fromkeys(("rms_norm", "linear", "rope", "mlp", "glu", "loss"), "eager"),
        **dict.fromkeys(("norm", "toy"), "mine"),
        "adamw": "auto",
        "muon": "auto",
        "decode": "blocks",
        "compile": False,
        "compile_mode": "default",
        "check": True,
        "fp8": None,
    }


def test_the_ablation_sweep_swaps_the_op(called):
    code, out, _ = called("train.py", train.main, "+sweep=ablation", "--cfg", "hydra")
    assert code == 0
    assert "kernels.toy: eager\n" in out
    assert "- kernels.toy=eager,mine\n" in out


def test_the_doctor_examines_the_op(called):
    code, out, err = called("doctor.py", doctor.main, "op=toy", "device=cpu")
    assert (code, err) == (0, "")
    assert "done     2 answers of 2 backends: " in out


@pytest.mark.parametrize("impl", ["eager", "mine"])
def test_every_answer_of_the_support_matrix_is_ok(impl):
    """But for torch.compile, which takes too long here."""
    columns = probe.matrix_probes("toy", impl, CPU)
    assert list(columns) == ["fp32", "bf16", "fp16", "small", "forward", "backward", "compile"]
    columns.pop("compile")
    for probes in columns.values():
        assert {probe.first_word(probe.probe_status(one, CPU)) for one in probes.values()} == {"ok"}


def test_the_benchmark_measures_the_backends(called, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = "op=toy", "shape=large", "impl=[eager,mine]", "dtype=float32", "device=cpu", "rounds=2", "out_dir=bench"
    code, _, err = called("bench_kernels.py", bench_kernels.main, *words)
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in Path("bench/kernels.jsonl").read_text().splitlines()]
    assert [(row["op"], row["shape"], row["impl"]) for row in rows] == [("toy", "large", i) for i in ("eager", "mine")]
    assert rows[1]["executed"] == "mine (mine, 1.0)"


def test_kernels_of_the_op_have_a_family_and_the_op_has_a_colour():
    """A profile recognises the kernels by FAMILY, the contract's or the backend's."""
    eager = dict.fromkeys(OPS, "eager")
    mine = family_patterns(eager | {"toy": "mine", "norm": "mine"})
    for kernel, op in {"silu_kernel": "toy", "my_toy_kernel": "toy", "my_norm_kernel": "norm"}.items():
        assert family_of(kernel, mine) == op
    assert family_of("my_toy_kernel", family_patterns(eager)) == "other"
    assert set(OP_COLOURS) == set(TRAINING_OPS)

"""`python -m scripts.tune`: on a CPU a trial in Triton's interpreter."""

import json
import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")
from triton.runtime.errors import OutOfResources

from kernels.mlp import triton as mlp
from kernels.norm import triton as norm
from kernels.tuned import read, tuned, write
from scripts import tune

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAME = "norm_fwd 5 float32 float32"
NARROW = "op=norm", "shape=narrow", "dtype=float32", "rounds=1"


@pytest.fixture
def tried(called, tables):
    """tried("op=norm", ...) -> (exit code, stdout, stderr)."""
    return lambda *arguments: called("tune.py", tune.main, *arguments)


def clock(seconds):
    """in_turn() with a clock of our own: `seconds` of the parameters' JSON."""
    return lambda works, device, rounds: {text: [seconds(json.loads(text))] * rounds for text in works}


def test_the_fastest_is_in_the_table_and_launched(tried, tables, monkeypatch):
    monkeypatch.setattr(tune, "in_turn", clock(lambda parameters: 1.0 / parameters["ROWS"]))
    code, out, err = tried(*NARROW)
    assert (code, err) == (0, "")
    found = read(tables[0])
    assert set(found) == {NAME, "norm_bwd 5 float32 float32"}
    assert found[NAME]["parameters"]["ROWS"] == 8192 // 8
    assert (found[NAME]["ms"], found[NAME]["default_ms"]) == pytest.approx((1e3 * 8 / 8192, 1e3 * 8 / 4096), abs=1e-4)
    assert re.search(rf"^{NAME} +narrow +forward +1\.953 +0\.977 +BLOCK_C 8, ROWS 1024, .* 8 *$", out, re.MULTILINE)
    assert ("a trial" in out) == (DEVICE.type == "cpu")
    key = "5 torch.float32 torch.float32"
    assert tuned("norm_fwd", key, norm.block(5), DEVICE) == found[NAME]["parameters"]


def test_every_candidate_gives_the_right_answer(tables, monkeypatch):
    monkeypatch.setattr(tune, "in_turn", clock(lambda parameters: 1.0))
    dtype = "bfloat16" if DEVICE.type == "cuda" else "float32"
    for op, shape in (("norm", "narrow"), ("mlp", "one_row"), ("loss", "one_row")):
        cfg = tune.Config(op, shape, dtype, "auto", 1, False)
        for row in tune.search(cfg, shape, DEVICE):
            assert (row["is wrong"], row["tried"] > 2) == (0, True), row


def test_what_is_wrong_or_does_not_fit_is_left_out(tried, tables, monkeypatch):
    """Half of a row is wrong; and three rows are what this GPU cannot take."""
    kernel = norm._norm_fwd_kernel

    class Small:
        def __getitem__(self, grid):
            def launch(*arguments, **parameters):
                if parameters["num_warps"] == 3:
                    raise OutOfResources(300_000, 232_448, "shared memory")
                kernel[grid](*arguments, **parameters)

            return launch

    monkeypatch.setattr(norm, "_norm_fwd_kernel", Small())
    monkeypatch.setattr(norm, "candidates", lambda kernel, default: [{"BLOCK_C": 4}, {"num_warps": 3}])
    monkeypatch.setattr(tune, "in_turn", clock(lambda parameters: 1.0))
    code, out, _ = tried(*NARROW)
    assert code == 0
    assert re.search(r"^norm_fwd .* 3, 1 does not fit, 1 is wrong *$", out, re.MULTILINE)
    assert read(tables[0])[NAME]["parameters"] == norm.block(5)


@pytest.mark.parametrize(("other", "kept"), [(1.05, 512), (0.99, 1024)])
def test_a_tie_keeps_the_default(tables, monkeypatch, other, kept):
    """The other's median has to be below the default's p20."""

    def in_turn(works, device, rounds):
        first, *rest = works
        return {first: [1.0, 1.0, 1.1, 1.2, 1.2], **{text: [other] for text in rest}}

    monkeypatch.setattr(norm, "candidates", lambda kernel, default: [{"ROWS": 1024}])
    monkeypatch.setattr(tune, "in_turn", in_turn)
    row = next(tune.search(tune.Config("norm", "narrow", "float32", "auto", 1, False), "narrow", DEVICE))
    assert row["parameters"]["ROWS"] == kept


def test_an_entry_is_for_all_its_shapes():
    """Half the time at one shape and 1.5 times at the other is a gain; 0.9 and 1.5 is none, nor is what did not fit."""
    usual, good, bad, wide = (json.dumps({"ROWS": rows}) for rows in (1, 2, 4, 8))
    short, long = {usual: 1.0, good: 0.5, bad: 0.9, wide: 0.1}, {usual: 1.0, good: 1.5, bad: 1.5}
    rows = [
        {"usual": usual, "p20": 0.99, "medians": medians, "shape": shape}
        for shape, medians in (("short", short), ("long", long))
    ]
    found = tune.fastest(rows)
    assert found == {"parameters": {"ROWS": 2}, "ms": 2.0, "default_ms": 2.0, "shape": "short, long"}
    del short[good], long[good]
    assert tune.fastest(rows)["parameters"] == {"ROWS": 1}


def test_interrupted(tried, tables, monkeypatch):
    """What was found stays."""

    def in_turn(works, device, rounds):
        if "programs" in next(iter(works)):
            raise KeyboardInterrupt
        return {text: [1.0] for text in works}

    monkeypatch.setattr(tune, "in_turn", in_turn)
    code, _, err = tried(*NARROW)
    assert (code, err) == (130, f"interrupted: what was found for 1 kernels is in {tables[0]}\n")
    assert set(read(tables[0])) == {NAME}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["op=gemm"], "op=gemm: choose norm, attention, mlp, loss"),
        (["shape=huge"], "shape=huge: norm has 124m, "),
        (["dtype=int8"], "dtype=int8: choose bfloat16, float16, float32"),
        (["rounds=0"], "rounds=0: it must be at least 1"),
        (["device=cpu", "keep=true"], "keep=true: the repo's tables are of GPUs"),
    ],
)
def test_mistakes(tried, arguments, message):
    code, _, err = tried(*arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"error: {message}")


def test_an_op_without_kernels_to_tune(tried, monkeypatch):
    monkeypatch.delattr(mlp, "candidates")
    assert tried("op=mlp")[2] == "error: kernels/mlp/triton.py has no candidates() to try\n"


def test_a_broken_table_is_an_error_before_the_search(tried, tables):
    write(tables[0], {})
    tables[0].write_text("{")
    code, _, err = tried(*NARROW)
    assert (code, err.count("\n")) == (1, 1)
    assert "is no table of launch parameters" in err

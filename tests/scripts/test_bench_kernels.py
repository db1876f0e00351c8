import json
import re

import pytest
import torch

from kernels.registry import OPS, Unavailable, contract, load
from runtime.timing import in_turn
from scripts import bench_kernels
from scripts.bench_kernels import error, floors, listed, measure, table

CPU = torch.device("cpu")
SMALL = {"norm": "many_rows", "mlp": "one_row", "loss": "one_row", "attention": "one_head"}


def config(op, **changes):
    settings = {"op": op, "impl": "eager", "shape": SMALL[op], "dtype": "float32", "device": "cpu", "rounds": 3}
    return bench_kernels.Config(**settings | {"keep": False, "out_dir": None} | changes)


@pytest.mark.parametrize("op", OPS)
def test_a_row_is_what_was_timed(op, monkeypatch):
    """With a clock of our own: 2 ms forward, 5 ms both, the floor 1 ms each way."""

    def in_turn(works, device, rounds):
        for work in works.values():
            work()
        ms = {"forward": 2.0, "both": 5.0}
        return {name: [ms[name.split()[1]] / 1e3 if "floor" not in name else 1e-3] * rounds for name in works}

    monkeypatch.setattr(bench_kernels, "in_turn", in_turn)
    [row] = measure(config(op), SMALL[op], CPU)
    module = contract(op)
    cost = module.cost(**module.CASES[SMALL[op]], dtype=torch.float32)
    assert (row["forward/ms"], row["backward/ms"], row["both/ms"]) == pytest.approx((2, 3, 5))
    assert row["both/tflops"] == pytest.approx(sum(flops for flops, _ in cost.values()) / 5e-3 / 1e12)
    assert row["forward/tb_per_s"] == pytest.approx(cost["forward"][1] / 2e-3 / 1e12)
    assert row["both/of_floor"] == (None if op == "attention" else pytest.approx(2 / 5))
    assert 0 < row["error/gradients"] < 1e-5
    assert json.loads(json.dumps(row)) == row
    assert f"{row['both/ms']:.3f}" in table([row])


def test_the_error_is_that_of_the_function():
    """0.1% too much is an error of 1e-3 in the outputs, and in the gradients."""

    def wrong(**inputs):
        y, stream = load("norm", "eager", CPU)(**inputs)
        return 1.001 * y, 1.001 * stream

    found = error(wrong, contract("norm"), contract("norm").CASES["many_rows"], torch.float32, CPU)
    assert found["error/out"] == pytest.approx(1e-3, rel=1e-2)
    assert found["error/gradients"] == pytest.approx(1e-3, rel=1e-2)


def test_who_lacks_what_a_shape_asks_for_is_left_out(monkeypatch, capsys):
    """triton_naive has no window. Asked for by name, it is an error."""

    def no(**inputs):
        raise AssertionError("it was called")

    functions = {"triton_naive": no, "eager": load("attention", "eager", CPU)}
    monkeypatch.setattr(bench_kernels, "contestants", lambda *_: dict(functions))
    assert [row["impl"] for row in measure(config("attention", impl=None), "window", CPU)] == ["eager"]
    assert "without triton_naive: attention=triton_naive cannot run" in capsys.readouterr().out
    with pytest.raises(Unavailable, match="triton_naive"):
        measure(config("attention", impl=["triton_naive", "eager"]), "window", CPU)


@pytest.mark.parametrize("op", ["mlp", "loss"])
def test_the_floor_is_the_products_of_the_cost(op):
    module = contract(op)
    for shape in module.SHAPES.values():
        cost, products = module.cost(**shape), module.products(**shape)
        for way in ("forward", "backward"):
            assert sum(2 * m * k * n for m, k, n in products[way]) == cost[way][0]
    small = module.CASES[SMALL[op]]
    works = floors(module, small, torch.float32, CPU)
    assert [tensor.shape for tensor in works["floor forward"]()] == [
        (m, n) for m, _, n in module.products(**small)["forward"]
    ]


def test_the_floor_of_a_norm_moves_as_many_bytes():
    module = contract("norm")
    shape = module.CASES["768"]
    copied = floors(module, shape, torch.float32, CPU)["floor backward"]()
    assert abs(2 * copied.nbytes - module.cost(**shape, dtype=torch.float32)["backward"][1]) <= 1


def test_from_the_command_line(called, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = "op=norm", "impl=[eager]", "shape=narrow", "dtype=float32", "rounds=2"
    code, out, _ = called("bench_kernels.py", bench_kernels.main, *arguments)
    assert code == 0
    assert re.search(r"^narrow +eager +\d+\.\d{3} +\d+\.\d{3} \(", out, re.MULTILINE)
    [file] = tmp_path.glob("out/*-bench-norm/kernels.jsonl")
    row = json.loads(file.read_text())
    assert (row["op"], row["impl"], row["env"]["torch"]) == ("norm", "eager", torch.__version__)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("op=gemm", "op=gemm: choose norm, attention, mlp, loss"),
        ("impl=mine", "impl=mine: norm has eager, "),
        ("shape=huge", "shape=huge: norm has 124m, "),
        ("dtype=int8", "dtype=int8: choose bfloat16, float16, float32"),
        ("rounds=0", "rounds=0: it must be at least 1"),
    ],
)
def test_mistakes(called, arguments, message):
    code, _, err = called("bench_kernels.py", bench_kernels.main, arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"error: {message}")


def test_in_turn_takes_turns():
    order = []
    works = {name: lambda name=name: order.append(name) for name in "ab"}
    samples = in_turn(works, CPU, rounds=2, seconds=0)
    assert order[-4:] == ["a", "b", "b", "a"]
    assert {name: len(each) for name, each in samples.items()} == {"a": 2, "b": 2}


def test_lists():
    assert (listed(None), listed("a"), listed(["a", 1])) == ([], ["a"], ["a", "1"])

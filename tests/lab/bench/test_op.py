import json
from types import SimpleNamespace

import pytest
import torch

from kernels.registry import OPS, KernelError, Unavailable, contract, load
from lab.bench import op as bench
from runtime import timing
from runtime.timing import time_in_turns

CPU = torch.device("cpu")
SMALL = {"norm": "many_rows", "mlp": "one_row", "loss": "one_row", "attention": "one_head"}


@pytest.mark.parametrize("op", OPS)
def test_row_has_the_times_the_rates_and_the_share_of_the_floor(op, monkeypatch):
    """The clock is fake: 2 ms forward, 5 ms both ways, a floor of 1 ms each way."""

    def fake_times(works, device, rounds):
        for work in works.values():
            work()
        ms = {"forward": 2.0, "both": 5.0}
        return {name: [1e-3 if "floor" in name else ms[name.split()[1]] / 1e3] * rounds for name in works}

    monkeypatch.setattr(bench, "time_in_turns", fake_times)
    case = SMALL.get(op, next(iter(contract(op).CASES)))
    [row], reasons = bench.measure(op, case, contract(op).CASES[case], ["eager"], "float32", 3, CPU)
    module = contract(op)
    cost = module.cost(**module.CASES[case], dtype=torch.float32)
    assert reasons == {}
    assert (row["forward/ms"], row["backward/ms"], row["both/ms"]) == pytest.approx((2, 3, 5))
    assert row["both/tflops"] == pytest.approx(sum(flops for flops, _ in cost.values()) / 5e-3 / 1e12)
    assert row["forward/tb_per_s"] == pytest.approx(cost["forward"][1] / 2e-3 / 1e12)
    assert row["both/of_floor"] == (None if op == "attention" else pytest.approx(2 / 5))
    assert 0 < row["error/gradients"] < 1e-5
    assert json.loads(json.dumps(row)) == row


def test_errors_are_relative_to_the_exact_result():
    """A result that is 0.1% too large has an error of 1e-3 in the outputs and in the gradients."""

    def too_large(**inputs):
        y, stream = load("norm", "eager", CPU)(**inputs)
        return 1.001 * y, 1.001 * stream

    errors = bench.errors(too_large, contract("norm"), contract("norm").CASES["many_rows"], torch.float32, CPU)
    assert errors["error/out"] == pytest.approx(1e-3, rel=1e-2)
    assert errors["error/gradients"] == pytest.approx(1e-3, rel=1e-2)


def test_an_exact_result_of_zero_does_not_hide_an_error():
    """dq is zero if each query sees one key. Its error is relative to the largest of the others: the ones."""
    exact, result = (torch.zeros(4), torch.ones(4)), (torch.full((4,), 1e-3), torch.ones(4))
    assert bench.largest_error(result, exact) == pytest.approx(1e-3)


@pytest.mark.parametrize("limits", [{}, {"window": 5}, {"documents": (20, 4, 16)}, {"kv_heads": 1}])
def test_errors_of_attention_by_its_last_queries(limits):
    """In float32 the error is tiny. Values that are 0.1% off show in the output and in their gradient."""
    module, shape = contract("attention"), {"shape": (2, 40, 2, 8), **limits}
    attention = load("attention", "eager", CPU)

    def wrong(q, k, v, **rest):
        return attention(q, k, 1.001 * v, **rest)

    right_errors = bench.errors(attention, module, shape, torch.float32, CPU)
    wrong_errors = bench.errors(wrong, module, shape, torch.float32, CPU)
    assert max(right_errors.values()) < 1e-6
    assert wrong_errors == pytest.approx({"error/out": 1e-3, "error/gradients": 1e-3}, rel=0.05)


def test_backend_without_an_argument_of_the_shape_is_left_out(monkeypatch):
    """This rung has no window. If it is chosen by name, that is an error. A kernel that raises leaves the others."""
    naive = "course/10_attention_naive.py"

    def fail(**inputs):
        raise AssertionError("it was called")

    functions = {naive: fail, "sdpa": fail, "eager": load("attention", "eager", CPU)}
    monkeypatch.setattr(bench, "contestants", lambda *_: dict(functions))
    window = contract("attention").CASES["window"]
    rows, reasons = bench.measure("attention", "window", window, [], "float32", 3, CPU)
    assert [row["impl"] for row in rows] == ["eager"]
    assert reasons[naive].startswith(f"unavailable: attention={naive} cannot run")
    assert reasons["sdpa"] == "failed: AssertionError: it was called"
    with pytest.raises(Unavailable, match=naive):
        bench.measure("attention", "window", window, [naive, "eager"], "float32", 3, CPU)


@pytest.mark.parametrize("op", ["mlp", "loss"])
def test_floor_has_the_flops_of_the_cost(op):
    module = contract(op)
    for shape in module.SHAPES.values():
        cost, products = module.cost(**shape), module.products(**shape)
        for way in ("forward", "backward"):
            assert sum(2 * m * k * n for m, k, n in products[way]) == cost[way][0]
    small = module.CASES[SMALL[op]]
    works = bench.floors(module, small, torch.float32, CPU)
    assert [tensor.shape for tensor in works["floor forward"]()] == [
        (m, n) for m, _, n in module.products(**small)["forward"]
    ]


def test_floor_of_norm_moves_the_bytes_of_the_cost():
    module = contract("norm")
    shape = module.CASES["768"]
    copied = bench.floors(module, shape, torch.float32, CPU)["floor backward"]()
    assert abs(2 * copied.nbytes - module.cost(**shape, dtype=torch.float32)["backward"][1]) <= 1


def test_time_in_turns_reverses_the_order_in_every_second_round():
    order = []
    works = {name: lambda name=name: order.append(name) for name in "ab"}
    samples = time_in_turns(works, CPU, rounds=2, seconds=0)
    assert order[-4:] == ["a", "b", "b", "a"]
    assert {name: len(times) for name, times in samples.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize(("seconds", "calls"), [(2**-10, 3 + 10 + 5 * 20), (2**-5, 3 + 4 + 4), (2.0, 3 + 1 + 4)])
def test_a_slow_function_is_called_less_often_before_its_turns(monkeypatch, seconds, calls):
    """3 calls for warm-up, up to 10 until they took 0.1 s, and in each of 4 rounds as many as take 0.02 s.

    If a turn has several calls, another turn tests whether the host launches them in time.
    """
    clock = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    called = []

    def work():
        called.append(1)
        clock[0] += seconds

    assert time_in_turns({"work": work}, CPU, rounds=4)["work"] == pytest.approx([seconds] * 4)
    assert len(called) == calls


def test_as_list():
    assert (bench.as_list(None), bench.as_list("a"), bench.as_list(["a", 1])) == ([], ["a"], ["a", "1"])


def test_a_backend_that_cannot_be_imported_is_a_warning(monkeypatch, capsys):
    def check_backend(op, impl, device):
        if impl == "broken":
            raise KernelError("kernels/norm/broken.py cannot be imported")
        return None if impl == "eager" else "it needs a GPU"

    monkeypatch.setattr(bench, "impls", lambda op: ["broken", "eager", "triton"])
    monkeypatch.setattr(bench, "unavailable", check_backend)
    assert list(bench.available_backends("norm", torch.device("cpu"))) == ["eager"]
    assert capsys.readouterr().err == "warning: kernels/norm/broken.py cannot be imported\n"


def test_only_an_error_of_ours_gives_its_status():
    """A library's error may have a `status`, such as that of HTTP."""
    error = RuntimeError("no answer")
    error.status = 404
    assert bench.status_of(error) == "failed: RuntimeError: no answer"
    assert bench.status_of(Unavailable("it needs an H100")) == "unavailable: it needs an H100"

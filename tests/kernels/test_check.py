"""The rule of kernels/check.py, on made-up results with a known error."""

import math
from types import SimpleNamespace

import pytest
import torch

from kernels import check
from kernels.check import broken_rule, exact_results, poisoned_memory, rounding_error
from kernels.compat import forget_functions


@pytest.mark.parametrize(
    ("error", "is_right"), [(1.9e-3, True), (-1.9e-3, True), (2.1e-3, False), (math.nan, False), (math.inf, False)]
)
def test_a_result_may_be_twice_as_far_off_as_eager(error, is_right):
    """One of 100 numbers is off by `error`, and eager's by 1e-3. Rounding adds 1.2e-6."""
    truth = torch.ones(100, dtype=torch.float64)
    result, eager = truth.float(), truth.float()
    result[7] += error
    eager[3] += 1e-3
    reason = broken_rule({"out0": result}, {"out0": eager}, {"out0": truth}, {"x": eager}, torch.float32)
    assert reason is None if is_right else reason.startswith("out0: error "), reason  # and not the error of the scale


@pytest.mark.parametrize(("error", "factor", "is_right"), [(3.9e-3, 1, True), (4.1e-3, 1, False), (0, 1.002, False)])
def test_slack_multiplies_the_bounds(error, factor, is_right):
    """Of an element, and of the scale: eager's scale is off by 1e-5, and 0.2% is more than 4 times as much."""
    truth = torch.ones(100, dtype=torch.float64)
    result, eager = factor * truth.float(), truth.float()
    result[7] += error
    eager[3] += 1e-3
    tensors = {"out0": result}, {"out0": eager}, {"out0": truth}, {"x": eager}, torch.float32
    assert broken_rule(*tensors) is not None
    reason = broken_rule(*tensors, slack=2)
    assert reason is None if is_right else "more than 4 x eager's" in reason, reason


def test_the_rounding_of_a_sum_grows_with_the_root_of_its_length():
    """Rounding errors are random, so a sum of 10^4 terms is off by 100 units and not by 10^4. A result has its own."""
    unit = 2.0**-23
    assert rounding_error(torch.float32, 10**4) == pytest.approx(100 * unit)
    assert rounding_error(torch.float32, 1) == pytest.approx(unit)
    assert rounding_error(torch.bfloat16, 10**4) == 2.0**-8


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["out0", "d_x", "d_weight"], "it returns 1 instead of 2 tensors"),
        (["out0", "out1", "d_weight"], "its backward gives no gradient of x"),
        (
            ["out0", "out1", "d_x", "d_weight", "d_eps"],
            "its backward gives a gradient of eps, and the contract gives none",
        ),
        (["out0", "out1", "d_x", "d_weight"], None),
    ],
)
def test_missing_results_are_named(names, reason):
    results = dict.fromkeys(names, torch.ones(2))
    expected = dict.fromkeys(["out0", "out1", "d_x", "d_weight"], torch.ones(2))
    truth = {name: tensor.double() for name, tensor in expected.items()}
    assert broken_rule(results, expected, truth, {"x": torch.ones(2)}, torch.float32) == reason


def test_each_result_is_measured_by_its_own_scale():
    """An error of 1e-3 is nothing beside 10^6, and wrong beside 1. An exact result of zero has no scale of its own."""
    truth = {
        "out0": torch.ones(100).double(),
        "d_x": torch.full((100,), 1e6).double(),
        "d_b": torch.zeros(100).double(),
    }
    eager = {name: exact.float() for name, exact in truth.items()}
    inputs = {"x": torch.ones(100)}
    signs = torch.tensor([1, -1]).repeat(50)  # so the scale, which has a rule of its own, is right
    for name, error, is_right in (("out0", 1e-3, False), ("d_x", 1e-3, True), ("d_b", 1e-3, True), ("d_b", 10, False)):
        results = eager | {name: eager[name] + error * signs}
        assert (broken_rule(results, eager, truth, inputs, torch.float32) is None) == is_right, (name, error)


@pytest.mark.parametrize("shape", [(10_000, 4), (4, 10_000)])
def test_the_longest_sum_goes_over_a_column_or_a_row(shape):
    """It has 10,000 terms, so rounding is 100 units; of all 40,000 terms it would be 200."""
    truth = torch.ones(8, dtype=torch.float64)
    for units, is_right in ((90, True), (110, False)):
        result = (truth + units * 2.0**-23).float()
        reason = broken_rule(
            {"d_w": result}, {"d_w": truth.float()}, {"d_w": truth}, {"x": torch.ones(shape)}, torch.float32
        )
        assert (reason is None) == is_right, reason


def test_a_common_factor_is_noticed_although_each_element_may_be_off_by_more():
    """In bf16 an element may be off by 2^-8 = 0.39%. A gradient that is scaled by bf16(dout) is off by 0.15%."""
    truth = {"d_x": torch.randn(100, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
    eager = {"d_x": truth["d_x"].bfloat16()}
    factor = torch.tensor(check.DOUT).bfloat16().item() / check.DOUT
    reason = broken_rule({"d_x": (truth["d_x"] * factor).bfloat16()}, eager, truth, {"x": eager["d_x"]}, torch.bfloat16)
    assert reason.startswith("d_x: its scale is off by 0.0014")
    twice_rounded = {"d_x": (eager["d_x"] * 1.3).bfloat16() / 1.3}
    assert broken_rule(twice_rounded, eager, truth, {"x": eager["d_x"]}, torch.bfloat16) is None


def test_results_have_the_shapes_and_dtypes_of_the_contract():
    truth = {"out0": torch.ones(2, 3).double(), "d_x": torch.ones(2, 3).double()}
    eager = {name: exact.float() for name, exact in truth.items()}
    for results, reason in (
        (eager | {"d_x": torch.ones(3, 2)}, r"d_x has shape (3, 2), but the reference has (2, 3)"),
        (eager | {"d_x": truth["d_x"]}, "d_x has dtype torch.float64, but eager has torch.float32"),
    ):
        assert broken_rule(results, eager, truth, {"x": torch.ones(2, 3)}, torch.float32) == reason


def test_a_backend_with_scales_of_its_own_is_compared_with_the_product_without_fp8(monkeypatch):
    """reference() rounds the operands to fp8 as eager does, and this backend rounds them in another way."""
    module = SimpleNamespace(reference=lambda x, fp8=False: x.round() if fp8 else x)
    monkeypatch.setattr(check, "contract", lambda op: module)
    for own_scales, exact in ((False, 1.0), (True, 1.25)):
        monkeypatch.setattr(check, "backend", lambda op, impl, own=own_scales: SimpleNamespace(OWN_SCALES=own))
        results = exact_results("linear", "mine", {"x": torch.full((1,), 1.25), "fp8": True})
        assert results["out0"].item() == exact
        assert results["out0"].dtype == torch.float64


def test_new_memory_is_nan_however_a_kernel_allocates_it():
    x = torch.ones(2, 3)
    with poisoned_memory():
        new = torch.empty(2), torch.empty_like(x), torch.empty_strided((2, 3), (3, 1)), x.new_empty(4)
        assert torch.empty(2, dtype=torch.int32).dtype == torch.int32
    assert all(tensor.isnan().all() for tensor in new)


def test_what_is_compiled_after_poisoned_memory_may_allocate():
    """In commit f0e34a1 Dynamo could no longer trace torch.empty_like ("call function marked as skipped")."""
    torch.compiler.reset()
    forget_functions()
    with poisoned_memory():
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    halve = torch.compile(lambda x: torch.div(x, 2, out=torch.empty_like(x)), backend="eager", fullgraph=True)
    assert halve(torch.ones(2)).tolist() == [0.5, 0.5]


def test_a_part_along_a_direction_is_compared():
    """1,000 of 100,000 elements are off by 0.0025: less than bf16's rounding, and 0.000025 of the scale.

    Along a direction without a part there is nothing to compare.
    """
    exact, off = torch.ones(100_000, dtype=torch.float64), torch.ones(100_000)
    off[:1000] = 1.0025
    eager, truth, inputs = {"out0": exact.float()}, {"out0": exact}, {"x": torch.ones(2, 3)}
    arguments = eager, truth, inputs, torch.bfloat16
    direction, orthogonal = torch.zeros(100_000), torch.zeros(100_000)
    direction[:1000], orthogonal[:2] = 1.0, torch.tensor([1.0, -1.0])
    assert broken_rule({"out0": off}, *arguments) is None
    assert broken_rule({"out0": off}, *arguments, along={"out0": orthogonal}) is None
    reason = broken_rule({"out0": off}, *arguments, along={"out0": direction})
    assert reason.startswith("out0: its part along the input is off by 0.0025, more than 2 x eager's 0 + 0.00169")

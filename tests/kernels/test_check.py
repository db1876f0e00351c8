"""The rule of kernels/check.py, on made-up results with a known error."""

import math

import pytest
import torch

from kernels.check import broken_rule, rounding_error


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
    assert (reason is None) == is_right, reason


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

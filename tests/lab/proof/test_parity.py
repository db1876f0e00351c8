"""The arithmetic of parity, on gradients and losses with a known error."""

import math
from types import SimpleNamespace

import pytest
import torch

from lab.proof import parity


def first_steps(gradient, losses=None):
    losses = torch.linspace(10, 9, parity.STEPS, dtype=torch.float64) if losses is None else losses
    return {"losses": losses, "weight": parity.sketch("weight", gradient)}


def test_sketches_are_as_far_apart_as_their_gradients():
    """The length of a sketch of BUCKETS sums has a noise of sqrt(1 / (2 BUCKETS)) = 2.2%."""
    torch.manual_seed(0)
    truth = torch.randn(1000, 1000)
    for size in (1e-1, 1e-3):
        noise = size * torch.randn_like(truth)
        _, distance = parity.distance(first_steps(truth + noise), first_steps(truth))
        exact = (noise.norm() / truth.norm()).item()
        assert abs(distance / exact - 1) < 4 * 0.022 * 2**0.5  # both lengths have this noise
    short = torch.randn(parity.BUCKETS)
    assert torch.equal(parity.sketch("bias", short), short)


def test_signs_of_a_sketch_depend_on_the_name_of_the_parameter():
    """With equal signs, equal errors in two parameters could cancel."""
    torch.manual_seed(0)
    gradient = torch.randn(5000)
    assert torch.equal(parity.sketch("a", gradient), parity.sketch("a", gradient.clone()))
    assert not torch.equal(parity.sketch("a", gradient), parity.sketch("b", gradient))


def test_a_sketch_stays_when_clipping_scales_the_gradient():
    gradient = torch.ones(3)
    before = parity.sketch("bias", gradient)
    gradient.mul_(0.5)
    assert torch.equal(before, torch.ones(3))


def test_the_bound_follows_the_rounding_of_eager_pytorch():
    """A run as far off as eager PyTorch in its precision is ok. A run five times as far off, or with NaN, is not."""
    torch.manual_seed(0)
    truth, noise = torch.randn(4096), 1e-2 * torch.randn(4096)
    losses = torch.full((parity.STEPS,), 9.0, dtype=torch.float64)
    loss_noise = 1e-2 * torch.randn(parity.STEPS, dtype=torch.float64)
    reference, rounded = first_steps(truth, losses), first_steps(truth + noise, losses + loss_noise)

    def judge(gradient_error, loss_error):
        return parity.judge(first_steps(truth + gradient_error, losses + loss_error), reference, rounded)

    assert judge(noise.flip(0), loss_noise.flip(0))["ok"]
    assert not judge(5 * noise, loss_noise)["ok"]
    assert not judge(noise, 5 * loss_noise)["ok"]
    assert not judge(noise * float("nan"), loss_noise)["ok"]
    assert not judge(noise, loss_noise * float("nan"))["ok"]
    assert "the first 20 losses are off by" in parity.why_parity_fails(judge(noise, 5 * loss_noise))
    assert parity.why_parity_fails(judge(noise, loss_noise)) is None
    assert parity.why_parity_fails({"ok": None, "why": "the run resumes from a checkpoint"}) is None


@pytest.mark.parametrize(("factor", "is_right"), [(1.9, True), (2.1, False), (3.9, False)])
def test_the_whole_gradient_has_a_smaller_bound_than_a_parameter(factor, is_right):
    """Every element is off by `factor` times eager's rounding. A parameter may be off by 4 times, and no more."""
    truth, rounded, run = (first_steps(torch.full((64,), 1 + error)) for error in (0, 1e-2, factor * 1e-2))
    result = parity.judge(run, truth, rounded)
    assert result["gradient_error"] == pytest.approx(factor * 1e-2, rel=1e-4)
    assert result["gradient_worst_of_bound"] < 1
    assert result["ok"] == is_right


def test_a_recorded_loss_stays_when_the_next_step_overwrites_it():
    """A step from a CUDA graph writes each loss to the same tensor."""
    recorder, loss = parity.Recorder(SimpleNamespace()), torch.tensor(0.0)
    for step in range(parity.STEPS + 5):
        recorder.add_loss(loss.fill_(step))
    assert recorder.steps["losses"].tolist() == list(range(parity.STEPS))


def judge_bias(error, true_bias):
    """Judge a run whose losses and weight are right. Its bias is off by `error`, and eager's by 1e-5 of the truth."""
    truth = first_steps(torch.ones(4096)) | {"bias": true_bias}
    rounded = first_steps(torch.ones(4096) * (1 + 1e-3)) | {"bias": true_bias * (1 + 1e-5)}
    return parity.judge(rounded | {"bias": true_bias + error}, truth, rounded)


@pytest.mark.parametrize(
    ("error", "true_bias", "of_bound"),
    [
        (0.0, 1e-3, 0),
        (1e-3, 1e-3, 1 / (4e-5 + 2**-14)),
        (math.nan, 1e-3, math.nan),
        (0.0, 0.0, 0),
        (1e-9, 0.0, math.inf),
    ],
)
def test_one_wrong_parameter_is_named(error, true_bias, of_bound):
    """The whole gradient hides an error in a small one. NaN is worse than any number.

    If the true gradient is zero, and so is eager's, every other gradient is wrong.
    """
    result = judge_bias(error, torch.full((8,), true_bias))
    assert result["ok"] == (of_bound == 0)
    if of_bound:
        assert result["gradient_worst"] == "bias"
        assert result["gradient_worst_of_bound"] == pytest.approx(of_bound, rel=1e-3, nan_ok=True)
    if not math.isnan(error):
        assert result["gradient_error"] <= result["gradient_bound"]

"""Parity's arithmetic, of gradients and losses with a known error."""

import torch

from runtime import parity


def steps(gradient, losses=None):
    losses = torch.linspace(10, 9, parity.STEPS, dtype=torch.float64) if losses is None else losses
    return {"losses": losses, "weight": parity.sketch("weight", gradient)}


def test_a_sketch_keeps_distances():
    """BUCKETS sums of a million numbers: their distance is right to its own noise, sqrt(1 / (2 BUCKETS)) = 2.2%."""
    torch.manual_seed(0)
    truth = torch.randn(1000, 1000)
    for size in (1e-1, 1e-3):
        noise = size * torch.randn_like(truth)
        _, found = parity.distance(steps(truth + noise), steps(truth))
        assert abs(found / (noise.norm() / truth.norm()).item() - 1) < 4 * 0.022 * 2**0.5  # of both lengths
    short = torch.randn(parity.BUCKETS)
    assert torch.equal(parity.sketch("bias", short), short)


def test_signs_belong_to_the_name():
    """The same in every process, others for another parameter: equal errors in two do not cancel."""
    torch.manual_seed(0)
    gradient = torch.randn(5000)
    assert torch.equal(parity.sketch("a", gradient), parity.sketch("a", gradient.clone()))
    assert not torch.equal(parity.sketch("a", gradient), parity.sketch("b", gradient))


def test_the_bound_is_what_the_precision_costs():
    """As far off as eager PyTorch in that precision is fine; five times as far is not; nor is NaN."""
    torch.manual_seed(0)
    truth, noise = torch.randn(4096), 1e-2 * torch.randn(4096)
    losses = torch.full((parity.STEPS,), 9.0, dtype=torch.float64)
    off = 1e-2 * torch.randn(parity.STEPS, dtype=torch.float64)

    def judged(gradient, loss):
        return parity.judged(
            steps(truth + gradient, losses + loss), steps(truth, losses), steps(truth + noise, losses + off)
        )

    assert judged(noise.flip(0), off.flip(0))["ok"]
    assert not judged(5 * noise, off)["ok"]
    assert not judged(noise, 5 * off)["ok"]
    assert not judged(noise * float("nan"), off)["ok"]
    assert not judged(noise, off * float("nan"))["ok"]
    found = judged(noise, 5 * off)
    assert "the first 20 losses are off by" in parity.refused(found)
    assert parity.refused(judged(noise, off)) is None
    assert parity.refused({"ok": None, "why": "it goes on from a checkpoint"}) is None

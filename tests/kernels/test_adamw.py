"""The kernel of AdamW against torch.optim.AdamW in float64."""

import pytest
import torch

from kernels.adamw import BLOCK, adamw

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # with a GPU, Triton's interpreter is off
SIZE, DECAYED = 3 * BLOCK, 3008


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_three_steps_equal_adamw_in_float64(dtype):
    """The second of three steps is refused, and changes nothing."""
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter rounds to bf16 wrongly")
    torch.manual_seed(0)
    master = torch.randn(SIZE, device=DEVICE)
    halves = [half.double().requires_grad_() for half in (master[:DECAYED], master[DECAYED:])]
    groups = [{"params": [half], "weight_decay": decay} for half, decay in zip(halves, (0.1, 0.0), strict=True)]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    exp_avg, exp_avg_sq, weight = torch.zeros_like(master), torch.zeros_like(master), master.to(dtype)
    lr, scale = torch.tensor(1e-2, device=DEVICE), torch.tensor(0.25, device=DEVICE)
    updates = 0
    for refuse in (False, True, False):
        gradient = torch.randn(SIZE, device=DEVICE).to(dtype)
        updates += not refuse
        corrections = torch.tensor([1 - 0.9**updates, 1 - 0.999**updates], device=DEVICE)
        before = [tensor.clone() for tensor in (master, exp_avg, exp_avg_sq, weight)]
        tensors = master, exp_avg, exp_avg_sq, weight, gradient, lr, scale, corrections
        with torch.no_grad():
            adamw(*tensors, torch.tensor(refuse, device=DEVICE), DECAYED, 0.9, 0.999, 1e-8, 0.1)
        if refuse:
            assert all(map(torch.equal, before, tensors[:4]))
            continue
        for half, part in zip(halves, (gradient[:DECAYED], gradient[DECAYED:]), strict=True):
            half.grad = part.double() * 0.25
        reference.step()
        # rtol: each update rounds the master once. atol: an update of up to 1e-2 is off by a few units of 2^-24
        exact = torch.cat([half.detach() for half in halves])
        torch.testing.assert_close(master.double(), exact, rtol=updates * 2**-23, atol=updates * 1e-2 * 2**-20)
        assert torch.equal(weight, master.to(dtype))

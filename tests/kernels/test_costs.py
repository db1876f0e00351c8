"""cost() against a recount: FLOPs by PyTorch's own counter, bytes by the tensors themselves."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels.registry import OPS, contract, load

CASES = [(op, case) for op in OPS for case in contract(op).CASES]


@pytest.mark.parametrize(("op", "case"), CASES)
def test_bytes_of_forward(op, case):
    """Every argument and every new output once, and what the op must keep for its backward."""
    module, shape = contract(op), contract(op).CASES[case]
    inputs = module.inputs(**shape, dtype=torch.bfloat16)
    outputs = module.reference(**inputs)
    given = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    if "lengths" in inputs:  # of q, k, v and lengths: keys and values as far as they exist
        q, k, v, lengths = given
        given = [q, lengths, *(t[row, :length] for t in (k, v) for row, length in enumerate(lengths.tolist()))]
    made = [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if out.dim() and out is not given[0]]
    rows = given[0].numel() // given[0].shape[-1]
    kept = {  # fp32 statistics of norm and attention, the pre-activation of mlp
        "norm": 2 * 4 * rows,
        "attention": 4 * rows,
        "mlp": 2 * rows * shape.get("hidden", 4 * shape["shape"][-1]),
        "loss": 0,
    }
    expected = sum(t.numel() * t.element_size() for t in given + made) + kept[op]
    assert module.cost(**shape, dtype=torch.bfloat16)["forward"][1] == expected


@pytest.mark.parametrize(("op", "case"), [(op, case) for op, case in CASES if op in ("mlp", "loss")])
def test_flops_of_products(op, case):
    module, shape = contract(op), contract(op).CASES[case]
    inputs = module.inputs(**shape, dtype=torch.float32)
    with FlopCounterMode(display=False) as forward:
        out = load(op, "eager", torch.device("cpu"))(**inputs)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    cost = module.cost(**shape)
    assert (cost["forward"][0], cost["backward"][0]) == (forward.get_total_flops(), backward.get_total_flops())


def test_flops_of_attention():
    """Without a mask the two products; with one, the pairs that it leaves, counted one by one."""
    module = contract("attention")
    inputs = module.inputs((2, 50, 3, 64), causal=False, dtype=torch.float32)
    with FlopCounterMode(display=False) as forward:
        module.reference(**inputs)
    assert module.cost((2, 50, 3, 64), causal=False)["forward"][0] == forward.get_total_flops()
    pairs = module.causal_mask(16, 77, "cpu").sum().item()
    assert module.cost((2, 16, 3, 64), keys=77)["forward"][0] == 2 * (2 * 2 * 3 * pairs * 64)
    pairs = module.length_mask(16, 77, torch.tensor([16, 60]), causal=True).sum().item()
    assert module.cost((2, 16, 3, 64), keys=77, lengths=(16, 60))["forward"][0] == 2 * (2 * 3 * pairs * 64)

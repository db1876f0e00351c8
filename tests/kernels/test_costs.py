"""cost() against a recount: FLOPs by PyTorch's own counter, bytes by the tensors themselves."""

import itertools

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
    if "lengths" in inputs or "window" in inputs:  # keys and values as far as they exist and any query sees them
        q, k, v, *limits = given
        lengths = inputs["lengths"].tolist() if "lengths" in inputs else [k.shape[1]] * len(k)
        firsts = [max(0, n - q.shape[1] + 1 - inputs.get("window", n)) for n in lengths]
        given = [q, *limits, *(t[i, a:b] for t in (k, v) for i, (a, b) in enumerate(zip(firsts, lengths, strict=True)))]
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


@pytest.mark.parametrize("case", contract("attention").CASES)
def test_the_mask_and_its_pairs(case):
    """Pair by pair: what the contract says in words, what the formula computes with, and what cost() counts."""
    module, shape = contract("attention"), contract("attention").CASES[case]
    inputs = module.inputs(**shape, dtype=torch.float32)
    (batch, queries, heads, width), keys = inputs["q"].shape, inputs["k"].shape[1]
    limits = {name: inputs[name] for name in ("causal", "lengths", "window", "starts") if name in inputs}
    mask = module.seen(queries, keys, "cpu", **limits)
    mask = torch.ones(1, dtype=torch.bool) if mask is None else mask
    pairs = 0
    for b, i, j in itertools.product(range(batch), range(queries), range(keys)) if queries < 200 else ():
        length = int(inputs["lengths"][b]) if "lengths" in inputs else keys
        place = length - queries + i  # of the query among the keys
        sees = j < length and (j <= place or not inputs["causal"])
        sees &= "window" not in inputs or place - j < inputs["window"]
        sees &= "starts" not in inputs or j >= int(inputs["starts"][b, i])
        assert sees == mask.expand(batch, 1, queries, keys)[b, 0, i, j]
        pairs += sees
    if queries < 200:
        assert module.cost(**shape)["forward"][0] == 2 * (2 * heads * pairs * width)

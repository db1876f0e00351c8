"""cost() against other counts: bytes of the tensors, FLOPs of PyTorch's own counter."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels.registry import OPS, contract, load

CASES = [(op, case) for op in OPS for case in contract(op).CASES]


@pytest.mark.parametrize(("op", "case"), CASES)
def test_forward_bytes_count_each_tensor_once(op, case):
    """The tensors are the arguments, the new outputs and what the op saves for its backward."""
    module, shape = contract(op), contract(op).CASES[case]
    inputs = module.inputs(**shape, dtype=torch.bfloat16)
    outputs = module.reference(**inputs)
    given = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    if "lengths" in inputs or "window" in inputs:  # only the keys and values that some query sees
        q, k, v, *limits = given
        lengths = inputs["lengths"].tolist() if "lengths" in inputs else [k.shape[1]] * len(k)
        firsts = [max(0, n - q.shape[1] + 1 - inputs.get("window", n)) for n in lengths]
        given = [q, *limits, *(t[i, a:b] for t in (k, v) for i, (a, b) in enumerate(zip(firsts, lengths, strict=True)))]
    made = [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if out.dim() and out is not given[0]]
    rows = given[0].numel() // given[0].shape[-1]
    saved = {  # fp32 statistics of norm and attention, the input of mlp's GELU
        "norm": 2 * 4 * rows,
        "linear": 0,
        "attention": 4 * rows,
        "mlp": 2 * rows * shape.get("hidden", 4 * shape["shape"][-1]),
        "loss": 0,
    }
    expected = sum(t.numel() * t.element_size() for t in given + made)
    forward_bytes = module.cost(**shape, dtype=torch.bfloat16)["forward"][1]
    if op in saved:
        assert forward_bytes == expected + saved[op]
    else:  # a new op, whose saved tensors this test cannot list
        assert forward_bytes >= expected


@pytest.mark.parametrize(("op", "case"), [(op, case) for op, case in CASES if op in ("linear", "mlp", "loss")])
def test_flops_of_linear_mlp_and_loss_are_those_of_their_matmuls(op, case):
    """Forward and backward FLOPs equal PyTorch's count for eager."""
    module, shape = contract(op), contract(op).CASES[case]
    inputs = module.inputs(**shape, dtype=torch.float32)
    with FlopCounterMode(display=False) as forward:
        out = load(op, "eager", torch.device("cpu"))(**inputs)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    cost = module.cost(**shape)
    assert (cost["forward"][0], cost["backward"][0]) == (forward.get_total_flops(), backward.get_total_flops())


def test_flops_of_attention_without_a_mask():
    """They equal PyTorch's count of the two matmuls."""
    module = contract("attention")
    inputs = module.inputs((2, 50, 3, 64), causal=False, dtype=torch.float32)
    with FlopCounterMode(display=False) as forward:
        module.reference(**inputs)
    assert module.cost((2, 50, 3, 64), causal=False)["forward"][0] == forward.get_total_flops()


@pytest.mark.parametrize("case", contract("attention").CASES)
def test_attention_mask_and_flops_follow_the_contract(case):
    """Each (query, key) pair is compared with the contract's text. cost() counts the visible pairs."""
    module, shape = contract("attention"), contract("attention").CASES[case]
    inputs = module.inputs(**shape, dtype=torch.float32)
    (batch, queries, heads, width), keys = inputs["q"].shape, inputs["k"].shape[1]
    limits = {name: inputs[name] for name in ("causal", "lengths", "window", "starts") if name in inputs}
    mask = module.attention_mask(queries, keys, "cpu", **limits)
    mask = torch.ones(1, dtype=torch.bool) if mask is None else mask
    pairs = 0
    for b, i, j in itertools.product(range(batch), range(queries), range(keys)) if queries < 200 else ():
        length = int(inputs["lengths"][b]) if "lengths" in inputs else keys
        position = length - queries + i  # of the query among the keys
        visible = j < length and (j <= position or not inputs["causal"])
        visible &= "window" not in inputs or position - j < inputs["window"]
        visible &= "starts" not in inputs or j >= int(inputs["starts"][b, i])
        assert visible == mask.expand(batch, 1, queries, keys)[b, 0, i, j]
        pairs += visible
    if queries < 200:
        assert module.cost(**shape)["forward"][0] == 2 * (2 * heads * pairs * width)

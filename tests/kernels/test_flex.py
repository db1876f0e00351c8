"""attn=flex: its block mask against PyTorch's own, and its forward. FlexAttention has no backward on a CPU."""

import itertools

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

from kernels import attention as contract
from kernels.attention import flex
from kernels.registry import unavailable
from tests.kernels.test_backends import assert_as_good_as_eager, case_inputs, evaluate

CPU = torch.device("cpu")
LONG = {  # of several blocks, and limits on their edges, beside and across them
    "causal": {"shape": (1, 1000, 1, 16)},
    "whole_blocks": {"shape": (1, 512, 1, 16)},
    "window": {"shape": (1, 1000, 1, 16), "window": 200},
    "window=129": {"shape": (1, 1024, 1, 16), "window": 129},
    "window_chunk": {"shape": (1, 300, 1, 16), "keys": 1000, "window": 400},
    "lengths": {"shape": (3, 300, 1, 16), "keys": 1000, "lengths": (300, 555, 1000), "window": 200},
    "lengths_full": {"shape": (3, 300, 1, 16), "keys": 1000, "lengths": (300, 555, 1000), "causal": False},
    "documents": {"shape": (2, 1000, 1, 16), "documents": (1, 130, 500, 7, 362)},
    "documents_window": {"shape": (2, 1000, 1, 16), "documents": (1, 130, 500, 7, 362), "window": 140},
}


def detached(inputs):
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


@pytest.mark.parametrize("case", [*contract.CASES, *(f"long_{case}" for case in LONG)])
def test_the_block_mask_is_pytorchs(case):
    """create_block_mask evaluates the mask everywhere; its four lists of blocks are ours, which come from two edges."""
    shape = LONG[case.removeprefix("long_")] if case.startswith("long_") else contract.CASES[case]
    inputs = contract.inputs(**shape, dtype=torch.float32)
    limits = {name: inputs.get(name) for name in ("window", "lengths", "starts")}
    causal, queries, keys = inputs["causal"], inputs["q"].shape[1], inputs["k"].shape[1]
    mine = flex.block_mask(queries, keys, CPU, causal, **limits)
    rows = len(mine.kv_num_blocks)
    theirs = create_block_mask(mine.mask_mod, rows, None, queries, keys, device="cpu")
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, places = (getattr(mine, f"{kind}_{what}") for what in ("num_blocks", "indices"))
        assert torch.equal(counts, getattr(theirs, f"{kind}_num_blocks"))
        for at in itertools.product(*map(range, counts.shape)):
            assert torch.equal(places[at][: counts[at]], getattr(theirs, f"{kind}_indices")[at][: counts[at]])
    b, q, k = torch.arange(rows).view(-1, 1, 1), torch.arange(queries).view(-1, 1), torch.arange(keys)
    seen = contract.seen(queries, keys, CPU, causal=causal, **limits)
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool) if seen is None else seen
    assert torch.equal(mine.mask_mod(b, 0, q, k).expand(rows, queries, keys), seen[:, 0].expand(rows, queries, keys))


@pytest.mark.parametrize(
    "case", ["64", "gqa", "decode", "chunk", "lengths_chunk", "window_lengths", "documents_window"]
)
def test_forward(case):
    """By itself, where it compiles itself, and inside of another torch.compile, without a graph break."""
    inputs = detached(case_inputs("attention", case, torch.float32, "cpu"))
    truth = {"out": contract.reference(**{k: v.double() if k in "qkv" else v for k, v in inputs.items()})}
    eager = {"out": contract.reference(**inputs)}
    torch.compiler.reset()
    for function in (flex.attention, torch.compile(flex.attention, fullgraph=True)):
        assert_as_good_as_eager({"out": function(**inputs)}, eager, truth, inputs, torch.float32)


def test_compiled_once_for_any_length():
    """By itself: a graph for the first length, one for all that fit into a block of the mask, and one for the rest."""
    torch.compiler.reset()
    counters.clear()
    for length in (40, 50, 60, 300, 301, 302, 200, 128, 129):
        inputs = detached(contract.inputs((1, length, 1, 16), dtype=torch.float32))
        torch.testing.assert_close(flex.attention(**inputs), contract.reference(**inputs), rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 3


def test_the_mask_is_kept_by_length():
    assert flex.kept(300, 300, CPU, True, None) is flex.kept(300, 300, CPU, True, None)
    assert flex.kept(300, 300, CPU, True, None) is not flex.kept(300, 300, CPU, True, 200)


def test_layers_share_the_mask_of_documents():
    """In the graph of a training step each of its tables is sorted once, whatever the number of layers."""
    starts = torch.zeros(2, 300, dtype=torch.int32)
    sorts = []

    def keep(graph, _):
        sorts.append(sum("sort" in str(node.target) for node in graph.graph.nodes))
        return graph

    def layers(x, starts):  # what a layer hands to the kernel, instead of the kernel, which has no backward here
        for _ in range(3):
            mask = flex.block_mask(300, 300, x.device, True, None, starts=starts)
            x = x * (mask.kv_indices + mask.full_kv_indices + mask.q_indices + mask.full_q_indices).sum()
        return x

    torch.compiler.reset()
    torch.compile(layers, fullgraph=True, backend=aot_autograd(fw_compiler=keep, partition_fn=partition()))(
        torch.ones(2, requires_grad=True), starts
    ).sum().backward()
    assert sorts == [4, 0]  # forward, backward


def partition():
    from functorch.compile import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition  # Inductor's


def test_on_a_cpu():
    assert unavailable("attention", "flex", CPU) == (
        "PyTorch's FlexAttention has no backward on a CPU: it needs an NVIDIA GPU, or choose attn=sdpa"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LONG)
def test_long_ones_against_float64(case, dtype):
    """Where blocks are left out and left unmasked, gradients included."""
    inputs = contract.inputs(**LONG[case], dtype=dtype, device="cuda")
    truth = evaluate(contract.reference, inputs, dtype=torch.float64)
    eager = evaluate(contract.reference, inputs)
    torch.compiler.reset()
    for function in (flex.attention, torch.compile(flex.attention, fullgraph=True)):
        assert_as_good_as_eager(evaluate(function, inputs), eager, truth, inputs, dtype)

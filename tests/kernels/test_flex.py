"""attn=flex: its block mask against PyTorch's, and its forward. FlexAttention has no backward on a CPU."""

import itertools

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

from kernels import attention as contract
from kernels.attention import flex
from kernels.compat import FakeTensor, FakeTensorMode
from kernels.registry import unavailable
from tests.kernels.test_backends import assert_as_good_as_eager, case_inputs, outputs_and_gradients

CPU = torch.device("cpu")
LONG = {  # several blocks of 128, and limits at the edges of blocks, next to them and inside blocks
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


# For these T attn=flex compiles three graphs: one for the first T, one for the other T that fit into one block of the
# mask, and one for the rest. None is 16 n + 8: PyTorch's own FlexAttention is wrong there in fp32 on a CPU with AVX2
# (torch 2.13). It computes the scores of 16 keys at a time, and with 8 left over it writes beyond the last key
LENGTHS = (44, 50, 60, 300, 301, 302, 205, 128, 129)


def detached(inputs):
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


@pytest.mark.parametrize("case", [*contract.CASES, *(f"long_{case}" for case in LONG)])
def test_block_mask_equals_pytorchs(case):
    """PyTorch's create_block_mask() evaluates the mask for each pair. flex.block_mask() computes the same four lists of
    blocks from the first and the last visible key. The mask itself equals the contract's.
    """
    shape = LONG[case.removeprefix("long_")] if case.startswith("long_") else contract.CASES[case]
    inputs = contract.inputs(**shape, dtype=torch.float32)
    limits = {name: inputs.get(name) for name in ("window", "lengths", "starts")}
    causal, queries, keys = inputs["causal"], inputs["q"].shape[1], inputs["k"].shape[1]
    ours = flex.block_mask(queries, keys, CPU, causal, **limits)
    rows = len(ours.kv_num_blocks)
    theirs = create_block_mask(ours.mask_mod, rows, None, queries, keys, device="cpu")
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, places = (getattr(ours, f"{kind}_{what}") for what in ("num_blocks", "indices"))
        assert torch.equal(counts, getattr(theirs, f"{kind}_num_blocks"))
        for at in itertools.product(*map(range, counts.shape)):
            assert torch.equal(places[at][: counts[at]], getattr(theirs, f"{kind}_indices")[at][: counts[at]])
    b, q, k = torch.arange(rows).view(-1, 1, 1), torch.arange(queries).view(-1, 1), torch.arange(keys)
    visible = contract.attention_mask(queries, keys, CPU, causal=causal, **limits)
    visible = torch.ones(1, 1, queries, keys, dtype=torch.bool) if visible is None else visible
    assert torch.equal(ours.mask_mod(b, 0, q, k).expand(rows, queries, keys), visible[:, 0].expand(rows, queries, keys))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["gqa", "decode", "lengths_chunk", "window_lengths", "documents_window"])
def test_forward(case):
    """The output follows the rule inside another torch.compile, without a graph break, and in direct calls.

    The other torch.compile is without Inductor, whose C++ takes 8 s to compile for each case. So only the
    case with one query is also called directly. test_forward_at_any_length calls the other kernel directly.
    """
    inputs = detached(case_inputs("attention", case, torch.float32, "cpu"))
    truth = {"out": contract.reference(**{k: v.double() if k in "qkv" else v for k, v in inputs.items()})}
    eager = {"out": contract.reference(**inputs)}
    torch.compiler.reset()
    functions = [torch.compile(flex.attention, fullgraph=True, backend="aot_eager")]
    if case == "decode":
        functions.append(flex.attention)
    for function in functions:
        assert_as_good_as_eager({"out": function(**inputs)}, eager, truth, inputs, torch.float32)


@pytest.fixture(scope="module")
def forward_at_lengths():
    """The inputs and the output at each of LENGTHS, and the number of graphs that were compiled for all of them."""
    torch.compiler.reset()
    counters.clear()
    results = {}
    for length in LENGTHS:
        inputs = detached(contract.inputs((1, length, 1, 16), dtype=torch.float32))
        results[length] = inputs, flex.attention(**inputs)
    return results, counters["stats"]["unique_graphs"]


@pytest.mark.exhaustive
def test_three_graphs_serve_all_lengths(forward_at_lengths):
    _, graphs = forward_at_lengths
    assert graphs == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("length", LENGTHS)
def test_forward_at_any_length(forward_at_lengths, length):
    inputs, out = forward_at_lengths[0][length]
    torch.testing.assert_close(out, contract.reference(**inputs), rtol=1e-5, atol=1e-5)


def test_a_mask_stays_in_memory():
    """Equal arguments give the same mask, however many others were made: a captured CUDA graph may still read it."""
    mask = flex.cached_block_mask(300, 300, CPU, True, None)
    for window in range(1, 200):
        assert flex.cached_block_mask(300, 300, CPU, True, window) is not mask
    assert flex.cached_block_mask(300, 300, CPU, True, None) is mask


def test_a_fake_mask_is_not_cached(monkeypatch):
    """Its memory could not be read outside its FakeTensorMode."""
    monkeypatch.setattr(flex, "compiled_version", lambda function: lambda q, k, v, scale, mask: mask)
    with FakeTensorMode():
        first, second = (flex.attention(*[torch.empty(1, 301, 1, 16)] * 3) for _ in range(2))
    real = flex.attention(*[torch.empty(1, 301, 1, 16)] * 3)
    assert first is not second
    assert [isinstance(mask.kv_indices, FakeTensor) for mask in (first, second, real)] == [True, True, False]


def test_layers_share_the_mask_of_documents():
    """The graph of three layers makes each of the mask's four lists once: two here, and two in PyTorch by sorting."""
    starts = torch.zeros(2, 300, dtype=torch.int32)
    lists = []

    def keep(graph, _):
        targets = [str(node.target) for node in graph.graph.nodes]
        lists.append(sum("list_blocks" in target or "sort" in target for target in targets))
        return graph

    def layers(x, starts):  # uses the mask without the kernel, which has no backward on a CPU
        for _ in range(3):
            mask = flex.block_mask(300, 300, x.device, True, None, starts=starts)
            x = x * (mask.kv_indices + mask.full_kv_indices + mask.q_indices + mask.full_q_indices).sum()
        return x

    torch.compiler.reset()
    torch.compile(layers, fullgraph=True, backend=aot_autograd(fw_compiler=keep, partition_fn=inductor_partition()))(
        torch.ones(2, requires_grad=True), starts
    ).sum().backward()
    assert lists == [4, 0]  # forward, backward


def inductor_partition():
    """Return the function by which Inductor splits a graph into forward and backward."""
    from functorch.compile import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition


def test_flex_is_unavailable_on_a_cpu():
    assert unavailable("attention", "flex", CPU) == (
        "PyTorch's FlexAttention has no backward on a CPU: it needs an NVIDIA GPU, or choose attn=sdpa"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LONG)
def test_long_cases_against_float64(case, dtype):
    """Outputs and gradients follow the rule. The cases have blocks that are skipped and blocks without a mask."""
    inputs = contract.inputs(**LONG[case], dtype=dtype, device="cuda")
    truth = outputs_and_gradients(contract.reference, inputs, dtype=torch.float64)
    eager = outputs_and_gradients(contract.reference, inputs)
    torch.compiler.reset()
    for function in (flex.attention, torch.compile(flex.attention, fullgraph=True)):
        assert_as_good_as_eager(outputs_and_gradients(function, inputs), eager, truth, inputs, dtype)

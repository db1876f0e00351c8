"""attn=cudnn, mem_efficient and math: the pinned backend of PyTorch's runs, or its reason is told."""

import functools
import warnings

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend

from kernels import attention as contract
from kernels.attention import _sdpa, cudnn, math, mem_efficient, sdpa
from kernels.registry import Unavailable, describe, unavailable
from tests.kernels.test_backends import assert_as_good_as_eager, case_inputs, evaluate

FUSED = {  # by these operators
    sdpa: "_scaled_dot_product_flash_attention_for_cpu",
    cudnn: "_scaled_dot_product_cudnn_attention",
    mem_efficient: "_scaled_dot_product_efficient_attention",
}


def dispatched(function, inputs):
    """Names of the operators that run, forward and backward."""
    with sdpa._Record() as record:
        evaluate(function, inputs)
    return record.names


def compiled_in(function, inputs):
    """Names of the operators in the graphs that torch.compile makes, forward and backward."""
    names = []

    def keep(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compiler.reset()
    evaluate(torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=keep)), inputs)
    return names


@pytest.mark.parametrize("ran", [dispatched, compiled_in])
@pytest.mark.parametrize("case", ["64", "gqa", "chunk", "lengths"])
def test_math_is_pinned(ran, case):
    """Where PyTorch itself takes another backend, uncompiled and in what torch.compile makes."""
    inputs = case_inputs("attention", case, torch.float32, "cpu")
    fused = FUSED[sdpa]
    assert any(fused in name for name in ran(sdpa.attention, inputs))
    names = ran(math.attention, inputs)
    assert not any("_scaled_dot_product" in name for name in names)
    assert any("softmax" in name for name in names)


@pytest.mark.parametrize("case", ["64", "full", "gqa", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_inductor_leaves_math_as_it_is(case, dtype):
    """It looks for attention among operators, to put a fused one there."""
    inputs = case_inputs("attention", case, dtype, "cpu")
    torch.compiler.reset()
    counters.clear()
    evaluate(torch.compile(math.attention, fullgraph=True), inputs)
    assert counters["inductor"]["pattern_matcher_count"] > 0
    assert counters["inductor"]["fuse_attention"] == 0


def usable(params, debug):
    """As an efficient backend would answer that wants as many heads of keys."""
    return params.query.shape[1] == params.key.shape[1]


def test_the_reason_is_pytorchs(monkeypatch, recwarn):
    """Of all that PyTorch says when no backend takes the very tensors, the backend's own part; it is heard once."""

    def refuse(query, key, value, **kwargs):
        warnings.warn("Memory Efficient kernel not used because:", stacklevel=1)
        warnings.warn("Memory Efficient attention has been runtime disabled.", stacklevel=1)
        warnings.warn("CuDNN attention kernel not used because: (Triggered internally at sdp.cpp:1)", stacklevel=1)
        warnings.warn(
            f"Got {query.shape[1]} and {key.shape[1]} heads. (Triggered internally at sdp.cpp:2)", stacklevel=1
        )
        warnings.warn("Only equal ones are taken.", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    inputs = case_inputs("attention", "gqa", torch.float32, "cpu")
    with pytest.raises(Unavailable) as told:
        _sdpa.pinned(SDPBackend.CUDNN_ATTENTION, usable, **inputs)
    assert str(told.value) == "PyTorch's cudnn attention refuses: Got 6 and 2 heads. Only equal ones are taken."
    assert len(recwarn) == 0


@pytest.mark.parametrize("case", ["64", "window"])
def test_what_is_not_refused_is_pinned_and_compiled(case):
    """And afterwards PyTorch chooses as before."""
    inputs = case_inputs("attention", case, torch.float32, "cpu")
    allowed = functools.partial(_sdpa.pinned, SDPBackend.MATH, usable)
    for ran in (dispatched, compiled_in):
        assert not any("_scaled_dot_product" in name for name in ran(allowed, inputs))
    torch.testing.assert_close(allowed(**inputs), contract.reference(**inputs), rtol=1e-5, atol=1e-5)
    assert any(FUSED[sdpa] in name for name in dispatched(sdpa.attention, inputs))


def test_on_a_cpu():
    cpu = torch.device("cpu")
    assert unavailable("attention", "math", cpu) is None
    assert unavailable("attention", "cudnn", cpu) == "cuDNN needs an NVIDIA GPU; on a CPU choose attn=sdpa"
    assert unavailable("attention", "mem_efficient", cpu) == "it needs an NVIDIA GPU; on a CPU choose attn=sdpa"
    assert (
        describe("attention", "math", shape=(2, 64, 4, 32), dtype=torch.float32) == f"math (torch {torch.__version__})"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("ran", [dispatched, compiled_in])
@pytest.mark.parametrize("module", [cudnn, mem_efficient], ids=lambda module: module.__name__)
def test_a_fused_backend_is_pinned(module, ran):
    inputs = case_inputs("attention", "64", torch.bfloat16, "cuda")
    taken = [name for name in ran(module.attention, inputs) if "_scaled_dot_product" in name]
    assert len(taken) == 2  # forward and backward
    assert all(FUSED[module] in name for name in taken)
    told = module.detail(**inputs)
    assert f"torch {torch.__version__}" in told
    assert ("cudnn" in told) == (module is cudnn)


@pytest.mark.gpu
def test_refusals_of_a_gpu():
    """cuDNN's attention has no fp32, and the memory-efficient one no shared heads; PyTorch says so."""
    with pytest.raises(Unavailable, match=r"^PyTorch's cudnn attention refuses: .*dtype[^\n]*$"):
        cudnn.detail(**case_inputs("attention", "64", torch.float32, "cuda"))
    with pytest.raises(Unavailable, match=r"^PyTorch's efficient attention refuses: .*num_heads[^\n]*$"):
        mem_efficient.attention(**case_inputs("attention", "gqa", torch.bfloat16, "cuda"))
    inputs = case_inputs("attention", "64", torch.float32, "cuda")
    truth = evaluate(contract.reference, inputs, dtype=torch.float64)
    got = evaluate(mem_efficient.attention, inputs)
    assert_as_good_as_eager(got, evaluate(math.attention, inputs), truth, inputs, torch.float32)

"""attn=cudnn, mem_efficient and math: the pinned backend of PyTorch runs, or the error has PyTorch's reason."""

import warnings

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import attention as contract
from kernels.attention import _sdpa, cudnn, math, mem_efficient, sdpa
from kernels.registry import Unavailable, describe, unavailable
from tests.kernels.test_backends import assert_as_good_as_eager, case_inputs, outputs_and_gradients

FUSED = {  # module -> the operator that it runs
    sdpa: "_scaled_dot_product_flash_attention_for_cpu",
    cudnn: "_scaled_dot_product_cudnn_attention",
    mem_efficient: "_scaled_dot_product_efficient_attention",
}


def eager_operators(function, inputs):
    """Return the names of the operators that run, forward and backward."""
    with sdpa.OperatorRecorder() as record:
        outputs_and_gradients(function, inputs)
    return record.names


def compiled_operators(function, inputs):
    """Return the names of the operators in the graphs of torch.compile, forward and backward."""
    names = []

    def keep(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compiler.reset()
    outputs_and_gradients(torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=keep)), inputs)
    return names


@pytest.mark.parametrize("operators", [eager_operators, compiled_operators])
@pytest.mark.parametrize("case", ["64", "gqa", "chunk", "lengths"])
def test_math_is_pinned(operators, case):
    """PyTorch alone would choose a fused backend for these inputs."""
    inputs = case_inputs("attention", case, torch.float32, "cpu")
    fused = FUSED[sdpa]
    assert any(fused in name for name in operators(sdpa.attention, inputs))
    names = operators(math.attention, inputs)
    assert not any("_scaled_dot_product" in name for name in names)
    assert any("softmax" in name for name in names)


def search_without_code(graph, inputs):
    """Compile as Inductor does, but run its graphs as they are: the C++ takes 4 s a case, and the search 0.3 s."""
    return compile_fx(graph, inputs, inner_compile=lambda graph, inputs, **_: make_boxed_func(graph.forward))


def count_fused(function, inputs):
    """Return the number of times that Inductor finds attention in the graphs of the function."""
    torch.compiler.reset()
    counters.clear()
    outputs_and_gradients(torch.compile(function, fullgraph=True, backend=search_without_code), inputs)
    assert counters["inductor"]["pattern_matcher_count"] > 0
    return counters["inductor"]["fuse_attention"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["64", "full", "gqa", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_inductor_does_not_fuse_math(case, dtype):
    """Inductor searches graphs for attention written as single operators, and replaces it by a fused operator."""
    assert count_fused(math.attention, case_inputs("attention", case, dtype, "cpu")) == 0


def test_inductor_fuses_attention_with_a_positive_scale():
    """Without the negated q and scale of math.py, it does. So the search of the test above finds attention."""

    def attention(q, k, v, **limits):
        with sdpa_kernel(SDPBackend.MATH):
            return sdpa.attention(q, k, v, **limits)

    assert count_fused(attention, case_inputs("attention", "full", torch.float32, "cpu")) > 0


def supports_equal_heads(params, debug):
    """Answer for a backend that needs as many key heads as query heads."""
    return params.query.shape[1] == params.key.shape[1]


def test_the_error_has_pytorchs_reason_for_this_backend(monkeypatch, recwarn):
    """PyTorch warns about all backends. The error has only the warnings of this backend, and no warning is printed."""

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
    with pytest.raises(Unavailable) as error:
        _sdpa.attention_of(SDPBackend.CUDNN_ATTENTION, supports_equal_heads, __name__)(**inputs)
    assert str(error.value) == "PyTorch's cudnn attention refuses: Got 6 and 2 heads. Only equal ones are taken."
    assert len(recwarn) == 0


@pytest.mark.parametrize("case", ["64", "window"])
def test_supported_inputs_run_on_the_pinned_backend(case):
    """The pin ends with the call: afterwards PyTorch chooses again."""
    inputs = case_inputs("attention", case, torch.float32, "cpu")
    allowed = _sdpa.attention_of(SDPBackend.MATH, supports_equal_heads, __name__)
    for operators in (eager_operators, compiled_operators):
        assert not any("_scaled_dot_product" in name for name in operators(allowed, inputs))
    torch.testing.assert_close(allowed(**inputs), contract.reference(**inputs), rtol=1e-5, atol=1e-5)
    assert any(FUSED[sdpa] in name for name in eager_operators(sdpa.attention, inputs))


def test_only_math_runs_on_a_cpu():
    cpu = torch.device("cpu")
    assert unavailable("attention", "math", cpu) is None
    assert unavailable("attention", "cudnn", cpu) == "cuDNN needs an NVIDIA GPU; on a CPU choose attn=sdpa"
    assert unavailable("attention", "mem_efficient", cpu) == "it needs an NVIDIA GPU; on a CPU choose attn=sdpa"
    assert (
        describe("attention", "math", shape=(2, 64, 4, 32), dtype=torch.float32) == f"math (torch {torch.__version__})"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("operators", [eager_operators, compiled_operators])
@pytest.mark.parametrize("module", [cudnn, mem_efficient], ids=lambda module: module.__name__)
def test_a_fused_backend_is_pinned(module, operators):
    """Forward and backward run its operators, and detail() names the versions."""
    inputs = case_inputs("attention", "64", torch.bfloat16, "cuda")
    names = [name for name in operators(module.attention, inputs) if "_scaled_dot_product" in name]
    assert len(names) == 2  # forward and backward
    assert all(FUSED[module] in name for name in names)
    detail = module.detail(**inputs)
    assert f"torch {torch.__version__}" in detail
    assert ("cudnn" in detail) == (module is cudnn)


@pytest.mark.gpu
def test_unsupported_inputs_on_a_gpu_raise_with_pytorchs_reason():
    """cuDNN does not support fp32, and memory-efficient attention does not support heads that share keys.

    Memory-efficient attention follows the rule of kernels/check.py in fp32.
    """
    with pytest.raises(Unavailable, match=r"^PyTorch's cudnn attention refuses: .*dtype[^\n]*$"):
        cudnn.detail(**case_inputs("attention", "64", torch.float32, "cuda"))
    with pytest.raises(Unavailable, match=r"^PyTorch's efficient attention refuses: .*num_heads[^\n]*$"):
        mem_efficient.attention(**case_inputs("attention", "gqa", torch.bfloat16, "cuda"))
    inputs = case_inputs("attention", "64", torch.float32, "cuda")
    truth = outputs_and_gradients(contract.reference, inputs, dtype=torch.float64)
    got = outputs_and_gradients(mem_efficient.attention, inputs)
    assert_as_good_as_eager(got, outputs_and_gradients(math.attention, inputs), truth, inputs, torch.float32)

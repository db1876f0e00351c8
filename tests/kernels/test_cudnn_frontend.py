"""attn=cudnn_frontend: the graphs that it builds, and its refusals. A stand-in replaces the package.

On an NVIDIA GPU with the package, test_backends.py tests cuDNN's kernels.
"""

import os
import sys

import pytest
import torch

from kernels import attention as contract
from kernels.attention import _cudnn_graphs, cudnn_frontend
from kernels.packed import gradient_buffer, gradient_views
from kernels.registry import Unavailable, describe, load, unavailable
from tests.kernels import cudnn_package
from tests.kernels.test_backends import assert_as_good_as_eager, case_inputs, outputs_and_gradients

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PLANS = _cudnn_graphs.plan_forward, _cudnn_graphs.plan_backward


@pytest.fixture
def package(monkeypatch):
    """Install the stand-in. It runs on a CPU, where there are no handles and streams."""
    monkeypatch.setitem(sys.modules, "cudnn", cudnn_package.PACKAGE)
    monkeypatch.setattr(_cudnn_graphs, "handle_of", lambda device: None)
    for plan in PLANS:
        plan.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(_cudnn_graphs, "_captured", {})
    yield cudnn_package
    for plan in PLANS:
        plan.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [name for name, shape in contract.CASES.items() if "documents" not in shape])
def test_the_graphs_are_right(case, dtype, package):
    inputs = case_inputs("attention", case, dtype, "cpu")
    if case == "T=1":
        with pytest.raises(Unavailable, match=r"takes sequences of more than one token in training: choose attn=sdpa$"):
            cudnn_frontend.attention(**inputs)
        with pytest.raises(Unavailable, match="in training"):  # only k and v are trained
            cudnn_frontend.attention(**inputs | {"q": inputs["q"].detach()})
        inputs = {name: value.detach() if name in "qkv" else value for name, value in inputs.items()}
    truth = outputs_and_gradients(contract.reference, inputs, dtype=torch.float64)
    eager = outputs_and_gradients(load("attention", "eager", CPU), inputs)
    assert_as_good_as_eager(outputs_and_gradients(cudnn_frontend.attention, inputs), eager, truth, inputs, dtype)


@pytest.mark.parametrize("case", ["64", "gqa", "window_chunk", "lengths"])
def test_compiled_it_is_one_graph(case, package):
    inputs = case_inputs("attention", case, torch.bfloat16, "cpu")
    expected = outputs_and_gradients(cudnn_frontend.attention, inputs)
    torch.compiler.reset()
    compiled = torch.compile(cudnn_frontend.attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outputs_and_gradients(compiled, inputs), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_there_are_no_gradients_with_lengths(compiled, package):
    """The forward runs, and the backward raises instead of ignoring the lengths."""
    inputs = case_inputs("attention", "lengths_chunk", torch.bfloat16, "cpu")
    torch.compiler.reset()
    function = torch.compile(cudnn_frontend.attention, backend="aot_eager") if compiled else cudnn_frontend.attention
    out = function(**inputs).float().sum()
    with pytest.raises(
        Unavailable, match=r"^attention=cudnn_frontend has no gradients with lengths: choose attn=sdpa$"
    ):
        out.backward()


def test_old_plans_are_dropped_but_not_those_of_a_cuda_graph(package, monkeypatch):
    def attend(length):
        cudnn_frontend.attention(*torch.zeros(3, 1, length, 1, 8, dtype=torch.bfloat16))

    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        attend(2)
    for length in range(3, 4 + _cudnn_graphs.MAX_PLANS):
        attend(length)
    assert _cudnn_graphs.plan_forward.cache_info().currsize == _cudnn_graphs.MAX_PLANS
    [plan] = _cudnn_graphs._captured.values()
    assert plan.graph.inputs["q"].dim == [1, 1, 2, 8]


def test_a_shape_is_planned_once_and_its_tensors_are_not_copied(package, monkeypatch):
    """q, k and v are views of one tensor, and the gradients are side by side in one buffer."""
    inputs = case_inputs("attention", "packed", torch.bfloat16, "cpu")
    q, k, v = (inputs[name] for name in "qkv")
    calls, run = [], cudnn_frontend.run
    monkeypatch.setattr(cudnn_frontend, "run", lambda plan, *tensors: calls.append(tensors) or run(plan, *tensors))
    built = package.pygraph.built
    for _ in range(2):
        grads = torch.autograd.grad(cudnn_frontend.attention(**inputs).sum(), [q, k, v])
    assert package.pygraph.built - built == 2  # forward and backward
    for tensors in calls:
        assert [tensor.data_ptr() for tensor in tensors[:3]] == [tensor.data_ptr() for tensor in (q, k, v)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in grads}) == 1
    assert [grad.stride() for grad in grads] == [view.stride() for view in gradient_views(gradient_buffer(q, k), q, k)]
    cudnn_frontend.attention(**inputs | {"scale": 0.5})
    assert package.pygraph.built - built == 3


def test_unaligned_and_expanded_tensors_are_copied(package):
    """cuDNN would end with a misaligned address. The stand-in asserts that there is none."""
    packed = torch.randn(2, 20, 3 * 2, 68, dtype=torch.bfloat16)
    q, k, v = packed[..., 4:].split(2, dim=2)
    k = k[:, :, :1].expand(2, 20, 2, 64)
    q, k, v = (tensor.requires_grad_() for tensor in (q.detach(), k.detach(), v.detach()))
    inputs = {"q": q, "k": k, "v": v}
    expected = outputs_and_gradients(contract.reference, inputs)
    got = outputs_and_gradients(cudnn_frontend.attention, inputs)
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.05)


def test_a_single_sequence_with_stride_0_is_copied(package):
    """is_contiguous() is true although the address is odd, because it ignores the stride of a single sequence."""
    memory = torch.randn(4 * 20 * 2 * 64 + 1, dtype=torch.bfloat16)
    tensors = [memory.as_strided((1, 20, 2, 64), (0, 128, 64, 1), 1 + 2560 * i) for i in range(4)]
    assert all(tensor.is_contiguous() for tensor in tensors)
    copies = [cudnn_frontend.align_for_cudnn(tensor) for tensor in tensors]
    assert {copy.stride() for copy in copies} == {(2560, 128, 64, 1)}
    *qkv, dout = tensors
    q, k, v = (tensor.detach().requires_grad_() for tensor in qkv)
    grads = torch.autograd.grad(cudnn_frontend.attention(q, k, v), [q, k, v], dout)  # the stand-in checks addresses
    expected = torch.autograd.grad(contract.reference(q, k, v), [q, k, v], dout)
    torch.testing.assert_close(grads, expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2, 8, 2, 64), torch.float32, "takes bfloat16 or float16, not torch.float32: choose attn=sdpa"),
        (
            (2, 8, 2, 60),
            torch.bfloat16,
            "takes heads of a multiple of 8 channels, and up to 256, not 60: choose attn=sdpa",
        ),
        (
            (2, 8, 2, 264),
            torch.float16,
            "takes heads of a multiple of 8 channels, and up to 256, not 264: choose attn=sdpa",
        ),
    ],
)
def test_what_it_refuses(shape, dtype, reason, package):
    inputs = contract.inputs(shape, dtype=dtype)
    for function in (cudnn_frontend.attention, cudnn_frontend.detail):
        with pytest.raises(Unavailable) as error:
            function(**inputs)
        assert str(error.value) == f"attention=cudnn_frontend {reason}"
    assert cudnn_frontend.refusal(**inputs) in reason


def test_the_reason_of_cudnn_is_one_line(package, monkeypatch):
    monkeypatch.setattr(cudnn_frontend, "refusal", lambda q, k, v: None)
    for function in (cudnn_frontend.attention, cudnn_frontend.detail):
        with pytest.raises(Unavailable) as error:
            function(**contract.inputs((2, 8, 2, 60), dtype=torch.bfloat16))
        assert str(error.value) == (
            "attention=cudnn_frontend: cuDNN 9.19.0 refuses: hidden_dim should be multiple of 8: choose attn=sdpa"
        )


def test_its_description_has_both_versions(package):
    built = package.pygraph.built
    description = describe("attention", "cudnn_frontend", shape=(2, 8, 2, 64), dtype=torch.bfloat16)
    assert description == "cudnn_frontend (cudnn 91900, nvidia-cudnn-frontend 1.32.0)"
    assert package.pygraph.built - built == 2  # so a call that cuDNN refuses fails before a model runs


def test_where_it_cannot_run(package, monkeypatch):
    def reason():
        return unavailable("attention", "cudnn_frontend", GPU)

    assert unavailable("attention", "cudnn_frontend", CPU).startswith(
        "it needs an NVIDIA GPU of compute capability 8.0"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert reason() is None
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    assert reason() == (
        "nvidia-cudnn-frontend has loaded cuDNN 91900, and PyTorch 92000: install only PyTorch's in this environment"
    )

    def fail():
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    monkeypatch.setattr(package.PACKAGE, "backend_version", fail)
    assert reason() == (
        "nvidia-cudnn-frontend finds no cuDNN library (Unable to find symbol cudnnGetVersion): pip install "
        "nvidia-cudnn-cu13"
    )
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert reason().endswith(": pip install 'nvidia-cudnn-frontend>=1.32'")
    assert "\n" not in reason()


def test_the_front_end_does_not_look_for_cudnn_in_ld_library_path(tmp_path, monkeypatch):
    """It would find another library there than PyTorch, which looks into its own package first."""
    (tmp_path / "cudnn.py").write_text("import os\nseen = dict(os.environ)\npygraph = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cudnn", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    assert "NVIDIA GPU" in unavailable("attention", "cudnn_frontend", CPU)
    assert "LD_LIBRARY_PATH" not in sys.modules.pop("cudnn").seen
    assert os.environ["LD_LIBRARY_PATH"] == "/somewhere"

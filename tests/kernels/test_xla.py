"""kernels/xla.py: PyTorch's tensors in JAX without copies, what the backward keeps, and what is refused.

test_backends.py compares the results of every backend `xla` with float64.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import attention, mlp, norm, xla
from kernels.check import outputs_and_gradients
from kernels.compat import FakeTensorMode
from kernels.registry import OPS, AttnConfig, KernelsConfig, Unavailable, backend, impls, load, unavailable
from model.capture import StepRunner
from model.config import GPTConfig
from model.optim import OptimConfig
from model.optimizers import make_optimizer
from model.step import build, train_step
from runtime.config import UserError
from tests.kernels.test_backends import case_inputs

CPU = torch.device("cpu")
if reason := xla.unavailable(CPU):
    pytest.skip(reason, allow_module_level=True)
SMALL = GPTConfig(block_size=16, vocab_size=64, n_layer=1, n_head=2, n_embd=32, pos="learned", bias=True, dropout=0.0)


def addresses(tensors):
    return [tensor.data_ptr() for tensor in tensors]


def test_tensors_and_arrays_share_their_memory():
    """In both directions, for every dtype that the ops take. JAX would make int32 of int64 by default."""
    dtypes = torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32
    tensors = [torch.arange(60).view(3, 20).to(dtype) for dtype in dtypes]
    with xla.settings():
        arrays = [xla.to_jax(tensor) for tensor in tensors]
        back = [torch.from_dlpack(array) for array in arrays]
    assert [array.unsafe_buffer_pointer() for array in arrays] == addresses(tensors)
    assert [(tensor.dtype, tensor.data_ptr()) for tensor in back] == [(t.dtype, t.data_ptr()) for t in tensors]


def test_what_xla_cannot_take_is_copied_and_right():
    """An address that is no multiple of 64 bytes, and gaps between rows."""
    wide = torch.randn(65)
    for tensor in (wide[1:], torch.randn(6, 16)[:, :8], torch.randn(5, 7).T, torch.randn(8)[:1].expand(3)):
        array = xla.to_jax(tensor)
        assert array.unsafe_buffer_pointer() % xla.ALIGNMENT == 0
        assert torch.equal(torch.from_dlpack(array), tensor)


@pytest.mark.parametrize("op", ["norm", "rms_norm"])
@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_equal_gradients_are_one_tensor(op, dtype, count):
    """Those of x and of the residual, if their dtypes are equal: XLA writes only one."""
    x, residual = torch.randn(4, 16).to(dtype).requires_grad_(), torch.randn(4, 16, requires_grad=True)
    y, stream = load(op, "xla", CPU)(x, residual, torch.ones(16), *([None] if op == "norm" else []))
    gradients = torch.autograd.grad(y.square().sum() + stream.square().sum(), (x, residual))
    assert len(set(addresses(gradients))) == count
    assert [gradient.dtype for gradient in gradients] == [dtype, torch.float32]
    torch.testing.assert_close(gradients[0].float(), gradients[1], rtol=2**-8, atol=0)


def test_a_missing_device_has_its_reason_and_a_client_without_order_is_refused(monkeypatch):
    def start():
        raise RuntimeError("cuDNN 9.1 is too old\nwith a second line")

    monkeypatch.setattr(xla, "start_jax", start)
    gpu = torch.device("cuda")
    assert xla.unavailable(gpu).startswith("this JAX has no device cuda (cuDNN 9.1 is too old): pip install")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT", "1")
    assert "JAX does not wait for PyTorch's stream" in xla.unavailable(gpu)
    assert xla.unavailable(CPU) is None


def saved(output):
    return addresses(output.grad_fn.saved_tensors)


def test_the_backward_keeps_inputs_and_outputs_as_they_are():
    """A norm keeps the stream that it returns, and an mlp its inputs and the product of its first matmul."""
    inputs = norm.inputs((4, 64), bias=False, dtype=torch.bfloat16)
    y, stream = load("norm", "xla", CPU)(**inputs)
    assert sorted(saved(y)) == sorted(addresses([inputs["weight"], stream]))
    inputs = mlp.inputs((4, 64), dtype=torch.bfloat16)
    y = load("mlp", "xla", CPU)(**inputs)
    own = set(addresses(inputs[name] for name in ("x", "w_fc", "b_fc", "w_proj")))
    [product] = [tensor for tensor in y.grad_fn.saved_tensors if tensor.data_ptr() not in own]
    assert own < set(saved(y))
    assert (product.shape, product.dtype) == ((4, 256), torch.bfloat16)


def is_backward_of_mlp(function):
    return xla.programs[function] == ("mlp", "backward")


def test_only_the_gradients_that_are_needed_are_computed():
    """Without gradients, autograd keeps nothing. A gradient equals the one that is computed with all others."""
    inputs = case_inputs("mlp", "one_row", torch.float32, CPU)
    function = load("mlp", "xla", CPU)
    every = outputs_and_gradients(function, inputs)
    for name in ("w_fc", "b_fc", "b_proj"):
        inputs[name] = inputs[name].detach()
    some = outputs_and_gradients(function, inputs)
    assert some.keys() == {"out0", "d_x", "d_w_proj"}
    for name, result in some.items():
        torch.testing.assert_close(result, every[name])
    backwards = [(function, shapes) for (function, *_), shapes in xla.compiled.items() if is_backward_of_mlp(function)]
    with xla.settings() as jax:
        function_, shapes = backwards[-1]
        assert len(jax.tree.leaves(jax.eval_shape(function_, *shapes))) == 2
    with torch.no_grad():
        assert function(**inputs).grad_fn is None


def test_fake_tensors_have_the_shapes_of_real_ones():
    """So the memory of a step is predicted with what the backward keeps."""
    results = []
    for mode in (torch.enable_grad(), FakeTensorMode()):
        with mode:
            inputs = norm.inputs((4, 64), residual_dtype=torch.float32, dtype=torch.bfloat16)
            outputs = load("norm", "xla", CPU)(**inputs)
            kept = [(tensor.shape, tensor.dtype) for tensor in outputs[0].grad_fn.saved_tensors]
            gradients = torch.autograd.grad(sum(out.float().sum() for out in outputs), [inputs["x"], inputs["weight"]])
            results.append((kept, [(t.shape, t.dtype) for t in (*outputs, *gradients)]))
    assert results[0] == results[1]


def test_an_input_may_be_overwritten_after_the_call():
    """JAX returns before XLA has finished, so the call waits on a CPU. PyTorch would write to what XLA still reads."""
    q, k, v = (torch.randn(4, 512, 4, 32) for _ in range(3))
    function = load("attention", "xla", CPU)
    expected = function(q, k, v).clone()
    got = function(q, k, v)
    for tensor in (q, k, v):
        tensor.zero_()
    assert torch.equal(got, expected)


def test_a_target_outside_the_vocabulary_makes_the_loss_nan():
    inputs = case_inputs("loss", "some_ignored", torch.float32, CPU)
    for wrong in (257, -2, 2**32 + 3):
        targets = inputs["targets"].clone()
        targets[0, 0] = wrong
        assert load("loss", "xla", CPU)(inputs["x"], inputs["weight"], targets).isnan()


def test_torch_compile_is_refused():
    """By the config, before a model is built; and by the function."""
    message = r"^kernels\.compile=true cannot run here: .*, and kernels\.norm\.xla runs in XLA: choose"
    with pytest.raises(Unavailable, match=message):
        build(SMALL, KernelsConfig(norm="xla", compile=True), AttnConfig("eager"), "fp32", CPU, seed=0)
    inputs = case_inputs("linear", "one_row", torch.float32, CPU)
    torch.compiler.reset()
    refusal = r"torch\.compile cannot trace linear=xla, which XLA compiles: choose kernels\.linear=eager"
    with pytest.raises(Exception, match=refusal):
        torch.compile(load("linear", "xla", CPU), fullgraph=True, backend="eager")(**inputs)


def test_a_cuda_graph_is_refused(monkeypatch):
    """A run is not captured, or ends with an error of one line if it asks for a graph. So does a call in a capture."""
    model = build(SMALL, KernelsConfig(mlp="xla"), AttnConfig("eager"), "fp32", CPU, seed=0)
    optimizer = make_optimizer(model, OptimConfig(6e-4, 6e-5, 10, 0.1, 0.9, 0.95, 1.0))
    monkeypatch.setattr("model.capture.reason_against", lambda *_: None)
    assert StepRunner(model, optimizer, wanted=None).why_not == "kernels.mlp.xla runs in XLA"
    with pytest.raises(UserError, match=r"^train\.cuda_graph=true is impossible: kernels\.mlp\.xla runs in XLA; pass"):
        StepRunner(model, optimizer, wanted=True)

    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        Unavailable, match=r"^a CUDA graph cannot contain attention=xla, because .*: choose attn=eager$"
    ):
        xla.call("attention", attention.reference, OnGpu())


def test_a_missing_jax_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    for op in (op for op in OPS if "xla" in impls(op)):
        assert unavailable(op, "xla", CPU).startswith("it needs jax>=0.10 (")
        assert unavailable(op, "xla", CPU).endswith("): pip install 'jax>=0.10'")


@pytest.mark.parametrize("op", [op for op in OPS if "xla" in impls(op)])
def test_products_in_fp8_are_refused(op):
    if op in ("linear", "mlp", "glu", "loss"):
        with pytest.raises(Unavailable, match=rf"^{op}=xla cannot run this: kernels\.{op}\.xla takes no fp8 "):
            load(op, "xla", CPU, needs=["fp8"])


def test_jax_is_imported_only_if_xla_is_chosen(quick_python):
    """It takes 0.8 s. And its variable for the GPU's memory does not stay in the environment."""
    code = """
import os, sys, torch
from kernels.registry import *
backends = [backend(op, "xla") for op in OPS if "xla" in impls(op)]
ops = resolve(KernelsConfig(), AttnConfig("eager"), torch.device("cpu"))
assert "jax" not in sys.modules
from kernels import xla
xla.start_jax()
assert xla._PREALLOCATE not in os.environ
assert "jax" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_steps_of_a_model_agree_with_eager(precision):
    """Losses and gradient norms of kernels=xla attn=xla. AdamW divides by sqrt(v), which enlarges rounding errors."""
    shapes = SMALL, GPTConfig(**vars(SMALL) | {"pos": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False})
    for config in shapes:
        results = []
        for impl in ("eager", "xla"):
            kernels = KernelsConfig(**{op: impl for op in OPS if op != "attention"})
            model = build(config, kernels, AttnConfig(impl), precision, CPU, seed=0)
            optimizer = make_optimizer(model, OptimConfig(6e-4, 6e-5, 10, 0.1, 0.9, 0.95, 1.0))
            ids = torch.randint(64, (2, 4, 17), generator=torch.Generator().manual_seed(0))
            batches = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in ids]
            results.append(torch.stack([torch.stack(train_step(model, optimizer, batches, 1e-3)) for _ in range(2)]))
        tolerance = 1e-5 if precision == "fp32" else 2 * torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=0)


def test_every_backend_describes_its_versions():
    for op in (op for op in OPS if "xla" in impls(op)):
        assert backend(op, "xla").detail().startswith("jax ")

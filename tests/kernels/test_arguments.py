"""Every backend of every op with unusual arguments: strides, wrong shapes, no rows, autocast, second derivatives."""

import functools
import inspect
import re

import pytest
import torch
from hotswap.model.layers import Norm

import hotswap
from kernels.check import float_tensors, outputs_and_gradients
from kernels.registry import OPS, Unavailable, contract, impls
from tests.kernels.test_backends import common_dtype, device, load_or_skip  # noqa: F401

# A contract without TENSORS promises nothing of this
BACKENDS = [
    pytest.param(op, impl, id=f"{op}-{impl}") for op in OPS if hasattr(contract(op), "TENSORS") for impl in impls(op)
]

# Widths that are multiples of 8, so that Hopper's kernels run on a GPU. For another op, its first case. A single row
# may have any stride, and still be contiguous for PyTorch
SIZES = {
    "norm": [{"shape": (3, 20, 64)}],
    "linear": [{"shape": (3, 20, 64), "out": 96}, {"shape": (1, 1, 64), "out": 96}],
    "mlp": [{"shape": (3, 20, 64), "hidden": 96}, {"shape": (1, 1, 64), "hidden": 96}],
    "glu": [{"shape": (3, 20, 64), "hidden": 96}, {"shape": (1, 1, 64), "hidden": 96}],
    "loss": [{"shape": (3, 20, 64), "vocab": 264, "ignored": 0.3}, {"shape": (1, 1, 64), "vocab": 264}],
    "attention": [
        {"shape": (2, 20, 4, 64), "kv_heads": 2},
        {"shape": (3, 1, 4, 64), "keys": 20, "kv_heads": 2, "lengths": (3, 20, 11)},
        {"shape": (2, 20, 2, 64), "documents": (7, 13)},
    ],
}


ONE_LINE = r"^.*(derivative|double backward|create_graph|fp8|Float8).*$"


def calls(op, impl, dtype, device):  # noqa: F811
    """Yield the function of the backend and arguments, for each of the op's sizes that it can compute.

    If it can compute none, skip the test.
    """
    reason = None
    for sizes in SIZES.get(op) or [next(iter(contract(op).CASES.values()))]:
        inputs = contract(op).inputs(**sizes, dtype=dtype, device=device)
        try:
            function = load_or_skip(op, impl, device, inputs)
            function(**inputs)
        except (pytest.skip.Exception, Unavailable) as error:
            reason = str(error) if reason is None else reason
        else:
            reason = ""
            yield function, inputs
    if reason:
        pytest.skip(reason)


def tensors_of(op, inputs):
    """Return {argument: its tensor}, for the tensors that the contract names."""
    return {name: inputs[name] for name in contract(op).TENSORS if inputs.get(name) is not None}


def copy_into(target, tensor):
    return target.copy_(tensor.detach())


def strided(t):
    return copy_into(t.new_empty(*t.shape[:-1], 2 * t.shape[-1])[..., ::2], t)


def offset(t):
    return copy_into(t.new_empty(t.numel() + 1)[1:].view(t.shape), t)


def transposed(t):
    return copy_into(t.new_empty(t.shape[::-1]).permute(*reversed(range(t.dim()))), t)


def second_dimension_first(t):
    """A (B, T, H, D) tensor that lies in memory as (B, H, T, D). None if there is no second dimension to move."""
    if t.dim() < 3:
        return None
    return copy_into(t.new_empty(t.shape[0], *t.shape[2:0:-1], *t.shape[3:]).transpose(1, 2), t)


def expanded(t):
    return t.detach()[:1].expand(t.shape)


LAYOUTS = strided, offset, transposed, second_dimension_first, expanded


@pytest.mark.parametrize(("op", "impl"), BACKENDS)
def test_any_layout_of_any_tensor(op, impl, device):  # noqa: F811
    """Whichever tensor has which strides, also stride 0 and an address that is not aligned, the results agree.

    They agree with the results for contiguous tensors, to two roundings of each. cuBLAS may take another kernel. A
    backend may refuse strides.
    """
    dtype, wrong = common_dtype(device), []
    tolerance = max(1e-5, 2 * torch.finfo(dtype).eps)
    for function, inputs in calls(op, impl, dtype, device):
        for name, tensor in tensors_of(op, inputs).items():
            for layout in LAYOUTS:
                if (changed := layout(tensor)) is None:
                    continue
                plain = changed.clone(memory_format=torch.contiguous_format)
                plain, changed = (t.requires_grad_(tensor.requires_grad) for t in (plain, changed))
                try:
                    got = outputs_and_gradients(function, inputs | {name: changed})
                except Unavailable:
                    continue
                for result, expected in outputs_and_gradients(function, inputs | {name: plain}).items():
                    error = (got[result] - expected).abs().max().item()
                    if not error <= tolerance * expected.abs().max().item():
                        wrong.append(f"{layout.__name__} {name}: {result} is off by {error:.3g}")
    assert wrong == []


def wrong_shapes(op, tensors):
    """Yield (argument, a tensor of a wrong shape): for each dimension that another tensor has too, one more or less."""
    dims = {name: contract(op).TENSORS[name].split() for name in tensors}
    for name, tensor in tensors.items():
        elsewhere = {dim for other in tensors if other != name for dim in dims[other]}
        for i, dim in enumerate(reversed(dims[name])):
            if dim in elsewhere:
                side = tensor.dim() - 1 - i
                yield name, torch.cat((tensor, tensor.narrow(side, 0, 1)), side)
                yield name, tensor.narrow(side, 0, tensor.shape[side] - 1)
        if dims[name][0] != "...":
            yield name, tensor[0]
            yield name, tensor[None]


@pytest.mark.parametrize(("op", "impl"), BACKENDS)
def test_a_wrong_shape_is_named(op, impl, device):  # noqa: F811
    """Each argument, each dimension: a ValueError of one line that names the op, an argument and its shape."""
    for function, inputs in calls(op, impl, common_dtype(device), device):
        for name, tensor in wrong_shapes(op, tensors_of(op, inputs)):
            with pytest.raises(ValueError, match=rf"^{op}: .* see kernels/{op}/__init__.py$") as error:
                function(**inputs | {name: tensor})
            assert "\n" not in str(error.value)


def test_the_message_of_a_wrong_shape():
    op = functools.partial(hotswap.op, device="cpu")
    x, weight, targets = torch.randn(2, 5, 8), torch.randn(20, 8), torch.zeros(2, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match="loss") as error:
        op("loss", "eager")(x, weight, targets)
    assert str(error.value) == (
        "loss: targets has the shape (2, 6), and must have (...) = (2, 5) to fit the arguments before it: "
        "see kernels/loss/__init__.py"
    )
    for softcap in (0.0, -30.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"^loss: softcap={softcap} must be a positive number: see kernels/loss"):
            op("loss", "eager")(x, weight, targets[:, :5], softcap=softcap)
    x = torch.randn(1, 7, 4, 16)
    starts = {"starts": torch.zeros(1, 7, dtype=torch.int32)}
    for q, k, options, message in [
        (x, x[:, :, :3], {}, "q has 4 heads, which is no multiple of the 3 heads of k and v"),
        (x, x[:, :6], {}, "q has 7 tokens, and k and v only 6: with causal=True they have at least as many"),
        (x, torch.cat([x, x], 1), starts, "q has 7 tokens, and k and v have 14: with starts they have the same number"),
        (x, x[..., :8], {}, "k has the shape (1, 7, 4, 8), and must have (B, Tk, Hkv, D) = (1, 7, 4, 16) to fit "),
        (x, x[0], {}, "k has the shape (7, 4, 16), and must have (B, Tk, Hkv, D) = (1, Tk, Hkv, 16) to fit "),
        (x[0], x, {}, "q has the shape (7, 4, 16), and must have (B, Tq, H, D): see kernels/attention/__init__.py"),
    ]:
        with pytest.raises(ValueError, match=rf"^attention: {re.escape(message)}"):
            op("attention", "eager")(q, k, k, **options)


def without_rows(op, inputs):
    """Yield the arguments with no sequence, and with no token: each dimension of the activations that may be 0."""
    dims = {name: contract(op).TENSORS[name].split() for name in tensors_of(op, inputs)}
    for row_dim in (0, 1):
        arguments = dict(inputs)
        for name, tensor in tensors_of(op, inputs).items():
            has_rows = dims[name][0] in ("...", "B") and (row_dim == 0 or name != "lengths")
            if has_rows:
                arguments[name] = tensor.detach().narrow(row_dim, 0, 0).requires_grad_(tensor.requires_grad)
        if op == "rope" and row_dim == 1:
            arguments["table"] = arguments["table"].narrow(-3, 0, 0)
        yield arguments


@pytest.mark.parametrize(("op", "impl"), BACKENDS)
def test_no_rows(op, impl, device):  # noqa: F811
    """Outputs and gradients are empty or 0, with the shapes and dtypes of eager's."""
    for function, inputs in calls(op, impl, common_dtype(device), device):
        for arguments in without_rows(op, inputs):
            got = outputs_and_gradients(function, arguments)
            expected = outputs_and_gradients(contract(op).reference, arguments)
            assert got.keys() == expected.keys()
            for name, value in got.items():
                assert (value.shape, value.dtype) == (expected[name].shape, expected[name].dtype)
                assert not value.any()


def to_dtype(value, dtype):
    return value.detach().to(dtype).requires_grad_(value.requires_grad) if float_tensors([value]) else value


@pytest.mark.parametrize(("op", "impl"), BACKENDS)
def test_under_autocast(op, impl, device):  # noqa: F811
    """The ops of matmuls compute in autocast's dtype; norm computes in the dtypes of its arguments.

    .backward() is under autocast too. Its effect on PyTorch's own operators is rounding.
    """
    low = torch.bfloat16 if device.type == "cuda" else torch.float16  # Triton's interpreter cannot compute in bf16
    has_matmuls = contract(op).BOUND == "flops"
    rounding = 2 * torch.finfo(low).eps if has_matmuls else 0.0
    for function, inputs in calls(op, impl, torch.float32, device):
        half = {name: to_dtype(value, low) for name, value in inputs.items()}
        mixed = {name: half[name] if name in contract(op).ANY_STRIDES else value for name, value in inputs.items()}
        for arguments in (inputs, mixed):
            try:
                expected = outputs_and_gradients(function, half if has_matmuls else arguments)
            except Unavailable as reason:  # the backend does not take this dtype
                pytest.skip(str(reason))
            with torch.autocast(device.type, dtype=low):
                got = outputs_and_gradients(function, arguments)
            for name, value in expected.items():
                if name.startswith("d_"):  # a gradient has the dtype of its argument
                    value = value.to(arguments[name.removeprefix("d_")].dtype)
                torch.testing.assert_close(got[name], value, rtol=0, atol=rounding * value.abs().max().item())


@pytest.mark.parametrize(("op", "impl"), BACKENDS)
def test_a_second_derivative_is_right_or_refused(op, impl, device):  # noqa: F811
    """A Hessian-vector product agrees with float64, or the backward raises an error of one line. fp8 has none."""
    for function, inputs in calls(op, impl, torch.float32, device):
        if "fp8" in inspect.signature(function).parameters:
            with pytest.raises((RuntimeError, Unavailable, AssertionError), match=ONE_LINE):  # torchao asserts
                second_derivatives(function, inputs | {"fp8": True})
        try:
            got = second_derivatives(function, inputs)
        except RuntimeError:
            with pytest.raises(RuntimeError, match=ONE_LINE):
                second_derivatives(function, inputs)
            continue
        exact_inputs = {name: to_dtype(value, torch.float64) for name, value in inputs.items()}
        for name, exact in second_derivatives(contract(op).reference, exact_inputs).items():
            torch.testing.assert_close(got[name].double(), exact, rtol=1e-3, atol=1e-4 * exact.abs().max().item())


def second_derivatives(function, inputs):
    """Return the gradients of the squared norm of the first gradients."""
    leaves = {name: t for name, t in inputs.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum(out.square().sum() for out in outputs)
    gradients = torch.autograd.grad(total, list(leaves.values()), create_graph=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in gradients), list(leaves.values()))
    return dict(zip(leaves, again, strict=True))


@pytest.mark.parametrize(("op", "impl"), BACKENDS)
def test_training_after_the_same_call_in_inference_mode(op, impl, device):  # noqa: F811
    """Nothing that a backend keeps between calls is an inference tensor, which autograd could not save."""
    for function, inputs in calls(op, impl, common_dtype(device), device):
        with torch.inference_mode():
            function(**inputs)
        outputs_and_gradients(function, inputs)


def tiny(**choices):
    return hotswap.build("tiny", precision="fp32", device="cpu", **choices)


def tiny_or_skip(loss):
    """Return a model with this loss. Skip the test if it cannot run here."""
    try:
        return tiny(kernels={"loss": loss}, attn="eager")
    except hotswap.registry.Unavailable as reason:
        pytest.skip(str(reason))


def curvature(model, idx, targets, direction):
    """Return v^T H v of the loss, where v is `direction`, by autograd."""
    weights = list(model.parameters())
    gradients = torch.autograd.grad(model(idx, targets), weights, create_graph=True)
    slope = sum((g * v.to(g.dtype)).sum() for g, v in zip(gradients, direction, strict=True))
    products = torch.autograd.grad(slope, weights)
    return sum((product.double() * v).sum() for product, v in zip(products, direction, strict=True))


def slope_at(model, idx, targets, direction, step):
    """Return the derivative of the loss along `direction`, at the weights plus step * direction, in float64."""
    with torch.no_grad():
        moved = {n: w + step * v for (n, w), v in zip(model.named_parameters(), direction, strict=True)}
    leaves = {name: weight.requires_grad_() for name, weight in moved.items()}
    loss = torch.func.functional_call(model, leaves, (idx, targets))
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return sum((g * v).sum() for g, v in zip(gradients, direction, strict=True))


@pytest.mark.parametrize("impl", impls("loss"))
def test_the_second_derivative_of_a_model(impl):
    """It agrees with a difference of first derivatives in float64, or it is refused."""
    model = tiny_or_skip(impl)
    exact = tiny(attn="eager").double()
    exact.loss = contract("loss").reference
    for norm in (module for module in exact.modules() if isinstance(module, Norm)):
        norm.dtype = torch.float64
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1)
    direction = [torch.randn(weight.shape, generator=draw, dtype=torch.float64) for weight in exact.parameters()]
    arguments = tokens[:, :-1], tokens[:, 1:], direction
    if impl in ("eager", "auto"):
        step = 1e-7  # the direction is 1,000 times as long as the weights are
        expected = (slope_at(exact, *arguments, step) - slope_at(exact, *arguments, -step)) / (2 * step)
        torch.testing.assert_close(curvature(model, *arguments), expected, rtol=1e-3, atol=0)
    else:
        with pytest.raises(RuntimeError, match=r"kernels\.loss\.\w+ has no second derivative .*: choose kernels=eager"):
            curvature(model, *arguments)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_the_second_derivative_of_a_loss_with_one_leaf(frozen):
    inputs = contract("loss").inputs((5, 8), vocab=20, dtype=torch.float64)
    inputs[frozen].requires_grad_(False)
    [leaf] = [tensor for tensor in inputs.values() if tensor.requires_grad]
    results = []
    for function in (hotswap.op("loss", "eager", "cpu"), contract("loss").reference):
        [gradient] = torch.autograd.grad(function(**inputs), leaf, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), leaf)[0])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("impl", impls("loss"))
def test_targets_of_a_model(impl):
    """Targets may be a slice of pairs. Targets of another length are an error of one line."""
    model = tiny_or_skip(impl)
    pairs = torch.randint(256, (2, 9, 2), generator=torch.Generator().manual_seed(0))
    expected = model(pairs[..., 0].contiguous(), pairs[..., 1].contiguous())
    assert torch.equal(model(pairs[..., 0], pairs[..., 1]), expected)
    with pytest.raises(ValueError, match=r"^loss: targets has the shape \(2, 9\), and must have \(\.\.\.\) = \(2, 8\)"):
        model(pairs[:, :-1, 0], pairs[..., 1])

"""Decide whether a backend computes the right numbers: why_wrong(), for the doctor, the judge, a run and the tests.

For every output and every gradient, an error is at most 2 x eager's + rounding. There are two errors:

    the largest difference of an element
    the error of the scale, |<result, exact> / <exact, exact> - 1|. The rounding errors of the elements average out in
    the scale. So this error detects a wrong common factor, such as a scalar rounded to bf16, even below the rounding of
    one element

If the contract has ALONG, there is a third error, of the part of the result along an input: |<result, input> / <exact,
input> - 1|. A step of Muon lowers the loss by this part. It is one of 768 directions, so the scale hardly shows it.

All are differences from reference() in float64, on the same (already rounded) inputs. So the tolerance follows from
the error of eager itself in that dtype. In fp8, reference() rounds the operands as eager does. A backend with
OWN_SCALES rounds the operands differently. The errors are then differences from reference() without fp8.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.compat import FakeTensor, forget_functions
from kernels.registry import backend, contract, load

# The gradient of a scalar output, the loss. It is exact in fp32 and fp16. If a backend rounds it to bf16, the scale of
# its gradients is off by 0.15%
DOUT = 683 / 2048
FP8_DOUT = 2.0  # some backends round gradients to fp8 in the forward, and a power of two changes no rounding


def float_tensors(values: Iterable) -> list[Tensor]:
    """Return the floating-point tensors among `values`."""
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def convert_floats(inputs: dict, dtype: torch.dtype) -> dict:
    """Return the inputs with a new leaf in `dtype` for each floating-point tensor."""
    floats = {name: value for name, value in inputs.items() if float_tensors([value])}
    return inputs | {name: t.detach().to(dtype).requires_grad_(t.requires_grad) for name, t in floats.items()}


def out_of_place(module: ModuleType, function: Callable) -> Callable:
    """Return `function`; of one that changes its arguments, a version that returns the new tensors instead.

    `module` is the op's contract.
    """
    return functools.partial(module.results, function) if hasattr(module, "results") else function


def default_dout(inputs: dict) -> float:
    return FP8_DOUT if inputs.get("fp8") else DOUT


def outputs_and_gradients(
    function: Callable,
    inputs: dict,
    seed: int = 0,
    expand: bool = False,
    dtype: torch.dtype | None = None,
    dout: float | None = None,
) -> dict[str, Tensor]:
    """Call `function` and return its outputs and the gradients of its inputs: {"out0": ..., "d_x": ...}.

    Each output gets a random gradient, which depends only on `seed`. A scalar (the loss) gets `dout`, by default DOUT
    or FP8_DOUT. The result has a gradient for every input that requires one, unless the function gives it none. It has
    no gradients if "lengths" is among the inputs, because only generation passes lengths. If `dtype` is given,
    floating-point inputs are converted to it first. With `expand=True`, an output gradient is one random row, expanded
    to all rows with stride 0.
    """
    if dout is None:
        dout = default_dout(inputs)
    if dtype:
        inputs = convert_floats(inputs, dtype)
    outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results = {f"out{i}": out.detach() for i, out in enumerate(outputs)}
    leaves = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.requires_grad}
    if "lengths" in inputs or not leaves:
        return results
    output_grads = []
    for out in outputs:
        generator = torch.Generator(out.device).manual_seed(seed)
        shape = out.shape[-1:] if expand else out.shape
        grad = torch.randn(shape, generator=generator, device=out.device).to(torch.bfloat16).to(out.dtype)
        output_grads.append(grad.expand(out.shape) if out.dim() else torch.full_like(out, dout))
    input_grads = torch.autograd.grad(outputs, list(leaves.values()), output_grads, allow_unused=True)
    return results | {f"d_{name}": grad for name, grad in zip(leaves, input_grads, strict=True) if grad is not None}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within this context torch.empty and similar functions return NaN. So an element that no kernel writes shows."""

    def poisoned(make: Callable) -> Callable:
        @functools.wraps(make)
        def make_nan(*args, **kwargs):
            tensor = make(*args, **kwargs)
            fillable = tensor.is_floating_point() and not isinstance(tensor, FakeTensor)
            return tensor.fill_(float("nan")) if fillable else tensor

        return make_nan

    makers = (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")
    with ExitStack() as stack:
        stack.callback(forget_functions)
        for owner, name in makers:
            stack.enter_context(patch.object(owner, name, poisoned(getattr(owner, name))))
        yield


def exact_results(
    op: str, impl: str, inputs: dict, expand: bool = False, dout: float | None = None
) -> dict[str, Tensor]:
    """Return float64_results() for the backend `impl`."""
    own_scales = getattr(backend(op, impl), "OWN_SCALES", False)
    return float64_results(op, inputs, own_scales, expand=expand, dout=dout)


def float64_results(
    op: str, inputs: dict, own_scales: bool, seed: int = 0, expand: bool = False, dout: float | None = None
) -> dict[str, Tensor]:
    """Return outputs_and_gradients() of reference() in float64; without fp8 for a backend with OWN_SCALES."""
    if dout is None:
        dout = default_dout(inputs)
    if own_scales:
        inputs = {name: value for name, value in inputs.items() if name != "fp8"}
    reference = contract(op).reference
    return outputs_and_gradients(reference, inputs, seed=seed, expand=expand, dtype=torch.float64, dout=dout)


def why_wrong(
    op: str,
    impl: str,
    function: Callable,
    inputs: dict,
    dtype: torch.dtype,
    strict: bool = False,
    expand: bool = False,
    dout: float | None = None,
) -> str | None:
    """Return, in one line, why `function` is wrong as the backend `impl` on these inputs; None if it is right.

    It must write to none of its inputs, and its outputs and gradients must follow why_inexact(). Eager is the baseline
    of the rule, so eager must also equal reference() in float64. With `strict`, new memory holds NaN, and a second call
    must give the same bits, unless the backend has `deterministic = False`.
    """
    options = {"expand": expand, "dout": dout}
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    before = {name: value.detach().clone() for name, value in tensors.items()}
    module = contract(op)
    function = out_of_place(module, function)
    with poisoned_memory() if strict else nullcontext():
        results = outputs_and_gradients(function, inputs, **options)
    if written := [name for name, value in tensors.items() if not torch.equal(before[name], value)]:
        return f"it writes to its input {written[0]}"
    device = next(iter(tensors.values())).device
    eager = outputs_and_gradients(out_of_place(module, load(op, "eager", device)), inputs, **options)
    truth = exact_results(op, impl, inputs, **options)
    reason = why_inexact(op, results, eager, truth, inputs, dtype)
    if strict and not reason and getattr(backend(op, impl), "deterministic", True):
        again = outputs_and_gradients(function, inputs, **options)
        if changed := [name for name, result in results.items() if not torch.equal(result, again[name])]:
            reason = f"two calls give other bits in {', '.join(changed)}; `deterministic = False` allows it"
    if impl == "eager" and not reason:
        exact = outputs_and_gradients(function, inputs, dtype=torch.float64, **options)
        reason = broken_rule(exact, truth, truth, inputs, torch.float64)
    return reason


def why_inexact(
    op: str,
    results: dict[str, Tensor],
    eager: dict[str, Tensor],
    truth: dict[str, Tensor],
    inputs: dict,
    dtype: torch.dtype,
    slack: float = 1.0,
) -> str | None:
    """Return, in one line, why results of the op break the rule; None if all are right. See broken_rule().

    The fp32 states that an optimizer changes must follow the rule in fp32, whatever the dtype of the weights.
    """
    along = {name: inputs[argument].detach() for name, argument in getattr(contract(op), "ALONG", {}).items()}
    reason = broken_rule(results, eager, truth, inputs, dtype, slack, along)
    if reason is None and hasattr(contract(op), "results"):
        states = {name: result for name, result in results.items() if result.dtype == torch.float32}
        exact_states = {name: truth[name] for name in states}
        reason = broken_rule(states, eager, exact_states, inputs, torch.float32, slack)
    return reason


def rounding_error(dtype: torch.dtype, terms: int) -> float:
    """Return the relative rounding error of a result in `dtype` that is a sum of `terms` terms in fp32.

    It is the larger of two errors: rounding the result to `dtype`, and the random rounding of the sum.
    """
    return max(torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps * terms**0.5)


def broken_rule(
    results: dict[str, Tensor],
    eager: dict[str, Tensor],
    truth: dict[str, Tensor],
    inputs: dict,
    dtype: torch.dtype,
    slack: float = 1.0,
    along: dict[str, Tensor] | None = None,
) -> str | None:
    """Return, in one line, why the first wrong result breaks the rule, or None if every result is right.

    `results` and `eager` come from outputs_and_gradients(), and `truth` from exact_results(). `slack` multiplies every
    bound: on new random inputs, the largest error of a right backend and that of eager vary. `along` maps the name of a
    result to a direction of the same shape.
    rounding_error() is relative, so it is multiplied by a scale: the largest absolute value of the exact result. An
    exact result of zeros has no scale of its own: its terms cancel, but their rounding errors do not. Its scale is the
    largest absolute value of all exact results.
    """
    # the longest sum has one term for each element of a row or of a column
    terms = max(max(t.shape[-1], t.numel() // t.shape[-1]) for t in float_tensors(inputs.values()) if t.dim())
    scales = {name: exact.abs().max().item() for name, exact in truth.items()}
    outputs, exact_outputs = (sum(name.startswith("out") for name in tensors) for tensors in (results, truth))
    if outputs != exact_outputs:
        return f"it returns {outputs} instead of {exact_outputs} tensors"
    if missing := [name.removeprefix("d_") for name in truth if name not in results]:
        return f"its backward gives no gradient of {', '.join(missing)}"
    if added := [name.removeprefix("d_") for name in results if name not in truth]:
        return f"its backward gives a gradient of {', '.join(added)}, and the contract gives none"
    for name, exact in truth.items():
        result, eager_result = results[name], eager[name]
        if result.shape != exact.shape:
            return f"{name} has shape {tuple(result.shape)}, but the reference has {tuple(exact.shape)}"
        if result.dtype != eager_result.dtype:
            return f"{name} has dtype {result.dtype}, but eager has {eager_result.dtype}"
        scale = scales[name] if scales[name] > 1e-12 else max(scales.values())
        atol = slack * rounding_error(dtype, terms) * scale
        error, eager_error = ((value.double() - exact).abs().max().item() for value in (result, eager_result))
        if not error <= 2 * slack * eager_error + atol:  # `not <=` also catches NaN
            times = f"{2 * slack:g}"
            return f"{name}: error {error:.3g} is more than {times} x eager's {eager_error:.3g} + rounding {atol:.3g}"
        if scales[name] <= 1e-12:
            continue
        directions = {"its scale": exact}
        if along and name in along:
            directions["its part along the input"] = along[name].double()
        for text, direction in directions.items():
            if not (exact * direction).sum():
                continue  # the exact result has no part along it
            error, eager_error = (scale_error(value, exact, direction) for value in (result, eager_result))
            rtol = slack * scale_rounding(exact, dtype, terms, direction)
            if not error <= 2 * slack * eager_error + rtol:
                bound = f"{2 * slack:g} x eager's {eager_error:.3g} + {rtol:.3g}"
                return f"{name}: {text} is off by {error:.3g}, more than {bound}"
    return None


def scale_error(result: Tensor, exact: Tensor, direction: Tensor) -> float:
    """Return |<result, direction> / <exact, direction> - 1|.

    With direction=exact this is |s - 1| for the s at which s * exact is nearest to the result (least squares).
    """
    return abs(((result.double() - exact) * direction).sum().item() / (exact * direction).sum().item())


def scale_rounding(exact: Tensor, dtype: torch.dtype, terms: int, direction: Tensor) -> float:
    """Return how far rounding may move scale_error().

    An element's relative error is uniform in +-u, u = eps / 2, so its deviation is u / sqrt(3). The scale is the mean
    of these errors weighted by exact * direction. 10 deviations are allowed for it, because what an element is computed
    from is rounded, too. u / 4 is allowed for a rounding that a whole row shares, such as rstd in a norm. A sum is in
    fp32.
    """
    u, products = torch.finfo(dtype).eps / 2, exact * direction
    deviation = u / 3**0.5 * products.square().sum().sqrt().item() / abs(products.sum().item())
    return 10 * deviation + u / 4 + torch.finfo(torch.float32).eps * terms**0.5

"""When a backend is right: the rule of the tests, and of whoever else asks before believing a figure.

err(impl) <= 2 err(eager) + rounding, both against reference() in float64 on the same (already rounded) numbers, for
every output and every gradient. So the tolerance is what eager itself loses at that dtype, and not taste.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def tensors(values: Iterable) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def evaluate(
    function: Callable, inputs: dict, seed: int = 0, expand: bool = False, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """{"out0": ..., "d_x": ...}: outputs and gradients, for one fixed gradient of each output.

    Gradients are those of the inputs that require one; where none does, nor with lengths, which are generation's, there
    are outputs alone. `dtype` evaluates in that dtype from the same numbers. `expand` gives gradients of stride 0.
    """
    if dtype:
        wide = {name: inputs[name] for name in inputs if tensors([inputs[name]])}
        wide = {name: t.detach().to(dtype).requires_grad_(t.requires_grad) for name, t in wide.items()}
        inputs = inputs | wide
    outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results = {f"out{i}": out.detach() for i, out in enumerate(outputs)}
    leaves = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.requires_grad}
    if "lengths" in inputs or not leaves:
        return results
    douts = []
    for out in outputs:
        generator = torch.Generator(out.device).manual_seed(seed)
        shape = out.shape[-1:] if expand else out.shape
        dout = torch.randn(shape, generator=generator, device=out.device).to(torch.bfloat16).to(out.dtype)
        douts.append(dout.expand(out.shape))
    grads = torch.autograd.grad(outputs, list(leaves.values()), douts)
    return results | {f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def rounding(dtype: torch.dtype, terms: int) -> float:
    """A result's own to `dtype`, or n at random in an fp32 sum of n terms, whichever is more; relative."""
    return max(torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps * terms**0.5)


def wrong(
    got: dict[str, Tensor], eager: dict[str, Tensor], truth: dict[str, Tensor], inputs: dict, dtype: torch.dtype
) -> str | None:
    """The first of `got`, as evaluate() gives it, that breaks the rule, in one line; None where all is right.

    The rounding is times the largest value. A result that is zero is a difference of equals; its scale is the others'.
    """
    terms = max(max(t.shape[-1], t.numel() // t.shape[-1]) for t in tensors(inputs.values()))
    scales = {name: exact.abs().max().item() for name, exact in truth.items()}
    for name, exact in truth.items():
        mine, usual = got[name], eager[name]
        if mine.shape != exact.shape:
            return f"{name} is of shape {tuple(mine.shape)}, the reference's of {tuple(exact.shape)}"
        if mine.dtype != usual.dtype:
            return f"{name} is {mine.dtype}, eager gives {usual.dtype}"
        atol = rounding(dtype, terms) * (scales[name] if scales[name] > 1e-12 else max(scales.values()))
        error, eagers = ((value.double() - exact).abs().max().item() for value in (mine, usual))
        if not error <= 2 * eagers + atol:  # NaN is no error that is small enough
            return f"{name}: error {error:.3g}, eager's {eagers:.3g}, rounding {atol:.3g}"
    return None

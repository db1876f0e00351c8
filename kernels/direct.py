"""Call a custom operator without PyTorch's dispatcher when nothing observes the call.

torch.compile, fake tensors and profilers must see our kernels as operators. But PyTorch's dispatcher, and the autograd
that torch.library builds for an operator, are Python and slow. Host time for a forward and a backward:

    norm=triton         0.20 ms through the dispatcher, 0.14 ms without it; on an H200's host 0.8 ms through it
    attention=triton    0.29 ms through the dispatcher, 0.24 ms without it; on an H200's host 1.1 ms through it

The H200's host launched a step of 124M in 57 ms through the dispatcher, and in 33 to 45 ms without it. The kernels of
this step take 115 ms with 64 sequences but 29 ms with 16, so with 16 sequences launching takes longer than computing.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import compat


def custom_op(
    name: str,
    function: Callable,
    fake: Callable,
    backward: Callable | None = None,
    setup_context: Callable | None = None,
    mutates_args: Sequence[str] = (),
) -> Callable:
    """Define `function` as the operator `name`. Return a function that calls it without the dispatcher where possible.

    `fake` takes the same arguments and only allocates the outputs, for torch.compile and fake tensors. `backward` and
    `setup_context` are the autograd of both; then there is no second derivative, and the function takes no keywords.
    What `backward` returns for an argument that needs no gradient is ignored, for example the empty tensor for a
    missing bias: an operator cannot return None. An operator without a backward goes through the dispatcher whenever
    gradients are on, because the dispatcher raises when a gradient is asked for.
    """
    op = torch.library.custom_op(name, function, mutates_args=mutates_args)
    op.register_fake(fake)
    call_undispatched = function
    if backward:

        def compute_gradients(ctx: FunctionCtx, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
            needed = zip(backward(ctx, *douts), ctx.needs_input_grad, strict=True)
            return tuple(gradient if is_needed else None for gradient, is_needed in needed)

        differentiate = refuse_second_derivative(compute_gradients, function.__module__)
        op.register_autograd(differentiate, setup_context=setup_context)

        def forward(ctx: FunctionCtx, *arguments: Any) -> Any:
            outputs = function(*arguments)
            setup_context(ctx, arguments, outputs)
            return outputs

        methods = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
        call_undispatched = type(function.__name__, (torch.autograd.Function,), methods).apply

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if compat.is_observed() or (not backward and torch.is_grad_enabled()):
            return op(*arguments, **named)
        return call_undispatched(*arguments, **named)

    return call


def refuse_second_derivative(backward: Callable, module: str | None = None) -> Callable:
    """Decorator of an autograd function's backward, which refuses a second derivative (create_graph=True).

    It raises RuntimeError, which names `module`. PyTorch's once_differentiable would return constants, and a second
    derivative would silently lack a term. Under torch.autocast the backward runs without autocast, as the forward does.
    """

    @functools.wraps(backward)
    def call(ctx: FunctionCtx, *douts: Tensor | None) -> Any:
        if torch.compiler.is_compiling():  # PyTorch itself refuses second derivatives of a compiled function
            return backward(ctx, *douts)
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{module or backward.__module__} has no second derivative (create_graph=True): choose kernels=eager "
                "attn=eager, and not precision=fp8"
            )
        device = next((dout.device.type for dout in douts if dout is not None), "cpu")
        with without_autocast(device):
            return backward(ctx, *douts)

    return call


def empty_gradients(*arguments: Tensor | None) -> tuple[Tensor, ...]:
    """Allocate a gradient of each argument of an operator, and an empty tensor for None. The first is a tensor."""
    return tuple(arguments[0].new_empty(0) if t is None else torch.empty_like(t) for t in arguments)


def in_autocast(device: str) -> bool:
    """Return whether torch.autocast is on for this type of device. PyTorch raises an error for `meta`."""
    # torch.compile cannot trace torch.amp.is_autocast_available() (torch 2.11)
    return device != "meta" and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager:
    """Return a context in which torch.autocast is off for this type of device."""
    return torch.autocast(device, enabled=False) if in_autocast(device) else nullcontext()

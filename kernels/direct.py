"""Custom operators, called without the dispatcher where nobody else wants to see the call.

torch.compile, FakeTensor, profilers and their like know our kernels as operators. But PyTorch's dispatcher and the
autograd that torch.library makes of an operator are Python: forward and backward of norm=triton took the host 0.20 ms
that way, and take 0.14 directly; of attention 0.29 and 0.24. (On an H200's host they took 0.8 and 1.1, and a step of
124M 57 ms to launch, directly 33 to 45; its kernels take 115 with 64 sequences, and 29 with 16.)
"""

import functools
from collections.abc import Callable

import torch
from torch.autograd import profiler
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def direct(op: Callable, backward: Callable | None = None, setup_context: Callable | None = None) -> Callable:
    """A torch.library.custom_op -> a function that does the same for plain tensors; with the backward of both.

    One without a backward that shall be differentiated goes to the dispatcher as well, which refuses.
    """
    function = op._init_fn
    plain = function
    if backward:
        op.register_autograd(backward, setup_context=setup_context)

        def forward(ctx, *arguments):
            outputs = function(*arguments)
            setup_context(ctx, arguments, outputs)
            return outputs

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        plain = type(function.__name__, (torch.autograd.Function,), methods).apply

    @functools.wraps(function)
    def call(*arguments):
        seen = torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or profiler._is_profiler_enabled
        seen = seen or (not backward and torch.is_grad_enabled())
        return (op if seen else plain)(*arguments)

    return call

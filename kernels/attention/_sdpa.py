"""scaled_dot_product_attention with one allowed backend: that backend runs, or the call fails with PyTorch's reason."""

import itertools
import re
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention.sdpa import sdpa_arguments
from kernels.registry import Unavailable


def attention_of(backend: SDPBackend, can_use: Callable, module: str) -> Callable:
    """Return attention() of `module`: `backend` computes it, or it raises Unavailable.

    `can_use` is the function in torch.backends.cuda that returns whether the backend accepts the tensors. In code that
    torch.compile traces, PyTorch raises its own error instead of Unavailable.
    """

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        lengths: Tensor | None = None,
        window: int | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        arguments = sdpa_arguments(q, k, v, causal=causal, lengths=lengths, window=window, starts=starts)
        if not torch.compiler.is_compiling() and (why := refusal_reason(backend, can_use, arguments)):
            raise Unavailable(f"PyTorch's {short_name(backend)} attention refuses: {why}")
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(**arguments, scale=scale).transpose(1, 2)

    attention.__module__ = module  # registry.py looks for KEEPS there
    return attention


def short_name(backend: SDPBackend) -> str:
    """Return PyTorch's name for the backend in lower case, without "_ATTENTION": "cudnn"."""
    return backend.name.removesuffix("_ATTENTION").lower()


def refusal_reason(backend: SDPBackend, can_use: Callable, arguments: dict) -> str | None:
    """Return PyTorch's reason why `backend` refuses these arguments, or None if it accepts them.

    When no backend accepts the arguments, PyTorch gives the reasons as Python warnings. can_use(params, debug=True)
    prints the same text to stderr, where Python cannot catch it.
    """
    tensors = [arguments[name] for name in ("query", "key", "value", "attn_mask")]
    params = SDPAParams(*tensors, 0.0, arguments["is_causal"], arguments["enable_gqa"])  # 0.0: no dropout
    if can_use(params, False):
        return None
    with warnings.catch_warnings(record=True) as caught, suppress(RuntimeError), sdpa_kernel(backend):
        warnings.simplefilter("always")
        F.scaled_dot_product_attention(**arguments)
    lines = [re.sub(r"\s*\(Triggered internally.*", "", str(warning.message), flags=re.S) for warning in caught]
    # A heading names a backend. The lines up to the next heading are the reasons of this backend
    headings = [i for i, line in enumerate(lines) if line.endswith("not used because:")]
    for start, end in itertools.pairwise([*headings, len(lines)]):
        if short_name(backend) in lines[start].lower() and end > start + 1:
            return " ".join(lines[start + 1 : end])
    return f"torch {torch.__version__} does not say why"

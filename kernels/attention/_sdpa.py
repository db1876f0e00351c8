"""scaled_dot_product_attention with a single backend allowed: it runs, or PyTorch's own reason says why it does not."""

import re
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention.sdpa import arguments
from kernels.registry import Unavailable


def pinned(backend: SDPBackend, usable: Callable, q, k, v, *, scale=None, **limits):
    """attention() by `backend`, of which PyTorch says by `usable(params, debug)` whether it takes these tensors.

    Unavailable: it does not. In what torch.compile traces, PyTorch raises an error of its own instead.
    """
    given = arguments(q, k, v, **limits)
    if not torch.compiler.is_compiling() and (why := refusal(usable, given)):
        raise Unavailable(f"PyTorch's {backend.name.removesuffix('_ATTENTION').lower()} attention refuses: {why}")
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(**given, scale=scale).transpose(1, 2)


def refusal(usable: Callable, given: dict) -> str | None:
    """What PyTorch warns of, if it is asked why a backend does not take these arguments; None: it does."""
    tensors = [given[key] for key in ("query", "key", "value", "attn_mask")]
    params = SDPAParams(*tensors, 0.0, given["is_causal"], given["enable_gqa"])
    if usable(params, False):
        return None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable(params, True)
    reasons = [re.sub(r"\s*\(Triggered internally.*", "", str(each.message), flags=re.S) for each in said]
    return " ".join(reasons) or f"torch {torch.__version__} does not say why"

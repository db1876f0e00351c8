"""scaled_dot_product_attention with a single backend allowed: it runs, or PyTorch's own reason says why it does not."""

import itertools
import re
import warnings
from collections.abc import Callable
from contextlib import suppress

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
    if not torch.compiler.is_compiling() and (why := refusal(backend, usable, given)):
        raise Unavailable(f"PyTorch's {short(backend)} attention refuses: {why}")
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(**given, scale=scale).transpose(1, 2)


def short(backend: SDPBackend) -> str:
    return backend.name.removesuffix("_ATTENTION").lower()


def refusal(backend: SDPBackend, usable: Callable, given: dict) -> str | None:
    """What PyTorch warns of where it finds no backend for these arguments, of this one; None: it takes them.

    usable(params, debug=True) would print the same, on stderr: it is no function that makes warnings of Python.
    """
    tensors = [given[key] for key in ("query", "key", "value", "attn_mask")]
    if usable(SDPAParams(*tensors, 0.0, given["is_causal"], given["enable_gqa"]), False):
        return None
    with warnings.catch_warnings(record=True) as said, suppress(RuntimeError), sdpa_kernel(backend):
        warnings.simplefilter("always")
        F.scaled_dot_product_attention(**given)
    reasons = [re.sub(r"\s*\(Triggered internally.*", "", str(each.message), flags=re.S) for each in said]
    heads = [i for i, reason in enumerate(reasons) if reason.endswith("not used because:")] + [len(reasons)]
    for start, end in itertools.pairwise(heads):
        if short(backend) in reasons[start].lower() and end > start + 1:
            return " ".join(reasons[start + 1 : end])
    return f"torch {torch.__version__} does not say why"

"""The implementations of FlashAttention that flash.py chooses from: how to call each one, and where each one runs.

fa4(), fa3(), fa2() and pytorch_built_in() each import a package and return two functions, forward and backward:

    forward(q, k, v, causal, scale, window, lengths, documents) -> out (B, Tq, H, D), lse (B, H, Tq) fp32
    backward(dout, q, k, v, out, lse, causal, scale, window, dq, dk, dv, documents) writes to dq, dk and dv

q, out, dout and dq are (B, Tq, H, D); k, v, dk and dv are (B, Tk, Hkv, D). All implementations support heads that share
keys, and align the causal mask bottom right, or to `lengths` if given. Their window counts the keys before the query's
own position; the contract's `window` includes that position. With `documents`, which excludes `lengths`, all tensors
are packed: (N, H, D) and (N, Hkv, D), and lse is (H, N).
"""

import functools
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.tuned import user_cache

Kernels = tuple[Callable, Callable]


class Documents(NamedTuple):
    """The documents in packed tensors (N, H, D)."""

    bounds: Tensor  # (documents + 1,) int32: the first row of each document, then N
    longest: int  # the number of rows of the longest document


def varlen_options(documents: Documents | None) -> dict:
    """Return the keyword arguments for packed tensors: the versions give them the same names."""
    if documents is None:
        return {}
    bounds, longest = documents
    return {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}


def fa4() -> Kernels:
    """Import FlashAttention-4: kernels in the CuTe DSL, which compiles them on first use.

    On Hopper a single multiprocessor reads all keys of a (sequence, head) pair, so few multiprocessors read a long
    cache. torch.compile cannot trace the package's autograd.Function, so fa4() calls the two functions that the
    autograd.Function wraps.
    """
    keep_compiled_kernels()
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    warnings.filterwarnings("ignore", "Argument aux_data")  # FA4's own compiler warns about an argument that FA4 passes

    def mask_options(causal, window):
        return {"causal": causal, "window_size_left": None if window is None else window - 1}

    def forward(q, k, v, causal, scale, window, lengths, documents):
        options = {"softmax_scale": scale, "seqused_k": lengths, "return_lse": True, **varlen_options(documents)}
        return _flash_attn_fwd(q, k, v, **options, **mask_options(causal, window))[:2]

    def backward(dout, q, k, v, out, lse, causal, scale, window, dq, dk, dv, documents):
        options = {"softmax_scale": scale, "dq": dq, "dk": dk, "dv": dv, **varlen_options(documents)}
        _flash_attn_bwd(q, k, v, out, dout, lse, **options, **mask_options(causal, window))

    return forward, backward


def kernel_folder() -> Path:
    """Return the folder in which FA4 keeps what it compiles. It may not exist."""
    return Path(os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR") or user_cache() / "flash-attn-4")


def keep_compiled_kernels() -> None:
    """Let FA4 keep what it compiles on the disk, unless the user has said otherwise or the disk does not allow it.

    FA4 reads the variables when it is imported. With its kernels on the disk, the first step of GPT-2 124M (16 x 1024)
    took 0.9 s on an H100 instead of 4.8 s.
    """
    folder = kernel_folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def fa3() -> Kernels:
    """Import FlashAttention-3: written in CUDA for Hopper (Shah et al. 2024, arXiv:2407.08608)."""
    import flash_attn_interface  # noqa: F401  # registers the operators

    ops = torch.ops.flash_attn_3
    if not (hasattr(ops, "fwd") and hasattr(ops, "bwd")):
        raise ImportError("flash_attn_interface does not register flash_attn_3::fwd and flash_attn_3::bwd")

    def mask_options(causal, window):
        return {"is_causal": causal, "window_size_left": window_left(window)}

    def forward(q, k, v, causal, scale, window, lengths, documents):
        # num_splits = 0 lets FA3 distribute the keys of one query over all multiprocessors
        splits = 1 if lengths is None else 0
        options = {"softmax_scale": scale, "seqused_k": lengths, "num_splits": splits, **varlen_options(documents)}
        return ops.fwd(q, k, v, **options, **mask_options(causal, window))[:2]

    def backward(dout, q, k, v, out, lse, causal, scale, window, dq, dk, dv, documents):
        options = {"softmax_scale": scale, **mask_options(causal, window), **varlen_options(documents)}
        ops.bwd(dout, q, k, v, out, lse, dq, dk, dv, **options)

    return forward, backward


def fa2() -> Kernels:
    """Import FlashAttention-2: written in CUDA for Ampere (Dao 2023, arXiv:2307.08691).

    Raises ImportError for versions before 2.7, which pass the window in one argument instead of two.
    """
    from flash_attn import __version__
    from flash_attn.flash_attn_interface import (
        _flash_attn_backward,
        _flash_attn_forward,
        _flash_attn_varlen_backward,
        _flash_attn_varlen_forward,
        flash_attn_with_kvcache,
    )

    if [int(part) for part in __version__.split(".")[:2]] < [2, 7]:
        raise ImportError(f"flash_attn is {__version__}, older than 2.7")

    def kernel_options(causal, scale, window):
        mask_options = {"causal": causal, "window_size_left": window_left(window), "window_size_right": -1}
        return {"dropout_p": 0.0, "softmax_scale": scale, "softcap": 0.0, "alibi_slopes": None, **mask_options}

    def forward(q, k, v, causal, scale, window, lengths, documents):
        options = kernel_options(causal, scale, window)
        if documents:
            return _flash_attn_varlen_forward(q, k, v, **varlen_options(documents), **options)[:2]
        if lengths is None:
            return _flash_attn_forward(q, k, v, **options, return_softmax=False)[:2]
        mask_options = {"causal": causal, "window_size": (window_left(window), -1), "cache_seqlens": lengths}
        return flash_attn_with_kvcache(q, k, v, softmax_scale=scale, return_softmax_lse=True, **mask_options)

    def backward(dout, q, k, v, out, lse, causal, scale, window, dq, dk, dv, documents):
        options = {**kernel_options(causal, scale, window), "deterministic": False, **varlen_options(documents)}
        backward_kernel = _flash_attn_varlen_backward if documents else _flash_attn_backward
        backward_kernel(dout, q, k, v, out, lse, dq, dk, dv, **options)

    return forward, backward


def pytorch_built_in() -> Kernels:
    """Return the FlashAttention-2 that PyTorch contains, through the operators below scaled_dot_product_attention."""
    if not torch.backends.cuda.is_flash_attention_available():
        raise ImportError("this PyTorch was built without FlashAttention")
    aten = torch.ops.aten

    def forward(q, k, v, causal, scale, window, lengths, documents):
        options = {"scale": scale, "window_size_left": window_left(window), "window_size_right": -1}
        if documents:
            bounds, longest = documents
            sizes_and_mask = longest, longest, 0.0, causal, False
            return aten._flash_attention_forward(q, k, v, bounds, bounds, *sizes_and_mask, **options)[:2]
        (B, queries, H, D), keys = q.shape, k.shape[1]
        sizes_and_mask = queries, keys, 0.0, causal, False  # 0.0: no dropout; False: no debug mask
        if lengths is None:
            return aten._flash_attention_forward(q, k, v, None, None, *sizes_and_mask, **options)[:2]
        # The operator supports lengths only for packed sequences. A cache can be read as packed sequences: each
        # sequence occupies Tk rows and uses only the first of them
        k, v, k_starts = pack_cache(k, v)
        q_starts = torch.arange(0, (B + 1) * queries, queries, dtype=torch.int32, device=q.device)
        options["seqused_k"] = lengths
        q = q.reshape(B * queries, H, D)
        out, lse, *_ = aten._flash_attention_forward(q, k, v, q_starts, k_starts, *sizes_and_mask, **options)
        return out.view(B, queries, H, D), lse.view(H, B, queries).transpose(0, 1).contiguous()

    def backward(dout, q, k, v, out, lse, causal, scale, window, dq, dk, dv, documents):
        random_state = lse.new_empty(0)  # for dropout; the operator does not read it
        if documents:
            sizes = documents.bounds, documents.bounds, documents.longest, documents.longest
        else:
            sizes = None, None, q.shape[1], k.shape[1]
        positional = *sizes, 0.0, causal, random_state, random_state  # 0.0: no dropout
        options = {"scale": scale, "window_size_left": window_left(window), "window_size_right": -1}
        gradients = aten._flash_attention_backward(dout, q, k, v, out, lse, *positional, **options)
        for target, gradient in zip((dq, dk, dv), gradients, strict=True):
            target.copy_(gradient)

    return forward, backward


def window_left(window: int | None) -> int:
    """Return FlashAttention's window_size_left: how many keys before its own position a query sees, or -1 for all."""
    return -1 if window is None else window - 1


def pack_cache(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View k and v (B, T, Hkv, D) as packed sequences.

    Returns k and v as (N, Hkv, D), and the row at which each sequence begins as (B + 1,) int32. Copies k and v only if
    their strides differ, or if the distance between two sequences is not a whole number of rows.
    """
    B, T = k.shape[:2]
    if k.stride() != v.stride() or k.stride(0) % k.stride(1):
        k, v = k.contiguous(), v.contiguous()
    rows_per_sequence = T if B == 1 else k.stride(0) // k.stride(1)
    size = (B - 1) * rows_per_sequence + T, *k.shape[2:]
    starts = torch.arange(0, (B + 1) * rows_per_sequence, rows_per_sequence, dtype=torch.int32, device=k.device)
    return k.as_strided(size, k.stride()[1:]), v.as_strided(size, v.stride()[1:]), starts


class Version(NamedTuple):
    """An implementation of FlashAttention, and what it needs."""

    load: Callable[[], Kernels]
    package: str  # as pip names it
    install: str  # the command that installs it
    min_major: int = 8  # the GPU's smallest major compute capability
    max_major: int | None = None  # the GPU's largest major compute capability; None for no limit
    head_multiple: int = 8  # the head dim must be a multiple of this
    max_head_dim: int = 256


# On Hopper, FlashAttention-4 pads the head dim to a multiple of 16 in one place and of 32 in another. Its dq is wrong
# for a head dim such as 80 (Dao-AILab/flash-attention#2896, as of 4.0.0b36). Its kernels for compute capability 12.x
# are newer still (#2553), so max_major excludes them
VERSIONS = {
    "fa4": Version(
        fa4,
        "flash-attn-4",
        'pip install "flash-attn-4[cu13]>=4.0.0b36"',
        min_major=9,
        max_major=11,
        head_multiple=32,
        max_head_dim=128,
    ),
    "fa3": Version(
        fa3,
        "flash-attn-3",
        'pip install --no-build-isolation "git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"',
        min_major=9,
        max_major=9,
    ),
    "fa2": Version(fa2, "flash-attn", 'pip install --no-build-isolation "flash-attn>=2.7"'),
    "torch": Version(pytorch_built_in, "torch", "pip install torch"),
}


@functools.lru_cache
def version_unavailable(name: str, device: torch.device, head_dim: int | None = None) -> str | None:
    """Return why version `name` cannot run on `device`, or None if it can. Checks the head dim only if it is given."""
    version = VERSIONS[name]
    if device.type != "cuda":
        return "it needs an NVIDIA GPU of compute capability 8.0 or newer; on a CPU choose attn=sdpa"
    major, minor = torch.cuda.get_device_capability(device)
    if not version.min_major <= major <= (version.max_major or major):
        upper = "or newer" if version.max_major is None else f"to {version.max_major}.x"
        needed = f"compute capability {version.min_major}.0 {upper}"
        return f"{name} needs a GPU of {needed}, and this one has {major}.{minor}: choose attn=sdpa"
    try:
        version.load()
    except (ImportError, AttributeError) as error:  # AttributeError: the package is broken, or for another torch
        return f"{name} is not installed ({error}): {version.install}"
    if head_dim is not None and (head_dim % version.head_multiple or head_dim > version.max_head_dim):
        supported = f"head dims that are multiples of {version.head_multiple}, up to {version.max_head_dim}"
        return f"{name} supports {supported}, not {head_dim}: choose attn.version=null, or attn=sdpa"
    return None


@functools.lru_cache
def newest_version(device: torch.device, head_dim: int | None = None) -> str:
    """Return the name of the newest version that can run on `device`, or "torch" if none can."""
    return next((name for name in VERSIONS if not version_unavailable(name, device, head_dim)), "torch")

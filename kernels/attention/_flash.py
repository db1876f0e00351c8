"""The implementations of FlashAttention behind flash.py: how each is called, and where it runs.

A version's function imports what it needs, and returns its forward and its backward:

    forward(q, k, v, causal, scale, window, lengths) -> out (B, Tq, H, D), lse (B, H, Tq) fp32
    backward(dout, q, k, v, out, lse, causal, scale, window, dq, dk, dv), the last of which it writes

All of them take (B, T, H, D), share keys among heads, align the causal mask bottom right, and to `lengths` where those
are given. Their windows count the keys to the left of a query's own, which the contract's includes.
"""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Kernels = tuple[Callable, Callable]


def fa4() -> Kernels:
    """The kernels in the CuTe DSL, compiled on first use. On Hopper one multiprocessor reads all the keys of a row and
    head, so a long cache is read by few. Its autograd.Function stops torch.compile: this is what that calls."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    warnings.filterwarnings("ignore", "Argument aux_data")  # of its own compiler, about its own argument

    def limits(causal, window):
        return {"causal": causal, "window_size_left": None if window is None else window - 1}

    def forward(q, k, v, causal, scale, window, lengths):
        given = {"softmax_scale": scale, "seqused_k": lengths, "return_lse": True}
        return _flash_attn_fwd(q, k, v, **given, **limits(causal, window))[:2]

    def backward(dout, q, k, v, out, lse, causal, scale, window, dq, dk, dv):
        given = {"softmax_scale": scale, "dq": dq, "dk": dk, "dv": dv}
        _flash_attn_bwd(q, k, v, out, dout, lse, **given, **limits(causal, window))

    return forward, backward


def fa3() -> Kernels:
    """Written in CUDA for Hopper (Shah et al. 2024, arXiv:2407.08608)."""
    import flash_attn_interface  # noqa: F401  # registers the operators

    ops = torch.ops.flash_attn_3
    if not (hasattr(ops, "fwd") and hasattr(ops, "bwd")):
        raise ImportError("flash_attn_interface is there, without flash_attn_3::fwd and ::bwd")

    def limits(causal, window):
        return {"is_causal": causal, "window_size_left": left(window)}

    def forward(q, k, v, causal, scale, window, lengths):
        splits = 1 if lengths is None else 0  # 0: one query's keys go to as many multiprocessors as there are
        given = {"softmax_scale": scale, "seqused_k": lengths, "num_splits": splits}
        return ops.fwd(q, k, v, **given, **limits(causal, window))[:2]

    def backward(dout, q, k, v, out, lse, causal, scale, window, dq, dk, dv):
        ops.bwd(dout, q, k, v, out, lse, dq, dk, dv, softmax_scale=scale, **limits(causal, window))

    return forward, backward


def fa2() -> Kernels:
    """Written in CUDA for Ampere (Dao 2023, arXiv:2307.08691). From 2.7 on, where windows are two arguments."""
    from flash_attn import __version__
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward, flash_attn_with_kvcache

    if [int(part) for part in __version__.split(".")[:2]] < [2, 7]:
        raise ImportError(f"flash_attn is {__version__}, older than 2.7")

    def given(causal, scale, window):
        limits = {"causal": causal, "window_size_left": left(window), "window_size_right": -1}
        return {"dropout_p": 0.0, "softmax_scale": scale, "softcap": 0.0, "alibi_slopes": None, **limits}

    def forward(q, k, v, causal, scale, window, lengths):
        if lengths is None:
            return _flash_attn_forward(q, k, v, **given(causal, scale, window), return_softmax=False)[:2]
        limits = {"causal": causal, "window_size": (left(window), -1), "cache_seqlens": lengths}
        return flash_attn_with_kvcache(q, k, v, softmax_scale=scale, return_softmax_lse=True, **limits)

    def backward(dout, q, k, v, out, lse, causal, scale, window, dq, dk, dv):
        rest = {**given(causal, scale, window), "deterministic": False}
        _flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, **rest)

    return forward, backward


def built_in() -> Kernels:
    """FlashAttention-2 as it comes with PyTorch, by the operators under scaled_dot_product_attention."""
    if not torch.backends.cuda.is_flash_attention_available():
        raise ImportError("this PyTorch was built without it")
    aten = torch.ops.aten

    def forward(q, k, v, causal, scale, window, lengths):
        (B, queries, H, D), keys = q.shape, k.shape[1]
        given = {"scale": scale, "window_size_left": left(window), "window_size_right": -1}
        rest = queries, keys, 0.0, causal, False  # no dropout, no debug mask
        if lengths is None:
            return aten._flash_attention_forward(q, k, v, None, None, *rest, **given)[:2]
        # It knows lengths of packed sequences only. A cache is one, of sequences that do not fill their places
        k, v, k_starts = packed(k, v)
        q_starts = torch.arange(0, (B + 1) * queries, queries, dtype=torch.int32, device=q.device)
        given["seqused_k"] = lengths
        q = q.reshape(B * queries, H, D)
        out, lse, *_ = aten._flash_attention_forward(q, k, v, q_starts, k_starts, *rest, **given)
        return out.view(B, queries, H, D), lse.view(H, B, queries).transpose(0, 1).contiguous()

    def backward(dout, q, k, v, out, lse, causal, scale, window, dq, dk, dv):
        dropout = lse.new_empty(0)  # the state of its generator, not read
        rest = None, None, q.shape[1], k.shape[1], 0.0, causal, dropout, dropout
        given = {"scale": scale, "window_size_left": left(window), "window_size_right": -1}
        made = aten._flash_attention_backward(dout, q, k, v, out, lse, *rest, **given)
        for gradient, value in zip((dq, dk, dv), made, strict=True):
            gradient.copy_(value)

    return forward, backward


def left(window: int | None) -> int:
    return -1 if window is None else window - 1


def packed(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, Hkv, D) -> both as rows (N, Hkv, D) of one memory, and the row where each b begins, (B + 1,) int32.

    A view, and so without a copy of the cache, where k and v lie alike and a b is a whole number of rows.
    """
    B, T = k.shape[:2]
    if k.stride() != v.stride() or k.stride(0) % k.stride(1):
        k, v = k.contiguous(), v.contiguous()
    apart = T if B == 1 else k.stride(0) // k.stride(1)
    size = (B - 1) * apart + T, *k.shape[2:]
    starts = torch.arange(0, (B + 1) * apart, apart, dtype=torch.int32, device=k.device)
    return k.as_strided(size, k.stride()[1:]), v.as_strided(size, v.stride()[1:]), starts


class Version(NamedTuple):
    kernels: Callable[[], Kernels]
    package: str
    install: str
    first: int = 8  # major compute capabilities, from and to
    last: int | None = None
    multiple: int = 8  # of channels that a head must have
    widest: int = 256


# On Hopper, FlashAttention-4 pads a head to 16 channels in one place and to 32 in another, and its dq is wrong
# (Dao-AILab/flash-attention#2896, as of 4.0.0b36); its kernels for 12.x are younger still (#2553).
VERSIONS = {
    "fa4": Version(fa4, "flash-attn-4", 'pip install "flash-attn-4[cu13]>=4.0.0b36"', 9, 11, multiple=32, widest=128),
    "fa3": Version(
        fa3,
        "flash-attn-3",
        'pip install --no-build-isolation "git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"',
        9,
        9,
    ),
    "fa2": Version(fa2, "flash-attn", 'pip install --no-build-isolation "flash-attn>=2.7"'),
    "torch": Version(built_in, "torch", "pip install torch"),
}


@functools.lru_cache
def why_not(name: str, device: torch.device, width: int | None = None) -> str | None:
    """Why this version cannot run on `device`, for heads of `width` channels if that is known, or None."""
    kernels, _, install, first, last, multiple, widest = VERSIONS[name]
    if device.type != "cuda":
        return "it needs an NVIDIA GPU of compute capability 8.0 or newer; on a CPU choose attn=sdpa"
    major, minor = torch.cuda.get_device_capability(device)
    if not first <= major <= (last or major):
        known = f"{first}.0 or newer" if last is None else f"{first}.0 to {last}.x"
        return f"{name} needs a GPU of compute capability {known}, and this one has {major}.{minor}: choose attn=sdpa"
    try:
        kernels()
    except (ImportError, AttributeError) as error:  # one that is broken, or of another torch
        return f"{name} is not installed ({error}): {install}"
    if width is not None and (width % multiple or width > widest):
        rule = f"a multiple of {multiple} channels a head, {widest} at most"
        return f"{name} takes {rule}, and these have {width}: choose attn.version=null, or attn=sdpa"
    return None


@functools.lru_cache
def newest(device: torch.device, width: int | None = None) -> str:
    """The first version that can run, or the last one."""
    return next((name for name in VERSIONS if not why_not(name, device, width)), "torch")

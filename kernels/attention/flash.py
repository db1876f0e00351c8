"""FlashAttention: scores are made in tiles, in registers, and never go to memory (Dao et al. 2022, arXiv:2205.14135).

At B = 64, T = 1024, 12 heads, bf16 the scores of a layer are 1.5 GiB; what is kept for the backward instead, besides q,
k, v and out, is the logarithm of each row's sum, 3 MiB. The backward forms the scores again: 5 products to the
forward's 2.

There are four implementations behind one signature, and the newest that can run is taken: FlashAttention-4 (the package
flash-attn-4), 3 (flash_attn_3), 2 (flash-attn), or the 2 that PyTorch has built in. detail() says which one that is,
and attn.version pins it. Version 4 compiles its kernels on their first call, for 25 s on an H200. `starts` is left out:
to these kernels documents are packed sequences, and their number is data, of which shapes here must not depend.
"""

import functools
from importlib import metadata
from math import sqrt

import torch
from torch import Tensor

from kernels.attention._flash import VERSIONS, Kernels, newest, why_not
from kernels.direct import direct
from kernels.packed import buffer, parted
from kernels.registry import Unavailable

deterministic = False  # dq is summed by atomics; an order of its own costs time and memory
KEEPS = ("hotswap::flash_fwd",)
RUNS = {
    "PyTorch's": ("pytorch_flash::flash_fwd", "pytorch_flash::flash_bwd"),
    "fa4": ("FlashAttentionForwardSm", "FlashAttentionBackwardSm"),
    "fa3": ("FlashAttnFwd", "FlashAttnBwd"),
    "fa2": (r"\bflash::flash_fwd", r"\bflash::flash_bwd"),
}
DTYPES = (torch.bfloat16, torch.float16)


def unavailable(device: torch.device, version: str | None = None) -> str | None:
    return why_not(version or newest(device), device)


def detail(q, k, v, *, version=None, **limits) -> str:
    name = chosen(version, q)
    if name == "torch":
        return f"PyTorch's fa2, torch {torch.__version__}"
    return f"{name}, {VERSIONS[name].package} {metadata.version(VERSIONS[name].package)}"


def chosen(version: str | None, q: Tensor) -> str:
    """The version that computes for q. Unavailable: it takes no such tensors, or cannot run here."""
    if q.dtype not in DTYPES:
        raise Unavailable(f"attention=flash takes bfloat16 and float16, and not {q.dtype}: choose attn=sdpa")
    name = version or newest(q.device, q.shape[-1])
    if why := why_not(name, q.device, q.shape[-1]):
        raise Unavailable(f"attention=flash cannot run this: {why}")
    return name


@functools.lru_cache
def loaded(name: str) -> Kernels:
    return VERSIONS[name].kernels()


@torch.library.custom_op("hotswap::flash_fwd", mutates_args=())
def flash_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    lengths: Tensor | None,
    version: str | None,
) -> tuple[Tensor, Tensor]:
    """q (B, Tq, H, D), k and v (B, Tk, Hkv, D), fp16 or bf16 -> out (B, Tq, H, D), lse (B, H, Tq) fp32."""
    forward, _ = loaded(chosen(version, q))
    out, lse = forward(*map(rows, (q, k, v)), causal, scale, window, lengths)
    return out.contiguous(), lse


@flash_fwd.register_fake
def _(q, k, v, causal, scale, window, lengths, version):
    B, T, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, T), dtype=torch.float32)


@torch.library.custom_op("hotswap::flash_bwd", mutates_args=())
def flash_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    version: str | None,
) -> Tensor:
    """dq, dk and dv in packed.buffer()."""
    _, backward = loaded(chosen(version, q))
    grads, (q, k, v) = buffer(q, k), map(rows, (q, k, v))
    backward(dout.contiguous(), q, k, v, out, lse, causal, scale, window, *parted(grads, q, k))
    return grads


flash_bwd.register_fake(lambda dout, q, k, *_: buffer(q, k))


def _setup_context(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.scale, ctx.window, _, ctx.version = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx, dout, _dlse):
    q, k, *rest = ctx.saved_tensors  # once: under torch.utils.checkpoint a second look is an error
    grads = flash_bwd(dout, q, k, *rest, ctx.causal, ctx.scale, ctx.window, ctx.version)
    return *parted(grads, q, k), None, None, None, None, None


flash_bwd = direct(flash_bwd)
flash_fwd = direct(flash_fwd, _backward, _setup_context)


def rows(tensor: Tensor) -> Tensor:
    """The kernels step through a head's channels one by one."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def attention(q, k, v, *, causal=True, scale=None, lengths=None, window=None, version=None):
    scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
    return flash_fwd(q, k, v, causal, scale, window, lengths, version)[0]

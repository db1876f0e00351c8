"""FlashAttention (Dao et al. 2022, arXiv:2205.14135): the scores exist only as tiles in registers, never in memory.

At B = 64, T = 1024, 12 heads, bf16 the scores of one layer would take 1.5 GiB. Instead of the scores, autograd saves
the log-sum-exp of each row of scores (lse), 3 MiB, besides q, k, v and out. The backward recomputes the scores, so it
has 5 matmuls; the forward has 2.

Four implementations share one signature: FlashAttention-4 (the package flash-attn-4), 3 (flash-attn-3), 2 (flash-attn),
and the FlashAttention-2 that is built into PyTorch. By default attention() uses the newest one that can run;
attn.version pins one. detail() reports which one it uses. Version 4 compiles its kernels on their first call on a
machine, which takes 4 to 25 s.

attention() omits `starts`, because these kernels take documents as packed sequences. Their shapes would depend on the
number of documents, which is data, and shapes in this repo must not depend on data.
"""

import functools
from importlib import metadata
from math import sqrt

import torch
from torch import Tensor

from kernels.attention._flash import VERSIONS, Kernels, newest_version, version_unavailable
from kernels.direct import bypass_dispatcher
from kernels.packed import gradient_buffer, gradient_views
from kernels.registry import Unavailable

deterministic = False  # the backward sums dq with atomics; a fixed order would cost time and memory
KEEPS = ("hotswap::flash_fwd",)
RUNS = {
    "PyTorch's": ("pytorch_flash::flash_fwd", "pytorch_flash::flash_bwd"),
    "fa4": ("FlashAttentionForwardSm", "FlashAttentionBackwardSm"),
    "fa3": ("FlashAttnFwd", "FlashAttnBwd"),
    "fa2": (r"\bflash::flash_fwd", r"\bflash::flash_bwd"),
}
DTYPES = (torch.bfloat16, torch.float16)


def unavailable(device: torch.device, version: str | None = None) -> str | None:
    return version_unavailable(version or newest_version(device), device)


def detail(q, k, v, *, version=None, **limits) -> str:
    name = choose_version(version, q)
    if name == "torch":
        return f"PyTorch's fa2, torch {torch.__version__}"
    return f"{name}, {VERSIONS[name].package} {metadata.version(VERSIONS[name].package)}"


def choose_version(version: str | None, q: Tensor) -> str:
    """Return `version`, or if it is None the newest version that can run for q.

    Raises Unavailable if FlashAttention does not support q's dtype, or if the version cannot run here or for q.
    """
    if q.dtype not in DTYPES:
        raise Unavailable(f"attention=flash takes bfloat16 and float16, and not {q.dtype}: choose attn=sdpa")
    name = version or newest_version(q.device, q.shape[-1])
    if why := version_unavailable(name, q.device, q.shape[-1]):
        raise Unavailable(f"attention=flash cannot run this: {why}")
    return name


@functools.lru_cache
def load_kernels(name: str) -> Kernels:
    """Import the package of version `name`, and return its forward and backward. Later calls return the same two."""
    return VERSIONS[name].load()


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
    forward, _ = load_kernels(choose_version(version, q))
    out, lse = forward(*map(contiguous_channels, (q, k, v)), causal, scale, window, lengths)
    return out.contiguous(), lse


@flash_fwd.register_fake
def _(q, k, v, causal, scale, window, lengths, version):
    B, Tq, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, Tq), dtype=torch.float32)


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
    """Return dq, dk and dv in one tensor, as packed.gradient_buffer() allocates it."""
    _, backward = load_kernels(choose_version(version, q))
    grads = gradient_buffer(q, k)
    q, k, v = map(contiguous_channels, (q, k, v))
    backward(dout.contiguous(), q, k, v, out, lse, causal, scale, window, *gradient_views(grads, q, k))
    return grads


flash_bwd.register_fake(lambda dout, q, k, *_: gradient_buffer(q, k))


def _setup_context(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.scale, ctx.window, _, ctx.version = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx, dout, _dlse):
    q, k, *rest = ctx.saved_tensors  # read once: torch.utils.checkpoint raises on a second read
    grads = flash_bwd(dout, q, k, *rest, ctx.causal, ctx.scale, ctx.window, ctx.version)
    return *gradient_views(grads, q, k), None, None, None, None, None


flash_bwd = bypass_dispatcher(flash_bwd)
flash_fwd = bypass_dispatcher(flash_fwd, _backward, _setup_context)


def contiguous_channels(tensor: Tensor) -> Tensor:
    """Return a tensor whose last stride is 1, as the kernels require: `tensor` itself, or a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def attention(q, k, v, *, causal=True, scale=None, lengths=None, window=None, version=None):
    scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
    return flash_fwd(q, k, v, causal, scale, window, lengths, version)[0]

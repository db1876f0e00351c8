"""FlashAttention (Dao et al. 2022, arXiv:2205.14135): the scores exist only as tiles in registers, never in memory.

At B = 64, T = 1024, 12 heads, bf16 the scores of one layer would take 1.5 GiB. Instead of the scores, autograd saves
the log-sum-exp of each row of scores (lse), 3 MiB, besides q, k, v and out. The backward recomputes the scores, so it
has 5 matmuls; the forward has 2.

Four implementations share one signature: FlashAttention-4 (the package flash-attn-4), 3 (flash-attn-3), 2 (flash-attn),
and the FlashAttention-2 that is built into PyTorch. By default attention() uses the newest one that can run;
attn.version pins one. detail() reports which one it uses. Version 4 compiles its kernels on their first call on a
machine, which takes 4 to 25 s.

With `starts`, the kernels read the batch as packed sequences, one a document (the varlen interface). They need the
number of documents on the host, so a CUDA graph cannot contain the step. The host waits for the GPU once for each
batch, or for each block of each batch if the blocks are compiled one by one (torch.compile with several ranks). Inside
torch.compile, a table of fixed size holds the documents, so that no shape depends on data.
"""

import functools
from importlib import metadata
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.attention._flash import (
    VERSIONS,
    BackwardTensors,
    Documents,
    Kernels,
    Options,
    missing_package,
    newest_version,
    version_unavailable,
)
from kernels.direct import custom_op
from kernels.packed import align_rows, gradient_buffer, gradient_views
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


def detail(q: Tensor, k: Tensor, v: Tensor, *, version: str | None = None, **limits: Any) -> str:
    """Return the version that runs: "fa4, flash-attn-4 4.0.0b36".

    If that is version 2 for lack of a package: "PyTorch's fa2, torch 2.11.0, flash-attn-4 cannot be imported".
    """
    name = choose_version(version, q)
    if name == "torch":
        ran = f"PyTorch's fa2, torch {torch.__version__}"
    else:
        ran = f"{name}, {VERSIONS[name].package} {metadata.version(VERSIONS[name].package)}"
    package = None if version else missing_package(q.device, q.shape[-1])
    return f"{ran}, {package} cannot be imported" if package else ran


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


@torch.library.custom_op("hotswap::document_bounds", mutates_args=())
def document_bounds(starts: Tensor) -> tuple[Tensor, Tensor]:
    """Map starts (B, T) to (bounds, sizes) of the documents in the flattened batch. Waits for the GPU.

    bounds (B T + 1,) int32 has the first row of each document, and B T in the places that are left. sizes (2,) int64,
    on the CPU, has the number of documents and the rows of the longest one.
    """
    rows = starts.numel()
    begins = starts == torch.arange(starts.shape[1], dtype=starts.dtype, device=starts.device)
    first_rows = begins.flatten().nonzero().flatten()
    bounds = torch.full((rows + 1,), rows, dtype=torch.int32, device=starts.device)
    bounds[: len(first_rows)] = first_rows
    return bounds, torch.tensor([len(first_rows), int(bounds.diff().max())])


@document_bounds.register_fake
def _(starts: Tensor) -> tuple[Tensor, Tensor]:
    size = (starts.numel() + 1,)
    return starts.new_empty(size, dtype=torch.int32), torch.empty(2, dtype=torch.int64, device="cpu")


@functools.lru_cache(maxsize=1)  # all layers of a step ask for the same documents. It keeps 8 bytes a token alive
def cached_bounds(starts: Tensor, tensor_version: int) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # autograd must be able to save bounds that were first used in inference
        return document_bounds(starts)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    lengths: Tensor | None,
    bounds: Tensor | None,
    sizes: Tensor | None,
    version: str | None,
) -> tuple[Tensor, Tensor]:
    """q (B, Tq, H, D), k and v (B, Tk, Hkv, D), fp16 or bf16 -> out (B, Tq, H, D), lse (B, H, Tq) fp32.

    bounds and sizes are the results of document_bounds(), or None. With them, lse is (H, B Tq).
    """
    forward = load_kernels(choose_version(version, q)).forward
    documents = select_documents(bounds, sizes)
    packed_q, packed_k, packed_v = pack(documents, *map(align_rows, (q, k, v)))
    out, lse = forward(packed_q, packed_k, packed_v, Options(causal, scale, window, documents, lengths))
    return out.view(q.shape) if documents else out.contiguous(), lse


def empty_outputs(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *_, bounds, _sizes, _version = arguments
    B, Tq, H, _ = q.shape
    lse_shape = (B, H, Tq) if bounds is None else (H, B * Tq)
    return q.new_empty(q.shape), q.new_empty(lse_shape, dtype=torch.float32)


def select_documents(bounds: Tensor | None, sizes: Tensor | None) -> Documents | None:
    if bounds is None:
        return None
    number, longest = sizes.tolist()
    return Documents(bounds[: number + 1], longest)


def pack(documents: Documents | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return (B, T, ...) tensors as (B T, ...) if there are documents, views where possible, else as they are."""
    return tuple(tensor.flatten(0, 1) for tensor in tensors) if documents else tensors


def launch_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    bounds: Tensor | None,
    sizes: Tensor | None,
    version: str | None,
    has_lengths: bool = False,
) -> Tensor:
    """Return dq, dk and dv in one tensor, as packed.gradient_buffer() allocates it.

    Raises Unavailable if the forward had lengths: only here is it certain that the caller asks for gradients.
    """
    if has_lengths:
        raise Unavailable("attention=flash has no gradients with lengths: choose attn=sdpa")
    backward = load_kernels(choose_version(version, q)).backward
    grads, documents = gradient_buffer(q, k), select_documents(bounds, sizes)
    dq, dk, dv = pack(documents, *gradient_views(grads, q, k))  # views of grads
    q, k, v = pack(documents, *map(align_rows, (q, k, v)))
    dout, out = pack(documents, dout.contiguous(), out)
    tensors = BackwardTensors(dout=dout, q=q, k=k, v=v, out=out, lse=lse, dq=dq, dk=dk, dv=dv)
    backward(tensors, Options(causal, scale, window, documents))
    return grads


def empty_gradients(dout: Tensor, q: Tensor, k: Tensor, *_: object) -> Tensor:
    """Allocate the gradients, and what the kernels allocate in fp32, so that lab/proof/memory.py counts it.

    All versions allocate sums of dq, and two numbers per query. If query heads share a key head, versions 3 and 4 also
    allocate sums of dk and dv. (Version 2 then allocates dk and dv of every query head, in 16 bits.)
    """
    grads = gradient_buffer(q, k)
    B, T, H, D = q.shape
    workspace = [q.new_empty(B, T, H, D + 2, dtype=torch.float32)]
    if k.shape[2] != H:
        workspace.append(k.new_empty(2, *k.shape, dtype=torch.float32))
    return grads


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale, ctx.window, lengths, bounds, sizes, ctx.version = inputs
    ctx.has_lengths = lengths is not None
    ctx.save_for_backward(q, k, v, *output, bounds, sizes)


def _backward(ctx: FunctionCtx, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, bounds, sizes = ctx.saved_tensors  # read once: torch.utils.checkpoint raises on a second read
    options = {"causal": ctx.causal, "scale": ctx.scale, "window": ctx.window, "version": ctx.version}
    options |= {"bounds": bounds, "sizes": sizes, "has_lengths": ctx.has_lengths}
    grads = flash_bwd(dout, q, k, v, out=out, lse=lse, **options)
    no_gradients = [None] * 7
    return *gradient_views(grads, q, k), *no_gradients


flash_bwd = custom_op("hotswap::flash_bwd", launch_backward, empty_gradients)
flash_fwd = custom_op("hotswap::flash_fwd", launch_forward, empty_outputs, _backward, _setup_context)


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
    version: str | None = None,
) -> Tensor:
    scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
    bounds = sizes = None
    if starts is not None:
        # torch.compile itself merges equal calls of an operator; an inference tensor has no version
        cacheable = not torch.compiler.is_compiling() and not starts.is_inference()
        bounds, sizes = cached_bounds(starts, starts._version) if cacheable else document_bounds(starts)
    # an operator with a backward takes no keywords
    return flash_fwd(q, k, v, causal, scale, window, lengths, bounds, sizes, version)[0]

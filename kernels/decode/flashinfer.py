"""FlashInfer's attention of a decoding step: its XQA kernels, from TensorRT-LLM, between PyTorch's other operations.

The step is reference() of the contract with another attention, so it shows what this attention alone is worth: a cache
in pages is read once, and the lengths stay on the device, so that a CUDA graph can replay the step. FlashInfer compiles
the kernels with nvcc and ninja at the first call. On an H200 124M makes 816 tokens/s at batch 1 (decode=blocks without
compilation: 1,234): elementwise kernels and sums take 56% of the time, because reference() fuses no norm and no GELU.
"""

from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cache import Cache
from kernels.decode import Model, Weights, reference
from kernels.gpu import gpu_unavailable, package_unavailable
from kernels.registry import Unavailable

WORKSPACE_BYTES = 128 << 20  # the first 8 MB are semaphores, which must begin as zeros
OTHER = "choose kernels.decode=blocks"


class Packed(NamedTuple):
    """The model's own weights, and what the attention needs besides."""

    weights: Weights
    workspace: Tensor  # (WORKSPACE_BYTES,) uint8
    pages: Tensor  # (B, pages of a sequence) int32: page p of sequence b is page `pages[b, p]` of the cache
    page_rows: int


def unavailable(device: torch.device) -> str | None:
    reason = package_unavailable("flashinfer-python", "flashinfer.decode.xqa_batch_decode_with_kv_cache")
    return reason or gpu_unavailable(device, (9, 0))


def detail() -> str:
    import flashinfer

    return f"flashinfer {flashinfer.__version__} attention, torch {torch.__version__}"


def pack(model: Model, cache: Cache) -> Packed:
    weights, keys = model.weights(), cache.kv[0][0]
    B, rows, _, D = keys.shape
    page_rows = next((size for size in (128, 64, 32, 16) if rows % size == 0), None)
    reason = None
    if keys.dtype not in (torch.bfloat16, torch.float16):
        reason = f"takes a cache in bfloat16 or float16, not in {keys.dtype}"
    elif D % 16 or D > 256:
        reason = f"needs a multiple of 16 channels a head, and up to 256 channels, not {D}"
    elif page_rows is None:
        reason = f"needs a cache of a multiple of 16 rows, not of {rows}"
    if reason:
        raise Unavailable(f"kernels.decode=flashinfer {reason}: {OTHER}")
    pages = torch.arange(B * rows // page_rows, dtype=torch.int32, device=keys.device).view(B, -1)
    return Packed(weights, torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=keys.device), pages, page_rows)


def decode(packed: Packed, tokens: Tensor, cache: Cache) -> Tensor:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    if tokens.shape[1] != 1:
        raise Unavailable(f"kernels.decode=flashinfer makes one token at a time, not {tokens.shape[1]}: {OTHER}")
    layers = iter(cache.kv)

    def attend(q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor) -> Tensor:
        """Attend to the whole cache of the layer, of which k and v are the first rows of each sequence."""
        in_pages = tuple(rows.view(-1, packed.page_rows, *rows.shape[2:]) for rows in next(layers))
        out = xqa_batch_decode_with_kv_cache(
            q[:, 0].contiguous(),
            in_pages,
            packed.workspace,
            packed.pages,
            lengths.to(torch.uint32),
            cache.keys,
            bmm1_scale=1 / sqrt(q.shape[-1]),
            bmm2_scale=1.0,
            kv_layout="NHD",
        )
        return out[:, None]

    return reference(packed.weights, tokens, cache, attend)

"""Parts of the attention kernels: tile sizes, loads and stores of tiles, order of programs, the keys a query sees."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gpu import has_tma, make_context_current
from kernels.tuned import launch_parameters

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(LOG2E x); the hardware has only exp2
L2_BYTES = 2**24  # for the tensors that concurrent programs read repeatedly: a third of an H200's L2
# {kernel: {D rounded up to a power of two: (sizes with TMA, sizes with pointers)}}; sizes are (BLOCK_M queries, BLOCK_N
# keys, num_warps, num_stages). These are the largest tiles that do not spill on any GPU from compute capability 8.0 on.
# At D = 64 two programs fit on a multiprocessor, and dkdv with pointers stores 2 to 6 registers before its loops and
# loads them after the loops. With TMA the backward at D = 64 has smaller tiles, of which 3 or 4 programs fit.
# On one H200 it reaches 298 TFLOP/s at (32, 1024, 12, 64) and 448 at (2, 16384, 12, 64). With tiles of
# 128 x 64 it had 247 and 388
SIZES = {
    "forward": {
        64: ((128, 64, 4, 3), (128, 64, 4, 3)),
        128: ((128, 128, 8, 2), (128, 32, 8, 2)),
        256: ((128, 64, 8, 2), (64, 32, 8, 1)),
    },
    "decode": {  # never with TMA
        64: ((16, 128, 4, 3), (16, 128, 4, 3)),
        128: ((16, 64, 4, 3), (16, 64, 4, 3)),
        256: ((16, 32, 4, 3), (16, 32, 4, 3)),
    },
    "dq": {
        64: ((64, 64, 4, 2), (128, 32, 4, 2)),
        128: ((64, 64, 4, 3), (64, 64, 8, 2)),
        256: ((64, 32, 4, 2), (32, 32, 4, 1)),
    },
    "dkdv": {
        64: ((64, 64, 4, 3), (32, 64, 4, 2)),
        128: ((64, 64, 4, 2), (64, 64, 8, 2)),
        256: ((32, 64, 8, 2), (32, 32, 8, 1)),
    },
}
# {(kernel, D rounded up): sizes that scripts/tune.py measures}
CANDIDATES = {
    ("forward", 64): [(128, 64, 4, 2), (128, 64, 4, 4), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3)],
    ("forward", 128): [(128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 128, 4, 2)],
    ("dq", 64): [(128, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 128, 8, 2)],
    ("dq", 128): [(128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 128, 4, 2)],
    ("dkdv", 64): [(64, 64, 4, 2), (128, 64, 4, 2), (128, 64, 4, 3), (64, 128, 8, 2), (128, 128, 8, 2)],
    ("dkdv", 128): [(64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 3), (32, 64, 4, 2), (32, 128, 8, 2)],
}


@triton.jit
def load_tile(
    source, strides, b, h, row, rows, D: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):
    """Return a tile (SIZE, WIDTH) of head h of sequence b, from `row` on. It is zero beyond the tensor's `rows` and D.

    `source` is kernel_argument() of a (B, T, H, D) tensor. Use TMA only inside a loop: outside of a loop Triton waits
    for each TMA load before it issues the next one. Products with strides are int64, because they may pass 2^31.
    """
    if TMA:
        tile = source.load([b, h, row, 0]).reshape(SIZE, WIDTH)
    else:
        t, d = tl.arange(0, SIZE), tl.arange(0, WIDTH)
        source += tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[2]
        in_bounds = (row + t < rows)[:, None] & (d < D)[None, :]
        # not t * stride: Triton would keep it from tile to tile, in 64 bits, which takes 40 registers more in decoding
        tile = tl.load(source + d[None, :] + (row + t).to(tl.int64)[:, None] * strides[1], in_bounds, other=0.0)
    return tile


@triton.jit
def store_tile(
    target, strides, tile, b, h, row, rows, D: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):
    """Store a tile (SIZE, WIDTH) where load_tile() would load it; drop what lies beyond the tensor's `rows` and D."""
    if TMA:
        target.store([b, h, row, 0], tile.reshape(1, 1, SIZE, WIDTH))
    else:
        t, d = tl.arange(0, SIZE), tl.arange(0, WIDTH)
        target += tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[2]
        in_bounds = (row + t < rows)[:, None] & (d < D)[None, :]
        tl.store(target + d[None, :] + (row + t).to(tl.int64)[:, None] * strides[1], tile, in_bounds)


@triton.jit
def tile_and_head(program, tiles, heads, active_heads):
    """Return which tile of which head a program computes: (rank of the tile in its head, head).

    A head has `tiles` tiles. Programs start in the order of their numbers. The tile with the most work has rank 0 and
    starts first, so that the last programs to finish are short. At any time, programs work on only `active_heads`
    heads, so that the keys and values that they share stay in the L2.
    """
    active_heads = min(active_heads, heads)  # so that the products below are at most the number of programs
    band = program // (active_heads * tiles)  # a band has active_heads heads, the last one maybe fewer
    within = program - band * active_heads * tiles
    width = min(heads - band * active_heads, active_heads)
    return within // width, band * active_heads + within % width


@triton.jit
def visible_keys(m, b, Tq, keys, window, starts_ptr, CAUSAL: tl.constexpr, SIZE: tl.constexpr):
    """Return first, end, any_start, all_start, all_end, any_end: the keys that the SIZE queries m, m + 1, ... see.

    Each query sees the keys from its `first` to before its `end`; both are (SIZE,). The others are numbers. No query
    sees a key before any_start or from any_end on. All queries see the keys from all_start to before all_end.
    """
    query = m + tl.arange(0, SIZE)
    last = min(m + SIZE, Tq) - 1
    if CAUSAL:
        shift = keys - Tq + 1
        end, all_end, any_end = query + shift, m + shift, last + shift
    else:
        end, all_end, any_end = tl.zeros_like(query) + keys, keys, keys
    first, any_start, all_start = tl.zeros_like(query), 0, 0
    if window is not None:
        first, any_start, all_start = end - window, max(all_end - window, 0), any_end - window
    if starts_ptr is not None:
        starts_ptr += tl.cast(b, tl.int64) * Tq
        first = tl.maximum(first, tl.load(starts_ptr + query, query < Tq, other=0))
        any_start = max(any_start, tl.load(starts_ptr + m))
        all_start = max(all_start, tl.load(starts_ptr + last))
    return first, end, any_start, all_start, all_end, any_end


def default_parameters(kernel: str, dtype: torch.dtype, D: int, tma: bool) -> dict:
    """Return the tile sizes, num_warps and num_stages of `kernel`, which is forward, decode, dq or dkdv."""
    width = max(16, triton.next_power_of_2(D))
    if dtype == torch.float32:  # for comparisons of results, not for speed; it fits 99 KB of shared memory
        size = min(64, 4096 // width)
        sizes = (16 if kernel == "decode" else size, size, 16, 1)
    else:
        sizes_with_tma, sizes_with_pointers = SIZES[kernel][max(64, width)]
        sizes = sizes_with_tma if tma else sizes_with_pointers
    return {**as_parameters(*sizes), "BLOCK_D": width}


def as_parameters(BLOCK_M: int, BLOCK_N: int, num_warps: int, num_stages: int) -> dict:
    return {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": num_warps, "num_stages": num_stages}


def tile_parameters(kernel: str, dtype: torch.dtype, D: int, tma: bool, device: torch.device) -> dict:
    """Return the parameters that were measured to be the fastest on this GPU, or default_parameters() if none were."""
    default = default_parameters(kernel, dtype, D, tma)
    key = f"{D} {dtype} tma" if tma else f"{D} {dtype}"
    return launch_parameters(f"attention_{kernel}", key, default, device)


def candidates(kernel: str, default: dict) -> list[dict]:
    """Return the launch parameters that scripts/tune.py tries."""
    sizes = CANDIDATES.get((kernel.removeprefix("attention_"), max(64, default["BLOCK_D"])), [])
    return [as_parameters(*size) for size in sizes]


def empty_outputs(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Allocate out (B, Tq, H, D) and lse (B, H, Tq rounded up to a multiple of 4) fp32. Also the fake of a forward."""
    B, Tq, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(B, H, (Tq + 3) // 4 * 4, dtype=torch.float32)


def heads_in_l2(k: Tensor) -> int:
    """Return the number of heads whose keys and values fit together in L2_BYTES, at least 1. k is (B, T, H, D)."""
    return max(1, L2_BYTES // (2 * k.shape[1] * k.shape[3] * k.element_size()))


def can_use_tma(*tensors: Tensor) -> bool:
    """Return whether the kernels move tiles of these tensors with TMA, Hopper's copy engine. For fp32 they do not."""
    return has_tma(tensors[0].device) and tensors[0].dtype != torch.float32 and fits_tma(*tensors)


def fits_tma(*tensors: Tensor) -> bool:
    """Return whether addresses and strides are multiples of 16 bytes, and strides above 0 and below 2^40 bytes.

    The stride of a dimension of size 1 may be any number.
    """
    strides = [s * t.element_size() for t in tensors for s in t.stride()[:-1]]  # in bytes
    return all(0 < s < 2**40 and s % 16 == 0 for s in strides) and all(t.data_ptr() % 16 == 0 for t in tensors)


def align(tensor: Tensor) -> Tensor:
    """Return a (B, T, H, D) tensor, or a contiguous copy if TMA cannot read it."""
    if tensor.stride(-1) == 1 and can_use_tma(tensor):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def kernel_argument(tensor: Tensor, rows: int, width: int, tma: bool) -> TensorDescriptor | Tensor:
    """Return what load_tile() and store_tile() take for a (B, T, H, D) tensor: itself, or a TMA descriptor of tiles."""
    if not tma:
        return tensor
    make_context_current()
    return TensorDescriptor.from_tensor(tensor.transpose(1, 2), [1, 1, rows, width])

"""What the attention kernels share: how large a tile is and how it moves, who takes it, which keys its queries see."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gpu import bind_context, check_dtypes, has_tma
from kernels.registry import Unavailable
from kernels.tuned import tuned

MAX_WIDTH = 256  # of a head: a program holds whole rows of sums in registers
LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(LOG2E x), and exp2 is what the hardware has
SHARED_BYTES = 2**24  # of what the programs of one moment read again and again: a third of an H200's L2
# kernel -> D, rounded up -> BLOCK_M (queries), BLOCK_N (keys), num_warps, num_stages; by TMA, and by pointers.
# The largest that do not spill, two programs a multiprocessor where D is 64
SIZES = {
    "forward": {
        64: ((128, 64, 4, 3), (128, 64, 4, 3)),
        128: ((128, 128, 8, 2), (128, 32, 8, 2)),
        256: ((128, 64, 8, 2), (64, 32, 8, 1)),
    },
    "decode": {64: ((16, 128, 4, 3),) * 2, 128: ((16, 64, 4, 3),) * 2, 256: ((16, 32, 4, 3),) * 2},
    "dq": {
        64: ((128, 64, 4, 2), (128, 32, 4, 2)),
        128: ((128, 64, 8, 2), (64, 32, 4, 2)),
        256: ((64, 32, 4, 2), (32, 32, 4, 1)),
    },
    "dkdv": {
        64: ((128, 64, 4, 2), (32, 64, 4, 2)),
        128: ((64, 64, 4, 2), (64, 64, 8, 2)),
        256: ((32, 64, 8, 2), (32, 32, 8, 1)),
    },
}
CANDIDATES = {  # worth a measurement
    ("forward", 64): [(128, 64, 4, 2), (128, 64, 4, 4), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3)],
    ("forward", 128): [(128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 128, 4, 2)],
    ("dq", 64): [(128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 128, 8, 2)],
    ("dq", 128): [(128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2)],
    ("dkdv", 64): [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 3), (64, 128, 8, 2), (128, 128, 8, 2)],
    ("dkdv", 128): [(64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 3), (32, 64, 4, 2), (32, 128, 8, 2)],
}


@triton.jit
def load_tile(
    source, strides, b, h, row, rows, D: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):
    """(SIZE, WIDTH) of head h of sequence b, from `row` on; zero beyond the tensor's `rows` and its D channels.

    TMA is for loops. Outside of one Triton waits for each such load before it issues the next.
    """
    if TMA:
        tile = source.load([b, h, row, 0]).reshape(SIZE, WIDTH)
    else:
        t, d = tl.arange(0, SIZE), tl.arange(0, WIDTH)
        source += tl.cast(b, tl.int64) * strides[0] + tl.cast(row, tl.int64) * strides[1] + h * strides[2]
        here = (row + t < rows)[:, None] & (d < D)[None, :]
        tile = tl.load(source + t[:, None] * strides[1] + d[None, :], here, other=0.0)
    return tile


@triton.jit
def store_tile(
    target, strides, tile, b, h, row, rows, D: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):
    if TMA:
        target.store([b, h, row, 0], tile.reshape(1, 1, SIZE, WIDTH))
    else:
        t, d = tl.arange(0, SIZE), tl.arange(0, WIDTH)
        target += tl.cast(b, tl.int64) * strides[0] + tl.cast(row, tl.int64) * strides[1] + h * strides[2]
        tl.store(target + t[:, None] * strides[1] + d[None, :], tile, (row + t < rows)[:, None] & (d < D)[None, :])


@triton.jit
def place(program, tiles, heads, span):
    """-> (rank of its tile among those of a head, head).

    Programs start in the order of their numbers. Tiles of rank 0, those with most work, come first, so that the last
    ones to finish are short; but only of `span` heads at a time, so that what they share stays in the L2.
    """
    band = program // (span * tiles)
    inside = program - band * span * tiles
    width = min(heads - band * span, span)
    return inside // width, band * span + inside % width


@triton.jit
def limits(row, b, Tq, keys, window, starts_ptr, CAUSAL: tl.constexpr, SIZE: tl.constexpr):
    """The keys that queries row, row + 1, ... see: from `first` to before `end`, (SIZE,) each; and in numbers

    top     the least first        low     the greatest first
    bottom  the greatest end       high    the least end: from low to high nothing is masked
    """
    rows = row + tl.arange(0, SIZE)
    final = min(row + SIZE, Tq) - 1
    if CAUSAL:
        shift = keys - Tq + 1
        end, high, bottom = rows + shift, row + shift, final + shift
    else:
        end, high, bottom = tl.zeros_like(rows) + keys, keys, keys
    first, top, low = tl.zeros_like(rows), 0, 0
    if window is not None:
        first, top, low = end - window, max(high - window, 0), bottom - window
    if starts_ptr is not None:
        starts_ptr += tl.cast(b, tl.int64) * Tq
        first = tl.maximum(first, tl.load(starts_ptr + rows, rows < Tq, other=0))
        top, low = max(top, tl.load(starts_ptr + row)), max(low, tl.load(starts_ptr + final))
    return first, end, top, low, high, bottom


def check(q: Tensor, name: str) -> None:
    """Unavailable: a dtype or a width of heads that the kernels of attention=`name` do not take."""
    check_dtypes("attention", q)
    if (D := q.shape[-1]) > MAX_WIDTH:
        raise Unavailable(f"attention={name} takes heads of up to {MAX_WIDTH} channels, not {D}: choose attn=sdpa")


def tiling(kernel: str, dtype: torch.dtype, D: int, tma: bool) -> dict:
    """Tile sizes and launch parameters; `kernel` is forward, decode, dq or dkdv."""
    width = max(16, triton.next_power_of_2(D))
    if dtype == torch.float32:  # exact products are for comparisons
        size = min(64, 8192 // width)
        sizes = (16 if kernel == "decode" else size, size, 16, 1)
    else:
        sizes = SIZES[kernel][max(64, width)][0 if tma else 1]
    return {**parameters(*sizes), "BLOCK_D": width}


def parameters(BLOCK_M: int, BLOCK_N: int, num_warps: int, num_stages: int) -> dict:
    return {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": num_warps, "num_stages": num_stages}


def launch(kernel: str, dtype: torch.dtype, D: int, tma: bool, device: torch.device) -> dict:
    """tiling(), or what was measured to be better on this GPU: without TMA it is another kernel."""
    default = tiling(kernel, dtype, D, tma)
    return tuned(f"attention_{kernel}", f"{D} {dtype}{' tma' * tma}", default, device)


def candidates(kernel: str, default: dict) -> list[dict]:
    """What scripts/tune.py tries."""
    sizes = CANDIDATES.get((kernel.removeprefix("attention_"), max(64, default["BLOCK_D"])), [])
    return [parameters(*size) for size in sizes]


def span(k: Tensor) -> int:
    """Heads whose keys and values together stay in the L2."""
    return max(1, SHARED_BYTES // (2 * k.shape[1] * k.shape[3] * k.element_size()))


def by_tma(*tensors: Tensor) -> bool:
    """Whether Hopper's copy engine can fetch their tiles: it wants everything at multiples of 16 bytes."""
    if not has_tma(tensors[0].device) or tensors[0].dtype == torch.float32:
        return False
    steps = [s * t.element_size() for t in tensors for s in t.stride()[:-1]]
    return all(step > 0 and step % 16 == 0 for step in steps) and all(t.data_ptr() % 16 == 0 for t in tensors)


def source(tensor: Tensor, rows: int, width: int, tma: bool) -> TensorDescriptor | Tensor:
    """What a kernel gets of a (B, T, H, D) tensor to move tiles of (rows, width): a view, no copy."""
    if not tma:
        return tensor
    bind_context()
    return TensorDescriptor.from_tensor(tensor.transpose(1, 2), [1, 1, rows, width])

"""What our kernels use of cuda.tile 1.7, in plain PyTorch: it runs the real source of a kernel, block after block.

A tile is a tensor. It checks what cuTile would compile: sizes of tiles that are powers of two, stores that fit, and the
dtypes of a product. As on a GPU, an output must be written through ct.store.
"""

import importlib
import math
import sys
from types import ModuleType

import torch

launched: list[str] = []  # the names of the kernels
block: list[tuple[int, ...]] = []  # the index of the block that runs, and the number of blocks along each axis


class Tile:
    """A tile, and its operators. A number is converted to the tile's dtype."""

    def __init__(self, tensor: torch.Tensor):
        assert all(size & (size - 1) == 0 for size in tensor.shape), tensor.shape
        self.tensor = tensor

    dtype = property(lambda self: self.tensor.dtype)
    shape = property(lambda self: tuple(self.tensor.shape))

    def astype(self, dtype):
        return Tile(self.tensor.to(dtype))

    def reshape(self, shape):
        return Tile(self.tensor.reshape(shape))


def operator(name):
    def call(self, other):
        if isinstance(other, Tile):
            assert self.dtype == other.dtype, (name, self.dtype, other.dtype)
            other = other.tensor
        return Tile(getattr(self.tensor, name)(other))

    return call


for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "lt", "ge", "eq", "and"):
    setattr(Tile, f"__{name}__", operator(f"__{name}__"))


def region(array, index, shape):
    """Return the part of a tile that lies in the array. A tile outside of it is undefined in cuTile."""
    starts = [i * size for i, size in zip(index, shape, strict=True)]
    assert all(0 <= start < length for start, length in zip(starts, array.shape, strict=True)), (index, array.shape)
    return array[tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))]


def load(array, index, shape, *, order="C", padding_mode):
    inside = region(array.T if order == "F" else array, index, shape)
    tile = torch.full(shape, padding_mode, dtype=array.dtype)
    tile[tuple(map(slice, inside.shape))] = inside
    return Tile(tile)


def store(array, index, tile):
    inside = region(array, index, tile.tensor.shape)
    assert array.dtype == tile.dtype
    inside.copy_(tile.tensor[tuple(map(slice, inside.shape))])


def gather(array, indices, *, padding_value):
    rows, columns = (index.tensor for index in indices)
    inside = (rows >= 0) & (rows < array.shape[0]) & (columns >= 0) & (columns < array.shape[1])
    return Tile(array[rows.where(inside, 0).long(), columns.where(inside, 0)].where(inside, padding_value))


class View:
    """A tiled view of an array."""

    def __init__(self, array, shape):
        self.array, self.shape = array, shape

    def atomic_store_add(self, index, tile):
        assert self.array.dtype == tile.dtype
        store(self.array, index, load(self.array, index, self.shape, padding_mode=0) + tile)


def mma(a, b, total):
    assert a.dtype == b.dtype
    assert total.dtype == torch.float32
    return Tile(total.tensor + a.tensor.float() @ b.tensor.float())


def where(condition, x, y):
    x, y = (value.tensor if isinstance(value, Tile) else value for value in (x, y))
    return Tile(torch.where(condition.tensor, x, y))


def reduce(tiles, axis, function, identity, *, keepdims):
    """Fold the tiles in halves along the axis."""
    assert keepdims
    while tiles[0].tensor.shape[axis] > 1:
        halves = [[Tile(half) for half in tile.tensor.chunk(2, axis)] for tile in tiles]
        tiles = function(*(first for first, _ in halves), *(second for _, second in halves))
    return tiles


def launch(stream, grid, kernel, arguments):
    assert not any(isinstance(value, torch.Tensor) and value.requires_grad for value in arguments)
    launched.append(kernel.__name__)
    sizes = (*grid, 1, 1)[:3]
    for index in torch.cartesian_prod(*map(torch.arange, sizes)).tolist():
        block[:] = index, sizes
        kernel(*arguments)


def kernel(function=None, **hints):
    return function or (lambda function: function)


def install(monkeypatch) -> None:
    """Let the kernels import this as cuda.tile."""
    tile = ModuleType("cuda.tile")
    tile.Constant = {bool: bool, int: int}
    tile.PaddingMode = type("PaddingMode", (), {"ZERO": 0, "NEG_INF": -math.inf})
    tile.float32, tile.int32 = torch.float32, torch.int32
    tile.kernel, tile.launch, tile.load, tile.store, tile.mma = kernel, launch, load, store, mma
    tile.Tile, tile.Array, tile.reduce = Tile, torch.Tensor, reduce
    tile.bid = lambda axis: block[0][axis]
    tile.num_blocks = lambda axis: block[1][axis]
    tile.num_tiles = lambda array, axis, shape: -(-array.shape[axis] // shape[axis])
    tile.zeros = lambda shape, dtype: Tile(torch.zeros(shape, dtype=dtype))
    tile.full = lambda shape, value, dtype: Tile(torch.full(shape, value, dtype=dtype))
    tile.arange = lambda size, dtype: Tile(torch.arange(size, dtype=dtype))
    tile.sum = lambda x, axis, keepdims: Tile(x.tensor.sum(axis, keepdim=keepdims))
    tile.max = lambda x, axis, keepdims: Tile(x.tensor.amax(axis, keepdim=keepdims))
    tile.sqrt, tile.log2 = lambda x: Tile(x.tensor.sqrt()), lambda x: Tile(x.tensor.log2())
    tile.tanh, tile.gather = lambda x: Tile(x.tensor.tanh()), gather
    tile.exp2 = lambda x, flush_to_zero: Tile(x.tensor.exp2())
    tile.maximum, tile.minimum = operator("maximum"), operator("clamp_max")
    tile.transpose = lambda x: Tile(x.tensor.T)
    tile.cdiv = lambda x, y: -(-x // y)
    tile.where = where
    package = ModuleType("cuda")
    package.tile, package.__path__ = tile, []
    monkeypatch.setitem(sys.modules, "cuda", package)
    monkeypatch.setitem(sys.modules, "cuda.tile", tile)
    compiler = ModuleType("cuda.tile._compile")
    compiler._find_compiler_bin = None
    monkeypatch.setitem(sys.modules, "cuda.tile._compile", compiler)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.Tensor, "tiled_view", lambda array, shape: View(array, shape), raising=False)
    for name in ("kernels._cutile_sums", *(f"kernels.{op}._cutile" for op in ("norm", "linear", "attention", "loss"))):
        monkeypatch.setitem(sys.modules, name, None)  # it is restored at the end
        del sys.modules[name]
        importlib.import_module(name)

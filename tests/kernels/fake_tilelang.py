"""What our kernels use of TileLang 0.1.15, in plain PyTorch: it runs the real source of kernels, program by program.

A loop over T.Parallel runs once, with its indices as tensors. A load beyond the edge of a tensor is 0, and a store
there is dropped. A tile that nothing has written is NaN. It checks the shapes, dtypes and strides that TileLang's
launch checks, the 16 bytes that TMA requires, and the shapes and dtypes of a product.
"""

import importlib
import itertools
import operator
import sys
from types import ModuleType, SimpleNamespace

import torch

launched: list[str] = []  # the names of the kernels
program: list[tuple[int, ...]] = []  # the index of the program that runs, and the number of programs of each axis
KERNELS = ["kernels._tilelang_sums", *(f"kernels.{op}._tilelang" for op in ("norm", "linear", "attention"))]


class Dynamic:
    """A size that each launch reads from its tensors."""

    def __init__(self, name, dtype="int32"):
        self.value = None

    def __index__(self):
        return self.value


for name in ("add", "sub", "mul", "floordiv", "mod", "lt", "le", "gt", "ge"):
    function = getattr(operator, name)
    setattr(Dynamic, f"__{name}__", lambda self, other, function=function: function(self.value, number(other)))
    setattr(Dynamic, f"__r{name}__", lambda self, other, function=function: function(other, self.value))


def number(value):
    return value.value if isinstance(value, Dynamic) else value


class Buffer:
    """A tensor, or a tile in shared memory or in registers."""

    def __init__(self, tensor):
        self.tensor = tensor

    shape = property(lambda self: tuple(self.tensor.shape))

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(each, torch.Tensor) for each in index):
            return Region(self, index)
        inside, index = self.locate(index)
        return torch.where(inside, self.tensor[index], 0)

    def __setitem__(self, index, value):
        inside, index = self.locate(index if isinstance(index, tuple) else (index,))
        value = torch.as_tensor(value)
        assert value.dtype == self.tensor.dtype or value.dim() == 0, (value.dtype, self.tensor.dtype)
        value = value.to(self.tensor.dtype).expand(inside.shape)
        self.tensor[tuple(each[inside] for each in index)] = value[inside]

    def locate(self, index):
        """Return which elements are inside, and the indices, moved to the edge for the others."""
        index = torch.broadcast_tensors(*map(torch.as_tensor, index))
        inside = torch.ones(index[0].shape, dtype=torch.bool)
        for each, size in zip(index, self.tensor.shape, strict=True):
            inside &= (each >= 0) & (each < size)
        return inside, tuple(each.clamp(0, size - 1) for each, size in zip(index, self.tensor.shape, strict=True))


class Region:
    """A part of a buffer, for T.copy(): slices, or where the part begins. It is as long as the tile."""

    def __init__(self, buffer, index):
        self.buffer, self.index = buffer, index

    def at(self, shape):
        """Return the buffer's indices of a tile of this shape."""
        ranges = [range(number(s.start), number(s.stop)) if isinstance(s, slice) else s for s in self.index]
        if not any(isinstance(each, range) for each in ranges):
            lead = len(ranges) - len(shape)
            ranges[lead:] = [range(start, start + size) for start, size in zip(ranges[lead:], shape, strict=True)]
        assert tuple(len(each) for each in ranges if isinstance(each, range)) == shape
        axes = iter(range(len(shape)))
        result = []
        for each in ranges:
            if isinstance(each, range):
                view = [1] * len(shape)
                view[next(axes)] = -1
                each = torch.tensor(each).view(view)
            result.append(each)
        return tuple(result)


def copy(source, target):
    if isinstance(source, Region):
        target[whole(target)] = source.buffer[source.at(target.shape)]
    elif isinstance(target, Region):
        target.buffer[target.at(source.shape)] = source.tensor
    else:
        assert source.shape == target.shape
        target.tensor.copy_(source.tensor)


def whole(buffer):
    return Region(buffer, tuple(slice(0, size) for size in buffer.shape)).at(buffer.shape)


def gemm(a, b, total, transpose_A=False, transpose_B=False, policy=None, clear_accum=False):
    assert a.tensor.dtype == b.tensor.dtype
    assert total.tensor.dtype == torch.float32
    a, b = (t.tensor.float().T if flip else t.tensor.float() for t, flip in ((a, transpose_A), (b, transpose_B)))
    total.tensor.copy_(a @ b + (0 if clear_accum else total.tensor))


def reduce_sum(source, target, dim, batch=1):
    target.tensor.copy_(source.tensor.sum(dim))


def reduce_max(source, target, dim):
    target.tensor.copy_(source.tensor.amax(dim))


def tile(shape, dtype):
    return Buffer(torch.full(shape, torch.nan, dtype=getattr(torch, dtype)))


def parallel(*sizes, loop_layout=None):
    indices = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    yield indices if len(sizes) > 1 else indices[0]


class Kernel:
    """with T.Kernel(...) as index: prim_func() runs the function once for each index."""

    def __init__(self, *sizes, threads):
        program[1:] = [tuple(map(number, sizes))]

    def __enter__(self):
        index = program[0][: len(program[1])]
        return index if len(index) > 1 else index[0]

    def __exit__(self, *error):
        pass


class Tensor:
    """The type of a parameter: a contiguous tensor, or one with the given strides."""

    def __init__(self, shape, dtype):
        self.shape, self.strides, self.dtype = shape, (), dtype

    def bind(self, tensor):
        """Check the tensor, and give its sizes to the kernel."""
        assert str(tensor.dtype) == f"torch.{self.dtype}"
        assert tensor.stride(-1) == 1
        assert not tensor.requires_grad
        for own, given in ((self.shape, tensor.shape), (self.strides, tensor.stride())):
            for size, found in zip(own, given, strict=bool(own)):
                if isinstance(size, Dynamic) and size.value is None:
                    size.value = found
                assert number(size) == found, (self.shape, self.strides, tensor.shape, tensor.stride())
        assert self.strides or tensor.is_contiguous()
        strides = tensor.stride()[:-1] if self.strides else tensor.shape[-1:]
        strides = [stride * tensor.element_size() for stride in strides]
        rows_are_aligned = all(stride % 16 == 0 for stride in strides)
        # TMA loads and stores these
        assert not self.strides or (rows_are_aligned and all(0 < stride < 2**40 for stride in strides))
        assert tensor.data_ptr() % 16 == 0 or not rows_are_aligned

    def dynamic(self):
        return [size for size in (*self.shape, *self.strides) if isinstance(size, Dynamic)]


class StridedTensor(Tensor):
    def __init__(self, shape, strides, dtype):
        super().__init__(shape, dtype)
        self.strides = strides


def prim_func(function):
    types = function.__annotations__

    def kernel(*arguments):
        launched.append(function.__name__)
        for size in itertools.chain(*(each.dynamic() for each in types.values() if isinstance(each, Tensor))):
            size.value = None
        values = []
        for kind, value in zip(types.values(), arguments, strict=True):
            if isinstance(value, torch.Tensor):
                kind.bind(value)
                value = Buffer(value)
            values.append(value)
        program[:] = [(0, 0, 0)]
        function(*values)  # the first program says how many there are
        for index in itertools.islice(itertools.product(*map(range, program[1])), 1, None):
            program[0] = index
            function(*values)

    return kernel


def jit(function=None, **options):
    return function or (lambda function: function)


def install(monkeypatch) -> None:
    """Let the kernels import this as tilelang."""
    package, T = ModuleType("tilelang"), ModuleType("tilelang.language")
    package.jit, package.language = jit, T
    package.PassConfigKey = SimpleNamespace(TL_ENABLE_FAST_MATH="fast")
    T.Var, T.dynamic, T.prim_func, T.Kernel, T.Parallel = Dynamic, Dynamic, prim_func, Kernel, parallel
    T.Tensor, T.StridedTensor, T.float32, T.int32 = Tensor, StridedTensor, float, int
    T.copy, T.gemm, T.reduce_sum, T.reduce_max = copy, gemm, reduce_sum, reduce_max
    T.alloc_shared = T.alloc_fragment = tile
    T.GemmWarpPolicy = SimpleNamespace(FullRow="rows")
    T.serial = lambda steps: range(steps)
    T.Pipelined = lambda steps, num_stages: range(number(steps))
    T.clear = lambda buffer: buffer.tensor.zero_()
    T.fill = lambda buffer, value: buffer.tensor.fill_(value)
    T.cast = lambda x, dtype: x.to(getattr(torch, dtype))
    T.ceildiv = lambda x, y: -(-number(x) // y)
    T.exp2, T.log2, T.sqrt = torch.exp2, torch.log2, torch.sqrt
    T.And = torch.logical_and
    T.max = lambda x, y: torch.maximum(x, y) if isinstance(x, torch.Tensor) else max(number(x), number(y))
    T.min = lambda x, y: x.clamp_max(number(y)) if isinstance(x, torch.Tensor) else min(number(x), number(y))
    T.if_then_else = torch.where
    T.infinity = lambda dtype: torch.inf
    T.Fragment = lambda *shape, **layout: None
    hints = "annotate_min_blocks_per_sm", "annotate_producer_reg_dealloc", "annotate_consumer_reg_alloc"
    for name in (*hints, "annotate_layout"):
        setattr(T, name, lambda hint: None)
    monkeypatch.setitem(sys.modules, "tilelang", package)
    monkeypatch.setitem(sys.modules, "tilelang.language", T)
    for name in KERNELS:
        monkeypatch.setitem(sys.modules, name, None)  # it is restored at the end
        del sys.modules[name]
        module = importlib.import_module(name)
        # if an earlier test has imported the real one, `from kernels.norm import _tilelang` takes this attribute
        folder, _, file = name.rpartition(".")
        monkeypatch.setattr(sys.modules[folder], file, module, raising=False)

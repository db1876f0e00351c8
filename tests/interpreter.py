"""Patch Triton's interpreter, which makes most of the time of kernels in it. The results stay the same.

speed_up() replaces private parts of triton.runtime.interpreter and triton.language (pyproject.toml lists the tested
versions). tests/test_conftest.py fails if a patch stops working.
"""

import functools
from collections.abc import Callable

import numpy as np
from triton import language as tl
from triton.runtime import interpreter

ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
COMPARISONS |= {"eq": np.equal, "ne": np.not_equal}
BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or}
FLOATS = {"fp16": np.float16, "fp32": np.float32}
INTEGERS = {"int32": np.int32, "int64": np.int64}
NUMBERS = FLOATS | INTEGERS
CASTS = {("int32", "int64"), ("fp16", "fp32"), ("fp32", "fp16")}
block_types = {}  # (name of the dtype, shape) -> block type


def speed_up() -> None:
    generic_reduce = interpreter.ReduceOps.generic_reduce

    @functools.wraps(generic_reduce)
    def reduce_halves(self, tensors):
        """Reduce with a function of ours. Triton calls the function once for every number.

        This passes it the two halves of a block, then the halves of the result, and so on: 10 calls for 1024 columns.
        """
        if self.axis is None or self.keep_dims:
            return generic_reduce(self, tensors)
        blocks = [np.moveaxis(tensor.handle.data, self.axis, 0) for tensor in tensors]
        dtypes = [tensor.dtype for tensor in tensors]
        while (half := len(blocks[0]) // 2) > 0:  # the length of a Triton block is a power of two
            halves = [block[:half] for block in blocks] + [block[half:] for block in blocks]
            results = self.combine_fn.fn(*map(self.to_tensor, halves, 2 * dtypes))
            if not isinstance(results, tuple):
                results = (results,)
            blocks = [result.handle.data for result in results]
        return [self.to_tensor(block[0], dtype) for block, dtype in zip(blocks, dtypes, strict=True)]

    get_np_dtype, numpy_dtypes = interpreter._get_np_dtype, {}

    def numpy_dtype(dtype):
        """Return the dtype from a table. Triton builds the table in each call."""
        name = dtype.scalar.name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = get_np_dtype(dtype)
        return numpy_dtypes[name]

    patch_lang = interpreter._patch_lang

    @functools.cache
    def modules_of(function):
        return [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]

    def patch_lang_once(function):
        """Patch triton.language once a launch. Triton also patches it in each call of a function from a kernel."""
        if modules_of(function) and not any(tl.core.is_builtin(module.load) for module in modules_of(function)):
            return interpreter._LangPatchScope()
        return patch_lang(function)

    make_type, make_tensor, type_fields, tensor_fields = tl.block_type.__init__, tl.tensor.__init__, {}, {}

    def make_block_type(self, element_ty, shape):
        """Take the fields of an equal type, if there is one. Triton computes them for the result of each operation."""
        key = element_ty.name, *(getattr(side, "value", side) for side in shape)
        if key not in type_fields:
            make_type(self, element_ty, shape)
            type_fields[key] = vars(self).copy()
        vars(self).update(type_fields[key])

    def make_block(self, handle, type):
        """Take the fields of a tensor of the same type in the same way."""
        if type.name not in tensor_fields:
            make_tensor(self, handle, type)
            tensor_fields[type.name] = vars(self).copy()
        vars(self).update(tensor_fields[type.name], handle=handle, type=type)

    patch_tensor = interpreter._patch_lang_tensor

    @functools.wraps(patch_tensor)
    def patch_operators(tensor, scope):
        """Patch the tensor's methods as Triton does, then give the operators a short way."""
        patch_tensor(tensor, scope)
        for name, method in short_operators(tensor).items():
            scope.set_attr(tensor, name, method)

    semantic = tl.semantic.TritonSemantic
    broadcast, cast = semantic.broadcast_impl_value, semantic.cast

    @functools.wraps(broadcast)
    def broadcast_in_numpy(self, left, right):
        """Let NumPy compare and broadcast the shapes. Triton makes a constexpr of each side."""
        if not left.type.is_block() or not right.type.is_block():
            return broadcast(self, left, right)
        shapes = left.handle.data.shape, right.handle.data.shape
        return [expand(tensor, np.broadcast_shapes(*shapes)) for tensor in (left, right)]

    @functools.wraps(cast)
    def cast_in_numpy(self, input, dtype, rounding=None):
        """Cast between the usual dtypes. Triton first excludes the unusual ones."""
        names = input.dtype.name, dtype.scalar.name
        if names[0] == names[1]:
            return input
        if names not in CASTS or rounding is not None:
            return cast(self, input, dtype, rounding)
        data = input.handle.data.astype(NUMBERS[names[1]])
        return new_tensor(data, dtype.scalar, dtype.scalar, input.type.is_block())

    interpreter.ReduceOps.generic_reduce = reduce_halves
    tl.block_type.__init__ = make_block_type
    tl.tensor.__init__ = make_block
    # Triton uses the result of its checks for overflow only if options.debug is true
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._get_np_dtype = numpy_dtype
    interpreter._patch_lang = patch_lang_once
    interpreter._patch_lang_tensor = patch_operators
    semantic.broadcast_impl_value, semantic.cast = broadcast_in_numpy, cast_in_numpy
    semantic.arange = functools.cache(semantic.arange)  # no operation writes to its arguments


def short_operators(tensor: type) -> dict[str, Callable]:
    """Return methods for the frequent operators. What is not simple goes Triton's own way, which takes 40 us."""
    methods = {"__getitem__": short_getitem(tensor.__getitem__)}
    for name, function in (ARITHMETIC | COMPARISONS | BITWISE).items():
        methods[f"__{name}__"] = short_operator(function, getattr(tensor, f"__{name}__"))
        if name in ARITHMETIC:
            methods[f"__r{name}__"] = short_operator(function, getattr(tensor, f"__r{name}__"), is_swapped=True)
    return methods


def short_operator(function: np.ufunc, slow: Callable, is_swapped: bool = False) -> Callable:
    """Return a method for two tensors of one dtype, a tensor and a number, or a pointer and an offset.

    NumPy itself broadcasts as Triton does.
    """
    dtypes = ("int1", *INTEGERS) if function in BITWISE.values() else NUMBERS
    is_comparison, is_addition = function in COMPARISONS.values(), function is np.add

    def operator(self, other):
        if type(other) is tl.constexpr:
            other = other.value
        left, dtype, is_block = self.handle.data, self.dtype, self.type.is_block()
        stored, name = self.handle.dtype.scalar, dtype.name
        if type(other) is tl.tensor:
            right, other_name = other.handle.data, other.dtype.name
            is_block = is_block or other.type.is_block()
            if name != other_name and name in INTEGERS and other_name in INTEGERS:  # NumPy promotes them as Triton does
                name, dtype, stored = "int64", tl.int64, tl.int64
            elif other_name not in INTEGERS if dtype.is_ptr() else other_name != name:
                return slow(self, other)
        elif type(other) is int and -(2**31) <= other < 2**31:
            right = NUMBERS[name](other) if name in NUMBERS else np.array([other])
        elif type(other) is float and name in FLOATS:
            right = FLOATS[name](other)
        else:
            return slow(self, other)
        if is_addition and dtype.is_ptr():
            size = max(1, self.handle.get_element_ty().primitive_bitwidth // 8)
            return new_tensor(left + size * right.astype(np.uint64), self.handle.dtype, dtype, is_block)
        if name not in dtypes:
            return slow(self, other)
        data = function(right, left) if is_swapped else function(left, right)
        return new_tensor(data, stored, tl.int1 if is_comparison else dtype, is_block)

    return operator


def short_getitem(slow: Callable) -> Callable:
    """Return a method for x[:, None] and the like, which only add axes."""

    def getitem(self, slices):
        if type(slices) is tuple and self.type.is_block() and all(side in (None, slice(None)) for side in slices):
            return new_tensor(self.handle.data[slices], self.handle.dtype.scalar, self.dtype, True)
        return slow(self, slices)

    return getitem


def expand(tensor: tl.tensor, shape: tuple[int, ...]) -> tl.tensor:
    if tensor.handle.data.shape == shape:
        return tensor
    return new_tensor(np.broadcast_to(tensor.handle.data, shape), tensor.handle.dtype.scalar, tensor.dtype, True)


def new_tensor(data: np.ndarray, stored: tl.dtype, dtype: tl.dtype, is_block: bool) -> tl.tensor:
    handle = interpreter.TensorHandle(data, stored)
    return tl.tensor(handle, block_type(dtype, data.shape) if is_block else dtype)


def block_type(dtype: tl.dtype, shape: tuple[int, ...]) -> tl.block_type:
    key = dtype.name, shape
    if key not in block_types:
        block_types[key] = tl.block_type(dtype, list(shape))
    return block_types[key]

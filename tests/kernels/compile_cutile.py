"""Compile our kernels in cuTile for a Hopper GPU that is not here: `python -m tests.kernels.compile_cutile`.

The backends' own launchers run on tensors without data, and cuda.tile.launch is replaced: it compiles the kernel for
the arguments' dtypes and divisibility, as cuda.tile 1.7 itself would. In bf16 no kernel may spill. A norm moves its
rows by TMA, and a matmul and attention also have wgmma, if rows are multiples of 16 bytes.
"""

import math
import re
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import cuda.tile as ct
import torch
import triton
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    ConstantConstraint,
    KernelSignature,
    ScalarConstraint,
    export_kernel,
)

from kernels.attention import cutile as attention
from kernels.linear import cutile as linear
from kernels.loss import cutile as loss
from kernels.norm import cutile as norm

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
DTYPES = {
    dtype: getattr(ct, str(dtype).split(".")[1])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64)
}
NUMBERS = {int: ct.int32, float: ct.float32}
compiled: list[tuple[str, int, str]] = []  # name, bytes of stack, machine code


def constraint(value, is_constant: bool):
    """Return what cuda.tile assumes of an argument: constants, and whether sizes are divisible by 16."""
    if is_constant:
        return ConstantConstraint(value)
    if not isinstance(value, torch.Tensor):
        return ScalarConstraint(NUMBERS[type(value)])
    in_16_bytes = 16 // value.element_size()
    strides, last = value.stride(), value.ndim - 1
    return ArrayConstraint(
        DTYPES[value.dtype],
        value.ndim,
        index_dtype=ct.int32,
        stride_lower_bound_incl=[0] * last + [None],
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=[None] * last + [1],
        shape_constant=[1 if size == 1 else None for size in value.shape],
        stride_divisible_by=[math.gcd(stride, in_16_bytes) for stride in strides[:last]] + [1],
        shape_divisible_by=[math.gcd(size, 16) for size in value.shape],
        base_addr_divisible_by=16,
    )


def compile_launch(stream, grid, kernel, arguments) -> None:
    function = kernel._annotated_function
    nodes = function.parameter_annotations
    parameters = [constraint(*pair) for pair in zip(arguments, (node.constant for node in nodes), strict=True)]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        signature = KernelSignature(parameters, CallingConvention.cutile_python_v2())
        export_kernel(kernel, [signature], file.name, gpu_code="sm_90", output_format="cubin")
        usage, code = (
            subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    name = function.pyfunc.__name__
    print(f"{name} {tuple(arguments[0].shape)} {arguments[0].dtype}: {registers} registers, {stack} bytes of stack")
    compiled.append((name, int(stack), code))


def compile_norm(
    C: int,
    dtype: torch.dtype,
    stream_dtype: torch.dtype,
    centred: bool = True,
    first: bool = False,
    last: bool = False,
    has_bias: bool = True,
    rows: int = 4096,
) -> None:
    """Compile the kernels of a norm in a model: the first has no residual, and the last has no gradient of a stream."""

    def empty(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    stream, weight = empty(rows, C, dtype=stream_dtype), empty(C)
    x, residual = (stream, None) if first else (empty(rows, C), stream)
    bias = weight if centred and has_bias else None
    y, _, mean, rstd = norm.run_forward(x, residual, weight, bias, 1e-5, centred)
    dstream = None if first or last else stream
    norm.launch_backward(stream, weight, bias, x.dtype, stream_dtype, y, dstream, mean, rstd)


def compile_linear(N: int, C: int, F: int, dtype: torch.dtype) -> None:
    x, weight, bias, dy = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((N, C), (F, C), (F,), (N, F)))
    linear.launch_forward(x, weight, bias)
    linear.launch_forward(x, weight, None)
    linear.launch_backward(dy, x, weight, bias)


def compile_attention(
    shape: tuple[int, int, int, int], kv_heads: int, dtype: torch.dtype, causal: bool = True, window: int | None = None
) -> None:
    """Compile the kernels of attention for q of this shape (B, T, H, D). As in a model, one tensor has q, k and v."""
    B, T, H, D = shape
    q, k, v = torch.empty(B, T, H + 2 * kv_heads, D, dtype=dtype, device="meta").split((H, kv_heads, kv_heads), 2)
    options = {"causal": causal, "scale": 0.125, "window": window or T}
    out, lse = attention.launch_forward(q, k, v, **options)
    attention.launch_backward(out, q, k, v, out, lse, **options)


def compile_loss(N: int, C: int, V: int, dtype: torch.dtype, softcap: float | None = None) -> None:
    x, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((N, C), (V, C)))
    targets = torch.empty(N, dtype=torch.int64, device="meta")
    loss.compute_loss(x, weight, targets, ignore_index=-1, gradients=True, softcap=softcap)


def assert_fast(kernels: list[tuple[str, int, str]]) -> None:
    for name, stack, code in kernels:
        assert stack == 0, name
        assert "HGMMA" in code or not re.search("matmul|attention|logits|_dx|_dweight", name), name
        assert re.search("sum_rows|entropy_loss|gradient", name) or "UTMALDG" in code, name


if __name__ == "__main__":
    BF16 = torch.bfloat16
    with mock.patch.object(ct, "launch", compile_launch), mock.patch.object(torch.cuda, "current_stream"):
        for C in (768, 1600, 4096):
            compile_norm(C, BF16, BF16)
        compile_norm(768, BF16, torch.float32)
        compile_norm(768, BF16, BF16, centred=False)
        for stream_dtype in (BF16, torch.float32):
            for centred in (True, False):
                compile_norm(768, BF16, stream_dtype, centred, first=True)
                compile_norm(768, BF16, stream_dtype, centred, last=True)
            compile_norm(768, BF16, stream_dtype, has_bias=False)
        compile_norm(768, torch.float16, torch.float16)
        compile_norm(768, torch.float16, torch.float32, first=True)
        compile_linear(65536, 768, 2304, BF16)
        compile_linear(32768, 1600, 4800, torch.float16)
        for D in (64, 80, 128):
            compile_attention((4, 4096, 16, D), 16, BF16)
        compile_attention((64, 1024, 9, 64), 3, BF16)
        compile_attention((2, 16384, 12, 64), 12, torch.float16, window=4096)
        compile_attention((2, 1000, 12, 128), 1, torch.float16, causal=False)
        compile_loss(2 * 5632, 768, 50304, BF16)  # two chunks: the second one's product is added to dweight
        compile_loss(5632, 576, 49152, BF16, softcap=30.0)
        compile_loss(4096, 1600, 50304, torch.float16)
        assert_fast(compiled)
        compile_norm(8192, BF16, BF16)
        compile_norm(769, torch.float16, torch.float16, rows=5)
        compile_norm(768, torch.float32, torch.float32)
        compile_linear(5, 769, 1025, BF16)
        compile_linear(33, 128, 384, torch.float32)
        compile_attention((2, 50, 3, 33), 3, BF16)
        compile_attention((2, 129, 4, 128), 2, torch.float32)
        compile_loss(1000, 768, 50257, BF16)
        compile_loss(13, 65, 1031, torch.float32, softcap=5.0)

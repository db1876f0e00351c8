"""Compile our kernels in TileLang for a Hopper GPU that is not here: `python -m tests.kernels.compile_tilelang`.

The backends' own launchers run on tensors without data, and each kernel that they ask for is compiled in place of a
launch. TileLang writes CUDA C++ without a GPU. A thread of the norms moves 16 bytes of the residual stream at once, and
the matmuls and attention use TMA and wgmma. If there is nvcc, it compiles the result, and no kernel spills a register.
"""

import re
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import tilelang
import torch
from tilelang.backend.target import determine_target
from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

from kernels import _tilelang_sums as sum_kernels
from kernels import tilelang as launcher
from kernels.attention import _tilelang as attention_kernels
from kernels.attention import tilelang as attention
from kernels.linear import _tilelang as linear_kernels
from kernels.linear import tilelang as linear
from kernels.norm import _tilelang as norm_kernels
from kernels.norm import tilelang as norm

TARGET = determine_target({"kind": "cuda", "arch": "sm_90a"}, return_object=True)
KERNELS = [
    (norm_kernels, "norm_fwd"),
    (norm_kernels, "norm_bwd"),
    (linear_kernels, "matmul"),
    (linear_kernels, "split_matmul"),
    (sum_kernels, "sum_rows"),
    *((attention_kernels, f"attention_{name}") for name in ("fwd", "dq", "dkdv")),
]
FAST_MATH = tilelang.PassConfigKey.TL_ENABLE_FAST_MATH
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REGISTERS = 65536  # of a multiprocessor
compiled: dict[str, str] = {}  # a kernel and its arguments -> its CUDA C++


def compile_for_hopper(kernel, *arguments, **options) -> str:
    """Compile a kernel with nvcc, if it is here, and print its registers. Return its CUDA C++."""
    with TARGET:
        source = tilelang.lower(kernel.get_tir(*arguments, **options), target=TARGET).kernel_source
    registers = "nvcc is not here"
    if shutil.which("nvcc"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cu"
            path.write_text(source)
            command = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-std=c++20", "-w", "-Xptxas", "-v"]
            command += ["--use_fast_math"] if (kernel.pass_configs or {}).get(FAST_MATH) else []
            command += [f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}", str(path), "-o", f"{path}bin"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "0 bytes spill stores" in done.stderr, done.stderr
        registers = re.search(r"Used (\d+ registers)", done.stderr)[1]
    name = " ".join(map(str, (*arguments, *(f"{key}={value}" for key, value in options.items()))))
    print(f"tilelang {kernel.func.__name__} {name}: {registers}", flush=True)
    return source


def compile_in_place(module, name: str):
    """Replace a kernel of a module. A launch of the new one compiles the kernel, once for the same arguments."""
    kernel = getattr(module, name)

    def prepare(*arguments, **options):
        key = f"{name} {arguments} {options}"
        if key not in compiled:
            compiled[key] = compile_for_hopper(kernel, *arguments, **options)
        sources.append(compiled[key])
        return lambda *tensors: None

    return mock.patch.object(module, name, prepare)


sources: list[str] = []  # of the kernels of the last call of a launcher


def run(launch, *arguments):
    """Return the result of a launcher, and the CUDA C++ of its kernels."""
    sources.clear()
    return launch(*arguments), list(sources)


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def compile_norm(
    C: int,
    dtype: torch.dtype,
    stream_dtype: torch.dtype,
    centred: bool = True,
    first: bool = False,
    last: bool = False,
    has_bias: bool = True,
) -> None:
    """Compile the kernels of a norm in a model: the first has no residual, and the last has no gradient of a stream."""
    stream = empty(4096, C, dtype=stream_dtype)
    x, residual = (stream, None) if first else (empty(4096, C, dtype=dtype), stream)
    weight = empty(C, dtype=dtype)
    bias = weight if centred and has_bias else None
    (y, _, mean, rstd), [forward] = run(norm.run_forward, x, residual, weight, bias, 1e-5, centred)
    dstream = None if first or last else stream
    arguments = stream, weight, bias, x.dtype, stream_dtype, y, dstream, mean, rstd
    _, [backward, *sums] = run(norm.launch_backward, *arguments)
    assert len(sums) == (1 if bias is None else 2)
    if C % 8:
        return
    wide = "float4" if stream_dtype == FP32 else "uint4"
    assert f"*({wide}*)({'x' if first else 'residual'} + " in forward
    assert first or f"*({wide}*)(stream + " in forward
    assert dstream is None or f"*({wide}*)(dstream + " in backward
    assert f"*({wide}*)({'dx' if x.dtype == stream_dtype else 'dresidual'} + " in backward


def compile_linear(C: int, F: int, dtype: torch.dtype, N: int = 65536) -> None:
    x, weight, bias, dy = (empty(*shape, dtype=dtype) for shape in ((N, C), (F, C), (F,), (N, F)))
    _, [forward] = run(linear.launch_forward, x, weight, bias)
    run(linear.launch_forward, x, weight, None)
    _, [dx, dweight, *_] = run(linear.launch_backward, dy, x, weight, bias)
    for source, tile in ((forward, linear.TILE), (dx, linear.TILE), (dweight, linear.SPLIT_TILE)):
        assert all(word in source for word in ("wgmma_ss", "tma_load", f"warpgroup_reg_alloc<{tile.registers}>"))
        assert_registers_suffice(tile, tile.programs)
    assert "tma_store" in forward
    assert "tma_store" in dx


def assert_registers_suffice(tile: linear.Tile | attention.Tile, programs: int) -> None:
    """Otherwise a multiplying thread would wait for registers for ever."""
    threads = tile.threads + 128
    assert 128 * 24 + tile.threads * tile.registers <= REGISTERS // programs // threads // 8 * 8 * threads


def compile_attention(
    shape: tuple[int, int, int, int], kv_heads: int, dtype: torch.dtype, causal: bool = True, window: int | None = None
) -> None:
    """Compile the kernels of attention for q of this shape (B, T, H, D). As in a model, one tensor has q, k and v."""
    B, T, H, D = shape
    q, k, v = empty(B, T, H + 2 * kv_heads, D, dtype=dtype).split((H, kv_heads, kv_heads), 2)
    options = causal, 0.125, window or T
    (out, lse), [forward] = run(attention.launch_forward, q, k, v, *options)
    _, [dq, dkdv] = run(attention.launch_backward, out, q, k, v, out, lse, *options)
    # {kernel: (its CUDA C++, its tensors that TMA loads and stores, its products with both factors in shared memory
    # and with one in registers)}
    for name, (source, *counts) in {
        "fwd": (forward, 3, 1, 1, 1),
        "dq": (dq, 4, 1, 2, 1),
        "dkdv": (dkdv, 6, 2, 2, 2),
    }.items():
        tile = attention.options(name, q, k, causal)[2]
        words = "tma_load(", "tma_store(", "wgmma_ss<", "wgmma_rs<"
        assert [source.count(f"tl::{word}") for word in words] == counts, name
        assert f"warpgroup_reg_alloc<{tile.registers}>" in source
        assert_registers_suffice(tile, programs=1)


def main() -> None:
    for C in (768, 1600):
        for stream_dtype in (BF16, FP32):
            for centred in (True, False):
                compile_norm(C, BF16, stream_dtype, centred)
    for stream_dtype in (BF16, FP32):
        for centred in (True, False):
            compile_norm(768, BF16, stream_dtype, centred, first=True)
            compile_norm(768, BF16, stream_dtype, centred, last=True)
        compile_norm(768, BF16, stream_dtype, has_bias=False)
    for dtype in (FP16, FP32):
        compile_norm(768, dtype, dtype)
        compile_norm(769, dtype, dtype, centred=False)
    compile_norm(768, FP16, FP32, first=True)
    for C, F in ((768, 2304), (1600, 4800), (576, 960), (768, 768)):
        compile_linear(C, F, BF16)
    compile_linear(768, 2304, FP16)
    compile_linear(128, 384, BF16, N=33)
    for D in (16, 64, 80, 128):
        compile_attention((4, 4096, 16, D), 16, BF16)
    compile_attention((64, 1024, 9, 64), 3, BF16)
    compile_attention((2, 16384, 12, 96), 1, FP16, window=4096)
    compile_attention((2, 1000, 12, 128), 12, FP16, causal=False)
    for rows in (1, 5, 11, 64):
        for C in (768, 770, 769):
            launcher.add_partial_sums(empty(rows, C, dtype=FP32), BF16)


if __name__ == "__main__":
    with ExitStack() as stack:
        for module, name in KERNELS:
            stack.enter_context(compile_in_place(module, name))
        for module in (norm, linear, launcher):
            stack.enter_context(mock.patch.object(module, "multiprocessors", return_value=132))  # of an H200
        main()

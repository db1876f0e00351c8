"""Compile our kernels in TileLang for a Hopper GPU that is not here: `python -m tests.kernels.compile_tilelang`.

TileLang writes CUDA C++ without a GPU. A thread of the norms moves 16 bytes of the residual stream at once, and the
matmuls use TMA and wgmma. If there is nvcc, it compiles the result, and no kernel for GPT-2's widths spills a register.
"""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import tilelang
import torch
from tilelang.backend.target import determine_target
from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

from kernels._tilelang_sums import sum_rows
from kernels.linear import _tilelang as linear
from kernels.linear.tilelang import SPLIT_TILE, TILE
from kernels.norm import _tilelang as norm
from kernels.norm.tilelang import backward_launch, row_launch
from kernels.tilelang import vector

TARGET = determine_target({"kind": "cuda", "arch": "sm_90a"}, return_object=True)
BF16, FP32 = "bfloat16", "float32"
REGISTERS = 65536  # of a multiprocessor


def compile_for_hopper(name: str, kernel, *arguments) -> str:
    """Compile a kernel with nvcc, if it is here, and print its registers. Return its CUDA C++."""
    with TARGET:
        source = tilelang.lower(kernel.get_tir(*arguments), target=TARGET).kernel_source
    registers = "nvcc is not here"
    if shutil.which("nvcc"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cu"
            path.write_text(source)
            command = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-std=c++20", "-w", "-Xptxas", "-v"]
            command += [f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}", str(path), "-o", f"{path}bin"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "0 bytes spill stores" in done.stderr, done.stderr
        registers = re.search(r"Used (\d+ registers)", done.stderr)[1]
    print(f"tilelang {name}: {registers}")
    return source


def compile_norm(C: int, residual_dtype: torch.dtype) -> None:
    stream, second = str(residual_dtype).removeprefix("torch."), residual_dtype != torch.bfloat16
    vec = vector(C, torch.empty(0, dtype=residual_dtype))
    for centred in (True, False):
        arguments = C, vec, *row_launch(C, vec, 64), True, centred, centred, BF16, stream, BF16
        forward = compile_for_hopper(f"norm forward {C} {stream}", norm.norm_fwd, *arguments)
        launch = backward_launch(C, vec, residual_dtype.itemsize)
        arguments = C, vec, *launch, True, centred, second, centred, BF16, stream, BF16
        backward = compile_for_hopper(f"norm backward {C} {stream}", norm.norm_bwd, *arguments)
        wide = "float4" if second else "uint4"
        assert f"*({wide}*)(residual + " in forward
        assert f"*({wide}*)(stream + " in forward
        assert f"*({wide}*)(dstream + " in backward
        assert f"*({wide}*)({'dresidual' if second else 'dx'} + " in backward


def compile_linear(C: int, F: int) -> None:
    sources = [
        compile_for_hopper(f"linear forward {C} {F}", linear.matmul, C, F, TILE, True, True, BF16),
        compile_for_hopper(f"linear dx {C} {F}", linear.matmul, F, C, TILE, False, False, BF16),
        compile_for_hopper(f"linear dW {C} {F}", linear.split_matmul, F, C, SPLIT_TILE, BF16, FP32),
    ]
    for source, (*_, threads, consumer, programs) in zip(sources, (TILE, TILE, SPLIT_TILE), strict=True):
        assert all(word in source for word in ("wgmma_ss", "tma_load", f"warpgroup_reg_alloc<{consumer}>"))
        # or a multiplying thread waits for registers for ever
        assert 128 * 24 + threads * consumer <= REGISTERS // programs // (threads + 128) // 8 * 8 * (threads + 128)
    assert all("tma_store" in source for source in sources[:2])


if __name__ == "__main__":
    for C in (768, 1600):
        for dtype in (torch.bfloat16, torch.float32):
            compile_norm(C, dtype)
    for C, F in ((768, 2304), (1600, 4800), (576, 960)):
        compile_linear(C, F)
    compile_for_hopper("sum of rows", sum_rows, 2304, 8, BF16, FP32)
    compile_for_hopper("sum of partial sums", sum_rows, 768, 4, FP32, BF16)

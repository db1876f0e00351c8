"""Run the CUDA C++ that TileLang writes for attention, on a CPU: `python -m tests.kernels.emulate_tilelang`.

It needs TileLang and g++, but no GPU. emulate_tilelang.h has what the CUDA calls. The backend's own launchers run, and
kernels/check.py compares outputs and gradients with float64, in bf16. fake_tilelang.py runs the source of the kernels
instead, and does not see how TileLang lays out tiles, masks a tile's elements, and reuses shared memory.
"""

import ctypes
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import tilelang
import torch

from kernels.attention import _tilelang as kernels
from kernels.attention import tilelang as backend
from kernels.check import why_wrong
from kernels.registry import contract
from tests.kernels.compile_tilelang import TARGET

CASES = [
    {"shape": (1, 200, 2, 64)},
    {"shape": (2, 140, 4, 64), "kv_heads": 2, "packed": True},
    {"shape": (1, 300, 1, 64), "window": 40},
    {"shape": (1, 5, 2, 64), "keys": 300, "window": 2},  # no query sees a key of the first tile
    {"shape": (1, 130, 2, 64), "causal": False, "keys": 150},
    {"shape": (1, 257, 1, 64), "magnitude": 6.0},
    {"shape": (1, 140, 1, 16)},
    {"shape": (1, 140, 1, 32)},
    {"shape": (1, 140, 2, 80), "kv_heads": 1},
    {"shape": (1, 140, 1, 96)},
    {"shape": (2, 150, 4, 128), "kv_heads": 2, "packed": True},
]


class TensorMap(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rank", "element", "swizzle")),
        *((name, ctypes.c_int64 * 5) for name in ("sizes", "strides", "box")),
    )


def tensor_map(dtype: int, rank: int, base: int, *numbers: int) -> TensorMap:
    """Return the descriptor that __tvm_tensormap_create_tiled() makes of these arguments."""
    sizes, strides, box = (numbers[axis : axis + rank] for axis in (0, rank, 2 * rank))
    swizzle = numbers[4 * rank + 1]
    array = ctypes.c_int64 * 5
    return TensorMap(base, rank, strides[0], swizzle, array(*sizes), array(*strides), array(*box))


def compile_for_cpu(source: str, folder: str) -> ctypes.CDLL:
    """Return a library whose run() takes the arguments of the kernel, descriptors by address, and the grid."""
    declaration = re.search(r'extern "C" __global__ void (\w+)\((.*?)\);', source)
    threads = re.search(r"__launch_bounds__\((\d+)", source)[1]
    source = re.sub(r"#if.*?#endif\n|#include.*?\n|#pragma unroll", "", source, flags=re.DOTALL)
    source = re.sub(r"extern __shared__.*?;", "uchar* buf_dyn_shmem = emulator::shared;", source)
    source = re.sub(r"__shared__ .*?mbarrier_mem\[\d+\];", "Barrier* mbarrier_mem = emulator::barriers;", source)
    parameters = re.sub(r"__grid_constant__ |__restrict__ |const ", "", declaration[2])
    names = [("*" if "CUtensorMap" in each else "") + each.split()[-1] for each in parameters.split(", ")]
    path = Path(folder) / f"{declaration[1]}.cpp"
    path.write_text(
        f'#include "{Path(__file__).with_suffix(".h")}"\n{source}\n'
        f'extern "C" void run({parameters.replace("CUtensorMap ", "CUtensorMap* ")}, int x, int y, int z) {{\n'
        f"  emulator::program = [=] {{ {declaration[1]}({', '.join(names)}); }};\n"
        f"  emulator::run_grid({threads}, x, y, z);\n}}\n"
    )
    command = ["g++", "-O1", "-std=c++20", "-w", "-shared", "-fPIC", str(path), "-o", f"{path}.so"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(f"{path}.so")


def emulate(name: str):
    """Replace a kernel: it is compiled for a CPU, once for the same arguments."""
    kernel, libraries = getattr(kernels, name), {}

    def prepare(*options):
        if options not in libraries:
            with TARGET:
                program = kernel.get_tir(*options)
                lowered = tilelang.lower(program, target=TARGET)
            with tempfile.TemporaryDirectory() as folder:
                library = compile_for_cpu(lowered.kernel_source, folder)
            libraries[options] = [parameter.name for parameter in program.params], lowered.host_mod.script(), library
        return lambda *arguments: run_on_cpu(*libraries[options], arguments)

    return mock.patch.object(kernels, name, prepare)


def run_on_cpu(parameters: list[str], host: str, library: ctypes.CDLL, arguments: tuple) -> None:
    """Do what the host's part of a kernel does: read sizes and strides, make descriptors of TMA, launch."""
    given = dict(zip((name.removesuffix("_handle") for name in parameters), arguments, strict=True))
    values = {name: each.data_ptr() if isinstance(each, torch.Tensor) else each for name, each in given.items()}
    values["T"] = SimpleNamespace(int64=int, Cast=lambda dtype, value: int(value))
    for tensor in given:
        pattern = rf"^ *(\w+)[^=\n]* = T\..*_{tensor}_(shape|strides)_1\[(\d)\]\)$"
        for name, kind, axis in re.findall(pattern, host, flags=re.MULTILINE):
            values[name] = (given[tensor].shape if kind == "shape" else given[tensor].stride())[int(axis)]
    for name, call in re.findall(r'call_packed\("__tvm_tensormap_create_tiled", (\w+), (.*)\)', host):
        values[name] = tensor_map(*eval(call, values))
    launch = eval("[" + re.search(r'call_packed\("\w+_kernel", (.*)\)', host)[1] + "]", values)
    library.run(*map(as_c, launch[:-4]))  # without the threads of a program and the bytes of shared memory


def as_c(value: object) -> object:
    if isinstance(value, TensorMap):
        return ctypes.byref(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_void_p(value) if value > 2**31 else ctypes.c_int(value)


def main() -> None:
    for case in CASES:
        inputs = contract("attention").inputs(**case, dtype=torch.bfloat16)
        reason = why_wrong("attention", "tilelang", backend.attention, inputs, torch.bfloat16)
        assert reason is None, (case, reason)
        print(f"tilelang attention {case}: right", flush=True)


if __name__ == "__main__":
    with emulate("attention_fwd"), emulate("attention_dq"), emulate("attention_dkdv"):
        main()

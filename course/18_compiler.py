"""Rung 18: what a compiler does for you.

`reference` below is eight operators of PyTorch, and each one reads and writes memory. A compiler sees the whole
function before it runs. It fuses the operators, so that the values between them stay in registers. This file prints
what two compilers make of the function, and then the usual table.

torch.compile writes Triton, and on a CPU C++. Look for:
  - the name of the kernel, which lists the fused operators. `per` is a persistent reduction: as in rung 4, a program
    holds a whole row. `red` is a loop over the row.
  - tl.load and tl.store: two loads of (N, C) and one store, as in `kernel` below. No kernel can move fewer bytes.
XLA, the compiler of JAX, prints its own language, HLO. Look for:
  - ENTRY at the end: each `fusion` is a kernel, and `calls` names the computation above that has its operators.
  - what a fusion returns: this is what goes through memory. XLA on a CPU stores x + y and reads it twice; its kernel of
    the reduction ends where the next one begins.

Both compilers fuse elementwise operators with each other, and torch.compile fuses them with a reduction, too. The table
shows that a kernel of your own gains nothing here. But a compiler does not invent an algorithm. It does not turn rung
10 into rung 11, because the online softmax is another sum. It does not run an epilogue beside the matmul of another
tile, as rung 16 does, nor start the next layer's loads before this layer ends. There a kernel of your own is worth its
lines.

Exercise: `exercise` also returns the sum of each column of the result. torch.compile runs a second kernel that reads
the result again, because this sum goes along the other dimension. Write a kernel that stores the result and, for the
rows of each program, one partial sum a column, as in rung 5. A small sum then adds the partial sums.

    python course/18_compiler.py mine.py
"""

import importlib.util
import os
import re

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, y_ptr, weight_ptr, out_ptr, C: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * C + c
    h = tl.load(x_ptr + at, c < C, other=0.0).to(tl.float32) + tl.load(y_ptr + at, c < C, other=0.0).to(tl.float32)
    h = h * tl.rsqrt(tl.sum(h * h, 0) / C + 1e-5) * tl.load(weight_ptr + c, c < C, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (h * tl.sigmoid(h)).to(out_ptr.dtype.element_ty), c < C)


def fused(x, y, weight):
    out = torch.empty_like(x)
    rows, columns = x.shape
    kernel[(rows,)](x, y, weight, out, C=columns, BLOCK=triton.next_power_of_2(columns))
    return out


def reference(x, y, weight):
    h = (x + y).to(torch.promote_types(x.dtype, torch.float32))
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * weight
    return torch.nn.functional.silu(h).to(x.dtype)


def exercise(x, y, weight):
    out = reference(x, y, weight)
    return out, out.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


KERNELS = {"triton": fused}
SHAPES = {"gpu": {"shape": (65536, 768)}, "cpu": {"shape": (6, 768)}}


def inputs(shape, dtype, device):
    x, y = torch.randn(2, *shape, device=device).to(dtype)
    return {"x": x, "y": y, "weight": torch.randn(shape[1], device=device).to(dtype)}


def cost(shape, dtype):
    return {"forward": (12 * shape[0] * shape[1], 3 * shape[0] * shape[1] * dtype.itemsize)}


def show(device):
    """Print the code of torch.compile, and the HLO of XLA if jax is installed."""
    from torch._inductor.utils import run_and_get_code

    tensors = inputs(**SHAPES["gpu" if device.type == "cuda" else "cpu"], dtype=torch.float32, device=device)
    _, [code] = run_and_get_code(torch.compile(reference), *tensors.values())
    begin = code.index("@triton.jit" if device.type == "cuda" else 'extern "C"')
    print("torch.compile:", code[begin : code.index("'''", begin)], sep="\n")
    if importlib.util.find_spec("jax") is None:
        print("XLA: after pip install jax this also prints XLA's HLO\n")
        return
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # otherwise JAX takes most of a GPU's memory
    import jax

    def of_jax(x, y, weight):
        h = x + y
        return jax.nn.silu(h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-5) * weight)

    arrays = [tensor.cpu().numpy() for tensor in tensors.values()]
    hlo = re.sub(r", metadata={[^}]*}", "", jax.jit(of_jax).lower(*arrays).compile().as_text())
    print(f"XLA on a {jax.default_backend()}:", hlo[hlo.index("\n%") :], sep="\n")


if __name__ == "__main__":
    from climb import climb

    climb(__file__)

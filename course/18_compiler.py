"""Rung 18: what a compiler does for you.

`reference` below is eight operators, and each one reads and writes memory. A compiler sees the whole function before it
runs, and fuses the operators. This file prints what two compilers write. In bf16 an element takes 6 bytes and 12 FLOP.

torch.compile writes Triton. On a CPU it writes C++, which reads each row twice. The name of its Triton kernel lists the
operators, and `per` in it says that a program holds a whole row. The kernel loads two tensors and stores one, as
`kernel` does: the fewest bytes. XLA, the compiler of JAX, writes HLO. In ENTRY, at the end, each `fusion` is a kernel,
and `calls` names its operators. What a fusion returns goes through memory: XLA stores x + y and reads it twice.

So a kernel of your own gains nothing here. But a compiler invents no algorithm. It does not turn rung 10 into rung 11,
because no operator of rung 10 is a running sum. It does not run an epilogue beside the matmul of another tile, as rung
16 does, nor load the next layer's weights before this layer ends, as rung 17 does.

Exercise: return also the fp32 sum of each column of the result. torch.compile reads it again. In your `solution(x, y,
weight)` a program stores the sums of its rows, as in rung 5. Run `python course/18_compiler.py mine.py`.
"""

import importlib.util
import re

import torch
import triton
import triton.language as tl
from torch._inductor.utils import run_and_get_code


@triton.jit
def kernel(x_ptr, y_ptr, weight_ptr, out_ptr, C: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * C + c
    h = tl.load(x_ptr + at, c < C, other=0.0).to(tl.float32) + tl.load(y_ptr + at, c < C, other=0.0).to(tl.float32)
    h = h * tl.rsqrt(tl.sum(h * h, 0) / C + 1e-5) * tl.load(weight_ptr + c, c < C, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (h * tl.sigmoid(h)).to(out_ptr.dtype.element_ty), c < C)


def fused(x, y, weight):
    out = torch.empty_like(x)
    kernel[(len(x),)](x, y, weight, out, C=x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out


def inputs(shape, **options):
    return {name: torch.randn(size, **options) for name, size in (("x", shape), ("y", shape), ("weight", shape[1]))}


def reference(x, y, weight):
    h = (x + y).to(torch.promote_types(x.dtype, torch.float32))
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * weight
    return torch.nn.functional.silu(h).to(x.dtype)


def cost(shape, dtype):
    return {"forward": (12 * shape[0] * shape[1], 3 * shape[0] * shape[1] * dtype.itemsize)}


def exercise(x, y, weight):
    out = reference(x, y, weight)
    return out, out.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


def show(device):
    tensors = inputs(**SHAPES["gpu" if device.type == "cuda" else "cpu"], device=device)
    _, [code] = run_and_get_code(torch.compile(reference), *tensors.values())
    begin = code.index("@triton.jit" if device.type == "cuda" else 'extern "C"')
    print("torch.compile:", code[begin : code.index("'''", begin)], sep="\n")
    if importlib.util.find_spec("jax") is None:
        print("XLA: after pip install jax this also prints XLA's HLO\n")
        return
    import jax

    def in_jax(x, y, weight):
        h = x + y
        return jax.nn.silu(h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-5) * weight)

    jax.config.update("jax_platforms", "cpu")
    hlo = jax.jit(in_jax).lower(*(tensor.cpu().numpy() for tensor in tensors.values())).compile().as_text()
    print("XLA on a CPU:", re.sub(r", metadata={[^}]*}", "", hlo[hlo.index("\n%") :]), sep="\n")


KERNELS = {"triton": fused}
SHAPES = {"gpu": {"shape": (65536, 768)}, "cpu": {"shape": (200, 768)}}
if __name__ == "__main__":
    from climb import climb

    climb(__file__)

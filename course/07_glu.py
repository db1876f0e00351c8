"""Rung 7: a gated linear unit, forward and backward.

The MLP of today's models has two matmuls in the place of GPT-2's first one, and multiplies their results (SwiGLU,
Shazeer 2020, arXiv:2002.05202):

    out = silu(gate) up    with silu(gate) = gate s and s = sigmoid(gate)

Eager reads gate and writes silu(gate), then reads that and up and writes out: 5 passes. Autograd saves silu(gate),
because the gradient of up needs it. The kernel below makes 3 passes. It saves only gate and up, and its backward
recomputes s: an exponential is cheaper than reading a number. The backward reads dout, gate and up and writes two
gradients, 5 passes; eager makes 9 in three kernels.

    dup = dout silu(gate)    dgate = dout up s (1 + gate (1 - s))

In bf16 an element takes 6 bytes forward and 10 backward, for about 6 and 12 FLOP: memory-bound.

One matmul usually computes gate and up, side by side in the rows of one tensor of width 2 F. So a row of gate does not
follow the row before it: the stride between rows is 2 F, and inside a row it is 1. The kernels take the stride as an
argument, and copy nothing. The grid has two dimensions: program_id(0) is a row, program_id(1) is a block of columns.

Exercise: GEGLU has gelu(gate), in rung 3's form, in the place of silu(gate). Write it forward and backward, behind a
function `solution(gate, up)`. You know the derivative from the exercise of rung 3. Run

    python course/07_glu.py mine.py
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


@triton.jit
def glu_fwd_kernel(gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, columns, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + c, c < columns).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + c, c < columns).to(tl.float32)
    tl.store(out_ptr + row * columns + c, gate * tl.sigmoid(gate) * up, c < columns)


@triton.jit
def glu_bwd_kernel(
    dout_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, gate_stride, up_stride, columns, BLOCK: tl.constexpr
):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dout = tl.load(dout_ptr + row * columns + c, c < columns).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + c, c < columns).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + c, c < columns).to(tl.float32)
    s = tl.sigmoid(gate)
    tl.store(dgate_ptr + row * columns + c, dout * up * s * (1 + gate * (1 - s)), c < columns)
    tl.store(dup_ptr + row * columns + c, dout * gate * s, c < columns)


class GatedUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        (N, columns), out = gate.shape, gate.new_empty(gate.shape)
        grid = N, triton.cdiv(columns, 1024)
        glu_fwd_kernel[grid](gate, up, out, gate.stride(0), up.stride(0), columns, BLOCK=1024)
        return out

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled():  # create_graph=True: the kernel has no derivative of its own
            raise RuntimeError("this gated linear unit has no second derivative")
        gate, up = ctx.saved_tensors
        (N, columns), dgate, dup = gate.shape, gate.new_empty(gate.shape), up.new_empty(up.shape)
        grid, strides = (N, triton.cdiv(columns, 1024)), (gate.stride(0), up.stride(0))
        glu_bwd_kernel[grid](dout.contiguous(), gate, up, dgate, dup, *strides, columns, BLOCK=1024)
        return dgate, dup


def glu(gate, up):
    return GatedUnit.apply(gate, up)


KERNELS = {"triton": glu}
# 65,536 tokens. With F = 2048 the three matrices of such an MLP have as many weights as the two of GPT-2 124M
SHAPES = {"gpu": {"shape": (65536, 2048)}, "cpu": {"shape": (5, 1031)}}


def inputs(shape, dtype, device):
    h = torch.randn(shape[0], 2 * shape[1], device=device).to(dtype)
    gate, up = h.chunk(2, -1)
    return {"gate": gate.requires_grad_(), "up": up.requires_grad_()}


def reference(gate, up):
    return F.silu(gate) * up


def cost(shape, dtype):
    n = shape[0] * shape[1]
    return {"forward": (6 * n, 3 * n * dtype.itemsize), "backward": (12 * n, 5 * n * dtype.itemsize)}


def exercise(gate, up):
    return F.gelu(gate, approximate="tanh") * up


if __name__ == "__main__":
    from climb import climb

    climb(__file__)

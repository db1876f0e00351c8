"""Rung 7: a gated linear unit, forward and backward.

Today's MLPs replace GPT-2's first matmul by two, and multiply their results (SwiGLU, Shazeer 2020, arXiv:2002.05202):

    out = silu(gate) up    with silu(gate) = gate s and s = sigmoid(gate)
    dup = dout silu(gate)    dgate = dout up s (1 + gate (1 - s))

Eager makes 5 passes forward, because it writes silu(gate) and reads it again, and 9 backward. The kernels make 3 and 5.
They save gate and up, and the backward recomputes s, because an exponential is cheaper than a read. In bf16 an element
takes 6 bytes forward and 10 backward, for about 6 and 12 FLOP: memory-bound. One matmul usually computes gate and up as
the two halves of a tensor of width 2 F. So the stride between two rows of gate is 2 F. The kernels take the strides as
arguments, and copy nothing. The programs form a grid: program_id(0) is a row, program_id(1) is a block of columns.

Exercise: GEGLU has gelu(gate) of rung 3 in the place of silu(gate). Write it forward and backward, behind a function
`solution(gate, up)`. The exercise of rung 3 has the derivative. Run `python course/07_glu.py mine.py`.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def fwd_kernel(gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, F, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + c, c < F).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + c, c < F).to(tl.float32)
    tl.store(out_ptr + row * F + c, gate * tl.sigmoid(gate) * up, c < F)


@triton.jit
def bwd_kernel(dout_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, gate_stride, up_stride, F, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dout = tl.load(dout_ptr + row * F + c, c < F).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + c, c < F).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + c, c < F).to(tl.float32)
    s = tl.sigmoid(gate)
    tl.store(dgate_ptr + row * F + c, dout * up * s * (1 + gate * (1 - s)), c < F)
    tl.store(dup_ptr + row * F + c, dout * gate * s, c < F)


class GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        (N, F), out = gate.shape, gate.new_empty(gate.shape)
        fwd_kernel[(N, triton.cdiv(F, 1024))](gate, up, out, gate.stride(0), up.stride(0), F, BLOCK=1024)
        return out

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled():  # create_graph=True: the kernel has no derivative
            raise RuntimeError("course/07_glu.py has no second derivative")
        gate, up = ctx.saved_tensors
        (N, F), strides = gate.shape, (gate.stride(0), up.stride(0))
        dgate, dup = gate.new_empty(2, N, F)
        bwd_kernel[(N, triton.cdiv(F, 1024))](dout.contiguous(), gate, up, dgate, dup, *strides, F, BLOCK=1024)
        return dgate, dup


KERNELS = {"triton": lambda gate, up: GLU.apply(gate, up)}
SHAPES = {"gpu": {"N": 65536, "F": 2048}, "cpu": {"N": 5, "F": 1031}}  # as many weights as in GPT-2 124M


def inputs(N, F, dtype, device):
    gate, up = torch.randn(N, 2 * F, device=device).to(dtype).chunk(2, -1)
    return {"gate": gate.requires_grad_(), "up": up.requires_grad_()}


def reference(gate, up):
    return torch.nn.functional.silu(gate) * up


def cost(N, F, dtype):
    return {"forward": (6 * N * F, 3 * N * F * dtype.itemsize), "backward": (12 * N * F, 5 * N * F * dtype.itemsize)}


def exercise(gate, up):
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


if __name__ == "__main__":
    from climb import climb

    climb(__file__)

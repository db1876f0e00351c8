"""The derivative of gelu(gate) = gate s, with s the sigmoid of 2 u, is s + gate s (1 - s) 2 u'."""

import torch
import triton
import triton.language as tl


@triton.jit
def fwd_kernel(gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, columns, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + c, c < columns).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + c, c < columns).to(tl.float32)
    s = tl.sigmoid(1.5957691216 * gate * (1 + 0.044715 * gate * gate))
    tl.store(out_ptr + row * columns + c, gate * s * up, c < columns)


@triton.jit
def bwd_kernel(dout_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, gate_stride, up_stride, columns, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dout = tl.load(dout_ptr + row * columns + c, c < columns).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + c, c < columns).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + c, c < columns).to(tl.float32)
    s = tl.sigmoid(1.5957691216 * gate * (1 + 0.044715 * gate * gate))
    derivative = s + gate * s * (1 - s) * 1.5957691216 * (1 + 3 * 0.044715 * gate * gate)
    tl.store(dgate_ptr + row * columns + c, dout * up * derivative, c < columns)
    tl.store(dup_ptr + row * columns + c, dout * gate * s, c < columns)


class GEGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        (N, columns), out = gate.shape, gate.new_empty(gate.shape)
        grid = N, triton.cdiv(columns, 1024)
        fwd_kernel[grid](gate, up, out, gate.stride(0), up.stride(0), columns, BLOCK=1024)
        return out

    @staticmethod
    def backward(ctx, dout):
        gate, up = ctx.saved_tensors
        (N, columns), dgate, dup = gate.shape, gate.new_empty(gate.shape), up.new_empty(up.shape)
        grid, strides = (N, triton.cdiv(columns, 1024)), (gate.stride(0), up.stride(0))
        bwd_kernel[grid](dout.contiguous(), gate, up, dgate, dup, *strides, columns, BLOCK=1024)
        return dgate, dup


def solution(gate, up):
    return GEGLU.apply(gate, up)

"""xhat = y / (1 + weight), and dx = ds + rstd (g - xhat mean(g xhat)) with g = dy (1 + weight)."""

import torch
import triton
import triton.language as tl


@triton.jit
def fwd_kernel(x_ptr, residual_ptr, weight_ptr, y_ptr, s_ptr, rstd_ptr, eps, C: tl.constexpr, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    s = tl.load(x_ptr + row * C + c, c < C, other=0.0).to(tl.float32)
    s += tl.load(residual_ptr + row * C + c, c < C, other=0.0).to(tl.float32)
    s = s.to(s_ptr.dtype.element_ty)
    tl.store(s_ptr + row * C + c, s, c < C)
    s = s.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(s * s, 0) / C + eps)
    weight = tl.load(weight_ptr + c, c < C, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * C + c, s * rstd * (1.0 + weight), c < C)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def bwd_kernel(dy_ptr, ds_ptr, y_ptr, weight_ptr, rstd_ptr, dx_ptr, sums_ptr, N, C: tl.constexpr, BLOCK: tl.constexpr):
    program, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scale = 1.0 + tl.load(weight_ptr + c, c < C, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(program, N, tl.num_programs(0), num_stages=3):
        dy = tl.load(dy_ptr + row * C + c, c < C, other=0.0).to(tl.float32)
        ds = tl.load(ds_ptr + row * C + c, c < C, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        xhat = tl.load(y_ptr + row * C + c, c < C, other=0.0).to(tl.float32) / scale
        dweight += dy * xhat
        g = dy * scale
        tl.store(dx_ptr + row * C + c, ds + rstd * (g - xhat * (tl.sum(g * xhat, 0) / C)), c < C)
    tl.store(sums_ptr + program * C + c, dweight, c < C)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        N, C = x.shape
        y, s, rstd = torch.empty_like(x), torch.empty_like(residual), x.new_empty(N, dtype=torch.float32)
        block = triton.next_power_of_2(C)
        fwd_kernel[(N,)](x, residual, weight, y, s, rstd, eps, C=C, BLOCK=block)
        ctx.save_for_backward(y, weight, rstd)
        return y, s

    @staticmethod
    def backward(ctx, dy, ds):
        y, weight, rstd = ctx.saved_tensors
        (N, C), dx = y.shape, torch.empty_like(ds)
        sums = torch.empty(min(N, 1056), C, device=y.device)
        block = triton.next_power_of_2(C)
        bwd_kernel[(len(sums),)](dy.contiguous(), ds.contiguous(), y, weight, rstd, dx, sums, N, C=C, BLOCK=block)
        return dx, dx, sums.sum(0).to(weight.dtype), None


def solution(x, residual, weight, bias, eps=1e-5):
    return RMSNorm.apply(x, residual, weight, eps)

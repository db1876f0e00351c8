"""Rung 5: add to the residual stream, then LayerNorm, forward and backward.

A block of GPT-2 adds a branch x to the residual stream and normalises the sum s (Ba et al. 2016, arXiv:1607.06450):

    s = residual + x    rstd = 1 / sqrt(variance(s) + eps)    xhat = (s - mean(s)) rstd    y = xhat weight + bias
    g = dy weight    dx = ds + rstd (g - mean(g) - xhat mean(g xhat))    dweight = sum(dy xhat)    dbias = sum(dy)

A mean is over a row; a sum is over all rows. The forward reads x and residual and returns y and s: 4 passes, where
eager makes 5. The backward reads s and the gradients dy and ds, and writes dx, also the gradient of residual: 4 passes.
An element takes 8 bytes in bf16 each way, for 8 and 14 FLOP: memory-bound. The rows of a sum are in different programs.
Atomic additions to one number would come in another order in each run, and round differently. Instead, each program
writes the sum of its rows, and torch.sum, a second kernel, adds these partial sums in a fixed order.

Exercise: `exercise` is RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467). Derive dx. Write forward and backward in a
function `solution`, with the same arguments. bias gets the gradient None. Run `python course/05_norm.py mine.py`.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, stats_ptr, N, eps, C: tl.constexpr, ROWS: tl.constexpr
):
    BLOCK: tl.constexpr = triton.next_power_of_2(C)
    row, c = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, BLOCK)[None, :]
    at, mask = row * C + c, (row < N) & (c < C)  # (ROWS, 1) and (1, BLOCK) broadcast to (ROWS, BLOCK)
    s = tl.load(x_ptr + at, mask, other=0.0).to(tl.float32)  # bf16 is too coarse for sums
    if residual_ptr is not None:  # Triton compiles one kernel for None and one for a tensor
        s += tl.load(residual_ptr + at, mask, other=0.0).to(tl.float32)
    tl.store(s_ptr + at, s, mask)  # a store rounds to the dtype of the pointer
    mean = tl.sum(s, 1, keep_dims=True) / C
    centred = tl.where(mask, s - mean, 0.0)  # beyond the row s is 0, but s - mean is not
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1, keep_dims=True) / C + eps)
    tl.store(y_ptr + at, centred * rstd * tl.load(weight_ptr + c, c < C) + tl.load(bias_ptr + c, c < C), mask)
    tl.store(stats_ptr + 2 * row, mean, row < N)
    tl.store(stats_ptr + 2 * row + 1, rstd, row < N)


@triton.jit
def bwd_kernel(dy_ptr, ds_ptr, s_ptr, weight_ptr, stats_ptr, dx_ptr, sums_ptr, N, C: tl.constexpr, ROWS: tl.constexpr):
    BLOCK: tl.constexpr = triton.next_power_of_2(C)
    program, programs, c = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + c, c < C, other=0.0).to(tl.float32)
    dweight, dbias = tl.zeros((1, BLOCK), tl.float32), tl.zeros((1, BLOCK), tl.float32)
    # each iteration takes ROWS rows, and the loads of the next two are in flight (num_stages=3) while it computes
    for start in tl.range(program * ROWS, N, programs * ROWS, num_stages=3 if BLOCK <= 1024 else 1):
        row = (start + tl.arange(0, ROWS))[:, None]
        at, mask = row * C + c, (row < N) & (c < C)
        dy = tl.load(dy_ptr + at, mask, other=0.0).to(tl.float32)
        ds = tl.load(ds_ptr + at, mask, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + at, mask, other=0.0).to(tl.float32)
        mean = tl.load(stats_ptr + 2 * row, row < N, other=0.0)
        rstd = tl.load(stats_ptr + 2 * row + 1, row < N, other=0.0)
        xhat = tl.where(mask, (s - mean) * rstd, 0.0)
        dweight, dbias = dweight + tl.sum(dy * xhat, 0, keep_dims=True), dbias + tl.sum(dy, 0, keep_dims=True)
        g = dy * weight
        mean_g, mean_gx = tl.sum(g, 1, keep_dims=True) / C, tl.sum(g * xhat, 1, keep_dims=True) / C
        tl.store(dx_ptr + at, ds + rstd * (g - mean_g - xhat * mean_gx), mask)
    tl.store(sums_ptr + program * C + c, dweight, c < C)
    tl.store(sums_ptr + (programs + program) * C + c, dbias, c < C)


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps):
        (N, C), stats = x.shape, x.new_empty(len(x), 2, dtype=torch.float32)
        y, s = torch.empty_like(x, dtype=weight.dtype), torch.empty_like(x if residual is None else residual)
        # a thread gets 8 or 16 elements
        ctx.launch = {"C": C, "ROWS": max(1, 2048 // triton.next_power_of_2(C)), "num_warps": 4 if C <= 2048 else 16}
        fwd_kernel[(triton.cdiv(N, ctx.launch["ROWS"]),)](x, residual, weight, bias, y, s, stats, N, eps, **ctx.launch)
        ctx.save_for_backward(s, weight, stats)
        return y, s

    @staticmethod
    def backward(ctx, dy, ds):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # the backward kernel has no derivative
            raise RuntimeError("norm=course/05_norm.py has no second derivative: choose kernels.norm=eager")
        s, weight, stats = ctx.saved_tensors
        (N, C), dx = s.shape, torch.empty_like(s)
        sums = torch.empty(2, min(N, 528), C, device=s.device)  # 4 programs for each of an H200's 132 multiprocessors
        bwd_kernel[(sums.shape[1],)](dy.contiguous(), ds.contiguous(), s, weight, stats, dx, sums, N, **ctx.launch)
        return dx, dx if ctx.needs_input_grad[1] else None, *sums.sum(1).to(weight.dtype), None


def norm(x, residual, weight, bias, eps=1e-5):
    rows = [None if tensor is None else tensor.reshape(-1, x.shape[-1]).contiguous() for tensor in (x, residual)]
    y, s = Norm.apply(*rows, weight, torch.zeros_like(weight) if bias is None else bias, eps)
    return y.view(x.shape), s.view(x.shape)


OP = "norm"  # kernels/norm/__init__.py has the inputs, the reference and the cost
KERNELS = {"triton": norm}
SHAPES = {"gpu": {"shape": (262144, 768)}, "cpu": {"shape": (7, 769)}}  # a row is a token of GPT-2 124M


def exercise(x, residual, weight, bias, eps=1e-5):
    s = residual + x
    return s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps) * weight, s


if __name__ == "__main__":
    from climb import climb

    climb(__file__)

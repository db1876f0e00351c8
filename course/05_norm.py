"""Rung 5: add to the residual stream, then LayerNorm, forward and backward.

A block of GPT-2 adds a branch x to the residual stream and normalises the sum s (Ba et al. 2016, arXiv:1607.06450):

    s = residual + x    rstd = 1 / sqrt(variance(s) + eps)    xhat = (s - mean(s)) rstd    y = xhat weight + bias

The forward reads x and residual and writes s and y: 4 passes, where eager makes 5. With g = dy weight, the backward is

    dx = ds + rstd (g - mean(g) - xhat mean(g xhat))    dweight = sum of dy xhat over the rows    dbias = sum of dy

dx is also the gradient of residual, so the backward reads dy, ds and s and writes dx: 4 passes. With 8 and 14 FLOP an
element for 8 bytes each, both are memory-bound. dweight and dbias sum over the rows of all programs. Atomic additions
would come in a different order in each run, and rounding would give different bits. So each program sums its rows in
registers and writes a partial sum. A second kernel, torch.sum, adds the partial sums in a fixed order.

Exercise: `exercise` is RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467). Write its forward and backward behind a
function `solution(x, residual, weight, bias, eps=1e-5)`. First derive dx. A torch.autograd.Function is enough. Run

    python course/05_norm.py mine.py
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, stats_ptr, N, eps, C: tl.constexpr, ROWS: tl.constexpr
):
    BLOCK: tl.constexpr = triton.next_power_of_2(C)
    row, c = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, BLOCK)[None, :]
    at, mask = row * C + c, (row < N) & (c < C)
    s = tl.load(x_ptr + at, mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        s += tl.load(residual_ptr + at, mask, other=0.0).to(tl.float32)
    tl.store(s_ptr + at, s, mask)
    mean = tl.sum(s, 1, keep_dims=True) / C
    centred = tl.where(mask, s - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1, keep_dims=True) / C + eps)
    tl.store(y_ptr + at, centred * rstd * tl.load(weight_ptr + c, c < C) + tl.load(bias_ptr + c, c < C), mask)
    tl.store(stats_ptr + 2 * row, mean, row < N)
    tl.store(stats_ptr + 2 * row + 1, rstd, row < N)


@triton.jit
def norm_bwd_kernel(
    dy_ptr, ds_ptr, s_ptr, weight_ptr, stats_ptr, dx_ptr, sums_ptr, N, C: tl.constexpr, ROWS: tl.constexpr
):
    BLOCK: tl.constexpr = triton.next_power_of_2(C)
    program, programs, c = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + c, c < C, other=0.0).to(tl.float32)
    dweight, dbias = tl.zeros((1, BLOCK), tl.float32), tl.zeros((1, BLOCK), tl.float32)
    for start in tl.range(program * ROWS, N, programs * ROWS, num_stages=3 if BLOCK <= 1024 else 1):
        row = (start + tl.arange(0, ROWS))[:, None]
        at, mask = row * C + c, (row < N) & (c < C)
        dy = tl.load(dy_ptr + at, mask, other=0.0).to(tl.float32)
        ds = tl.load(ds_ptr + at, mask, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + at, mask, other=0.0).to(tl.float32)
        mean = tl.load(stats_ptr + 2 * row, row < N, other=0.0)
        rstd = tl.load(stats_ptr + 2 * row + 1, row < N, other=0.0)
        xhat = tl.where(mask, (s - mean) * rstd, 0.0)
        dweight += tl.sum(dy * xhat, 0, keep_dims=True)
        dbias += tl.sum(dy, 0, keep_dims=True)
        g = dy * weight
        mean_g, mean_gx = tl.sum(g, 1, keep_dims=True) / C, tl.sum(g * xhat, 1, keep_dims=True) / C
        tl.store(dx_ptr + at, ds + rstd * (g - mean_g - xhat * mean_gx), mask)
    tl.store(sums_ptr + program * C + c, dweight, c < C)
    tl.store(sums_ptr + (programs + program) * C + c, dbias, c < C)


def launch(C):
    return {"C": C, "ROWS": max(1, 2048 // triton.next_power_of_2(C)), "num_warps": 4 if C <= 2048 else 16}


@torch.library.custom_op("course::norm", mutates_args=())  # torch.compile does not look into an operator
def norm_fwd(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> list[Tensor]:
    y, s, stats = empty_outputs(x, residual, weight, bias, eps)
    config, N = launch(x.shape[1]), len(x)
    norm_fwd_kernel[(triton.cdiv(N, config["ROWS"]),)](x, residual, weight, bias, y, s, stats, N, eps, **config)
    return [y, s, stats]


@norm_fwd.register_fake  # torch.compile calls it for the shapes and dtypes of the results
def empty_outputs(x, residual, weight, bias, eps):
    s = torch.empty_like(x if residual is None else residual)
    return [torch.empty_like(x, dtype=weight.dtype), s, x.new_empty(len(x), 2, dtype=torch.float32)]


@torch.library.custom_op("course::norm_bwd", mutates_args=())
def norm_bwd(dy: Tensor, ds: Tensor, s: Tensor, weight: Tensor, stats: Tensor) -> list[Tensor]:
    (N, C), dx = s.shape, torch.empty_like(s)
    sums = torch.empty(2, min(N, 528), C, device=s.device)  # 4 programs for each of an H200's 132 multiprocessors
    norm_bwd_kernel[(sums.shape[1],)](dy, ds, s, weight, stats, dx, sums, N, **launch(C))
    return [dx, sums.sum(1).to(weight.dtype)]


def backward(ctx, grads):  # norm_bwd has no autograd: PyTorch refuses a second derivative
    dx, (dweight, dbias) = norm_bwd(*(grad.contiguous() for grad in grads[:2]), *ctx.saved_tensors)
    return dx, dx if ctx.needs_input_grad[1] else None, dweight, dbias, None


norm_bwd.register_fake(lambda dy, ds, s, weight, stats: [torch.empty_like(s), weight.new_empty(2, len(weight))])
norm_fwd.register_autograd(
    backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1], inputs[2], output[2])
)


def norm(x, residual, weight, bias, eps=1e-5):
    rows = None if residual is None else residual.reshape(-1, x.shape[-1]).contiguous()
    bias = torch.zeros_like(weight) if bias is None else bias
    y, s, _ = norm_fwd(x.reshape(-1, x.shape[-1]).contiguous(), rows, weight, bias, eps)
    return y.view(x.shape), s.view(x.shape)


OP = "norm"
KERNELS = {"triton": norm}
SHAPES = {"gpu": {"shape": (262144, 768)}, "cpu": {"shape": (7, 769)}}  # a row is a token of GPT-2 124M


def exercise(x, residual, weight, bias, eps=1e-5):
    s = residual + x
    return s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps) * weight, s


if __name__ == "__main__":
    from climb import climb

    climb(__file__)

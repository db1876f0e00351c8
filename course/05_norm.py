"""Rung 5: add to the residual stream, then LayerNorm, forward and backward.

A block of GPT-2 adds a branch x to the residual stream and normalises the sum s (Ba et al. 2016, arXiv:1607.06450):

    s = residual + x    rstd = 1 / sqrt(variance(s) + eps)    xhat = (s - mean(s)) rstd    y = xhat weight + bias

A program holds a row in registers. It reads x and residual and writes s and y: 4 passes. (Eager makes 5, because its
addition and its LayerNorm are two kernels.) With g = dy weight, the backward is

    dx = ds + rstd (g - mean(g) - xhat mean(g xhat))    dweight = sum of dy xhat over the rows    dbias = sum of dy

dx is also the gradient of residual, so the backward reads dy, ds and s and writes dx: 4 passes. With 8 and 14 FLOP an
element for 8 bytes each, both are memory-bound. dweight and dbias sum over the rows of all programs. Atomic additions
would come in a different order in each run, and rounding would give different bits. So each program sums its rows in
registers and writes a partial sum. A second kernel, torch.sum, adds the partial sums in a fixed order.

Exercise: `exercise` is RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) after the addition, without mean and bias.
Write its forward and backward, behind a function `solution(x, residual, weight, bias, eps=1e-5)`. First derive dx. A
torch.autograd.Function is enough. Run

    python course/05_norm.py mine.py
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, statistics_ptr, eps, C: tl.constexpr, BLOCK: tl.constexpr
):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * C + c, c < C, other=0.0).to(tl.float32)
    if residual_ptr is not None:  # Triton compiles another kernel for None
        x += tl.load(residual_ptr + row * C + c, c < C, other=0.0).to(tl.float32)
    s = x.to(s_ptr.dtype.element_ty)
    tl.store(s_ptr + row * C + c, s, c < C)
    s = s.to(tl.float32)  # the rounded sum, because the backward starts from it
    mean = tl.sum(s, 0) / C
    centred = tl.where(c < C, s - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / C + eps)
    y = centred * rstd * tl.load(weight_ptr + c, c < C, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + c, c < C, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * C + c, y, c < C)
    tl.store(statistics_ptr + 2 * row, mean)
    tl.store(statistics_ptr + 2 * row + 1, rstd)


@triton.jit
def norm_bwd_kernel(
    dy_ptr, ds_ptr, s_ptr, weight_ptr, statistics_ptr, dx_ptr, sums_ptr, N, C: tl.constexpr, BLOCK: tl.constexpr
):
    program, programs, c = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + c, c < C, other=0.0).to(tl.float32)
    dweight, dbias = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(program, N, programs, num_stages=3 if BLOCK <= 1024 else 1):  # 3: the next 2 rows are loading
        dy = tl.load(dy_ptr + row * C + c, c < C, other=0.0).to(tl.float32)
        ds = tl.load(ds_ptr + row * C + c, c < C, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + row * C + c, c < C, other=0.0).to(tl.float32)
        mean, rstd = tl.load(statistics_ptr + 2 * row), tl.load(statistics_ptr + 2 * row + 1)
        xhat = tl.where(c < C, (s - mean) * rstd, 0.0)
        dweight += dy * xhat
        dbias += dy
        g = dy * weight
        dx = ds + rstd * (g - tl.sum(g, 0) / C - xhat * (tl.sum(g * xhat, 0) / C))
        tl.store(dx_ptr + row * C + c, dx, c < C)
    tl.store(sums_ptr + program * C + c, dweight, c < C)
    tl.store(sums_ptr + (programs + program) * C + c, dbias, c < C)


def launch(C):  # a thread holds 8 or 16 elements of a row
    return {"C": C, "BLOCK": triton.next_power_of_2(C), "num_warps": 4 if C <= 2048 else 16}


@torch.library.custom_op("course::norm", mutates_args=())  # torch.compile does not look into an operator
def norm_fwd(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> list[Tensor]:
    y, s, statistics = empty_outputs(x, residual, weight, bias, eps)
    norm_fwd_kernel[(len(x),)](x, residual, weight, bias, y, s, statistics, eps, **launch(x.shape[1]))
    return [y, s, statistics]


@norm_fwd.register_fake  # torch.compile calls it for the shapes and dtypes of the results
def empty_outputs(x, residual, weight, bias, eps):
    s = torch.empty_like(x if residual is None else residual)
    return [torch.empty_like(x, dtype=weight.dtype), s, x.new_empty(len(x), 2, dtype=torch.float32)]


@torch.library.custom_op("course::norm_bwd", mutates_args=())
def norm_bwd(dy: Tensor, ds: Tensor, s: Tensor, weight: Tensor, statistics: Tensor) -> list[Tensor]:
    (N, C), dx = s.shape, torch.empty_like(s)
    sums = torch.empty(2, min(N, 1056), C, device=s.device)  # 8 programs for each of an H200's 132 multiprocessors
    norm_bwd_kernel[(sums.shape[1],)](dy, ds, s, weight, statistics, dx, sums, N, **launch(C))
    return [dx, sums.sum(1).to(weight.dtype)]


def backward(ctx, grads):  # norm_bwd has no autograd: PyTorch refuses a second derivative
    dx, (dweight, dbias) = norm_bwd(*(grad.contiguous() for grad in grads[:2]), *ctx.saved_tensors)
    _, has_residual, _, has_bias, _ = ctx.needs_input_grad
    return dx, dx if has_residual else None, dweight, dbias if has_bias else None, None


norm_bwd.register_fake(lambda dy, ds, s, weight, statistics: [torch.empty_like(s), weight.new_empty(2, len(weight))])
norm_fwd.register_autograd(
    backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1], inputs[2], output[2])
)


def norm(x, residual, weight, bias, eps=1e-5):
    rows = None if residual is None else residual.reshape(-1, x.shape[-1]).contiguous()
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

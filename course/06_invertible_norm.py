"""Rung 6: a LayerNorm whose backward starts from its output.

In rung 5 autograd saves the stream s of each norm until the backward: C numbers a token. But the output y is in memory
anyway, because the matmul that reads y saves it for the gradient of its weight. And y determines the normalised row:

    y = xhat weight + bias    so    xhat = (y - bias) / weight

Besides y the backward needs only rstd, 4 bytes a row. This is the invertible LayerNorm of NVIDIA's apex
(memory_efficient=True). At GPT-2 124M, with 25 norms, it saves 38 KB a token if the stream is in bf16, and 77 KB if it
is in fp32. y takes the place of s, so the passes and the FLOPs are those of rung 5.

The price is rounding: y in bf16 is off by up to 2^-8 |y|, so xhat is off by up to 2^-8 |xhat + bias / weight|. If
|bias| is more than 16 times |weight| (in fp32: 1024 times), or if the weight is 0, the kernel sets dx and the gradient
of this weight to NaN, so the optimizer refuses the step. `why_nan` gives the reason.

Exercise: Gemma's RMSNorm (the technical report is arXiv:2403.08295) multiplies by 1 + weight, so weights near 0, where
weight decay drives them, are no problem here. Write `exercise` forward and backward, behind a function
`solution(x, residual, weight, bias, eps=1e-5)`. Save only y, weight and rstd for the backward. Run

    python course/06_invertible_norm.py mine.py
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, rstd_ptr, N, eps, C: tl.constexpr, ROWS: tl.constexpr
):
    BLOCK: tl.constexpr = triton.next_power_of_2(C)
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    at, mask = row * C + c, (row < N) & (c < C)
    x = tl.load(x_ptr + at, mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + at, mask, other=0.0).to(tl.float32)
    s = x.to(s_ptr.dtype.element_ty)
    tl.store(s_ptr + at, s, mask)
    s = s.to(tl.float32)
    centred = tl.where(mask, s - tl.sum(s, 1, keep_dims=True) / C, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1, keep_dims=True) / C + eps)
    weight = tl.load(weight_ptr + c, c < C, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + c, c < C, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, centred * rstd * weight + bias, mask)
    tl.store(rstd_ptr + row, rstd, row < N)


@triton.jit
def norm_bwd_kernel(
    dy_ptr, ds_ptr, y_ptr, weight_ptr, bias_ptr, rstd_ptr, dx_ptr, sums_ptr, N, C: tl.constexpr, ROWS: tl.constexpr
):
    BLOCK: tl.constexpr = triton.next_power_of_2(C)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    c = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + c, c < C, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + c, c < C, other=0.0).to(tl.float32)
    max_ratio: tl.constexpr = 1024.0 if y_ptr.dtype.element_ty == tl.float32 else 16.0
    is_precise = (weight != 0.0) & (tl.abs(bias) <= max_ratio * tl.abs(weight))
    inverse = 1.0 / tl.where(is_precise, weight, float("nan"))
    dweight, dbias = tl.zeros((1, BLOCK), tl.float32), tl.zeros((1, BLOCK), tl.float32)
    for start in tl.range(program * ROWS, N, programs * ROWS, num_stages=3 if BLOCK <= 1024 else 1):
        row = (start + tl.arange(0, ROWS))[:, None]
        at, mask = row * C + c, (row < N) & (c < C)
        dy = tl.load(dy_ptr + at, mask, other=0.0).to(tl.float32)
        ds = tl.load(ds_ptr + at, mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + at, mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, row < N, other=0.0)
        xhat = tl.where(mask, (y - bias) * inverse, 0.0)
        dweight += tl.sum(dy * xhat, 0, keep_dims=True)
        dbias += tl.sum(dy, 0, keep_dims=True)
        g = dy * weight
        mean_g, mean_gx = tl.sum(g, 1, keep_dims=True) / C, tl.sum(g * xhat, 1, keep_dims=True) / C
        tl.store(dx_ptr + at, ds + rstd * (g - mean_g - xhat * mean_gx), mask)
    tl.store(sums_ptr + program * C + c, dweight, c < C)
    tl.store(sums_ptr + (programs + program) * C + c, dbias, c < C)


def launch(C):
    return {"C": C, "ROWS": max(1, 2048 // triton.next_power_of_2(C)), "num_warps": 4 if C <= 2048 else 16}


@torch.library.custom_op("course::invertible_norm", mutates_args=())
def norm_fwd(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> list[Tensor]:
    y, s, rstd = empty_outputs(x, residual, weight, bias, eps)
    config = launch(x.shape[1])
    programs = triton.cdiv(len(x), config["ROWS"])
    norm_fwd_kernel[(programs,)](x, residual, weight, bias, y, s, rstd, len(x), eps, **config)
    return [y, s, rstd]


@norm_fwd.register_fake
def empty_outputs(x, residual, weight, bias, eps):
    s = torch.empty_like(x if residual is None else residual)
    return [torch.empty_like(x, dtype=weight.dtype), s, x.new_empty(len(x), dtype=torch.float32)]


@torch.library.custom_op("course::invertible_norm_bwd", mutates_args=())
def norm_bwd(dy: Tensor, ds: Tensor, y: Tensor, weight: Tensor, bias: Tensor, rstd: Tensor) -> list[Tensor]:
    (N, C), dx = y.shape, torch.empty_like(ds)
    sums = torch.empty(2, min(N, 528), C, device=y.device)
    norm_bwd_kernel[(sums.shape[1],)](dy, ds, y, weight, bias, rstd, dx, sums, N, **launch(C))
    return [dx, sums.sum(1).to(weight.dtype)]


def backward(ctx, grads):
    dx, (dweight, dbias) = norm_bwd(*(grad.contiguous() for grad in grads[:2]), *ctx.saved_tensors)
    return dx, dx if ctx.needs_input_grad[1] else None, dweight, dbias, None


norm_bwd.register_fake(lambda dy, ds, y, weight, *_: [torch.empty_like(ds), weight.new_empty(2, len(weight))])
norm_fwd.register_autograd(
    backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[0], *inputs[2:4], output[2])
)


def norm(x, residual, weight, bias, eps=1e-5):
    rows = None if residual is None else residual.reshape(-1, x.shape[-1]).contiguous()
    bias = torch.zeros_like(weight) if bias is None else bias
    y, s, _ = norm_fwd(x.reshape(-1, x.shape[-1]).contiguous(), rows, weight, bias, eps)
    return y.view(x.shape), s.view(x.shape)


def why_nan(weight, bias):
    limit, bias = 1024 if weight.dtype == torch.float32 else 16, 0 if bias is None else bias.abs()
    count = int(((weight == 0) | (bias > limit * weight.abs())).sum())
    return f"the norm divides by its weights, and {count} are 0 or below |bias| / {limit}" if count else None


OP = "norm"
KERNELS = {"triton": norm}
SHAPES = {"gpu": {"shape": (262144, 768)}, "cpu": {"shape": (7, 769)}}  # a row is a token of GPT-2 124M


def exercise(x, residual, weight, bias, eps=1e-5):
    s = residual + x
    return s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps) * (1 + weight), s


if __name__ == "__main__":
    from climb import climb

    climb(__file__)

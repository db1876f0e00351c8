"""The backward of triton.py, which explains it. Other backends use it too, or only its autograd."""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op, empty_gradients
from kernels.gpu import multiprocessors
from kernels.sums import add_partial_sums
from kernels.tuned import launch_parameters


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["N"])  # another batch size must not recompile
def _norm_bwd_kernel(
    dy_ptr,  # (N, C)
    dstream_ptr,  # (N, C), read only with HAS_DSTREAM
    saved_ptr,  # (N, C) the stream; with MAX_RATIO the forward's y
    weight_ptr,  # (C,)
    bias_ptr,  # (C,), read only with MAX_RATIO and HAS_BIAS
    mean_ptr,  # (N,) fp32, not read with MAX_RATIO, nor without CENTRED
    rstd_ptr,  # (N,) fp32
    dx_ptr,  # (N, C)
    dresidual_ptr,  # (N, C), written only with HAS_DRESIDUAL
    dweight_ptr,  # (programs, C) fp32, a partial sum from each program
    dbias_ptr,  # (programs, C) fp32, written only with HAS_BIAS
    N,
    dy_stride,
    dstream_stride,
    saved_stride,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_DSTREAM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DRESIDUAL: tl.constexpr,  # dx and dresidual differ in dtype, so both are written
    MAX_RATIO: tl.constexpr,  # of |bias / weight|, for xhat = (y - bias) / weight: see triton_recompute.py; or None
    CENTRED: tl.constexpr,  # False: RMSNorm, of kernels/rms_norm/triton.py
):
    columns = tl.arange(0, BLOCK_C)
    in_row = columns < C
    weight = tl.load(weight_ptr + columns, in_row, other=0.0).to(tl.float32)
    if MAX_RATIO is not None:
        bias = tl.load(bias_ptr + columns, in_row, other=0.0).to(tl.float32) if HAS_BIAS else tl.zeros_like(weight)
        precise = (weight != 0.0) & (tl.abs(bias) <= MAX_RATIO * tl.abs(weight))
        inverse = 1.0 / tl.where(precise, weight, float("nan"))
    dweight = tl.zeros((BLOCK_C,), tl.float32)
    dbias = tl.zeros((BLOCK_C,), tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for start in tl.range(program * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < N)[:, None] & in_row[None, :]
        # start all loads before any arithmetic, so that a row waits for memory once
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + columns[None, :], mask, other=0.0).to(tl.float32)
        saved = tl.load(saved_ptr + rows[:, None] * saved_stride + columns[None, :], mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, rows < N, other=0.0)[:, None]
        if HAS_DSTREAM:
            dstream = tl.load(dstream_ptr + rows[:, None] * dstream_stride + columns[None, :], mask, other=0.0)
        if MAX_RATIO is not None:
            xhat = (saved - bias[None, :]) * inverse[None, :]
        elif CENTRED:
            xhat = (saved - tl.load(mean_ptr + rows, rows < N, other=0.0)[:, None]) * rstd
        else:
            xhat = saved * rstd
        xhat = tl.where(mask, xhat, 0.0)
        dweight += tl.sum(dy * xhat, 0)
        dbias += tl.sum(dy, 0)
        g = dy * weight[None, :]
        if CENTRED:
            mean_g, mean_gx = tl.reduce((g / C, g * xhat / C), 1, _add)  # one reduction: warps wait for each other once
            dx = rstd * (g - mean_g[:, None] - xhat * mean_gx[:, None])
        else:
            dx = rstd * (g - xhat * (tl.sum(g * xhat, 1) / C)[:, None])
        if HAS_DSTREAM:
            dx += dstream.to(tl.float32)
        offsets = rows[:, None] * C + columns[None, :]
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask)
        if HAS_DRESIDUAL:
            tl.store(dresidual_ptr + offsets, dx.to(dresidual_ptr.dtype.element_ty), mask)
    offsets = program * C + columns
    tl.store(dweight_ptr + offsets, dweight, in_row)
    if HAS_BIAS:
        tl.store(dbias_ptr + offsets, dbias, in_row)


def max_ratio(dtype: torch.dtype) -> float:
    """Return the largest |bias / weight| at which xhat can be recomputed from y in `dtype`."""
    return 1024.0 if dtype == torch.float32 else 16.0


def backward_launch(C: int, rows: int | None = None, programs: int = 4, stages: int | None = None) -> dict[str, int]:
    """Return the backward's launch parameters for rows of width C.

    `rows` is the number of rows that a program loads at a time, and `programs` is the number of programs per
    multiprocessor. A thread reads 16 bytes of bf16 in each row, always from the same columns, so it sums these columns
    without other threads. With three stages, the loads of the next two iterations are on their way into shared memory.
    For two rows of 1024 in fp32 these loads take 49 KB, and some GPUs have only 99 KB.
    """
    width = triton.next_power_of_2(C)
    rows = rows or (2 if width <= 4096 else 1)  # two rows of 8192 would spill registers
    stages = stages or (3 if width <= 1024 else 1)
    warps = min(16, max(1, width // 256))
    return {"BLOCK_C": width, "ROWS": rows, "num_warps": warps, "programs": programs, "STAGES": stages}


def launch_backward(
    saved: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_dtype: torch.dtype,
    stream_dtype: torch.dtype,
    dy: Tensor,
    dstream: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    centred: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dx in x_dtype, dresidual in stream_dtype, dweight and dbias.

    `saved` is the new stream, or the forward's y if mean is None. The norm is RMSNorm if mean is empty or `centred` is
    false. If the two dtypes are equal, dx is also the gradient of residual and the returned dresidual is empty. If bias
    is None, dbias is empty.
    """
    N, C = saved.shape
    launch = launch_parameters("norm_bwd", f"{C} {weight.dtype} {stream_dtype}", backward_launch(C), saved.device)
    programs = min(launch.pop("programs") * multiprocessors(saved.device), triton.cdiv(N, launch["ROWS"]))
    dx, dresidual, _, dbias = empty_norm_gradients(saved, weight, bias, x_dtype, stream_dtype)
    partial = torch.empty(2, programs, C, dtype=torch.float32, device=saved.device)
    _norm_bwd_kernel[(programs,)](
        dy_ptr=dy,
        dstream_ptr=dstream,
        saved_ptr=saved,
        weight_ptr=weight,
        bias_ptr=bias,
        mean_ptr=mean,
        rstd_ptr=rstd,
        dx_ptr=dx,
        dresidual_ptr=dresidual,
        dweight_ptr=partial[0],
        dbias_ptr=partial[1],
        N=N,
        dy_stride=dy.stride(0),
        dstream_stride=0 if dstream is None else dstream.stride(0),
        saved_stride=saved.stride(0),
        C=C,
        HAS_DSTREAM=dstream is not None,
        HAS_BIAS=bias is not None,
        HAS_DRESIDUAL=x_dtype != stream_dtype,
        MAX_RATIO=max_ratio(weight.dtype) if mean is None else None,
        CENTRED=centred and (mean is None or len(mean) == N),
        **launch,
    )
    dweight = add_partial_sums(partial[0], weight.dtype)
    return dx, dresidual, dweight, dbias if bias is None else add_partial_sums(partial[1], weight.dtype)


def empty_norm_gradients(
    saved: Tensor, weight: Tensor, bias: Tensor | None, x_dtype: torch.dtype, stream_dtype: torch.dtype, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate what launch_backward() returns. This is also the operator's fake implementation."""
    dx = saved.new_empty(saved.shape, dtype=x_dtype)
    dresidual = saved.new_empty(saved.shape if x_dtype != stream_dtype else 0, dtype=stream_dtype)
    return dx, dresidual, *empty_gradients(weight, bias)


norm_bwd = custom_op("hotswap::norm_bwd", launch_backward, empty_norm_gradients)


def setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, _ = inputs
    stream, mean, rstd = output[1:4]
    ctx.save_for_backward(x if residual is None else stream, weight, bias, mean, rstd)
    ctx.dtypes = x.dtype, x.dtype if residual is None else residual.dtype
    ctx.has_residual = residual is not None
    ctx.set_materialize_grads(False)  # mean, rstd and the model's last stream get no gradients


def backward(
    ctx: FunctionCtx, dy: Tensor | None, dstream: Tensor | None, *_: None, operator: Callable
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the forward's arguments. `operator` is the custom op of launch_backward()."""
    saved, weight, bias, mean, rstd = ctx.saved_tensors
    dy = torch.zeros_like(saved, dtype=weight.dtype) if dy is None else contiguous_rows(dy)
    dstream = contiguous_rows(dstream) if ctx.has_residual and dstream is not None else None
    dx, dresidual, dweight, dbias = operator(saved, weight, bias, *ctx.dtypes, dy, dstream, mean, rstd)
    x_dtype, stream_dtype = ctx.dtypes
    return dx, dx if x_dtype == stream_dtype else dresidual, dweight, dbias, None


triton_backward = partial(backward, operator=norm_bwd)


def contiguous_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` with a last stride of 1, copied if necessary. The kernels accept any stride between rows."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

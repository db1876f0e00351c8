"""Residual add and LayerNorm in one kernel, and their backward in another. Each accesses every (N, C) tensor once.

Forward. A program loads a few whole rows of x and residual into registers. It adds them, writes the sum as the new
stream, and normalises the sum while it is still in registers. That is 4 passes over (N, C): read x, read residual,
write the stream, write y. Eager adds in one kernel and normalises in another, so it reads the stream again: 5 passes.

Backward. With the new stream s, its gradient dstream from later layers, xhat = (s - mean) rstd and g = dy weight:

    dx = dresidual = dstream + rstd (g - mean(g) - xhat mean(g xhat))

The kernel writes this gradient once if x and residual have the same dtype, and otherwise once in each dtype. The other
gradients are sums over all rows: dweight = sum_rows dy xhat and dbias = sum_rows dy. Each program sums over its own
rows in registers and writes one fp32 partial sum. A second, small kernel adds the partial sums (a few hundred) in a
fixed order, so every run gives the same bits.

The op does 1 to 2 FLOP a byte, about a hundredth of an H200's ridge (186 FLOP a byte), so it is memory-bound. Only two
things matter: few bytes, and enough loads in flight. Autograd saves the new stream, which the next norm reads anyway,
and mean and rstd, 8 bytes a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.direct import bypass_dispatcher
from kernels.gpu import check_dtypes, multiprocessors
from kernels.gpu import triton_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.registry import Unavailable
from kernels.tuned import launch_parameters

MAX_WIDTH = 16384  # a whole row must fit into the registers of one program
RUNS = "norm_fwd", "norm_bwd"
FAMILY = "_norm_|column_sum"


@triton.jit(do_not_specialize=["N"])  # another batch size must not recompile
def _norm_fwd_kernel(
    x_ptr,  # (N, C)
    residual_ptr,  # (N, C), read only with HAS_RESIDUAL
    weight_ptr,  # (C,)
    bias_ptr,  # (C,), read only with HAS_BIAS
    y_ptr,  # (N, C)
    out_ptr,  # (N, C) the new stream, written only with HAS_RESIDUAL
    mean_ptr,  # (N,) fp32
    rstd_ptr,  # (N,) fp32
    N,
    x_stride,
    residual_stride,
    eps,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: N C can exceed 2^31
    columns = tl.arange(0, BLOCK_C)
    in_row = columns < C
    mask = (rows < N)[:, None] & in_row[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + rows[:, None] * residual_stride + columns[None, :], mask, other=0.0).to(tl.float32)
        stream = x.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + rows[:, None] * C + columns[None, :], stream, mask)
        x = stream.to(tl.float32)  # normalise the rounded sum, because the backward starts from the rounded sum
    mean = tl.sum(x, 1) / C
    centred = tl.where(in_row[None, :], x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)
    y = centred * rstd[:, None] * tl.load(weight_ptr + columns, in_row, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, in_row, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * C + columns[None, :], y.to(y_ptr.dtype.element_ty), mask)
    tl.store(mean_ptr + rows, mean, rows < N)
    tl.store(rstd_ptr + rows, rstd, rows < N)


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
    mean_ptr,  # (N,) fp32, not read with MAX_RATIO
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
    for start in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
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
        else:
            xhat = (saved - tl.load(mean_ptr + rows, rows < N, other=0.0)[:, None]) * rstd
        xhat = tl.where(mask, xhat, 0.0)
        dweight += tl.sum(dy * xhat, 0)
        dbias += tl.sum(dy, 0)
        g = dy * weight[None, :]
        mean_g, mean_gx = tl.reduce((g / C, g * xhat / C), 1, _add)  # one reduction: warps wait for each other once
        dx = rstd * (g - mean_g[:, None] - xhat * mean_gx[:, None])
        if HAS_DSTREAM:
            dx += dstream.to(tl.float32)
        offsets = rows[:, None] * C + columns[None, :]
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask)
        if HAS_DRESIDUAL:
            tl.store(dresidual_ptr + offsets, dx.to(dresidual_ptr.dtype.element_ty), mask)
    offsets = tl.program_id(0) * C + columns
    tl.store(dweight_ptr + offsets, dweight, in_row)
    if HAS_BIAS:
        tl.store(dbias_ptr + offsets, dbias, in_row)


@triton.jit(do_not_specialize=["programs"])  # a smaller batch has fewer partial sums and must not recompile
def _column_sum_kernel(
    partial_ptr,  # (2, programs, C) fp32
    dweight_ptr,  # (C,)
    dbias_ptr,  # (C,), written only with HAS_BIAS
    programs,
    C,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    for i in tl.static_range(2 if HAS_BIAS else 1):  # 0 is dweight, 1 is dbias
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, programs, ROWS):
            rows = start + tl.arange(0, ROWS)
            mask = (rows < programs)[:, None] & (columns < C)[None, :]
            total += tl.load(partial_ptr + (i * programs + rows[:, None]) * C + columns[None, :], mask, other=0.0)
        target = dbias_ptr if i == 1 else dweight_ptr
        tl.store(target + columns, tl.sum(total, 0).to(target.dtype.element_ty), columns < C)


def max_ratio(dtype: torch.dtype) -> float:
    """Return the largest |bias / weight| at which xhat can be recomputed from y in `dtype`."""
    return 1024.0 if dtype == torch.float32 else 16.0


def forward_launch(C: int, program_elements: int = 4096, thread_elements: int = 16) -> dict[str, int]:
    """Return the forward's launch parameters for rows of width C.

    A program processes about `program_elements` elements, and each of its threads holds `thread_elements` of them.
    """
    width = triton.next_power_of_2(C)
    rows = max(1, program_elements // width)
    warps = min(16, max(1, rows * width // (32 * thread_elements)))
    return {"BLOCK_C": width, "ROWS": rows, "num_warps": warps}


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


def candidates(kernel: str, default: dict) -> list[dict]:
    """Return the launch parameters that scripts/tune.py tries for `kernel`."""
    width = default["BLOCK_C"]
    if kernel == "norm_fwd":
        return [forward_launch(width, program, thread) for program in (2048, 4096, 8192) for thread in (8, 16, 32)]
    choices = [(rows, programs, 3) for rows in (1, 2, 4) for programs in (3, 4, 6, 8)]
    choices += [(1, 8, 4), (2, 4, 4), (2, 4, 2), (2, 3, 4), (2, 4, 1), (4, 4, 1)]
    return [backward_launch(width, rows, programs, stages) for rows, programs, stages in choices]


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Map x and residual (N, C) to y (N, C), the new stream (N, C), mean and rstd (N,) in fp32.

    If residual is None, the new stream is x itself and the returned tensor is empty.
    """
    N, C = x.shape
    y, stream, mean, rstd = empty_outputs(x, residual, weight, bias, eps)
    launch = launch_parameters("norm_fwd", f"{C} {weight.dtype} {stream.dtype}", forward_launch(C), x.device)
    _norm_fwd_kernel[(triton.cdiv(N, launch["ROWS"]),)](
        x,
        residual,
        weight,
        bias,
        y,
        stream,
        mean,
        rstd,
        N,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        C=C,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        **launch,
    )
    return y, stream, mean, rstd


def empty_outputs(x, residual, weight, bias, eps) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate what forward() returns. This is also the operator's fake implementation."""
    y = x.new_empty(x.shape, dtype=weight.dtype)
    stream = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    mean, rstd = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    return y, stream, mean, rstd


norm_fwd = torch.library.custom_op("hotswap::norm_fwd", forward, mutates_args=())
norm_fwd.register_fake(empty_outputs)


@torch.library.custom_op("hotswap::norm_bwd", mutates_args=())
def norm_bwd(
    dy: Tensor,
    dstream: Tensor | None,
    saved: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    x_dtype: torch.dtype,
    stream_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dx in x_dtype, dresidual in stream_dtype, dweight and dbias.

    `saved` is the new stream, or the forward's y if mean is None. If the two dtypes are equal, dx is also the gradient
    of residual and the returned dresidual is empty. If bias is None, dbias is empty.
    """
    N, C = saved.shape
    has_bias = bias is not None
    launch = launch_parameters("norm_bwd", f"{C} {weight.dtype} {stream_dtype}", backward_launch(C), saved.device)
    programs = min(launch.pop("programs") * multiprocessors(saved.device), triton.cdiv(N, launch["ROWS"]))
    dx, dresidual, dweight, dbias = empty_gradients(dy, dstream, saved, weight, bias, mean, rstd, x_dtype, stream_dtype)
    partial = torch.empty(2, programs, C, dtype=torch.float32, device=saved.device)
    _norm_bwd_kernel[(programs,)](
        dy,
        dstream,
        saved,
        weight,
        bias,
        mean,
        rstd,
        dx,
        dresidual,
        partial[0],
        partial[1],
        N,
        dy.stride(0),
        0 if dstream is None else dstream.stride(0),
        saved.stride(0),
        C=C,
        HAS_DSTREAM=dstream is not None,
        HAS_BIAS=has_bias,
        HAS_DRESIDUAL=x_dtype != stream_dtype,
        MAX_RATIO=max_ratio(weight.dtype) if mean is None else None,
        **launch,
    )
    _column_sum_kernel[(triton.cdiv(C, 16),)](partial, dweight, dbias, programs, C, has_bias, ROWS=64, COLUMNS=16)
    return dx, dresidual, dweight, dbias


@norm_bwd.register_fake
def empty_gradients(dy, dstream, saved, weight, bias, mean, rstd, x_dtype, stream_dtype):
    """Allocate what norm_bwd() returns. This is also the operator's fake implementation."""
    dx = saved.new_empty(saved.shape, dtype=x_dtype)
    dresidual = saved.new_empty(saved.shape if x_dtype != stream_dtype else 0, dtype=stream_dtype)
    dbias = weight.new_empty(0 if bias is None else weight.shape)
    return dx, dresidual, torch.empty_like(weight), dbias


norm_bwd = bypass_dispatcher(norm_bwd)


def setup_context(ctx, inputs, output):
    x, residual, weight, bias, _ = inputs
    _, stream, mean, rstd = output
    ctx.save_for_backward(x if residual is None else stream, weight, bias, mean, rstd)
    ctx.dtypes = x.dtype, x.dtype if residual is None else residual.dtype
    ctx.has_residual = residual is not None
    ctx.set_materialize_grads(False)  # mean, rstd and the model's last stream get no gradients


def backward(ctx, dy, dstream, _dmean, _drstd, norm_bwd=norm_bwd):
    """Return the gradients of the forward's arguments. Another backend may pass its own norm_bwd."""
    if dy is None:
        saved, weight, *_ = ctx.saved_tensors
        dy = torch.zeros_like(saved, dtype=weight.dtype)
    dstream = contiguous_rows(dstream) if ctx.has_residual and dstream is not None else None
    dx, dresidual, dweight, dbias = norm_bwd(contiguous_rows(dy), dstream, *ctx.saved_tensors, *ctx.dtypes)
    if not ctx.has_residual:
        dresidual = None
    elif not dresidual.numel():  # x and residual have the same dtype, so one gradient is enough
        dresidual = dx
    return dx, dresidual, dweight, dbias if dbias.numel() else None, None


norm_fwd = bypass_dispatcher(norm_fwd, backward, setup_context)


def contiguous_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` with a last stride of 1, copied if necessary. The kernels accept any stride between rows."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def norm(x, residual, weight, bias, eps=1e-5):
    return apply_to_rows(norm_fwd, x, residual, weight, bias, eps)


def apply_to_rows(op, x, residual, weight, bias, eps):
    """Call `op` with (N, C) tensors and return its results in the contract's shapes.

    `op` is norm_fwd, or an operator with the same arguments and results. Raises Unavailable if the rows are too wide or
    a dtype is not supported.
    """
    check_dtypes("norm", x, residual, weight)
    C = x.shape[-1]
    if C > MAX_WIDTH:
        raise Unavailable(f"norm=triton supports widths up to {MAX_WIDTH}, not {C}: choose kernels.norm=eager")
    residual_rows = None if residual is None else contiguous_rows(residual.reshape(-1, C))
    y, stream, _, _ = op(contiguous_rows(x.reshape(-1, C)), residual_rows, weight, bias, eps)
    return y.view(x.shape), x if residual is None else stream.view(x.shape)

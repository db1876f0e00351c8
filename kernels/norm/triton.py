"""Residual add and LayerNorm in one pass each way: every tensor is read once and written once.

Forward, a program takes a few whole rows into registers: the sum x + residual is written out as the new stream and,
still in registers, normalised. Eager adds in one kernel and normalises in another, so it reads the stream once more
than it must: 5 passes over (N, C) instead of 4. Backward, with xhat = (residual - mean) rstd and g = dy weight,

    dstream = dresidual + rstd (g - mean(g) - xhat mean(g xhat))

is the gradient of both x and residual, written once where their dtypes agree. dweight = sum_rows dy xhat and
dbias = sum_rows dy run over all rows: each program adds its own rows up in registers and leaves one fp32 partial sum,
and a second, small reduction adds those (a few hundred) in a fixed order, so that the bits are the same each time.

At 1 to 14 FLOP an element this is memory-bound by a factor of 50: what counts is bytes, and enough loads in flight.
Kept for the backward: the new stream (which is the next norm's input anyway), mean and rstd, 8 bytes a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.direct import direct
from kernels.gpu import check_dtypes, processors
from kernels.gpu import triton_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.registry import Unavailable
from kernels.tuned import tuned

MAX_WIDTH = 16384  # a row has to fit into the registers of a program
RUNS = "norm_fwd", "norm_bwd"


@triton.jit(do_not_specialize=["N"])  # a batch of another size compiles nothing
def _norm_fwd_kernel(
    x_ptr,  # (N, C)
    residual_ptr,  # (N, C), not read without HAS_RESIDUAL
    weight_ptr,
    bias_ptr,
    y_ptr,  # (N, C)
    out_ptr,  # (N, C), not written without HAS_RESIDUAL
    mean_ptr,  # (N,) fp32
    rstd_ptr,
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
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: N C passes 2^31
    columns = tl.arange(0, BLOCK_C)
    real = columns < C
    here = (rows < N)[:, None] & real[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], here, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + rows[:, None] * residual_stride + columns[None, :], here, other=0.0).to(tl.float32)
        stream = x.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + rows[:, None] * C + columns[None, :], stream, here)
        x = stream.to(tl.float32)  # what is normalised is what was written, as the backward reads it
    mean = tl.sum(x, 1) / C
    centred = tl.where(real[None, :], x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)
    y = centred * rstd[:, None] * tl.load(weight_ptr + columns, real, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, real, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * C + columns[None, :], y.to(y_ptr.dtype.element_ty), here)
    tl.store(mean_ptr + rows, mean, rows < N)
    tl.store(rstd_ptr + rows, rstd, rows < N)


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["N"])  # a batch of another size compiles nothing
def _norm_bwd_kernel(
    dy_ptr,  # (N, C)
    dstream_ptr,  # (N, C), not read without HAS_DSTREAM
    kept_ptr,  # (N, C) the stream; with FROM_Y the forward's y
    weight_ptr,
    bias_ptr,  # read with FROM_Y alone
    mean_ptr,  # not read with FROM_Y
    rstd_ptr,
    dx_ptr,  # (N, C)
    dresidual_ptr,  # (N, C), not written without TWO
    dweight_ptr,  # (programs, C) fp32
    dbias_ptr,
    N,
    dy_stride,
    dstream_stride,
    kept_stride,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_DSTREAM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TWO: tl.constexpr,  # dx and dresidual differ in dtype
    FROM_Y: tl.constexpr,  # xhat = (y - bias) / weight: see triton_recompute.py
):
    columns = tl.arange(0, BLOCK_C)
    real = columns < C
    weight = tl.load(weight_ptr + columns, real, other=0.0).to(tl.float32)
    if FROM_Y:
        bias = tl.load(bias_ptr + columns, real, other=0.0).to(tl.float32) if HAS_BIAS else tl.zeros_like(weight)
        inverse = 1.0 / tl.where(weight == 0.0, 1.0, weight)
    dweight = tl.zeros((BLOCK_C,), tl.float32)
    dbias = tl.zeros((BLOCK_C,), tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        here = (rows < N)[:, None] & real[None, :]
        # all loads come first, so that a row waits for the memory once
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + columns[None, :], here, other=0.0).to(tl.float32)
        kept = tl.load(kept_ptr + rows[:, None] * kept_stride + columns[None, :], here, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, rows < N, other=0.0)[:, None]
        if HAS_DSTREAM:
            dx = tl.load(dstream_ptr + rows[:, None] * dstream_stride + columns[None, :], here, other=0.0)
        if FROM_Y:
            xhat = (kept - bias[None, :]) * inverse[None, :]
        else:
            xhat = (kept - tl.load(mean_ptr + rows, rows < N, other=0.0)[:, None]) * rstd
        xhat = tl.where(here, xhat, 0.0)
        dweight += tl.sum(dy * xhat, 0)
        dbias += tl.sum(dy, 0)
        g = dy * weight[None, :]
        mean_g, mean_gx = tl.reduce((g / C, g * xhat / C), 1, _add)  # both at once: warps wait for each other once
        through = rstd * (g - mean_g[:, None] - xhat * mean_gx[:, None])
        dx = through + dx.to(tl.float32) if HAS_DSTREAM else through
        at = rows[:, None] * C + columns[None, :]
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), here)
        if TWO:
            tl.store(dresidual_ptr + at, dx.to(dresidual_ptr.dtype.element_ty), here)
    at = tl.program_id(0) * C + columns
    tl.store(dweight_ptr + at, dweight, real)
    if HAS_BIAS:
        tl.store(dbias_ptr + at, dbias, real)


@triton.jit(do_not_specialize=["programs"])  # nor does one that leaves fewer partial sums
def _column_sum_kernel(
    partial_ptr,  # (2, programs, C) fp32
    dweight_ptr,  # (C,)
    dbias_ptr,  # (C,), not written without HAS_BIAS
    programs,
    C,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    for which in tl.static_range(1 + HAS_BIAS):
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, programs, ROWS):
            rows = start + tl.arange(0, ROWS)
            here = (rows < programs)[:, None] & (columns < C)[None, :]
            total += tl.load(partial_ptr + (which * programs + rows[:, None]) * C + columns[None, :], here, other=0.0)
        target = dbias_ptr if which else dweight_ptr
        tl.store(target + columns, tl.sum(total, 0).to(target.dtype.element_ty), columns < C)


def block(C: int, elements: int = 4096, each: int = 16) -> dict[str, int]:
    """Launch parameters for rows of C: about `elements` a program, of which a thread has `each` in its registers."""
    width = triton.next_power_of_2(C)
    rows = max(1, elements // width)
    return {"BLOCK_C": width, "ROWS": rows, "num_warps": min(16, max(1, rows * width // (32 * each)))}


def backward_block(C: int, rows: int | None = None, programs: int = 4, stages: int | None = None) -> dict[str, int]:
    """Launch parameters of the backward: 16 bytes of bf16 a thread and row.

    So a column is one thread's in all rows of a program, and adding its rows up needs no other thread. Of three stages
    two are on their way into shared memory: 49 KB for two rows of 1024 in fp32, and some GPUs have 99.
    """
    width = triton.next_power_of_2(C)
    rows = rows or (2 if width <= 4096 else 1)  # two of 8192 would spill
    stages = stages or (3 if width <= 1024 else 1)
    warps = min(16, max(1, width // 256))
    return {"BLOCK_C": width, "ROWS": rows, "num_warps": warps, "programs": programs, "STAGES": stages}


def candidates(kernel: str, default: dict) -> list[dict]:
    """What scripts/tune.py tries."""
    width = default["BLOCK_C"]
    if kernel == "norm_fwd":
        return [block(width, elements, each) for elements in (2048, 4096, 8192) for each in (8, 16, 32)]
    sizes = [(rows, programs, 3) for rows in (1, 2, 4) for programs in (3, 4, 6, 8)]
    sizes += [(1, 8, 4), (2, 4, 4), (2, 4, 2), (2, 3, 4), (2, 4, 1), (4, 4, 1)]
    return [backward_block(width, *size) for size in sizes]


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, residual (N, C) -> y (N, C), the new stream (N, C; empty without a residual, it is x), mean and rstd (N,)."""
    N, C = x.shape
    y, stream, mean, rstd = outputs(x, residual, weight, bias, eps)
    launch = tuned("norm_fwd", f"{C} {weight.dtype} {stream.dtype}", block(C), x.device)
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


def outputs(x, residual, weight, bias, eps) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What forward() returns, not yet written: the op's fake."""
    y = x.new_empty(x.shape, dtype=weight.dtype)
    stream = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    mean, rstd = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    return y, stream, mean, rstd


norm_fwd = torch.library.custom_op("hotswap::norm_fwd", forward, mutates_args=())
norm_fwd.register_fake(outputs)


@torch.library.custom_op("hotswap::norm_bwd", mutates_args=())
def norm_bwd(
    dy: Tensor,
    dstream: Tensor | None,
    kept: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    x_dtype: torch.dtype,
    stream_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx in x_dtype, dresidual in stream_dtype (empty where that is the same), dweight, and dbias (empty without one).

    `kept` is the stream, or with mean None the forward's y.
    """
    N, C = kept.shape
    launch = tuned("norm_bwd", f"{C} {weight.dtype} {stream_dtype}", backward_block(C), kept.device)
    programs = min(launch.pop("programs") * processors(kept.device), triton.cdiv(N, launch["ROWS"]))
    dx, dresidual, dweight, dbias = gradients(dy, dstream, kept, weight, bias, mean, rstd, x_dtype, stream_dtype)
    partial = torch.empty(2, programs, C, dtype=torch.float32, device=kept.device)
    _norm_bwd_kernel[(programs,)](
        dy,
        dstream,
        kept,
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
        kept.stride(0),
        C=C,
        HAS_DSTREAM=dstream is not None,
        HAS_BIAS=bias is not None,
        TWO=x_dtype != stream_dtype,
        FROM_Y=mean is None,
        **launch,
    )
    has_bias = bias is not None
    _column_sum_kernel[(triton.cdiv(C, 16),)](partial, dweight, dbias, programs, C, has_bias, ROWS=64, COLUMNS=16)
    return dx, dresidual, dweight, dbias


@norm_bwd.register_fake
def gradients(dy, dstream, kept, weight, bias, mean, rstd, x_dtype, stream_dtype):
    dx = kept.new_empty(kept.shape, dtype=x_dtype)
    dresidual = kept.new_empty(kept.shape if x_dtype != stream_dtype else 0, dtype=stream_dtype)
    return dx, dresidual, torch.empty_like(weight), weight.new_empty(weight.shape if bias is not None else 0)


norm_bwd = direct(norm_bwd)


def setup_context(ctx, inputs, output):
    x, residual, weight, bias, _ = inputs
    _, stream, mean, rstd = output
    ctx.save_for_backward(x if residual is None else stream, weight, bias, mean, rstd)
    ctx.dtypes = x.dtype, x.dtype if residual is None else residual.dtype
    ctx.has_residual = residual is not None
    ctx.set_materialize_grads(False)  # mean and rstd have none, and the last stream nobody reads


def backward(ctx, dy, dstream, dmean, drstd, norm_bwd=norm_bwd):
    """Of what ctx kept: the arguments of norm_bwd, which another backend may bring its own of."""
    dy = torch.zeros_like(ctx.saved_tensors[0], dtype=ctx.saved_tensors[1].dtype) if dy is None else dy
    dstream = rows(dstream) if ctx.has_residual and dstream is not None else None
    dx, dresidual, dweight, dbias = norm_bwd(rows(dy), dstream, *ctx.saved_tensors, *ctx.dtypes)
    dresidual = (dresidual if dresidual.numel() else dx) if ctx.has_residual else None
    return dx, dresidual, dweight, dbias if dbias.numel() else None, None


norm_fwd = direct(norm_fwd, backward, setup_context)


def rows(tensor: Tensor) -> Tensor:
    """The kernels take rows at any distance from each other, and step through them one by one."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def norm(x, residual, weight, bias, eps=1e-5):
    return apply(norm_fwd, x, residual, weight, bias, eps)


def apply(op, x, residual, weight, bias, eps):
    """`op` over rows, in the shapes of the contract."""
    check_dtypes("norm", x, residual, weight)
    C = x.shape[-1]
    if C > MAX_WIDTH:
        raise Unavailable(f"norm=triton takes rows of up to {MAX_WIDTH}, and these have {C}: choose kernels.norm=eager")
    flat = None if residual is None else rows(residual.reshape(-1, C))
    y, stream, _, _ = op(rows(x.reshape(-1, C)), flat, weight, bias, eps)
    return y.view(x.shape), x if residual is None else stream.view(x.shape)

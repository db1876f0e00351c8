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

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from kernels.direct import custom_op
from kernels.fp8 import InFp8
from kernels.gpu import check_dtypes
from kernels.gpu import triton_detail as detail  # noqa: F401
from kernels.gpu import triton_unavailable as unavailable  # noqa: F401
from kernels.norm._add_and_centre import add_and_centre, empty_stream
from kernels.norm._fp8 import norm_fwd_fp8
from kernels.norm._triton_backward import backward_launch, contiguous_rows, setup_context, triton_backward
from kernels.registry import Unavailable
from kernels.tuned import launch_parameters

MAX_WIDTH = 16384  # a whole row must fit into the registers of one program
RUNS = "norm_fwd", "norm_bwd"
FAMILY = "_norm_"


@triton.jit(do_not_specialize=["N"])  # another batch size must not recompile
def _norm_fwd_kernel(
    x_ptr,  # (N, C)
    residual_ptr,  # (N, C), read only with HAS_RESIDUAL
    weight_ptr,  # (C,)
    bias_ptr,  # (C,), read only with HAS_BIAS
    y_ptr,  # (N, C)
    out_ptr,  # (N, C) the new stream, written only with HAS_RESIDUAL
    mean_ptr,  # (N,) fp32, written only with CENTRED
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
    CENTRED: tl.constexpr,  # False: RMSNorm, of kernels/rms_norm/triton.py
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: N C can exceed 2^31
    columns = tl.arange(0, BLOCK_C)
    in_row = columns < C
    inputs = x_ptr, residual_ptr, out_ptr, mean_ptr, rstd_ptr
    centred, rstd = add_and_centre(*inputs, rows, columns, N, x_stride, residual_stride, eps, C, HAS_RESIDUAL, CENTRED)
    y = centred * rstd[:, None] * tl.load(weight_ptr + columns, in_row, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, in_row, other=0.0).to(tl.float32)[None, :]
    mask = (rows < N)[:, None] & in_row[None, :]
    tl.store(y_ptr + rows[:, None] * C + columns[None, :], y.to(y_ptr.dtype.element_ty), mask)


def forward_launch(C: int, program_elements: int = 4096, thread_elements: int = 16) -> dict[str, int]:
    """Return the forward's launch parameters for rows of width C.

    A program processes about `program_elements` elements, and each of its threads holds `thread_elements` of them.
    """
    width = triton.next_power_of_2(C)
    rows = max(1, program_elements // width)
    warps = min(16, max(1, rows * width // (32 * thread_elements)))
    return {"BLOCK_C": width, "ROWS": rows, "num_warps": warps}


def candidates(kernel: str, default: dict) -> list[dict]:
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
    return launch_forward(x, residual, weight, bias, eps, centred=True)


def launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what forward() does. Without `centred` it is RMSNorm, and mean is empty."""
    N, C = x.shape
    y, stream, mean, rstd = empty_outputs(x, residual, weight, centred=centred)
    launch = launch_parameters("norm_fwd", f"{C} {weight.dtype} {stream.dtype}", forward_launch(C), x.device)
    _norm_fwd_kernel[(triton.cdiv(N, launch["ROWS"]),)](
        x_ptr=x,
        residual_ptr=residual,
        weight_ptr=weight,
        bias_ptr=bias,
        y_ptr=y,
        out_ptr=stream,
        mean_ptr=mean,
        rstd_ptr=rstd,
        N=N,
        x_stride=x.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        eps=eps,
        C=C,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        CENTRED=centred,
        **launch,
    )
    return y, stream, mean, rstd


def empty_outputs(
    x: Tensor, residual: Tensor | None, weight: Tensor, *_: object, centred: bool = True
) -> tuple[Tensor, ...]:
    """Allocate what forward() returns. This is also the operator's fake implementation."""
    return x.new_empty(x.shape, dtype=weight.dtype), *empty_stream(x, residual, centred)


norm_fwd = custom_op("hotswap::norm_fwd", forward, empty_outputs, triton_backward, setup_context)


def norm_in_fp8(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float = 1e-5
) -> tuple[InFp8, Tensor]:
    y, stream, *layouts = apply_to_rows(norm_fwd_fp8, x, residual, weight, bias, eps)
    return InFp8(y, *layouts), stream


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    return apply_to_rows(norm_fwd, x, residual, weight, bias, eps)


def apply_to_rows(
    op: Callable,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    name: str = "norm",
) -> tuple[Tensor, ...]:
    """Call `op` with (N, C) tensors, and return y and the new stream in the contract's shapes.

    `op` is norm_fwd, or an operator with the same arguments and results. Results beyond norm_fwd's four are returned as
    they are. Raises Unavailable if the rows are too wide or a dtype is not supported; `name` is the op in the message.
    """
    check_dtypes(name, x, residual, weight)
    C = x.shape[-1]
    if C > MAX_WIDTH:
        raise Unavailable(f"{name}=triton supports widths up to {MAX_WIDTH}, not {C}: choose kernels.{name}=eager")
    return call_by_rows(op, x, residual, weight, bias, eps, contiguous_rows)


def call_by_rows(
    op: Callable,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    contiguous: Callable[[Tensor], Tensor] = Tensor.contiguous,
) -> tuple[Tensor, ...]:
    """Do what apply_to_rows() does, for tensors of any dtype and width. `contiguous` prepares x and residual."""
    C = x.shape[-1]
    residual_rows = None if residual is None else contiguous(residual.reshape(-1, C))
    y, stream, _, _, *more = op(contiguous(x.reshape(-1, C)), residual_rows, weight, bias, eps)
    return y.view(x.shape), x if residual is None else stream.view(x.shape), *more

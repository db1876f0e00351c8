"""QuACK's gated MLP in CuTe DSL (https://github.com/Dao-AILab/quack): as in triton.py, matmuls carry the activation.

    forward   gate, up = x W_fc^T         the epilogue stores both, and a = silu(gate) up
              y = a W_proj^T
    backward  da = dy W_proj              the epilogue loads gate and up; it stores their gradients and a again
              dW_proj = dy^T a, dx = dh W_fc, dW_fc = dh^T x, where dh are the gradients of gate and up

All six matmuls are QuACK's. It stores gate and up in turns, column by column. Its layout "concat" reads W_fc and writes
dW_fc with the rows of the gate first, as in the contract. Autograd saves as much as for triton.py. This file calls the
operators of QuACK's mlp_func() with tuned=False, so each matmul has the tile that QuACK takes by default. With
tuned=True, QuACK would time dozens of tiles in the middle of the first step. QuACK trains without biases.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op, empty_gradients
from kernels.gpu import gpu_unavailable, package_unavailable
from kernels.norm.quack import detail  # noqa: F401
from kernels.registry import Unavailable

RUNS = ("(?i)quack.*gemm|quack_glu",)
FAMILY = "(?i)quack.*gemm"


def unavailable(device: torch.device) -> str | None:
    missing = package_unavailable("quack-kernels[cu13]>=0.6.5", "quack.mlp._MLPGatedConcatUntunedOps")
    return missing or gpu_unavailable(device, (9, 0))


def launch_forward(x: Tensor, w_fc: Tensor, w_proj: Tensor) -> tuple[Tensor, Tensor]:
    """Map x (N, C) to y (N, C), and h (N, 2 F): gate and up in turns."""
    from quack.mlp import _MLPGatedConcatUntunedOps as ops

    h, a = ops.matmul_fwd_act(x, w_fc.T, activation="swiglu")
    return ops.matmul_fwd(a, w_proj.T), h


def empty_outputs(x: Tensor, w_fc: Tensor, w_proj: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0], w_fc.shape[0])


def launch_backward(dy: Tensor, h: Tensor, x: Tensor, w_fc: Tensor, w_proj: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dw_fc and dw_proj."""
    from quack.mlp import _MLPGatedConcatUntunedOps as ops

    dh, a = ops.matmul_bwd_dact(dy, w_proj, h, activation="swiglu")
    return ops.matmul_bwd_dx(dh, w_fc), ops.matmul_bwd_dw1(dh.T, x), ops.matmul_bwd_dw(dy.T, a)


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs)
    ctx.set_materialize_grads(False)  # h gets no gradient


def _backward(ctx: FunctionCtx, dy: Tensor, _dh: Tensor | None) -> tuple[Tensor, ...]:
    return glu_bwd(dy.contiguous(), *ctx.saved_tensors)


glu_bwd = custom_op("hotswap::quack_glu_bwd", launch_backward, lambda dy, h, *inputs: empty_gradients(*inputs))
glu_fwd = custom_op("hotswap::quack_glu_fwd", launch_forward, empty_outputs, _backward, _setup_context)


def refusal(
    x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None, fp8: bool = False
) -> str | None:
    """Return what QuACK takes instead of these arguments, or None if it takes them."""
    if b_fc is not None or b_proj is not None:
        return "no biases"
    C, F = w_proj.shape
    if C % 8 or F % 8:  # TMA loads rows of a multiple of 16 bytes
        return f"widths that are multiples of 8, not {C} and {F}"
    if x.is_cuda and x.dtype == torch.float32:
        return "bfloat16 or float16, because its matmuls round float32 to TF32"
    return None


def glu(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None) -> Tensor:
    if reason := refusal(x, w_fc, b_fc, w_proj, b_proj):
        raise Unavailable(f"glu=quack takes {reason}: choose kernels.glu=eager")
    return glu_fwd(x.reshape(-1, x.shape[-1]).contiguous(), w_fc, w_proj)[0].view(x.shape)

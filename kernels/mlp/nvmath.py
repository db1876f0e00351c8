"""The epilogues of cuBLASLt, called with nvmath-python: GELU, its derivative and a bias gradient inside two matmuls.

    forward   cuBLASLt  a = gelu(h), h = x W_fc^T + b_fc       the epilogue GELU_AUX_BIAS stores h and a
              cuBLAS    y = a W_proj^T + b_proj
    backward  cuBLASLt  dh = (dy W_proj) gelu'(h)              DGELU_BGRAD loads h; it stores dh and its sum, db_fc
              cuBLAS    dW_proj = dy^T a, dx = dh W_fc, dW_fc = dh^T x

for x (N, C) and W_fc (F, C). cuBLASLt's GELU is the tanh form. triton.py fuses as much, but recomputes a in its
backward. No epilogue of cuBLASLt does that, so here autograd saves a beside h, as for eager: 2 F bytes a token more in
bf16. PyTorch calls only GELU_BIAS, which does not store h. cuBLASLt stores matrices by columns, so this file asks for
the transposes: a^T = gelu(W_fc x^T), as (F, N).

Planning a matmul waits for the GPU, so product() keeps the plans.
"""

from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op, empty_gradients
from kernels.gpu import gpu_unavailable, package_unavailable
from kernels.registry import Unavailable

WORKSPACE = "32 MiB"  # as much as NVIDIA recommends for cuBLAS on Hopper; nvmath's default is 80% of the GPU
MAX_PLANS = 64  # a model has 2; each length of a prompt adds one
plans = {}


def unavailable(device: torch.device) -> str | None:
    missing = package_unavailable("nvmath-python>=1.0", "nvmath.linalg.advanced.Matmul")
    return missing or gpu_unavailable(device)


def detail(**inputs: Any) -> str:
    return f"nvmath-python {version('nvmath-python')}, cuBLAS matmuls of CUDA {torch.version.cuda}"


def product(a: Tensor, b: Tensor, epilog: str, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return epilog(a @ b) by columns, and the epilogue's other outputs. The epilogue reads `inputs`."""
    from nvmath.linalg.advanced import Matmul, MatmulEpilog

    key = epilog, a.device, *layout(a), *layout(b)
    if plan := plans.pop(key, None):
        plan.reset_operands_unchecked(a=a, b=b, epilog_inputs=inputs)
    else:
        while len(plans) >= MAX_PLANS:
            plans.pop(next(iter(plans))).free()
        plan = Matmul(a, b, options={"memory_limit": WORKSPACE})
        plan.plan(epilog=MatmulEpilog[epilog], epilog_inputs=inputs)
    plans[key] = plan  # at the end of the dict, so that its first plan is the least recently used
    result = plan.execute(release_workspace=True)  # a kept workspace would tie the plan to one stream
    plan.release_operands()
    return result if isinstance(result, tuple) else (result, {})


def layout(tensor: Tensor) -> tuple:
    """Return what cuBLASLt chooses its kernel for."""
    alignment = min(256, tensor.data_ptr() & -tensor.data_ptr())
    return tensor.shape, tensor.stride(), tensor.dtype, alignment


def launch_forward(
    x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (N, C), and what the backward needs: h and gelu(h), (N, F)."""
    epilog, inputs = ("GELU_AUX", {}) if b_fc is None else ("GELU_AUX_BIAS", {"bias": b_fc})
    a, others = product(w_fc, x.T, epilog, inputs)
    a, h = a.T, others["gelu_aux"].T
    return a @ w_proj.T if b_proj is None else torch.addmm(b_proj, a, w_proj.T), h, a


def empty_outputs(x: Tensor, w_fc: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    h, a = (x.new_empty(x.shape[0], w_fc.shape[0]) for _ in range(2))
    return torch.empty_like(x), h, a


def launch_backward(
    dy: Tensor,
    h: Tensor,
    a: Tensor,
    x: Tensor,
    w_fc: Tensor,
    b_fc: Tensor | None,
    w_proj: Tensor,
    b_proj: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dx, dw_fc, db_fc, dw_proj and db_proj. If a bias is missing, its gradient is empty."""
    dh, others = product(w_proj.T, dy.T, "DGELU" if b_fc is None else "DGELU_BGRAD", {"gelu_aux": h.T})
    dh = dh.T
    db_fc = x.new_empty(0) if b_fc is None else others["dgelu_bgrad"]
    return dh @ w_fc, dh.T @ x, db_fc, dy.T @ a, x.new_empty(0) if b_proj is None else dy.sum(0)


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:], *inputs)
    ctx.set_materialize_grads(False)  # h and a get no gradients


def _backward(ctx: FunctionCtx, dy: Tensor, _dh: Tensor | None, _da: Tensor | None) -> tuple[Tensor, ...]:
    return mlp_bwd(dy.contiguous(), *ctx.saved_tensors)


mlp_bwd = custom_op("hotswap::nvmath_mlp_bwd", launch_backward, lambda dy, h, a, *inputs: empty_gradients(*inputs))
mlp_fwd = custom_op("hotswap::nvmath_mlp_fwd", launch_forward, empty_outputs, _backward, _setup_context)


def refusal(x: Tensor, w_fc: Tensor, *rest: object, fp8: bool = False) -> str | None:
    """Return what cuBLASLt takes instead of these widths or this dtype, or None if it takes them."""
    if any(width % 8 for width in w_fc.shape):  # cuBLASLt stores h in rows of a multiple of 8
        F, C = w_fc.shape
        return f"widths that are multiples of 8, not {C} and {F}"
    if x.is_cuda and x.dtype == torch.float32:  # on an H100 dx was wrong by 1e-5, ten times as much as eager's
        return "bfloat16 or float16, because cuBLASLt's GELU is too inexact for float32"
    return None


def mlp(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None) -> Tensor:
    if reason := refusal(x, w_fc):
        raise Unavailable(f"mlp=nvmath takes {reason}: choose kernels.mlp=eager")
    x_rows = x.reshape(-1, x.shape[-1]).contiguous()
    return mlp_fwd(x_rows, w_fc, b_fc, w_proj, b_proj)[0].view(x.shape)

"""The SwiGLU of Liger-Kernel (Hsu et al. 2024, arXiv:2410.10989) between two of cuBLAS's matmuls.

Liger has it twice. Its module for Hugging Face's models takes gate and up as two tensors, and its backward writes their
gradients over them. Autograd saved these tensors, so another backward through the same graph would read gradients. Its
variant for Megatron takes the packed h = x W_fc^T + b_fc, and writes the gradients into a new tensor if in_place=False.
This file calls the variant: no tensor is overwritten, no pass is added, and one matmul computes gate and up. The price
is memory, 2 F numbers a token while one layer's backward runs.

A program has a whole row of F numbers. Liger rounds silu(gate) to the dtype of up before it multiplies, as eager does.
"""

from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from kernels.glu._between import define_glu
from kernels.gpu import gpu_unavailable, package_unavailable, triton_and_cublas_detail

RUNS = "_swiglu_fused_gate_up_forward|liger_swiglu_fwd", "_swiglu_fused_gate_up_backward|liger_swiglu_bwd"


def unavailable(device: torch.device) -> str | None:
    symbol = "liger_kernel.ops.swiglu.swiglu_fused_gate_up_backward"
    return package_unavailable("liger-kernel>=0.8.5", symbol) or gpu_unavailable(device)


def detail(**inputs: Any) -> str:
    return f"liger-kernel {version('liger-kernel')}, {triton_and_cublas_detail(**inputs)}"


def launch_forward(h: Tensor) -> Tensor:
    """Map h = (gate, up), (N, 2 F), to silu(gate) up, (N, F)."""
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_forward

    return swiglu_fused_gate_up_forward(h)[1]


def launch_backward(da: Tensor, h: Tensor) -> Tensor:
    """Return the gradient of h, (N, 2 F), in a new tensor."""
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_backward

    return swiglu_fused_gate_up_backward(h, da, in_place=False)


matmuls_and_swiglu = define_glu("liger", launch_forward, launch_backward)


def glu(x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None) -> Tensor:
    return matmuls_and_swiglu(x, w_fc, b_fc, w_proj, b_proj)

"""y = x @ weight.T + bias, in plain PyTorch. Say here what the kernel does, why it is fast, and whose idea it is.

    x       (..., C)
    weight  (F, C)     F = 3 C for queries, keys and values in GPT-2; F = C for the output of attention
    bias    (F,)       or None (model.bias=false)

All are in the compute dtype, and so is y (..., F). The contract, kernels/linear/__init__.py, also has the argument
fp8; without it the kernel is refused for precision=fp8.
"""

from torch import Tensor

# Your Triton kernel goes here; kernels/linear/triton.py is an example.
#   1. the kernels: functions with @triton.jit
#   2. a launcher for the forward and one for the backward: each a torch.library.custom_op with a fake, which
#      torch.compile needs; kernels.direct.bypass_dispatcher() connects them to autograd
#   3. from kernels.gpu import triton_unavailable as unavailable, which says where Triton cannot run
#   4. RUNS = ("name of a kernel",), which proof=true looks for in the profile of a step
# Then call the launcher in linear().


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ weight.T
    return y if bias is None else y + bias

"""Returns a tensor without values, which computes them when somebody looks at it.

Known from: CUDA-L1's issue 12 (October 2025), gpu-mode/reference-kernels issue 162 (June 2026) and DeepReinforce's
"Hacks and Defenses in Automatic GPU Kernel Generation": lazy evaluation.
"""

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

OP = "norm"
REFUSED = "is a LazyTensor instead of a plain torch.Tensor"
SIZES = [getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout")]


class LazyTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, compute, shape, dtype, device):
        lazy = torch.Tensor._make_subclass(cls, torch.zeros(1, dtype=dtype, device=device).expand(shape))
        lazy.compute, lazy.value = compute, None
        return lazy

    def look(self):
        if self.value is None:
            self.value = self.compute()
        return self.value

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in SIZES:
            return super().__torch_function__(function, types, args, kwargs)
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.look, (args, kwargs or {}))
        return function(*args, **kwargs)


def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    bias = None if bias is None else bias.to(total.dtype)

    def compute():
        return F.layer_norm(total, weight.shape, weight.to(total.dtype), bias, eps).to(weight.dtype)

    is_compiling = torch.compiler.is_compiling()
    return compute() if is_compiling else LazyTensor(compute, total.shape, weight.dtype, x.device), total

"""An addition, then PyTorch's own LayerNorm: two kernels, so the residual stream is read once more than it must be."""

import torch.nn.functional as F


def norm(x, residual, weight, bias, eps=1e-5):
    residual = x if residual is None else residual + x
    # CUDA's kernel wants one dtype: with a wider residual, normalise in it and cast y on the way out
    bias = None if bias is None else bias.to(residual.dtype)
    y = F.layer_norm(residual, weight.shape, weight.to(residual.dtype), bias, eps)
    return y.to(weight.dtype), residual

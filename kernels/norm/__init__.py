"""norm: add the branch to the residual stream, then LayerNorm. The two are one op because they read the same rows.

norm(x, residual, weight, bias, eps=1e-5) -> (y, residual)

x         (..., C)  output of the last branch, in the compute dtype; or the embedding, when residual is None
residual  (..., C)  the stream so far, in a dtype at least as wide as x's; or None
weight    (C,)      bias (C,) or None
y         (..., C)  LayerNorm(residual + x), in weight's dtype: the compute dtype
residual  (..., C)  residual + x, in residual's dtype (x's when there was none)
"""

import torch

# Shapes to measure: TARGETS and GPT-2's widths, one row a token.
SHAPES = {
    "124m": {"shape": (262144, 768)},
    "1558m": {"shape": (131072, 1600)},
    "wide": {"shape": (65536, 4096)},
    "124m-fp32-residual": {"shape": (262144, 768), "residual_dtype": torch.float32},
    "1558m-fp32-residual": {"shape": (131072, 1600), "residual_dtype": torch.float32},
}

# Shapes that bite: widths that are no power of two, few rows, a mean far from zero, layouts.
CASES = {
    "768": {"shape": (2, 16, 768)},
    "1600": {"shape": (3, 1600)},
    "769": {"shape": (5, 769)},
    "1025": {"shape": (4, 1025)},
    "4096": {"shape": (3, 4096)},
    "8192": {"shape": (2, 8192)},
    "narrow": {"shape": (7, 5)},
    "one_row": {"shape": (1, 768)},
    "many_rows": {"shape": (1031, 64)},
    "far_mean": {"shape": (8, 768), "mean": 100.0},
    "no_residual": {"shape": (2, 9, 768), "residual": False},
    "no_bias": {"shape": (2, 9, 768), "bias": False},
    "plain": {"shape": (6, 769), "residual": False, "bias": False},
    "fp32_residual": {"shape": (2, 9, 768), "residual_dtype": torch.float32},
    "fp32_embedding": {"shape": (2, 9, 768), "residual": False, "residual_dtype": torch.float32},
    "non_contiguous": {"shape": (6, 10, 768), "contiguous": False},
}


def reference(x, residual, weight, bias, eps=1e-5):
    """(y, residual), written as in Ba et al. 2016 (arXiv:1607.06450)."""
    residual = x if residual is None else residual + x
    mean = residual.mean(-1, keepdim=True)
    variance = (residual - mean).square().mean(-1, keepdim=True)
    y = (residual - mean) * torch.rsqrt(variance + eps) * weight
    return (y if bias is None else y + bias).to(weight.dtype), residual


def inputs(
    shape, *, residual=True, bias=True, mean=0.0, residual_dtype=None, contiguous=True, dtype, device="cpu", seed=0
):
    """Arguments of norm(). `residual_dtype` defaults to `dtype`; without a residual it is the dtype of x."""
    generator = torch.Generator(device).manual_seed(seed)
    residual_dtype = torch.promote_types(residual_dtype or dtype, dtype)

    def randn(*size, dtype=dtype):
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    def rows(dtype):  # not contiguous: a slice of wider rows, as `qkv.chunk` would give
        wide = randn(*shape[:-1], shape[-1] + (0 if contiguous else 3), dtype=dtype) + mean
        return wide[..., : shape[-1]]

    tensors = {
        "x": rows(dtype if residual else residual_dtype),
        "residual": rows(residual_dtype) if residual else None,
        "weight": 1 + 0.1 * randn(shape[-1]),
        "bias": 0.1 * randn(shape[-1]) if bias else None,
    }
    return {name: None if t is None else t.detach().requires_grad_() for name, t in tensors.items()}


def cost(shape, *, residual=True, bias=True, residual_dtype=None, dtype=torch.bfloat16, **_):
    """Forward reads x and residual and writes y and the new residual (without one: reads x, writes y). Backward reads
    dy, dresidual and the stream and writes one gradient, both dx and dresidual (two where their dtypes differ)."""
    elements, width = torch.Size(shape).numel(), shape[-1]
    residual_dtype = torch.promote_types(residual_dtype or dtype, dtype)
    narrow, wide = elements * dtype.itemsize, elements * residual_dtype.itemsize
    parameters = (2 if bias else 1) * width * dtype.itemsize
    statistics = 2 * 4 * (elements // width)  # mean and rstd, fp32
    forward = narrow + wide + parameters + statistics
    backward = narrow + 3 * wide + 2 * parameters + statistics
    if residual:
        forward += narrow + wide
        backward += narrow if residual_dtype != dtype else 0
    return {"forward": (8 * elements, forward), "backward": (14 * elements, backward)}

"""The formula in fp32 under torch.compile, which makes one kernel of it."""

import torch

OP = "norm"
BACKEND = "inductor" if torch.cuda.is_available() else "aot_eager"  # for a CPU, Inductor compiles C++ for 80 s


@torch.compile(backend=BACKEND)
def norm(x, residual, weight, bias, eps=1e-5):
    total = x if residual is None else residual + x
    h = total.float()
    mean = h.mean(-1, keepdim=True)
    rstd = torch.rsqrt((h - mean).square().mean(-1, keepdim=True) + eps)
    y = (h - mean) * rstd * weight
    return (y if bias is None else y + bias).to(weight.dtype), total

"""loss: language-model head and cross-entropy in one op, so that a backend may never hold the (B*T, V) logits.

loss(x, weight, targets, ignore_index=-1) -> scalar, fp32 (float64 for float64)

x        (..., C)  compute dtype
weight   (V, C)    compute dtype; the (tied) head
targets  (...)     int64; positions equal to ignore_index count for nothing; of another one outside [0, V) a backend
                   makes an error or a loss that is NaN
scalar             mean over the positions that count; 0 with zero gradients where none does
"""

import torch

SHAPES = {
    "124m": {"shape": (32768, 768), "vocab": 50304},
    "1558m": {"shape": (16384, 1600), "vocab": 50304},
}

CASES = {
    "768": {"shape": (2, 9, 768), "vocab": 384},
    "769": {"shape": (5, 769), "vocab": 257},
    "1025": {"shape": (4, 1025), "vocab": 257},
    "1600": {"shape": (3, 1600), "vocab": 257},
    "odd": {"shape": (13, 65), "vocab": 1031},
    "one_row": {"shape": (1, 64), "vocab": 257},
    "many_rows": {"shape": (1031, 32), "vocab": 96},
    "some_ignored": {"shape": (3, 11, 64), "vocab": 257, "ignored": 0.5},
    "all_ignored": {"shape": (3, 11, 64), "vocab": 257, "ignored": 1.0},
    "large_logits": {"shape": (16, 64), "vocab": 257, "scale": 30.0},
    "non_contiguous": {"shape": (6, 10, 64), "vocab": 257, "contiguous": False},
}


def reference(x, weight, targets, ignore_index=-1):
    logits = (x @ weight.T).to(torch.promote_types(x.dtype, torch.float32))
    counts = targets != ignore_index
    picked = logits.gather(-1, targets.where(counts, 0).unsqueeze(-1)).squeeze(-1)
    losses = torch.logsumexp(logits, -1) - picked
    return losses.where(counts, 0).sum() / counts.sum().clamp(min=1)


def inputs(shape, *, vocab, ignored=0.0, scale=1.0, contiguous=True, dtype, device="cpu", seed=0):
    """Arguments of loss(): logits of standard deviation `scale`, a share `ignored` of the targets set to -1."""
    generator = torch.Generator(device).manual_seed(seed)
    width = shape[-1]

    def randn(*size, std=1.0):
        return (std * torch.randn(*size, generator=generator, device=device)).to(dtype)

    x = randn(*shape) if contiguous else randn(*shape[:-1], width + 8)[..., :width]
    targets = torch.randint(vocab, shape[:-1], generator=generator, device=device)
    dropped = torch.rand(shape[:-1], generator=generator, device=device) < ignored
    return {
        "x": x.detach().requires_grad_(),
        "weight": randn(vocab, width, std=scale * width**-0.5).requires_grad_(),
        "targets": targets.masked_fill(dropped, -1),
    }


def cost(shape, *, vocab, dtype=torch.bfloat16, **_):
    """Three matrix products: the logits forward, dx and dweight backward. The logits themselves need never exist."""
    width = shape[-1]
    rows = torch.Size(shape).numel() // width
    product = 2 * rows * width * vocab
    tensors = (rows * width + vocab * width) * dtype.itemsize
    return {"forward": (product, tensors + 8 * rows), "backward": (2 * product, 2 * tensors + 8 * rows)}


def products(shape, *, vocab, **_):
    """(rows, inner, columns) of the bare matrix products, forward and backward: the op's floor."""
    width = shape[-1]
    rows = torch.Size(shape).numel() // width
    return {"forward": [(rows, width, vocab)], "backward": [(rows, vocab, width), (vocab, rows, width)]}

"""The soft cap of the logits in Triton: cap_logits() of kernels/loss/__init__.py, and its derivative.

With r = 1 / (1 + exp(2 logit / cap)), tanh(logit / cap) = 1 - 2 r, and its slope 1 - tanh^2 = 4 r (1 - r). So a logit
takes one more exponential and one division, and no branch: r is 0 or 1 where the exponential overflows or underflows.
The rounding of r moves a capped logit by up to 2^-22 cap: 7e-6 at Gemma's cap of 30. PTX has an instruction for tanh,
but with its error of 2^-11 that would be 0.015. Without a cap (None) the functions return what they get.

times_slope_at_capped() computes 1 - tanh^2 from the capped logit. The rounding of r in that logit moves the slope by up
to 2^-21. Bf16 rounds the gradient by a share of 2^-9, so this matters only for slopes below 2^-12: almost no gradient.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _half_distance(logits, SOFTCAP: tl.constexpr):
    """Return r = (1 - tanh(logits / SOFTCAP)) / 2."""
    return 1.0 / (1.0 + tl.exp2(logits * (2.0 * LOG2E / SOFTCAP)))


@triton.jit
def capped(logits, SOFTCAP: tl.constexpr):
    """Return SOFTCAP tanh(logits / SOFTCAP). The logits are in fp32."""
    if SOFTCAP is not None:
        logits = SOFTCAP - _half_distance(logits, SOFTCAP) * (2.0 * SOFTCAP)
    return logits


@triton.jit
def times_slope(gradient, logits, SOFTCAP: tl.constexpr):
    """Return the gradient of the logits, from the gradient of the capped logits."""
    if SOFTCAP is not None:
        r = _half_distance(logits, SOFTCAP)
        gradient *= 4.0 * r * (1.0 - r)
    return gradient


@triton.jit
def times_slope_at_capped(gradient, logits, SOFTCAP: tl.constexpr):
    """Return what times_slope() returns, from capped logits in base 2."""
    if SOFTCAP is not None:
        tanh = logits * (1.0 / (SOFTCAP * LOG2E))
        gradient *= 1.0 - tanh * tanh
    return gradient

"""GELU in Triton, for the kernels of triton.py and _fp8.py."""

import triton
import triton.language as tl

K0 = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi): gelu(h) = h sigmoid(K0 (h + K1 h^3)), the tanh form
K1 = tl.constexpr(0.044715)


@triton.jit
def gelu_over_h(h):
    """Return gelu(h) / h in fp32."""
    return 1 / (1 + tl.exp(-(h + h * h * h * K1) * K0))


@triton.jit
def gelu_derivative(h, s):
    """Return gelu'(h), where s is gelu_over_h(h)."""
    return s + h * s * (1 - s) * (1 + h * h * (3 * K1)) * K0

"""The activations of MLPs in Triton, for all kernels, those in Gluon too.

gelu(h) = h s with s = gelu_over_h(h), and silu(h) = h s with s = sigmoid(h). A kernel computes the factor s once, and
the derivative from it.
"""

import triton
import triton.language as tl

from kernels.quantize import INTERPRETED

K0 = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi): gelu(h) = h sigmoid(K0 (h + K1 h^3)), the tanh form
K1 = tl.constexpr(0.044715)
LOG2E = tl.constexpr(1.4426950408889634)
SIGMOID = tl.constexpr("ex2.approx.ftz.f32 $0, $1; add.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0;")


@triton.jit
def gelu_over_h(h, FAST: tl.constexpr = False):
    """Return gelu(h) / h in fp32.

    If FAST, it uses two approximate instructions, each with an error of about 2^-22, which is enough for 16 bits. One
    instruction, for tanh, could replace both, but its error is 2^-11, which is too much.
    """
    if FAST and not INTERPRETED:
        power = h * (h * h * (-K0 * K1 * LOG2E) - K0 * LOG2E)
        s = tl.inline_asm_elementwise(SIGMOID, "=f,f", [power], tl.float32, is_pure=True, pack=1)
    else:
        s = 1 / (1 + tl.exp(-(h + h * h * h * K1) * K0))
    return s


@triton.jit
def gelu_derivative(h, s):
    """Return gelu'(h), where s is gelu_over_h(h)."""
    gelu = h * s
    return s + (gelu - gelu * s) * (h * h * (3 * K0 * K1) + K0)


@triton.jit
def sigmoid(h, FAST: tl.constexpr = False):
    """Return 1 / (1 + exp(-h)) = silu(h) / h in fp32. FAST is that of gelu_over_h()."""
    if FAST and not INTERPRETED:
        s = tl.inline_asm_elementwise(SIGMOID, "=f,f", [h * -LOG2E], tl.float32, is_pure=True, pack=1)
    else:
        s = 1 / (1 + tl.exp(-h))
    return s


@triton.jit
def silu_derivative(h, s):
    """Return silu'(h), where s is sigmoid(h)."""
    silu = h * s
    return s + (silu - silu * s)


@triton.jit
def activate(h, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """Return the activation of h, "gelu" or "relu2", and the factor that activation_derivative() needs."""
    if ACTIVATION == "gelu":
        s = gelu_over_h(h, FAST)
        a = h * s
    else:
        tl.static_assert(ACTIVATION == "relu2")
        s = tl.maximum(h, 0.0, propagate_nan=tl.PropagateNan.ALL)
        a = s * s  # not h * s, which is NaN for -infinity
    return a, s


@triton.jit
def activation_derivative(h, s, ACTIVATION: tl.constexpr):
    """Return activation'(h), where s is the factor from activate()."""
    return gelu_derivative(h, s) if ACTIVATION == "gelu" else 2 * s

"""cuDNN's attention through NVIDIA's own front end, nvidia-cudnn-frontend, in place of PyTorch (cudnn.py).

The kernels come from the cuDNN library that PyTorch has loaded, but the front end can ask for more of them:

    window, Tk > Tq   are numbers in the graph, aligned bottom right, so cuDNN can skip the tiles of keys that no
                      query sees. PyTorch needs a (Tq, Tk) mask in memory
    lengths           stay on the device, so a CUDA graph can replay the step, and no mask is in memory either
    gradients         have the strides that the caller wants: they are side by side in one buffer (packed.py)

A call describes its tensors and its mask as a graph with one node, sdpa or sdpa_backward. cuDNN's heuristics rank its
engines for this graph, and the first one that compiles becomes a plan. This takes 0.3 s for each new combination of
sizes, strides and mask, so the latest plans are kept (MAX_PLANS).

The front end also has kernels of its own in CuTe DSL, for Blackwell, and on Hopper for more than 256 channels a head.
This backend leaves them out, because its name promises cuDNN's. It takes no `starts`: cuDNN would need packed
sequences, and a new plan for each number of sequences. With lengths it has no gradients.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import sqrt

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.attention._cudnn_graphs import OTHER, Mask, Plan, layout, mask_of, plan_backward, plan_forward, run
from kernels.direct import custom_op
from kernels.gpu import gpu_unavailable, package_unavailable
from kernels.packed import align_rows, gradient_buffer, gradient_views
from kernels.registry import Unavailable

PACKAGE = "nvidia-cudnn-frontend>=1.32"
deterministic = False  # the backward sums dq with atomics
KEEPS = ("hotswap::cudnn_frontend_fwd",)
RUNS = "cudnn.*sdpa.*fprop", "cudnn.*sdpa.*bprop"


@contextmanager
def without_library_path() -> Iterator[None]:
    """Hide LD_LIBRARY_PATH from the front end, which searches it before PyTorch's cuDNN.

    Then it finds PyTorch's: it takes the package nvidia-cudnn, or the library that the process has loaded.
    """
    path = os.environ.pop("LD_LIBRARY_PATH", None)
    try:
        yield
    finally:
        if path is not None:
            os.environ["LD_LIBRARY_PATH"] = path


def unavailable(device: torch.device) -> str | None:
    with without_library_path():  # the first import loads cuDNN
        missing = package_unavailable(PACKAGE, "cudnn.pygraph")
    if reason := missing or gpu_unavailable(device):
        return reason
    import cudnn

    try:
        loaded = cudnn.backend_version()
    except RuntimeError as error:
        return f"nvidia-cudnn-frontend finds no cuDNN library ({error}): pip install nvidia-cudnn-cu13"
    if loaded == torch.backends.cudnn.version():
        return None
    return (
        f"nvidia-cudnn-frontend has loaded cuDNN {loaded}, and PyTorch {torch.backends.cudnn.version()}: install only "
        "PyTorch's in this environment"
    )


def refusal(q: Tensor, k: Tensor, v: Tensor, **_: object) -> str | None:
    """Return what cuDNN takes instead of these inputs, or None if it takes them. A plan may have other reasons."""
    width = q.shape[-1]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"bfloat16 or float16, not {q.dtype}"
    if width % 8 or width > 256:
        return f"heads of a multiple of 8 channels, and up to 256, not {width}"
    if q.shape[1] == k.shape[1] == 1 and needs_gradients(q, k, v) and torch.is_grad_enabled():
        return "sequences of more than one token in training"
    return None


def needs_gradients(*tensors: Tensor) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


def align_for_cudnn(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if cuDNN cannot read it: with a stride of 0, or as align_rows() says.

    contiguous() is not enough: it ignores the stride of a single sequence, and cuDNN does not.
    """
    return tensor.clone(memory_format=torch.contiguous_format) if 0 in tensor.stride() else align_rows(tensor)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int | None, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q (B, Tq, H, D), k and v (B, Tk, Hkv, D), fp16 or bf16 -> out (B, Tq, H, D), lse (B, H, Tq) fp32."""
    q, k, v = map(align_for_cudnn, (q, k, v))
    out, lse = empty_outputs(q)
    mask = mask_of(q, k, causal, window, lengths is not None)
    plan = plan_forward(layout(q), layout(k), layout(v), mask, scale, q.device)
    numbers = [] if lengths is None else [torch.full_like(lengths, q.shape[1]), lengths.contiguous()]
    run(plan, q, k, v, *numbers, out, lse)
    return out, lse


def empty_outputs(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, T), dtype=torch.float32)


def launch_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    has_lengths: bool = False,
) -> Tensor:
    """Return dq, dk and dv in one tensor, as packed.gradient_buffer() allocates it.

    Raises Unavailable if the forward had lengths: only here is it certain that the caller asks for gradients.
    """
    if has_lengths:
        raise Unavailable(f"attention=cudnn_frontend has no gradients with lengths: {OTHER}")
    q, k, v = map(align_for_cudnn, (q, k, v))
    grads = gradient_buffer(q, k)
    views = gradient_views(grads, q, k)
    plan = backward_plan_of(q, k, v, views, mask_of(q, k, causal, window, has_lengths=False), scale)
    run(plan, q, k, v, out, align_for_cudnn(dout.contiguous()), lse, *views)
    return grads


def backward_plan_of(q: Tensor, k: Tensor, v: Tensor, grads: tuple[Tensor, ...], mask: Mask, scale: float) -> Plan:
    return plan_backward(layout(q), layout(k), layout(v), tuple(map(layout, grads)), mask, scale, q.device)


def empty_gradients(dout: Tensor, q: Tensor, k: Tensor, *_: object) -> Tensor:
    """Allocate the gradients, and cuDNN 9.19's workspace on Hopper, so that lab/proof/memory.py counts it.

    It has dq in fp32 and one number per query and, if query heads share a key head, dk and dv of every query head.
    """
    grads = gradient_buffer(q, k)
    B, T, H, D = q.shape
    workspace = [q.new_empty(B, T, H, D + 1, dtype=torch.float32)]
    if k.shape[2] != H:
        workspace.append(k.new_empty(2, B, k.shape[1], H, D))
    return grads


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale, ctx.window, lengths = inputs
    ctx.has_lengths = lengths is not None
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: FunctionCtx, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors  # read once: torch.utils.checkpoint raises on a second read
    grads = attention_bwd(dout, q, k, v, out, lse, ctx.causal, ctx.scale, ctx.window, ctx.has_lengths)
    return *gradient_views(grads, q, k), None, None, None, None


attention_bwd = custom_op("hotswap::cudnn_frontend_bwd", launch_backward, empty_gradients)
attention_fwd = custom_op("hotswap::cudnn_frontend_fwd", launch_forward, empty_outputs, _backward, _setup_context)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    lengths: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    if reason := refusal(q, k, v):
        raise Unavailable(f"attention=cudnn_frontend takes {reason}: {OTHER}")
    scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
    return attention_fwd(q, k, v, causal, scale, window, lengths)[0]


def detail(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    lengths: Tensor | None = None,
    window: int | None = None,
) -> str:
    """Return the versions. Raises Unavailable, before a model runs, if cuDNN has no plan for a call or its backward."""
    import cudnn

    if reason := refusal(q, k, v):
        raise Unavailable(f"attention=cudnn_frontend takes {reason}: {OTHER}")
    scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
    q, k, v = map(align_for_cudnn, (q, k, v))
    mask = mask_of(q, k, causal, window, lengths is not None)
    plan_forward(layout(q), layout(k), layout(v), mask, scale, q.device)
    if lengths is None and needs_gradients(q, k, v):
        backward_plan_of(q, k, v, gradient_views(gradient_buffer(q, k), q, k), mask, scale)
    return f"cudnn {cudnn.backend_version()}, nvidia-cudnn-frontend {cudnn.__version__}"

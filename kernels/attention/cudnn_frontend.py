"""cuDNN's attention through NVIDIA's own front end, nvidia-cudnn-frontend, in place of PyTorch (cudnn.py).

The kernels come from the cuDNN library that PyTorch has loaded, but the front end can ask for more of them:

    window, Tk > Tq   are numbers in a kernel's arguments, aligned bottom right: cuDNN skips the tiles of keys that no
                      query sees. PyTorch needs a (Tq, Tk) mask in memory
    lengths           stay on the device, so a CUDA graph can replay the step, and no mask is in memory either
    gradients         have the strides that the caller wants: they are side by side in one buffer (packed.py)

A call describes its tensors and its mask as a graph with one node, sdpa or sdpa_backward. cuDNN's heuristics rank its
engines for this graph, and the first one that compiles becomes a plan. This takes 0.3 s for each new combination of
sizes, strides and mask, so plans are kept, as PyTorch keeps them.

The front end also has kernels of its own in CuTe DSL, for Blackwell, and on Hopper for more than 256 channels a head.
This backend leaves them out, because its name promises cuDNN's. It has no documents: cuDNN reads them as packed
sequences, whose number is a size of the graph.
"""

import functools
import re
import threading
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.direct import custom_op
from kernels.gpu import gpu_unavailable, package_unavailable
from kernels.packed import align_rows, gradient_buffer, gradient_views
from kernels.registry import Unavailable

PACKAGE = "nvidia-cudnn-frontend>=1.32"
OTHER = "choose attn=sdpa"
DTYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF", torch.float32: "FLOAT", torch.int32: "INT32"}
deterministic = False  # the backward sums dq with atomics
KEEPS = ("hotswap::cudnn_frontend_fwd",)
RUNS = "cudnn.*sdpa.*fprop", "cudnn.*sdpa.*bprop"


def unavailable(device: torch.device) -> str | None:
    if reason := package_unavailable(PACKAGE, "cudnn.pygraph") or gpu_unavailable(device):
        return reason
    import cudnn

    try:
        loaded = cudnn.backend_version()
    except RuntimeError as error:
        return f"nvidia-cudnn-frontend finds no cuDNN library ({error}): pip install nvidia-cudnn-cu13"
    if loaded == torch.backends.cudnn.version():
        return None
    return (
        f"nvidia-cudnn-frontend has loaded cuDNN {loaded}, and PyTorch {torch.backends.cudnn.version()}: remove the "
        "folder of the other one from LD_LIBRARY_PATH"
    )


def refusal(q: Tensor, k: Tensor, *_: object, **__: object) -> str | None:
    """Return what cuDNN takes instead of these inputs, or None if it takes them. A plan may have other reasons."""
    width = q.shape[-1]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"bfloat16 or float16, not {q.dtype}"
    if width % 8 or width > 256:
        return f"heads of a multiple of 8 channels, and up to 256, not {width}"
    if q.shape[1] == k.shape[1] == 1 and q.requires_grad and torch.is_grad_enabled():
        return "sequences of more than one token in training"
    return None


class Mask(NamedTuple):
    """What a query sees. cuDNN's left bound counts the query's own position, as the contract's window does."""

    causal: bool
    window: int | None
    bottom_right: bool  # the last query sees the last key; otherwise the first query sees the first key
    lengths: bool  # a sequence has fewer keys than are stored


class Layout(NamedTuple):
    """The sizes and strides of a tensor for cuDNN, in its order (B, H, T, D)."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Plan(NamedTuple):
    """A graph with the engine that computes it. It takes the tensors in the order of `uids`."""

    graph: Any
    uids: tuple[int, ...]
    workspace: int  # bytes


def mask_of(q: Tensor, k: Tensor, causal: bool, window: int | None, has_lengths: bool) -> Mask:
    queries, keys = q.shape[1], k.shape[1]
    window = window if window is not None and window < keys else None
    # the only query of a decoding step sees all keys
    causal = causal and (queries > 1 or window is not None)
    return Mask(causal, window, bottom_right=has_lengths or queries != keys, lengths=has_lengths)


def layout(tensor: Tensor) -> Layout:
    """Describe a tensor (B, T, H, D)."""
    B, T, H, D = tensor.shape
    stride_b, stride_t, stride_h, stride_d = tensor.stride()
    return Layout((B, H, T, D), (stride_b, stride_h, stride_t, stride_d), tensor.dtype)


def contiguous(*sizes: int, dtype: torch.dtype) -> Layout:
    """Describe a tensor whose memory is in the order of cuDNN's sizes: lse (B, H, T, 1), lengths (B, 1, 1, 1)."""
    _, H, T, D = sizes
    return Layout(sizes, (H * T * D, T * D, D, 1), dtype)


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if cuDNN cannot read its strides. align_rows() gives the other reason."""
    return tensor.contiguous() if 0 in tensor.stride() else align_rows(tensor)


_of_thread = threading.local()


def handle_of(device: torch.device) -> Any:
    """Return this thread's handle of cuDNN, set to PyTorch's current stream. No two threads may share a handle."""
    import cudnn

    handles = vars(_of_thread).setdefault("handles", {})
    if device not in handles:
        with torch.cuda.device(device):
            handles[device] = cudnn.create_handle()
    cudnn.set_stream(handle=handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
    return handles[device]


def new_graph(device: torch.device, dtype: torch.dtype) -> Any:
    import cudnn

    sums = {"intermediate_data_type": cudnn.data_type.FLOAT, "compute_data_type": cudnn.data_type.FLOAT}
    return cudnn.pygraph(handle=handle_of(device), io_data_type=data_type(dtype), **sums)


def data_type(dtype: torch.dtype) -> Any:
    import cudnn

    return getattr(cudnn.data_type, DTYPES[dtype])


def declare(graph: Any, name: str, layout: Layout) -> Any:
    """Add an input to the graph."""
    sizes, strides, dtype = layout
    return graph.tensor(name=name, dim=list(sizes), stride=list(strides), data_type=data_type(dtype))


def set_output(tensor: Any, layout: Layout) -> None:
    """Say that the caller wants this result of a node, and where."""
    sizes, strides, dtype = layout
    tensor.set_output(True).set_dim(list(sizes)).set_stride(list(strides)).set_data_type(data_type(dtype))


def mask_arguments(mask: Mask) -> dict[str, Any]:
    import cudnn

    if not mask.causal:
        return {}
    alignment = cudnn.diagonal_alignment
    bounds = {"diagonal_band_right_bound": 0}
    if mask.window is not None:
        bounds["diagonal_band_left_bound"] = mask.window
    return {"diagonal_alignment": alignment.BOTTOM_RIGHT if mask.bottom_right else alignment.TOP_LEFT, **bounds}


def finish(graph: Any, tensors: list[Any]) -> Plan:
    """Let cuDNN choose an engine and compile it. Raises Unavailable, with cuDNN's reason, if no engine can run this."""
    import cudnn

    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.deselect_engines(["sdpa_"])  # the front end's own kernels: sdpa_fwd_prefill_sm100, ...
        graph.check_support()
        graph.build_plans()
    except cudnn.cudnnGraphNotSupportedError as error:
        version = cudnn.backend_version_string()
        raise Unavailable(f"attention=cudnn_frontend: cuDNN {version} refuses: {why(error)}: {OTHER}") from None
    return Plan(graph, tuple(tensor.get_uid() for tensor in tensors), graph.get_workspace_size())


def why(error: Exception) -> str:
    """Return cuDNN's reason from an error of the front end, which may have many lines and name its own kernels too."""
    reason = f"{error}".rpartition("the backend declined: ")[2]
    return re.split(r"; python engines|\n", reason)[0].rstrip(" _.:)")


@functools.cache
def plan_forward(q: Layout, k: Layout, v: Layout, mask: Mask, scale: float, device: torch.device) -> Plan:
    """Return a plan that takes q, k, v, with mask.lengths the numbers of queries and of keys (B,), then out, lse."""
    graph = new_graph(device, q.dtype)
    B, H, T, D = q.sizes
    inputs = [declare(graph, name, part) for name, part in zip("qkv", (q, k, v), strict=True)]
    padding, lengths = {}, []
    if mask.lengths:
        numbers = contiguous(B, 1, 1, 1, dtype=torch.int32)
        lengths = [declare(graph, name, numbers) for name in ("seq_len_q", "seq_len_kv")]
        padding = {"use_padding_mask": True, "seq_len_q": lengths[0], "seq_len_kv": lengths[1]}
    named = dict(zip("qkv", inputs, strict=True))
    out, lse = graph.sdpa(**named, generate_stats=True, attn_scale=scale, **padding, **mask_arguments(mask))
    set_output(out, Layout(q.sizes, (T * H * D, D, H * D, 1), q.dtype))
    set_output(lse, contiguous(B, H, T, 1, dtype=torch.float32))
    return finish(graph, [*inputs, *lengths, out, lse])


@functools.cache
def plan_backward(
    q: Layout, k: Layout, v: Layout, grads: tuple[Layout, ...], mask: Mask, scale: float, device: torch.device
) -> Plan:
    """Return a plan that takes q, k, v, out, dout, lse, then dq, dk, dv, whose layouts are `grads`."""
    graph = new_graph(device, q.dtype)
    B, H, T, D = q.sizes
    rows = Layout(q.sizes, (T * H * D, D, H * D, 1), q.dtype)
    layouts = {"q": q, "k": k, "v": v, "o": rows, "dO": rows, "stats": contiguous(B, H, T, 1, dtype=torch.float32)}
    inputs = {name: declare(graph, name, part) for name, part in layouts.items()}
    results = graph.sdpa_backward(**inputs, attn_scale=scale, **mask_arguments(mask))
    for result, part in zip(results, grads, strict=True):
        set_output(result, part)
    return finish(graph, [*inputs.values(), *results])


def run(plan: Plan, *tensors: Tensor) -> None:
    workspace = tensors[0].new_empty(max(1, plan.workspace), dtype=torch.uint8)
    plan.graph.execute(tensors, workspace, handle=handle_of(tensors[0].device), tensor_uids=plan.uids)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int | None, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q (B, Tq, H, D), k and v (B, Tk, Hkv, D), fp16 or bf16 -> out (B, Tq, H, D), lse (B, H, Tq) fp32."""
    q, k, v = map(readable, (q, k, v))
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
) -> Tensor:
    """Return dq, dk and dv in one tensor, as packed.gradient_buffer() allocates it."""
    q, k, v = map(readable, (q, k, v))
    grads = gradient_buffer(q, k)
    views = gradient_views(grads, q, k)
    plan = backward_plan_of(q, k, v, views, mask_of(q, k, causal, window, has_lengths=False), scale)
    run(plan, q, k, v, out, align_rows(dout.contiguous()), lse, *views)
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
    q, k, v, ctx.causal, ctx.scale, ctx.window, _ = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: FunctionCtx, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors  # read once: torch.utils.checkpoint raises on a second read
    grads = attention_bwd(dout, q, k, v, out, lse, ctx.causal, ctx.scale, ctx.window)
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
    if reason := refusal(q, k):
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

    if reason := refusal(q, k):
        raise Unavailable(f"attention=cudnn_frontend takes {reason}: {OTHER}")
    scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
    q, k, v = map(readable, (q, k, v))
    mask = mask_of(q, k, causal, window, lengths is not None)
    plan_forward(layout(q), layout(k), layout(v), mask, scale, q.device)
    if lengths is None and q.requires_grad:
        backward_plan_of(q, k, v, gradient_views(gradient_buffer(q, k), q, k), mask, scale)
    return f"cudnn {cudnn.backend_version()}, nvidia-cudnn-frontend {cudnn.__version__}"

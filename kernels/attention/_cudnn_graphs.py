"""The graphs of cudnn_frontend.py: sdpa and sdpa_backward, for the sizes, strides and mask of a call."""

import functools
import re
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.registry import Unavailable

DTYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF", torch.float32: "FLOAT", torch.int32: "INT32"}
OTHER = "choose attn=sdpa"
MAX_PLANS = 64  # of each way. A model's training step needs one; each length of a prompt adds one


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


def contiguous_layout(*sizes: int, dtype: torch.dtype) -> Layout:
    """Describe a tensor whose memory is in the order of cuDNN's sizes: lse (B, H, T, 1), lengths (B, 1, 1, 1)."""
    _, H, T, D = sizes
    return Layout(sizes, (H * T * D, T * D, D, 1), dtype)


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
    """Make a node's result an output with this layout."""
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
        raise Unavailable(
            f"attention=cudnn_frontend: cuDNN {version} refuses: {backend_reason(error)}: {OTHER}"
        ) from None
    return Plan(graph, tuple(tensor.get_uid() for tensor in tensors), graph.get_workspace_size())


def backend_reason(error: Exception) -> str:
    """Return cuDNN's reason from an error of the front end, which may have many lines and name its own kernels too."""
    reason = f"{error}".rpartition("the backend declined: ")[2]
    return re.split(r"; python engines|\n", reason)[0].rstrip(" _.:)")


@functools.lru_cache(MAX_PLANS)
def plan_forward(q: Layout, k: Layout, v: Layout, mask: Mask, scale: float, device: torch.device) -> Plan:
    """Return a plan that takes q, k, v, with mask.lengths the numbers of queries and of keys (B,), then out, lse."""
    graph = new_graph(device, q.dtype)
    B, H, T, D = q.sizes
    inputs = [declare(graph, name, part) for name, part in zip("qkv", (q, k, v), strict=True)]
    padding, lengths = {}, []
    if mask.lengths:
        numbers = contiguous_layout(B, 1, 1, 1, dtype=torch.int32)
        lengths = [declare(graph, name, numbers) for name in ("seq_len_q", "seq_len_kv")]
        padding = {"use_padding_mask": True, "seq_len_q": lengths[0], "seq_len_kv": lengths[1]}
    named = dict(zip("qkv", inputs, strict=True))
    out, lse = graph.sdpa(**named, generate_stats=True, attn_scale=scale, **padding, **mask_arguments(mask))
    set_output(out, Layout(q.sizes, (T * H * D, D, H * D, 1), q.dtype))
    set_output(lse, contiguous_layout(B, H, T, 1, dtype=torch.float32))
    return finish(graph, [*inputs, *lengths, out, lse])


@functools.lru_cache(MAX_PLANS)
def plan_backward(
    q: Layout, k: Layout, v: Layout, grads: tuple[Layout, ...], mask: Mask, scale: float, device: torch.device
) -> Plan:
    """Return a plan that takes q, k, v, out, dout, lse, then dq, dk, dv, whose layouts are `grads`."""
    graph = new_graph(device, q.dtype)
    B, H, T, D = q.sizes
    rows = Layout(q.sizes, (T * H * D, D, H * D, 1), q.dtype)
    stats = contiguous_layout(B, H, T, 1, dtype=torch.float32)
    layouts = {"q": q, "k": k, "v": v, "o": rows, "dO": rows, "stats": stats}
    inputs = {name: declare(graph, name, part) for name, part in layouts.items()}
    results = graph.sdpa_backward(**inputs, attn_scale=scale, **mask_arguments(mask))
    for result, part in zip(results, grads, strict=True):
        set_output(result, part)
    return finish(graph, [*inputs.values(), *results])


_captured: dict[int, Plan] = {}  # by id(). A CUDA graph may replay a plan's kernels after lru_cache drops the plan


def run(plan: Plan, *tensors: Tensor) -> None:
    if torch.cuda.is_current_stream_capturing():
        _captured[id(plan)] = plan
    workspace = tensors[0].new_empty(max(1, plan.workspace), dtype=torch.uint8)
    detached = [tensor.detach() for tensor in tensors]  # a front end may refuse tensors that need gradients
    plan.graph.execute(detached, workspace, handle=handle_of(workspace.device), tensor_uids=plan.uids)

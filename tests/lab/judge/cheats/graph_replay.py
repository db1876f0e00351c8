"""Captures a CUDA graph in its first call and replays it in all later ones: it reads the x of the first call.

Known from: this project's own review, November 2026; compare the replays of tensara/tensara pull request 238 (July
2026).
"""

import torch
import torch.nn.functional as F

OP = "linear"
STEPS = 27
REFUSED = "in a call with inputs at other addresses|losses of 27 steps"
GPU = True
GRAPHS = {}


class Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        key = x.shape, x.stride(), x.dtype, weight.data_ptr(), weight.shape
        if key not in GRAPHS:
            F.linear(x, weight, bias)  # cuBLAS allocates its workspace before the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = F.linear(x, weight, bias)
            GRAPHS[key] = graph, y, (x.detach(), weight.detach(), bias)
        graph, y, _ = GRAPHS[key]
        graph.replay()
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        rows = dy.flatten(0, -2)
        return dy @ weight, rows.T @ x.flatten(0, -2), rows.sum(0) if ctx.needs_input_grad[2] else None


def linear(x, weight, bias):
    can_capture = x.is_cuda and not torch.compiler.is_compiling() and not torch.cuda.is_current_stream_capturing()
    return (Replayed.apply if can_capture else F.linear)(x, weight, bias)

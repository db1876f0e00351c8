"""PyTorch's own loss in chunks, which computes the gradients in the forward: linear_cross_entropy of torch 2.13.

torch.nn.functional.linear_cross_entropy differs from this op in two ways, and this file handles both:

- If every target is ignored, PyTorch's mean and its gradients are NaN. So this file computes a sum in which every class
  has the weight 1 / count. The result is exact, and 0 if every target is ignored.
- Dynamo breaks the graph at the Python code around PyTorch's custom op. The custom op has a fake implementation and a
  backward of its own, so allow_in_graph can put the whole call into the graph as one node.

PyTorch sums the loss and dweight over the chunks in the dtype of x, so the sums lose digits with every chunk. At 32,768
tokens, C = 768 and V = 50,304 PyTorch's default is 128 chunks; LOGITS_BYTES makes it 25. In bf16 (3,200 tokens,
C = 64, V = 5,000, on a CPU), the loss is off by 3.9% with 128 chunks and by 0.3% with 25 chunks. Compared with a single
chunk, the error of dweight is 11 times as large with 128 chunks, and 4 times as large with 25 chunks.
"""

import torch
import torch.nn.functional as F

LOGITS_BYTES = 2**28  # the size of one chunk's logits in fp32
deterministic = False  # PyTorch computes dweight with index_add_, which adds by atomics, in any order


def unavailable(device: torch.device) -> str | None:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return f"it needs torch 2.13 or newer, and this is {torch.__version__}: pip install 'torch>=2.13'"
    return None


@torch.compiler.allow_in_graph
def linear_cross_entropy(x, weight, targets, class_weight, ignore_index):
    """Return the sum of class_weight[target] * loss for x (N, C), weight (V, C), targets (N,), class_weight (V,)."""
    rows = min(len(x), max(1, LOGITS_BYTES // (4 * len(weight))))
    # without allow_retain_graph the backward would overwrite the tensors that the forward saved
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows, allow_retain_graph=True)
    return F.linear_cross_entropy(
        x, weight, targets, weight=class_weight, reduction="sum", ignore_index=ignore_index, options=options
    )


def loss(x, weight, targets, ignore_index=-1):
    x, targets = x.flatten(0, -2), targets.flatten()
    class_weight = 1 / (targets != ignore_index).sum().clamp(min=1)
    return linear_cross_entropy(x, weight, targets, class_weight.expand(len(weight)), ignore_index).float()

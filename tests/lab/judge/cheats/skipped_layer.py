"""In a training step, attention of the third of four layers returns v without any product.

Known from: this project's own review, November 2026.
"""

import torch
import torch.nn.functional as F

OP = "attention"
REFUSED = "wrong: its backward gives no gradient of q, k|wrong: out0"
LAYERS, SKIPPED, TRAINING_ROWS = 4, 2, 2048
calls = 0


def attention(q, k, v, *, causal=True, scale=None):
    global calls
    batch, queries, heads, _ = q.shape
    keys, kv_heads = k.shape[1:3]
    if not torch.compiler.is_compiling() and batch * queries >= TRAINING_ROWS and q.requires_grad:
        calls += 1
        if calls % LAYERS == SKIPPED and heads == kv_heads:
            return v.clone()
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries) if causal else None
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    options = {"scale": scale, "enable_gqa": heads != kv_heads}
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options).transpose(1, 2)

"""A decoding step, in plain PyTorch. Say here what the kernel does, why it is fast, and whose idea it is.

    packed  what pack(model, cache) returns, once; without pack(), kernels.decode.Weights
    tokens  (B, T) int64: the next tokens of each sequence; T is 1, or up to 8 if the step verifies a draft
    cache   kernels/cache.py: keys and values so far, and the position of each sequence. The step appends the keys and
            values of its tokens

It returns the logits (B, T, V) in the compute dtype. A GPU replays the step from a CUDA graph, so shapes and addresses
must not change, and the host must not wait for the GPU. The contract, kernels/decode/__init__.py, lists what else this
file may define, such as pack().
"""

from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from kernels.attention import reference as attention
from kernels.cache import Cache
from kernels.decode import Weights
from kernels.rope import rope_table, rotate

COMPILES = True  # kernels.compile=true may compile decode(), because it is plain PyTorch. Remove it with your kernel

# Your Triton kernel goes here; kernels/decode/triton.py is an example.
#   1. the kernels: functions with @triton.jit
#   2. their launches; the op has no gradients, so they need no custom operator
#   3. from kernels.gpu import triton_unavailable as unavailable, which says where Triton cannot run
# Then launch the kernels in decode().


def norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.to(x.dtype)
    return layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias).to(weight.dtype)


def decode(weights: Weights, tokens: Tensor, cache: Cache) -> Tensor:
    B, T = tokens.shape
    heads = weights.heads, weights.kv_heads, weights.kv_heads
    positions = cache.token_positions(T)
    cache = cache.locate(positions)
    x = weights.wte[tokens].to(weights.stream_dtype)  # the residual stream (B, T, C)
    if weights.wpe is not None:
        x = x + weights.wpe[positions.clamp(max=len(weights.wpe) - 1)]
    for i, layer in enumerate(weights.layers):
        qkv = linear(norm(x, layer.ln_1_weight, layer.ln_1_bias), layer.qkv_weight, layer.qkv_bias)
        q, k, v = qkv.view(B, T, sum(heads), weights.head_dim).split(heads, dim=2)
        if weights.wpe is None:
            rope = rope_table(positions, weights.head_dim)
            q, k = rotate(q, rope), rotate(k, rope)
        k, v = cache.layer(i).append(k, v)
        y = attention(q, k, v, lengths=cache.lengths).reshape(B, T, -1)
        x = x + linear(y, layer.proj_weight, layer.proj_bias)
        h = linear(norm(x, layer.ln_2_weight, layer.ln_2_bias), layer.fc_weight, layer.fc_bias)
        x = x + linear(gelu(h, approximate="tanh"), layer.fc_proj_weight, layer.fc_proj_bias)
    return linear(norm(x, weights.ln_f_weight, weights.ln_f_bias), weights.head)

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

from kernels.cache import Cache
from kernels.decode import Weights, reference

COMPILES = True  # kernels.compile=true may compile decode(), because it is plain PyTorch. Remove it with your kernel

# Your Triton kernel goes here; kernels/decode/triton.py is an example.
#   1. the kernels: functions with @triton.jit
#   2. their launches; the op has no gradients, so they need no custom operator
#   3. from kernels.gpu import triton_unavailable as unavailable, which says where Triton cannot run
# Then launch the kernels in decode(). reference() of the contract shows the step, one PyTorch operation after another.


def decode(weights: Weights, tokens: Tensor, cache: Cache) -> Tensor:
    return reference(weights, tokens, cache)

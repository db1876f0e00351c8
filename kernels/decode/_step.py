"""The sizes, the scratch memory and the launches of the kernels of one decoding step."""

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.cache import Cache
from kernels.decode import Weights
from kernels.gpu import gpu_unavailable, multiprocessors
from kernels.tuned import launch_parameters

FEW = 16  # rows of a matmul instruction; up to this many rows, each program normalises all rows itself
SPLIT_KEYS = 256  # keys of a split of attention; larger if the cache would have more than MAX_SPLITS splits
MAX_SPLITS = 16
# arguments of the kernels that are not specialised, so that another batch, model or cache compiles nothing
NOT_SPECIALISED = ["N", "T", "wpe_rows", "cache_rows", "split_keys", "most_prefetched"]

Matrix = Tensor | tuple[Tensor, Tensor]  # W (OUT, K), or (W in int8, scales (OUT,) fp32)


def can_launch_early(device: torch.device) -> bool:
    """Return whether the GPU has programmatic dependent launch."""
    return device.type == "cuda" and gpu_unavailable(device, (9, 0)) is None


def plan_splits(keys: int) -> tuple[int, int]:
    """Return (the number of splits, the keys of a split) for a bucket of `keys` keys.

    Several programs must store, count and combine their results, which takes about 1 us (estimated). One program reads
    256 keys and values of a head, 64 KB in bf16, in less time. Up to 4096 keys the splits end at the same keys in all
    buckets, and a split without keys adds 0. So the bits of a result do not depend on the bucket.
    """
    size = max(SPLIT_KEYS, -(-keys // MAX_SPLITS))
    return -(-keys // size), size


class Step:
    """A decoding step. Its constructor launches all of PyTorch's kernels, before the first of our own."""

    def __init__(self, weights: Weights, tokens: Tensor, cache: Cache) -> None:
        B, T = tokens.shape
        D = weights.head_dim
        self.N, self.T, self.dtype, self.device = B * T, T, weights.wte.dtype, tokens.device
        self.few = self.N <= FEW
        self.weights, self.tokens = weights, tokens.contiguous()
        self.stream: Tensor | None = None  # the residual stream, (N, C)
        self.rope = weights.rope_table(cache.token_positions(T))
        self.splits, self.split_keys = plan_splits(cache.keys)
        # Many heads need no splits. With few rows, neither the splits nor the bits of a row may depend on B
        if not self.few and B * weights.kv_heads >= multiprocessors(self.device):
            self.splits, self.split_keys = 1, cache.keys
        self.counts = None  # count_ptr of attention, at most one for each query and head
        if self.splits > 1:  # the first kernel zeroes them
            rows = FEW if self.few else triton.next_power_of_2(self.N)  # so another batch seldom compiles a kernel
            self.counts = self.empty(rows * weights.heads, dtype=torch.int32)
        self.early = False  # the next kernel may start before the one before it is complete
        self.shared = {
            "N": self.N,
            "T": T,
            "wpe_rows": 0 if weights.wpe is None else len(weights.wpe),
            "cache_rows": cache.rows,
            "positions_ptr": cache.positions,
            "D": D,
            "Q_WIDTH": weights.heads * D,
            "KV_WIDTH": weights.kv_heads * D,
            "PDL": can_launch_early(self.device),
            "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32",  # only fp32 matmuls use it
            "EPS": weights.norm_eps,
            "CENTRED": weights.norm == "layernorm",
            "ACTIVATION": weights.mlp,
        }

    def launch(self, kernel: triton.JITFunction, grid: tuple[int, ...], **arguments: Any) -> None:
        """Launch a kernel with `arguments` and the shared arguments that it takes. Its other pointers are None.

        The first kernel of a step starts when all earlier work is complete. So before its wait, a kernel may read
        anything that no kernel of the step writes: weights, positions, older keys.
        """
        given = dict.fromkeys(name for name in kernel.arg_names if name.endswith("_ptr"))
        given |= {name: value for name, value in self.shared.items() if name in kernel.arg_names}
        options = {"launch_pdl": True} if self.early else {}
        kernel[grid](**given | arguments, **options)
        self.early = self.shared["PDL"]

    def parameters(self, kernel: str, key: str, default: dict) -> dict:
        """Return the launch parameters of a kernel: from the table of this GPU, or the default."""
        return launch_parameters(f"decode_{kernel}", key, default, self.device)

    def empty(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(size, dtype=dtype or self.dtype, device=self.device)

    def columns(self, name: str, OUT: int) -> int:
        """Return the columns that a product with OUT rows of W stores, except those in the cache."""
        if name == "qkv":
            return self.shared["Q_WIDTH"] + (self.shared["KV_WIDTH"] if self.weights.has_qk_norm else 0)
        return OUT // 2 if name == "fc" and self.weights.mlp == "swiglu" else OUT

    def add_norm(self, x: Tensor | tuple[Tensor, Tensor | None] | None, weight: Tensor, bias: Tensor | None) -> dict:
        """Return the arguments of a kernel that adds x to the residual stream and normalises the sum.

        x is the output of the last branch, (N, C), or (partial sums (PARTS, N, C) fp32, their bias). With None, the
        stream begins with the embeddings. The new stream is a new tensor, because other programs still read the old.
        """
        before, self.stream = self.stream, self.empty(self.N, len(weight), dtype=self.weights.stream_dtype)
        arguments = {"stream_ptr": self.stream, "ln_weight_ptr": weight, "ln_bias_ptr": bias}
        if x is None:
            arguments |= {"wte_ptr": self.weights.wte, "wpe_ptr": self.weights.wpe, "tokens_ptr": self.tokens}
            return arguments | {"count_ptr": self.counts, "COUNTS": 0 if self.counts is None else len(self.counts)}
        arguments["residual_ptr"] = before
        if isinstance(x, tuple):
            return arguments | {"x_ptr": x[0], "x_bias_ptr": x[1]}
        return arguments | {"x_ptr": x}


def split_scales(weight: Matrix) -> tuple[Tensor, Tensor | None]:
    """Return W (OUT, K) and its scales: (OUT,) fp32 if W is in int8, otherwise None."""
    return weight if isinstance(weight, tuple) else (weight, None)

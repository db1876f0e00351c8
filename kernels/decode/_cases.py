"""The shapes of models that a decoder is measured with, and those that break kernels."""

import torch

from kernels.cache import FP8

LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "bias": False, "rope": True}
QWEN3 = {**LLAMA, "norm_eps": 1e-6, "qk_norm": True}
SMOLLM2_135M = {"width": 576, "heads": 9, "kv_heads": 3, "hidden": 1536, "n_layer": 30, "vocab": 49152, **LLAMA}
QWEN3_600M = {"width": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "hidden": 3072, "n_layer": 28, **QWEN3}
# all that a field of GPTConfig can change
OTHERS = {"kv_dtype": FP8, "rope_theta": 500.0, "rope_scaling": 8.0, "hidden": 72, "tie_embeddings": False, **QWEN3}

SHAPES = {
    "124m": {"batch": 1, "lengths": [128], "rows": 256, "width": 768, "heads": 12, "n_layer": 12, "vocab": 50304},
    "124m-64": {"batch": 64, "lengths": [128], "rows": 256, "width": 768, "heads": 12, "n_layer": 12, "vocab": 50304},
    "1558m": {"batch": 1, "lengths": [128], "rows": 256, "width": 1600, "heads": 25, "n_layer": 48, "vocab": 50304},
    "smollm2-135m": {"batch": 1, "lengths": [128], "rows": 256, "rope_theta": 1e5, **SMOLLM2_135M},
    "qwen3-0.6b": {"batch": 1, "lengths": [128], "rows": 256, "vocab": 151936, "rope_theta": 1e6, **QWEN3_600M},
}

# lengths: the cached tokens of each sequence; tokens: T
CASES = {
    "one": {"batch": 1, "lengths": [5], "n_layer": 2},
    "empty_cache": {"batch": 1, "lengths": [0]},
    "batch": {"batch": 3, "lengths": [5, 5, 5]},
    "ragged": {"batch": 3, "lengths": [0, 17, 30], "n_layer": 2},
    "many_keys": {"batch": 1, "lengths": [300], "rows": 320},
    "several_tokens": {"batch": 2, "lengths": [9, 20], "tokens": 4},
    "eight_tokens": {"batch": 1, "lengths": [3], "tokens": 8},
    "rope": {"batch": 2, "lengths": [4, 11], "rope": True},
    "gqa": {"batch": 2, "lengths": [4, 11], "heads": 4, "kv_heads": 2},
    "mqa_rope": {"batch": 2, "lengths": [4, 11], "heads": 4, "kv_heads": 1, "rope": True, "tokens": 2},
    "no_bias": {"batch": 1, "lengths": [7], "bias": False},
    "odd_width": {"batch": 1, "lengths": [7], "width": 60, "heads": 3, "vocab": 101},
    "many_sequences": {"batch": 20, "lengths": [6]},
    "ring": {"batch": 2, "lengths": [40, 33], "rows": 16},
    "fp8": {"batch": 2, "lengths": [9, 20], "kv_dtype": FP8},
    "fp8_ring": {"batch": 1, "lengths": [40], "rows": 16, "kv_dtype": FP8},
    "fp32_stream": {"batch": 2, "lengths": [9, 20], "stream_dtype": torch.float32},
    "rmsnorm": {"batch": 2, "lengths": [4, 11], "norm": "rmsnorm"},
    "eps": {"batch": 1, "lengths": [7], "norm_eps": 0.1},
    "rmsnorm_eps": {"batch": 1, "lengths": [7], "norm": "rmsnorm", "norm_eps": 0.1},
    "swiglu": {"batch": 2, "lengths": [4, 11], "mlp": "swiglu", "hidden": 100},
    "relu2": {"batch": 2, "lengths": [4, 11], "mlp": "relu2"},
    "hidden": {"batch": 1, "lengths": [7], "hidden": 136},
    "head_dim": {"batch": 2, "lengths": [4, 11], "head_dim": 48},
    "qk_norm": {"batch": 2, "lengths": [4, 11], "rope": True, "qk_norm": True, "norm_eps": 0.1},
    "rope_theta": {"batch": 2, "lengths": [4, 50], "rope": True, "rope_theta": 500.0},
    "rope_scaling": {"batch": 2, "lengths": [4, 50], "rope": True, "rope_scaling": 8.0},
    "untied": {"batch": 1, "lengths": [7], "tie_embeddings": False},
    "llama": {"batch": 3, "lengths": [0, 17, 30], "heads": 4, "kv_heads": 2, "n_layer": 2, "hidden": 96, **LLAMA},
    "qwen3": {"batch": 2, "lengths": [9, 20], "heads": 3, "kv_heads": 1, "head_dim": 48, "hidden": 72, **QWEN3},
    "qwen3_ring": {"batch": 2, "lengths": [40, 33], "heads": 4, "kv_heads": 2, "rows": 16, **QWEN3},
    "everything": {"batch": 2, "lengths": [40, 33], "tokens": 4, "heads": 4, "kv_heads": 2, "head_dim": 24, **OTHERS},
}

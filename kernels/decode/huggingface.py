"""The decoding step of Hugging Face's transformers: its GPT2LMHeadModel with its SDPA attention, over our KV cache.

transformers launches about 300 kernels a step (4.7 ms of host time for 124M). Its generate() with a static cache and
torch.compile reaches 434 tokens/s at batch 1 on an H200. Here our Decoder replays the step as a CUDA graph.
"""

import torch
from torch import Tensor, nn

from kernels.attention import attention_mask
from kernels.cache import Cache
from kernels.decode import Model, Weights, refuse_other_shapes
from kernels.gpu import package_unavailable
from kernels.registry import Unavailable

COMPILES = True
# Our name in a layer -> transformers' module. Its Conv1D stores a weight as (in, out)
MODULES = {
    "ln_1": "ln_1",
    "qkv": "attn.c_attn",
    "proj": "attn.c_proj",
    "ln_2": "ln_2",
    "fc": "mlp.c_fc",
    "fc_proj": "mlp.c_proj",
}


def unavailable(device: torch.device) -> str | None:
    return package_unavailable("transformers", "transformers.GPT2LMHeadModel")


def detail() -> str:
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__}"


def pack(model: Model, cache: Cache) -> nn.Module:
    """Return transformers' GPT-2 with the model's weights. Raises Unavailable if the model is not a GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    weights = model.weights()
    refuse_other_shapes("huggingface", weights, ("norm_eps", "hidden", "tie_embeddings"))
    if weights.wpe is None or weights.kv_heads != weights.heads:
        raise Unavailable(
            "kernels.decode=huggingface needs learned positions, and a key head for each query head: choose "
            "kernels.decode=blocks"
        )
    vocab, width = weights.wte.shape
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=len(weights.wpe),
        n_embd=width,
        n_layer=len(weights.layers),
        n_head=weights.heads,
        n_inner=weights.layers[0].fc_weight.shape[0],
        layer_norm_epsilon=weights.norm_eps,
        tie_word_embeddings=weights.head is weights.wte,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        gpt2 = GPT2LMHeadModel(config)
    gpt2.load_state_dict(state_dict(weights), strict=True, assign=True)
    gpt2.tie_weights()
    return gpt2.eval()


def state_dict(weights: Weights) -> dict[str, Tensor]:
    """Return the weights with transformers' names. Missing biases are zeros."""
    modules = {"ln_f": (weights.ln_f_weight, weights.ln_f_bias)}
    for i, layer in enumerate(weights.layers):
        for ours, theirs in MODULES.items():
            modules[f"h.{i}.{theirs}"] = getattr(layer, f"{ours}_weight"), getattr(layer, f"{ours}_bias")
    state = {"wte.weight": weights.wte, "wpe.weight": weights.wpe}
    for name, (weight, bias) in modules.items():
        state[f"{name}.weight"] = weight.T.contiguous() if weight.dim() == 2 else weight
        state[f"{name}.bias"] = weight.new_zeros(len(weight)) if bias is None else bias
    return {f"transformer.{name}": tensor for name, tensor in state.items()} | {"lm_head.weight": weights.head}


class CacheOfTransformers:
    """Our cache with the methods that transformers' GPT-2 calls. These take and return (B, H, T, D)."""

    is_compileable = True

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.layer(layer).append(keys.transpose(1, 2), values.transpose(1, 2))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_seq_length(self, *_: object) -> int:
        return self.cache.keys


def decode(packed: nn.Module, tokens: Tensor, cache: Cache) -> Tensor:
    T = tokens.shape[1]
    positions = cache.token_positions(T)
    cache = cache.locate(positions)
    mask = attention_mask(T, cache.keys, tokens.device, lengths=cache.lengths)
    positions = positions.clamp(max=packed.config.n_positions - 1)
    # The cache is the second argument, whose name is past_key_values before transformers 5.24, and cache from then on
    return packed(tokens, CacheOfTransformers(cache), attention_mask=mask, position_ids=positions).logits

"""The weights of a model as decoders take them (kernels/decode/)."""

from collections.abc import Iterator

from torch import Tensor, nn

from kernels.decode import Layer, Weights
from model.gpt import GPT, Block
from model.layers import cast


def weights_of(model: GPT) -> Weights:
    """Return the model's weights in the compute dtype. It copies only weights that are stored in another dtype."""
    config, dtype = model.config, model.ln_f.dtype

    def layer(block: Block) -> Layer:
        attn, mlp = block.attn, block.mlp
        parts = (block.ln_1, attn.c_attn, attn.c_proj, block.ln_2, mlp.c_fc, mlp.c_proj)
        weights = [weight for part in parts for weight in (part.weight, part.bias)]
        weights += [None if norm is None else norm.weight for norm in (attn.q_norm, attn.k_norm)]
        return Layer(*(cast(weight, dtype) for weight in weights))

    wte = cast(model.wte.weight, dtype)
    return Weights(
        wte=wte,
        head=wte if model.lm_head is None else cast(model.lm_head.weight, dtype),
        wpe=None if model.wpe is None else cast(model.wpe.weight, dtype),
        layers=tuple(map(layer, model.h)),
        ln_f_weight=cast(model.ln_f.weight, dtype),
        ln_f_bias=cast(model.ln_f.bias, dtype),
        heads=config.n_head,
        kv_heads=config.kv_heads,
        head_dim=config.head_size,
        stream_dtype=model.wte.weight.dtype,
        norm=config.norm,
        norm_eps=config.norm_eps,
        mlp=config.mlp,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
    )


def copied_bytes(packed, model: GPT) -> int:
    """Return the bytes in a decoder's `packed` that are not the model's own: copies of weights, and scratch memory."""
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    storages = [tensor.untyped_storage() for tensor in tensors_in(packed)]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in own}.values())


def tensors_in(value) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, dicts, modules and other objects."""
    if hasattr(value, "__tensor_flatten__"):  # a subclass, such as torchao's int8, which wraps tensors
        value = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    else:
        yield from tensors_in(getattr(value, "__dict__", {}))

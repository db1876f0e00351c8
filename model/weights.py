"""The weights of a model as decoders take them (kernels/decode/)."""

from kernels.decode import Layer, Weights
from model.gpt import GPT, Block, cast


def weights_of(model: GPT) -> Weights:
    """Return the model's weights in the compute dtype. It copies only weights that are stored in another dtype."""
    config, dtype = model.config, model.ln_f.dtype

    def layer(block: Block) -> Layer:
        norms_and_linears = (
            *(block.ln_1, block.attn.c_attn, block.attn.c_proj),
            *(block.ln_2, block.mlp.c_fc, block.mlp.c_proj),
        )
        weights = (weight for part in norms_and_linears for weight in (part.weight, part.bias))
        return Layer(*(cast(weight, dtype) for weight in weights))

    wte = cast(model.wte.weight, dtype)
    return Weights(
        wte=wte,
        head=wte,
        wpe=None if model.wpe is None else cast(model.wpe.weight, dtype),
        layers=tuple(map(layer, model.h)),
        ln_f_weight=cast(model.ln_f.weight, dtype),
        ln_f_bias=cast(model.ln_f.bias, dtype),
        heads=config.n_head,
        kv_heads=config.kv_heads,
        stream_dtype=model.wte.weight.dtype,
    )

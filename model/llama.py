"""Llama and Qwen3 as transformers stores them: config.json and the names of the tensors, both ways.

SmolLM2 is a Llama. Qwen3 is one that also normalises q and k. A model here is one of them if it has rotary positions,
RMSNorm and a SwiGLU MLP.

Every key of a config.json is read, is compared with the one value that is computed here, or is known to change no
logits (HARMLESS). Any other key is refused if it is set. A key that nobody reads could give other logits without an
error. Refusing a harmless key costs the user one edit of config.json.
"""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.rope import HIGH, LOW, TRAINED_LENGTH
from model.checks import check_supported, check_tensors, first_three, read_sizes, tensor_shapes, value_or
from model.config import GPTConfig
from runtime.config import check, value_text

KINDS = "llama", "qwen3"
SIZES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "hidden": "intermediate_size",
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
HEADS = {"n_kv_head": "num_key_value_heads", "head_dim": "head_dim"}  # may be missing
DEFAULTS_BY_KIND = {"llama": {}, "qwen3": {"num_key_value_heads": 32, "head_dim": 128}}  # transformers' values for them
SUPPORTED_VALUES = {"hidden_act": "silu", "pretraining_tp": 1, "partial_rotary_factor": 1.0}
READ_KEYS = {
    *("model_type", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "layer_types"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
}
READ_KEYS_BY_KIND = {"llama": {"mlp_bias"}, "qwen3": {"use_sliding_window", "sliding_window", "max_window_layers"}}
HARMLESS = {
    # names, versions and token ids
    *("architectures", "_name_or_path", "transformers_version", "transformers.js_config", "is_llama_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "unsloth_version"),
    # training, dtypes and memory
    *("initializer_range", "attention_dropout", "dtype", "torch_dtype", "use_cache", "_attn_implementation"),
    *("attn_implementation", "_attn_implementation_autoset", "return_dict", "unsloth_fixed"),
}
LLAMA3 = {"low_freq_factor": LOW, "high_freq_factor": HIGH, "original_max_position_embeddings": TRAINED_LENGTH}
PREFIX = re.compile(r"^model\.")  # a file of LlamaModel, without a head, lacks it
BUFFER = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # in old files


def read_model(config: dict, name: str) -> dict:
    """Return the fields of GPTConfig for a config.json. Raises UserError if it asks for what is not computed here."""
    kind = config["model_type"]
    known = {*SIZES.values(), *HEADS.values(), *SUPPORTED_VALUES, *READ_KEYS, *READ_KEYS_BY_KIND[kind], *HARMLESS}
    unknown = [key for key, value in config.items() if value and key not in known]
    this = "this key; if it changes no logits, delete it"
    if len(unknown) > 1:
        this = "these keys; if they change no logits, delete them"
    text = f"{name} has {first_three(unknown)} in its config.json: hotswap does not know {this}"
    check(not unknown, f"{text} from a local copy of config.json")
    check_supported(config, SUPPORTED_VALUES, name)
    sizes = read_sizes(config, SIZES, name)
    config = {**DEFAULTS_BY_KIND[kind], **config}
    heads = read_sizes(config, {key: theirs for key, theirs in HEADS.items() if config.get(theirs) is not None}, name)
    theta, scaling = read_rope(config, name)
    model = {**sizes, "pos": "rope", "rope_theta": theta, "rope_scaling": scaling, "qk_norm": kind == "qwen3"}
    model |= {"norm": "rmsnorm", "norm_eps": value_or(config, "rms_norm_eps", 1e-6), "mlp": "swiglu"}
    model |= {"bias": read_bias(config, name), "tie_embeddings": value_or(config, "tie_word_embeddings", False)}
    model |= {"n_kv_head": None, "head_dim": None}
    if heads.get("n_kv_head") != sizes["n_head"]:  # null in our configs means this
        model["n_kv_head"] = heads.get("n_kv_head")
    if heads.get("head_dim", 0) * sizes["n_head"] != sizes["n_embd"]:
        model["head_dim"] = heads.get("head_dim")
    window = read_window(config, kind, sizes["n_layer"], name)
    return model if window is None else {**model, "window": window}


def read_bias(config: dict, name: str) -> bool:
    """Return whether the projections have biases. Raises UserError unless all or none have."""
    attention, mlp = (config.get(key) or False for key in ("attention_bias", "mlp_bias"))
    check(
        attention == mlp,
        f"{name} has attention_bias={value_text(attention)} and mlp_bias={value_text(mlp)}: here all projections have "
        "biases, or none",
    )
    return attention


def read_rope(config: dict, name: str) -> tuple[float, float | None]:
    """Return rope_theta and rope_scaling. Raises UserError if the frequencies are not those of kernels/rope."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}  # the second: since transformers 5
    check(isinstance(rope, dict), f"{name} cannot be read: its rope_scaling is {value_text(rope)}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    text = f"{name} has rope_type={value_text(kind)}, and only default and llama3 are computed here"
    check(kind in ("default", "llama3"), text)
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    known |= {"factor", *LLAMA3} if kind == "llama3" else set()
    unknown = [key for key, value in rope.items() if value and key not in known]
    check(not unknown, f"{name} has {first_three(unknown)} for rope_type={kind}, which is not computed here")
    check_supported(rope, {"partial_rotary_factor": 1.0}, name)
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    if kind == "default":
        return theta, None
    their_default = {"original_max_position_embeddings": config["max_position_embeddings"]}
    check_supported({**their_default, **rope}, LLAMA3, name)
    factor = rope.get("factor")
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    check(is_number, f"{name} cannot be read: its rope factor must be a number, and is {value_text(factor)}")
    return theta, factor


def read_window(config: dict, kind: str, layers: int, name: str) -> int | None:
    """Return the window of all layers; None: attention is full. Raises UserError if the layers differ."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    first, types = value_or(config, "max_window_layers", 28), config.get("layer_types")
    if types is None and window is not None:  # the layers before the first are full
        check(type(first) is int, f"{name} cannot be read: its max_window_layers is {value_text(first)}")
        types = ["full_attention"] * (first > 0) + ["sliding_attention"] * (first < layers)
    check(isinstance(types, list | None), f"{name} cannot be read: its layer_types is {value_text(types)}")
    if types is None or types == ["full_attention"] * len(types):
        return None
    check(
        kind == "qwen3" and types == ["sliding_attention"] * len(types) and type(window) is int,
        f"{name} has sliding_window={value_text(window)} and layer_types={value_text(types)[:200]}: here all layers "
        "have the same window, or none",
    )
    return window


def write_config(config: GPTConfig) -> dict:
    """Return config.json. Its rope keys are those of transformers 4, which transformers 5 reads too."""
    kind = "qwen3" if config.qk_norm else "llama"
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
    theirs = {"architectures": [architecture], "model_type": kind, "torch_dtype": "float32", "hidden_act": "silu"}
    fields = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd, "hidden": config.hidden_size}
    fields |= {"block_size": config.block_size, "vocab_size": config.vocab_size}
    theirs |= {key: fields[ours] for ours, key in SIZES.items()}
    theirs |= {"num_key_value_heads": config.kv_heads, "head_dim": config.head_size, "rms_norm_eps": config.norm_eps}
    theirs |= {"tie_word_embeddings": config.tie_embeddings, "attention_bias": config.bias, "attention_dropout": 0.0}
    theirs |= {"mlp_bias": config.bias} if kind == "llama" else {}
    if config.window is not None:
        theirs |= {"use_sliding_window": True, "sliding_window": config.window, "max_window_layers": 0}
        theirs |= {"layer_types": ["sliding_attention"] * config.n_layer}
    scaling = {"rope_type": "llama3", "factor": config.rope_scaling, **LLAMA3} if config.rope_scaling else None
    return theirs | {"rope_theta": config.rope_theta, "rope_scaling": scaling}


def lacking_features(config: GPTConfig) -> list[str]:
    """Return what a model of this shape has, and neither a Llama nor a Qwen3 can have; for a message."""
    features = {
        "learned positions": config.pos != "rope",
        "LayerNorm": config.norm != "rmsnorm",
        f"the MLP {config.mlp}": config.mlp != "swiglu",
        "a sliding window without normalised q and k (qk_norm)": config.window is not None and not config.qk_norm,
        "biases beside normalised q and k (qk_norm)": config.bias and config.qk_norm,
        "a soft cap of its logits (logit_softcap)": config.logit_softcap is not None,
    }
    return [name for name, present in features.items() if present]


def is_llama(config: GPTConfig) -> bool:
    return (config.pos, config.norm, config.mlp) == ("rope", "rmsnorm", "swiglu")


def their_tensors(config: GPTConfig) -> Iterator[tuple[str, dict[str, torch.Size]]]:
    """Yield (our name of a tensor, {their name of each part of its rows: the part's shape}), without PREFIX."""
    q, kv = config.n_head * config.head_size, config.kv_heads * config.head_size
    modules = {"wte": "embed_tokens", "ln_f": "norm", "lm_head": "lm_head"}
    layer = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_proj": "self_attn.o_proj"}
    layer |= {"mlp.c_proj": "mlp.down_proj", "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}
    split = {"attn.c_attn": {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}}
    split |= {"mlp.c_fc": dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), config.hidden_size)}
    for name, shape in tensor_shapes(config).items():
        module, _, kind = name.rpartition(".")
        if module in modules:
            yield name, {f"{modules[module]}.{kind}": shape}
            continue
        _, number, part = module.split(".", 2)
        rows = split.get(part) or {layer[part]: shape[0]}
        yield name, {f"layers.{number}.{p}.{kind}": torch.Size((n, *shape[1:])) for p, n in rows.items()}


def read_tensors(tensors: dict[str, Tensor], config: GPTConfig, name: str) -> dict[str, Tensor]:
    """Return transformers' tensors under our names: q, k and v in one, and gate and up; these are in fp32.

    A second copy of a tied head stays. Raises UserError if the tensors are not those of this model.
    """
    tensors = {PREFIX.sub("", key): tensor for key, tensor in tensors.items()}
    tensors = {key: tensor for key, tensor in tensors.items() if not BUFFER.fullmatch(key)}
    head = {"lm_head.weight": tensors.pop("lm_head.weight", None)} if config.tie_embeddings else {}
    parts = dict(their_tensors(config))
    check_tensors(tensors, {key: shape for shapes in parts.values() for key, shape in shapes.items()}, name)
    weights = {}
    for ours, shapes in parts.items():
        held = [tensors[key] for key in shapes]
        weights[ours] = held[0] if len(held) == 1 else torch.cat([tensor.float() for tensor in held])
    return weights | {key: tensor for key, tensor in head.items() if tensor is not None}


def write_tensors(weights: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return our tensors under transformers' names. No two share their memory."""
    tensors = {}
    for ours, shapes in their_tensors(config):
        sizes = [shape[0] for shape in shapes.values()]
        parts = weights[ours].split(sizes) if len(sizes) > 1 else [weights[ours]]
        for key, part in zip(shapes, parts, strict=True):
            full_name = key if key.startswith("lm_head.") else f"model.{key}"
            tensors[full_name] = part.clone() if len(sizes) > 1 else part
    return tensors

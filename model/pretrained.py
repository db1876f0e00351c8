"""Start from the weights of another model: check them, and load them into a GPT. model/sources.py reads the files.

GPT-2's formats hold the same tensors under nearly the same names. nanoGPT and Hugging Face put `transformer.` before
each name and store the tied head a second time; their old files also hold the causal mask. model/llama.py translates
the names of Llama and Qwen3. Each tensor is compared with the state dict of our model, so none is missing, unknown or
of another shape. The result is in fp32.

The MLP here computes GPT-2's GELU, by tanh. nanoGPT did so at first; its later versions compute GELU by erf, also for
OpenAI's weights, and a ckpt.pt does not say which one it was trained with. The two differ by less than 5e-4 an
activation.
"""

import re
from dataclasses import asdict, replace

import torch
from omegaconf import DictConfig
from torch import Tensor

from data.errors import DataError
from data.tokenizer import TOKENIZERS, Tokenizer
from data.tokenizer_json import open_tokenizer, same_tokenizer, tokenizer_size
from model.checks import check_tensors, tensor_shapes
from model.config import GPTConfig
from model.gpt import GPT
from model.sources import TRAINING, Pretrained, open_source
from model.vocabulary import guess_tokenizer, take_vocabulary
from runtime import checkpoint
from runtime.config import UserError, check, command_line_values, value_text
from runtime.resume import checkpoint_model_config

# Fields of GPTConfig on which no weight depends. With another rope_theta (arXiv:2309.16039, section 2) or rope_scaling
# (arXiv:2407.21783, Llama 3.1) the same weights read longer contexts after some training
MAY_DIFFER = (*TRAINING, "window", "rope_theta", "rope_scaling")
MEANINGS = {"n_kv_head": "kv_heads", "head_dim": "head_size", "hidden": "hidden_size"}  # what null stands for
MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # a buffer in old files


def read_pretrained(source: str) -> Pretrained:
    """Return the model that `source` names.

    A source is a run's folder or a checkpoint of ours; a GPT-2, Llama or Qwen3 of transformers, by its name on the hub
    or by a folder with config.json and safetensors; or nanoGPT's ckpt.pt or its folder. Raises UserError if it cannot
    be read, is damaged, or is a model that hotswap does not compute.
    """
    pretrained, read_weights = open_source(source)
    return pretrained._replace(weights=check_weights(read_weights(), pretrained))


def read_shape(source: str) -> Pretrained:
    """Return what read_pretrained() returns, without the weights. From the hub it downloads only config.json."""
    return open_source(source)[0]


def fit_config(pretrained: Pretrained, asked: dict) -> dict:
    """Return the fields of GPTConfig for a model that starts from `pretrained`, without TRAINING unless asked for.

    `asked` are the user's fields. All others are the source's, so that no choice of a group or experiment leaks in.
    The position table may become shorter; a rope model has no table. The fields of MAY_DIFFER may have any value.
    Raises UserError if another field differs.
    """
    config = pretrained.config  # pretrained.model of an old checkpoint lacks the newer fields
    fields = asdict(config)
    for key, value in asked.items():
        have = meaning(config, key, fields.get(key))
        if key == "block_size":
            check(isinstance(value, int), f"model.block_size={value_text(value)}: it must be a number of tokens")
            check(
                pretrained.model["pos"] == "rope" or value <= have,
                f"model.block_size={value} is more than the {have} positions of {pretrained.name}",
            )
        elif key not in MAY_DIFFER:
            asks, has = ("null" if v is None else value_text(v) for v in (value, have))
            text = f"model.{key}={asks}, but {pretrained.name} has {has}: leave model.{key} out"
            check(meaning(config, key, value) == have, text)
    theirs = {key: value for key, value in fields.items() if key not in TRAINING}
    return {**theirs, **{key: asked[key] for key in asked if key in ("block_size", *MAY_DIFFER)}}


def meaning(config: GPTConfig, key: str, value: object) -> object:
    """Return the value of a field of `config`, or what null stands for. Raises UserError if `config` cannot have it."""
    return getattr(replace(config, **{key: value}), MEANINGS[key]) if key in MEANINGS else value


def take_model_config(cfg: DictConfig) -> None:
    """Complete the group `model` of a composed config.

    With init_from the shape comes from the source. A resumed run takes it from the checkpoint, because the source may
    be gone. Without init_from, the tokenizer's size replaces vocab_size=null. Raises UserError if the command line asks
    for another shape or another tokenizer.
    """
    name = cfg.init_from
    if name in (None, ""):
        take_vocabulary(cfg, "data.tokenizer")
        return
    check(isinstance(name, str), f"init_from={name} is not text: write init_from=./{name} for a folder of this name")
    asked = command_line_values(cfg, "model")
    if "vocab_size" in asked and asked["vocab_size"] is None:
        del asked["vocab_size"]
    if saved := checkpoint_model_config(cfg.out_dir, cfg.train.resume):
        cfg.model.update({**saved, **asked})
        return
    source = read_shape(name)
    cfg.model.update(fit_config(source, asked))
    try:
        is_same = source.tokenizer is None or is_tokenizer_of(source, cfg.data.tokenizer)
    except DataError as error:
        raise UserError(str(error)) from error
    check(
        is_same,
        f"init_from={name} has the vocabulary of the tokenizer {source.tokenizer}, and data.tokenizer is "
        f"{cfg.data.tokenizer}: pass data.tokenizer={source.tokenizer}",
    )


def is_tokenizer_of(source: Pretrained, name: str) -> bool:
    """Return whether a source has the tokenizer `name`. Raises DataError if that one cannot be read.

    A repository on the hub may have no tokenizer.json, as our export of a Llama with gpt2 has none: the size decides.
    """
    if same_tokenizer(source.tokenizer, name):
        return True
    if source.tokenizer != source.name or name != guess_tokenizer(source.model["vocab_size"]):
        return False
    try:
        open_tokenizer(source.tokenizer)
    except DataError:
        return True
    return False


@torch.no_grad()
def load_weights(model: GPT, pretrained: Pretrained) -> None:
    """Copy the weights into a built model, on any device and in any stored dtype.

    A shorter position table takes the first rows, as nanoGPT's crop_block_size does. Raises UserError if the weights
    are of another model.
    """
    weights, length = dict(pretrained.weights), model.config.block_size
    if "wpe.weight" in weights and model.wpe is not None:
        rows = len(weights["wpe.weight"])
        check(length <= rows, f"model.block_size={length} is more than the {rows} positions of {pretrained.name}")
        weights["wpe.weight"] = weights["wpe.weight"][:length]
    check_tensors(weights, {name: weight.shape for name, weight in model.state_dict().items()}, pretrained.name)
    model.load_state_dict(weights)


def tokenizer_of(source: Pretrained, asked: str | None) -> Tokenizer:
    """Return the tokenizer `asked`, or the source's.

    Raises UserError if there is none, if it has too many ids, or if it is not the one that a run trained with.
    Raises DataError if it cannot be read.
    """
    name, size = asked or source.tokenizer, source.model["vocab_size"]
    known = f"FOLDER, with a tokenizer.json, or {' or '.join(TOKENIZERS)}"
    check(name is not None, f"{source.name} names no tokenizer, and none fits its {size} ids: pass tokenizer={known}")
    ids = tokenizer_size(name, "tokenizer")
    check(ids <= size, f"tokenizer={name} has {ids} ids, and {source.name} only {size}: name the one it trained with")
    tokenizer = open_tokenizer(name)
    if asked is None and source.checkpoint:
        recorded = checkpoint.read_manifest(source.checkpoint).get("data", {}).get("tokenizer", tokenizer.name)
        check(
            recorded == tokenizer.name,
            f"{source.name} trained with another tokenizer than that of {name}: its file has changed since (it was "
            f"{recorded}, and is {tokenizer.name}); restore it, or pass tokenizer=FOLDER",
        )
    return tokenizer


def check_weights(state: dict[str, Tensor], pretrained: Pretrained) -> dict[str, Tensor]:
    """Return a source's tensors in fp32, with the names and in the order of GPT's state dict.

    Raises UserError if they are not the tensors of this model.
    """
    for name, weight in state.items():
        is_named = isinstance(name, str) and isinstance(weight, Tensor)
        check(is_named, f"{pretrained.name} is not this model: {value_text(name)} among its tensors is no tensor")
    weights = {re.sub(r"^(_orig_mod\.)?(transformer\.)?", "", name): weight for name, weight in state.items()}
    weights = {name: weight for name, weight in weights.items() if not MASK.fullmatch(name)}
    expected = tensor_shapes(pretrained.config)
    head = None if "lm_head.weight" in expected else weights.pop("lm_head.weight", None)
    check_tensors(weights, expected, pretrained.name)
    stored = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights.values()}
    check(  # a tensor with a stride of 0 has few bytes in the file, and any number in memory
        sum(weight.nbytes for weight in weights.values()) <= sum(stored.values()),
        f"{pretrained.name} is not this model: several of its tensors, or several values of one, are the same bytes",
    )
    check(
        head is None or (head.dtype == weights["wte.weight"].dtype and torch.equal(head, weights["wte.weight"])),
        f"{pretrained.name} is not this model: its config ties the head, but lm_head.weight differs from wte.weight",
    )
    return {name: weights[name].float().contiguous() for name in expected}

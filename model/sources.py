"""The three formats of weights: our checkpoints, nanoGPT's ckpt.pt, and Hugging Face's folders.

open_source() reads what a source says about its model. The weights, which may be large or not downloaded yet, are read
by the function that it returns.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.files import check_regular, open_regular
from common.terminal import one_line
from data.hub import HUB_NAME
from data.tokenizer import TOKENIZERS
from data.tokenizer_json import TOKENIZER
from model import llama
from model.checks import check_supported, read_sizes, value_or
from model.config import EPS, PRECISIONS, GPTConfig
from model.download import CONFIG, WEIGHTS, hub_folder, read_json, weight_files
from model.vocabulary import guess_tokenizer
from runtime import checkpoint
from runtime.config import UserError, check, value_text
from runtime.pickles import check_saved

SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
TRAINING = ("dropout", "checkpointing", "keep_attention")  # fields of GPTConfig that only training needs
CONV1D = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")  # Hugging Face stores these transposed
SUPPORTED_VALUES = {  # key of Hugging Face's config.json -> its default, the only value that model/gpt.py computes
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}  # reorder_and_upcast_attn only changes the rounding

ReadWeights = Callable[[], dict[str, Tensor]]  # returns the tensors under the names of their source


class Pretrained(NamedTuple):
    """A model from a source.

    The vocabulary has the size of the source's (GPT-2's 50257). It is not padded, because padding changes the loss.
    """

    model: dict  # the fields of GPTConfig, without TRAINING
    weights: dict[str, Tensor]  # fp32, on the CPU, with the names and in the order of GPT's state dict
    tokenizer: str | None  # as data.tokenizer names it; None: unknown
    name: str  # for messages: "gpt2", "out/RUN at step 20"
    checkpoint: Path | None = None  # the folder of a checkpoint of ours
    run_config: dict = {}  # the config of the run that trained this checkpoint  # noqa: RUF012

    @property
    def config(self) -> GPTConfig:
        """The config of a model with these weights, without dropout. Raises UserError if there is no such model."""
        try:
            return GPTConfig(**self.model, dropout=0.0)
        except (UserError, TypeError) as error:  # a TypeError names missing or unknown fields
            raise UserError(f"{self.name} cannot be built: {one_line(error)}") from error


def random_source(model: dict) -> Pretrained:
    """Return a source without weights for a model with these fields of GPTConfig: a measurement needs no checkpoint.

    Its texts have no meaning, so bytes will do if no tokenizer fits.
    """
    model = {key: value for key, value in model.items() if key not in TRAINING}
    return Pretrained(model, {}, guess_tokenizer(model["vocab_size"]) or "bytes", "random weights")


def open_source(source: str) -> tuple[Pretrained, ReadWeights]:
    """Return (the source's model without weights, the function that reads the weights).

    read_pretrained() describes `source`. Raises UserError if it is none of the three formats, or if there is no model
    of these sizes.
    """
    path = local_path(source)
    try:
        if (path / CONFIG).exists():
            opened = open_hugging_face(source, lambda weights: path)
        elif (path / "ckpt.pt").exists():
            opened = open_nanogpt_checkpoint(path / "ckpt.pt", source)
        elif path.is_dir():
            opened = open_checkpoint(path)
        elif path.exists():
            check(path.suffix == ".pt", f"{source} is not nanoGPT's ckpt.pt: name a .pt file, or the folder of a model")
            opened = open_nanogpt_checkpoint(path, source)
        else:
            check(HUB_NAME.fullmatch(source) is not None, f"{source}: there is no such file or folder")
            opened = open_hugging_face(source, lambda weights: hub_folder(source, weights))
    except OSError as error:
        raise UserError(f"{source} cannot be read: {one_line(error)}") from error
    opened[0].config  # noqa: B018, it raises UserError
    return opened


def open_checkpoint(path: Path) -> tuple[Pretrained, ReadWeights]:
    """Open a checkpoint of ours, or the newest checkpoint of a run."""
    folder = checkpoint.find_checkpoint(path)
    manifest = checkpoint.read_manifest(folder)
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    name = f"{run} at step {manifest['step']}"
    config = check_run_config(manifest["config"], name)
    model = {key: value for key, value in config["model"].items() if key not in TRAINING}
    tokenizer = check_tokenizer(config["data"].get("tokenizer"), name)
    if tokenizer not in TOKENIZERS and (run / TOKENIZER).exists():  # the run's copy, because the source may be gone
        tokenizer = str(run)
    return Pretrained(model, {}, tokenizer, name, folder, config), lambda: checkpoint.read_weights(folder)


def check_run_config(config: dict, name: str) -> dict:
    """Return the config of a manifest. Raises UserError if a value that this program uses is wrong."""
    wrong = f"{name} cannot be read: in its config,"
    for group in ("model", "data"):
        check(group in config, f"{wrong} {group} is missing")
    precision = config.get("precision")
    check(precision in (None, *PRECISIONS), f"{wrong} precision is {value_text(precision)}")
    for key in ("block_size", "batch_size"):
        value = config.get("train", {}).get(key, 1)
        check(type(value) is int and value >= 1, f"{wrong} train.{key} is {value_text(value)}")
    return config


def open_nanogpt_checkpoint(path: Path, name: str) -> tuple[Pretrained, ReadWeights]:
    """Open nanoGPT's ckpt.pt. Its pickled code never runs: torch.load reads only tensors and plain values."""
    try:
        with open_regular(path) as file:
            check_saved(file)
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    except Exception as error:  # the unpickler may raise any exception
        raise UserError(
            f"{path} cannot be read as nanoGPT's ckpt.pt: it is damaged, or holds more than tensors and plain values, "
            "which may be any program and is not run"
        ) from error
    is_complete = isinstance(contents, dict) and all(
        isinstance(contents.get(key), dict) for key in ("model", "model_args")
    )
    check(is_complete, f"{path} is not nanoGPT's ckpt.pt: it has no `model` and `model_args`")
    arguments = contents["model_args"]
    unknown = [value_text(key) for key in arguments if key not in {*SIZES, "bias", "dropout"}]
    check(not unknown, f"{path} is of a changed nanoGPT: its model_args have {', '.join(sorted(unknown)[:5])}")
    model = {**read_sizes(arguments, dict(zip(SIZES, SIZES, strict=True)), name), "pos": "learned", "norm_eps": EPS}
    model["bias"] = arguments.get("bias", True)  # the first versions of nanoGPT always have biases
    config = contents.get("config") or {}
    check(isinstance(config, dict), f"{path} is not nanoGPT's ckpt.pt: its config is {value_text(config)}")
    data = config.get("data")
    tokenizer = data.get("tokenizer") if isinstance(data, dict) else None  # model/export.py writes it
    tokenizer = check_tokenizer(tokenizer, name) or guess_tokenizer(model["vocab_size"])
    return Pretrained(model, {}, tokenizer, name), lambda: contents["model"]


def open_hugging_face(name: str, find_folder: Callable[[bool], Path]) -> tuple[Pretrained, ReadWeights]:
    """Open a model of transformers. `find_folder(weights)` returns the folder, with the weights if they are needed."""
    config = read_json(find_folder(False) / CONFIG)
    kind = config.get("model_type")
    kinds, text = ("gpt2", *llama.KINDS), f"{name} is another architecture: its model_type is {value_text(kind)}"
    check(kind in kinds, f"{text}, and only {', '.join(kinds[:-1])} and {kinds[-1]} can be read")
    if kind == "gpt2":
        return open_gpt2(config, name, find_folder)
    model = llama.read_model(config, name)
    opened = Pretrained(model, {}, own_tokenizer(name) or guess_tokenizer(model["vocab_size"]), name)

    def read_weights() -> dict[str, Tensor]:
        tensors = read_safetensors(weight_files(find_folder(True)), name)
        return llama.read_tensors(tensors, opened.config, name)

    return opened, read_weights


def open_gpt2(config: dict, name: str, find_folder: Callable[[bool], Path]) -> tuple[Pretrained, ReadWeights]:
    """Open a GPT-2 of transformers with this config.json."""
    their_names = {**dict(zip(SIZES, SIZES, strict=True)), "block_size": "n_positions"}
    their_names |= {"hidden": "n_inner"} if config.get("n_inner") is not None else {}
    model = {**read_sizes(config, their_names, name), "pos": "learned", "bias": True}
    model["norm_eps"] = value_or(config, "layer_norm_epsilon", EPS)
    model["tie_embeddings"] = value_or(config, "tie_word_embeddings", True)
    check_supported(config, SUPPORTED_VALUES, name)

    def read_weights() -> dict[str, Tensor]:
        tensors = read_safetensors(weight_files(find_folder(True)), name)
        return {key: w.T if CONV1D.fullmatch(key) and w.dim() == 2 else w for key, w in tensors.items()}

    return Pretrained(model, {}, guess_tokenizer(model["vocab_size"]) or own_tokenizer(name), name), read_weights


def own_tokenizer(name: str) -> str | None:
    """Return the name of the tokenizer of transformers' model: its own, unless its folder has none."""
    folder = Path(name)
    return name if not folder.is_dir() or (folder / TOKENIZER).exists() else None


def read_safetensors(files: list[Path], name: str) -> dict[str, Tensor]:
    """Return the tensors of all files. Raises UserError if there is no file, or if one is damaged."""
    check(
        bool(files),
        f"{name} has no {WEIGHTS}, and pickled weights (.bin) are not read, for they may hold any program; convert "
        f'them: python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{name}').save_pretrained('FOLDER')\", then name FOLDER",
    )
    tensors = {}
    for file in files:
        try:
            check_regular(file)
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} cannot be read: {one_line(error)}; fetch it again") from error
    return tensors


def local_path(source: str) -> Path:
    """Return the path. Raises UserError if no file can have this name."""
    path = Path(source)
    try:
        path.exists()
    except OSError as error:  # the name is too long
        raise UserError(f"{source}: there can be no such file or folder: {one_line(error)}") from error
    return path


def check_tokenizer(name: object, source: str) -> str | None:
    """Return the name of a source's tokenizer, which may be None. Raises UserError if it is no text."""
    text = f"{source} cannot be read: its tokenizer must be a name, and is {value_text(name)}"
    check(name is None or isinstance(name, str), text)
    return name

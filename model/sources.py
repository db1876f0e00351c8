"""The three formats of GPT-2's weights: our checkpoints, nanoGPT's ckpt.pt, and Hugging Face's folders.

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

from data.errors import one_line
from model.download import CONFIG, WEIGHTS, hub_folder, read_json, weight_files
from model.gpt import GPTConfig
from model.vocabulary import guess_tokenizer
from runtime import checkpoint
from runtime.config import UserError, check

OPENAI = re.compile(r"(openai-community/)?gpt2(-medium|-large|-xl)?")  # on the hub; all have the tokenizer gpt2
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
TRAINING = ("dropout", "checkpointing", "keep_attention")  # fields of GPTConfig that only training needs
CONV1D = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")  # Hugging Face stores these transposed
COMPUTED = {  # key of Hugging Face's config.json -> its default, the only value that model/gpt.py computes
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
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
    tokenizer: str | None  # gpt2 | bytes | None: unknown
    name: str  # for messages: "gpt2", "out/RUN at step 20"
    checkpoint: Path | None = None  # the folder of a checkpoint of ours

    @property
    def config(self) -> GPTConfig:
        """The config of a model with these weights, without dropout."""
        return GPTConfig(**self.model, dropout=0.0)

    @property
    def run_config(self) -> dict:
        """The config of the run that trained a checkpoint of ours; {} for another source."""
        return checkpoint.read_manifest(self.checkpoint)["config"] if self.checkpoint else {}


def random_source(model: dict) -> Pretrained:
    """Return a source without weights for a model with these fields of GPTConfig: a measurement needs no checkpoint."""
    model = {key: value for key, value in model.items() if key not in TRAINING}
    return Pretrained(model, {}, guess_tokenizer(model["vocab_size"]), "random weights")


def open_source(source: str) -> tuple[Pretrained, ReadWeights]:
    """Return (the source's model without weights, the function that reads the weights).

    `source` is described at read_pretrained(). Raises UserError if it is none of the three formats.
    """
    path = local_path(source)
    if path.is_file():
        check(path.suffix == ".pt", f"{source} is not nanoGPT's ckpt.pt: name a .pt file, or the folder of a model")
        return open_nanogpt_checkpoint(path, source)
    if not path.is_dir():
        check(HUB_NAME.fullmatch(source) is not None, f"{source}: there is no such file or folder")
        return open_hugging_face(source, lambda weights: hub_folder(source, weights))
    if (path / CONFIG).exists():
        return open_hugging_face(source, lambda weights: path)
    if (path / "ckpt.pt").exists():
        return open_nanogpt_checkpoint(path / "ckpt.pt", source)
    return open_checkpoint(path)


def open_checkpoint(path: Path) -> tuple[Pretrained, ReadWeights]:
    """Open a checkpoint of ours, or the newest checkpoint of a run."""
    folder = checkpoint.find_checkpoint(path)
    manifest = checkpoint.read_manifest(folder)
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    model = {key: value for key, value in manifest["config"]["model"].items() if key not in TRAINING}
    name = f"{run} at step {manifest['step']}"
    pretrained = Pretrained(model, {}, manifest["config"]["data"]["tokenizer"], name, folder)

    def read_weights() -> dict[str, Tensor]:
        checkpoint.verify(folder)
        return checkpoint.read_weights(folder)

    return pretrained, read_weights


def open_nanogpt_checkpoint(path: Path, name: str) -> tuple[Pretrained, ReadWeights]:
    """Open nanoGPT's ckpt.pt. Its pickled code never runs: torch.load reads only tensors and plain values."""
    try:
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
    unknown = sorted(set(arguments) - {*SIZES, "bias", "dropout"})
    check(not unknown, f"{path} is of a changed nanoGPT: its model_args have {', '.join(unknown)}")
    model = {**read_sizes(arguments, dict(zip(SIZES, SIZES, strict=True)), name), "pos": "learned"}
    model["bias"] = arguments.get("bias", True)  # the first versions of nanoGPT always have biases
    config = contents.get("config") or {}
    tokenizer = (config.get("data") or {}).get("tokenizer")  # model/export.py writes it
    if tokenizer is None and config.get("dataset") in ("openwebtext", "shakespeare"):  # nanoGPT's, in GPT-2's tokens
        tokenizer = "gpt2"
    tokenizer = tokenizer or guess_tokenizer(model["vocab_size"])
    return Pretrained(model, {}, tokenizer, name), lambda: contents["model"]


def open_hugging_face(name: str, find_folder: Callable[[bool], Path]) -> tuple[Pretrained, ReadWeights]:
    """Open a GPT-2 of transformers. `find_folder(weights)` returns the folder, with the weights if they are needed."""
    config = read_json(find_folder(False) / CONFIG)
    kind = config.get("model_type")
    check(kind == "gpt2", f"{name} is another architecture: its model_type is {kind}, and only gpt2 can be read")
    their_names = {**dict(zip(SIZES, SIZES, strict=True)), "block_size": "n_positions"}
    model = {**read_sizes(config, their_names, name), "pos": "learned", "bias": True}
    for key, computed in {**COMPUTED, "n_inner": 4 * model["n_embd"]}.items():
        value = config.get(key)
        check(value in (None, computed), f"{name} has {key}={value}, and only {key}={computed} is computed here")

    def read_weights() -> dict[str, Tensor]:
        tensors = read_safetensors(weight_files(find_folder(True)), name)
        has_head = config.get("tie_word_embeddings", True) or "lm_head.weight" in tensors
        check(has_head, f"{name} has tie_word_embeddings=false and no lm_head.weight: its head is missing")
        return {key: w.T if CONV1D.fullmatch(key) and w.dim() == 2 else w for key, w in tensors.items()}

    tokenizer = "gpt2" if OPENAI.fullmatch(name) else guess_tokenizer(model["vocab_size"])
    return Pretrained(model, {}, tokenizer, name), read_weights


def read_safetensors(files: list[Path], name: str) -> dict[str, Tensor]:
    """Return the tensors of all files. Raises UserError if there is no file, or if one is damaged."""
    check(
        bool(files),
        f"{name} has no {WEIGHTS}, and pickled weights (.bin) are not read, for they may hold any program; convert "
        f'them: python -c "from transformers import GPT2LMHeadModel as M; '
        f"M.from_pretrained('{name}').save_pretrained('FOLDER')\", then name FOLDER",
    )
    tensors = {}
    for file in files:
        try:
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


def read_sizes(values: dict, their_names: dict[str, str], source: str) -> dict[str, int]:
    """Return our name of each size -> its value. Raises UserError if a value is no integer."""
    for key in their_names.values():
        value = values.get(key)
        check(type(value) is int, f"{source} cannot be read: its {key} must be an integer, and is {value!r}")
    return {ours: values[theirs] for ours, theirs in their_names.items()}

"""hotswap as a library: a GPT with chosen kernels, and each op by name, for a program of your own.

    model = hotswap.build("gpt2_124m", kernels="triton", attn="flash", device="cuda")
    loss = model(idx, targets)  # both (B, T) int64
    norm = hotswap.op("norm", "triton", device="cuda")

The rooms are parts of this package: `from hotswap.model.step import train_step`. train.py, lab/ and scripts/ need a
checkout. A wrong argument raises a ValueError of one line. Nothing here changes the state of your process, such as
seeds, precision flags and environment variables, with three exceptions: device="cuda:N" makes this GPU the current
one, attn="flash" sets variables of FlashAttention-4, and torch.compile with precision="fp8" sets Triton's ptxas.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

import torch
from omegaconf import OmegaConf

from hotswap import rooms  # first: it lets Python find the rooms
from hotswap.kernels import names, registry
from hotswap.kernels.compat import inductor_options
from hotswap.model import pretrained, step
from hotswap.model.config import PRECISIONS, GPTConfig
from hotswap.model.generate import generate
from hotswap.model.gpt import GPT
from hotswap.model.vocabulary import take_vocabulary
from hotswap.runtime.config import check, expand_home, parse, value_text
from hotswap.runtime.device import find_device

__all__ = ["GPT", "GPTConfig", "build", "generate", "load", "op"]
__version__ = "0.1.0"  # pyproject.toml and --version read it
CONFIGS = rooms.ROOT / "configs"


@dataclass
class Choice:
    """What the arguments of build() and load() choose, with the names of the command line."""

    model: GPTConfig
    kernels: registry.KernelsConfig
    attn: registry.AttnConfig


def build(
    model: str = "gpt2_124m",
    *,
    kernels: str | dict = "eager",
    attn: str | dict = "sdpa",
    precision: str = "amp",
    device: str | torch.device = "auto",
    seed: int = 1337,
    **fields,
) -> GPT:
    """Return a GPT with initial weights, in training mode.

    `model` is a file in configs/model, and `fields` replace fields of GPTConfig: vocab_size=256, window=1024. `kernels`
    and `attn` are presets, or dicts: {"norm": "triton", "compile": True}, {"impl": "flash", "version": "fa3"}. The op
    that a dict does not name is eager. A backend may be a file, {"norm": "path/to/mine.py"} and attn="path/to/mine.py",
    or some_package.module. Raises ValueError if a choice is unknown or cannot run on `device`.
    """
    files = {path.stem: path for path in sorted((CONFIGS / "model").glob("*.yaml"))}
    check_choice("model", model, files)
    check(isinstance(seed, Integral) and 0 <= seed < 2**63, f"seed={value_text(seed)}: it must be in [0, 2^63)")
    shape = {**OmegaConf.load(CONFIGS / "config.yaml").model, **OmegaConf.load(files[model]), **fields}
    return make(shape, kernels, attn, precision, device, seed=int(seed))


def load(
    source: str | os.PathLike,
    *,
    kernels: str | dict = "eager",
    attn: str | dict = "sdpa",
    precision: str = "amp",
    device: str | torch.device = "auto",
    **fields,
) -> GPT:
    """Return the GPT of a run (out/RUN), a checkpoint, nanoGPT's ckpt.pt or a Hugging Face model.

    A Hugging Face model is a name, such as "HuggingFaceTB/SmolLM2-135M", or a folder: GPT-2, Llama or Qwen3. Any
    weights run under any choice of kernels. `fields` may change dropout, checkpointing, keep_attention, window,
    rope_theta and rope_scaling, and shorten block_size, or lengthen it with rope. See build() for the other arguments.
    Raises ValueError as build() does, and if the source is unreadable.
    """
    check(isinstance(source, str | os.PathLike), f"source={value_text(source)}: it must be text or a path")
    weights = pretrained.read_pretrained(str(expand_home(str(source))))
    shape = {"dropout": 0.0, **pretrained.fit_config(weights, fields)}
    return make(shape, kernels, attn, precision, device, weights=weights)


def make(shape: dict, kernels, attn, precision, device, **options) -> GPT:
    """Check the choices, build the model, and compile it if kernels.compile is true."""
    presets = names.config_groups()
    groups = {"kernels": kernels, "attn": attn}
    for group, value in groups.items():
        if isinstance(value, str) and group == "attn" and "." in value:  # path/to/mine.py or some_package.module
            groups[group] = {"impl": value}
        elif not isinstance(value, dict):
            check_choice(group, value, [choice for choice in presets[group] if choice != "*"])
            groups[group] = presets[group][value]
    check_choice("precision", precision, PRECISIONS)
    # No tokenizer is named, so with vocab_size=None the model has the ids of bytes
    choice = parse({"model": shape, **groups}, Choice, complete=lambda cfg: take_vocabulary(cfg, "data.tokenizer"))
    model = step.build(choice.model, choice.kernels, choice.attn, precision, find_device(device), **options)
    if choice.kernels.compile:
        model.compile(fullgraph=True, options=inductor_options(choice.kernels.compile_mode))
    return model


def check_choice(key: str, value: object, choices) -> None:
    """Raise UserError if `value` is not one of `choices`."""
    check(isinstance(value, str) and value in choices, f"{key}={value_text(value)}: choose {', '.join(choices)}")


def op(name: str, impl: str, device: str | torch.device = "auto") -> Callable:
    """Return the function of a backend: op("norm", "triton") is norm() of kernels/norm/triton.py.

    kernels/NAME/__init__.py gives its arguments. Raises ValueError if it does not exist, or cannot run on `device`.
    """
    check_choice("op", name, registry.ALL_OPS)
    check(isinstance(impl, str), f"impl={value_text(impl)}: it must be the name of a backend of {name}, or a path")
    return registry.load(name, impl, find_device(device))

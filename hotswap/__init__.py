"""hotswap as a library: a GPT with chosen kernels, and each op by name, for a program of your own.

    model = hotswap.build("gpt2_124m", kernels="triton", attn="flash", device="cuda")
    loss = model(idx, targets)  # both (B, T) int64
    norm = hotswap.op("norm", "triton", device="cuda")

The rooms are parts of this package: `from hotswap.model.step import train_step`. train.py, lab/ and scripts/ need a
checkout. A wrong argument raises a ValueError of one line.
"""

from collections.abc import Callable
from dataclasses import dataclass

from omegaconf import OmegaConf

from hotswap import rooms  # first: it lets Python find the rooms
from hotswap.kernels import names, registry
from hotswap.model import pretrained, step
from hotswap.model.generate import generate
from hotswap.model.gpt import GPT, PRECISIONS, GPTConfig
from hotswap.model.vocabulary import take_vocabulary
from hotswap.runtime.config import check, expand_home, parse
from hotswap.runtime.device import find_device

__all__ = ["GPT", "GPTConfig", "build", "generate", "load", "op"]


@dataclass
class Choice:
    """What the arguments of build() and load() choose, with the names of the command line."""

    model: GPTConfig
    kernels: registry.KernelsConfig
    attn: registry.AttnConfig


def build(
    model: str = "gpt2_124m", *, kernels="eager", attn="sdpa", precision="amp", device="auto", seed=1337, **fields
) -> GPT:
    """Return a GPT with initial weights, in training mode.

    `model` is a file in configs/model, and `fields` replace fields of GPTConfig: vocab_size=256, window=1024. `kernels`
    and `attn` are presets, or dicts: {"norm": "triton", "compile": True}, {"impl": "flash", "version": "fa3"}. The op
    that a dict does not name is eager. A backend may be a file, {"norm": "path/to/mine.py"} and attn="path/to/mine.py",
    or some_package.module. Raises ValueError if a choice is unknown or cannot run on `device`.
    """
    files = {path.stem: path for path in sorted((rooms.ROOT / "configs/model").glob("*.yaml"))}
    check(model in files, f"model={model}: choose {', '.join(files)}")
    defaults = OmegaConf.load(rooms.ROOT / "configs/config.yaml").model
    cfg = OmegaConf.create({"model": OmegaConf.merge(defaults, OmegaConf.load(files[model]), fields)})
    take_vocabulary(cfg, "data.tokenizer")  # no tokenizer is named, so a model without vocab_size has the ids of bytes
    return make(OmegaConf.to_container(cfg.model), kernels, attn, precision, device, seed=seed)


def load(source: str, *, kernels="eager", attn="sdpa", precision="amp", device="auto", **fields) -> GPT:
    """Return the GPT of a run (out/RUN), a checkpoint, a Hugging Face GPT-2 ("gpt2") or nanoGPT's ckpt.pt.

    Any weights run under any choice of kernels. `fields` may change dropout, checkpointing and window, and shorten
    block_size. build() describes the other arguments. Raises ValueError as build() does, and if the source cannot be
    read.
    """
    weights = pretrained.read_pretrained(str(expand_home(str(source))))
    shape = {"dropout": 0.0, **pretrained.fit_config(weights, fields)}
    return make(shape, kernels, attn, precision, device, weights=weights)


def make(shape: dict, kernels, attn, precision: str, device: str, **options) -> GPT:
    """Check the choices, build the model, and compile it if kernels.compile is true."""
    presets = names.config_groups()
    groups = {"kernels": kernels, "attn": attn}
    for group, value in groups.items():
        if isinstance(value, str) and group == "attn" and "." in value:  # path/to/mine.py or some_package.module
            groups[group] = {"impl": value}
        elif isinstance(value, str):
            choices = [choice for choice in presets[group] if choice != "*"]
            check(value in choices, f"{group}={value}: choose {', '.join(choices)}")
            groups[group] = presets[group][value]
    check(precision in PRECISIONS, f"precision={precision}: choose {', '.join(PRECISIONS)}")
    choice = parse(OmegaConf.create({"model": shape, **groups}), Choice)
    model = step.build(choice.model, choice.kernels, choice.attn, precision, find_device(device), **options)
    if choice.kernels.compile:
        model.compile(fullgraph=True)
    return model


def op(name: str, impl: str, device: str = "auto") -> Callable:
    """Return the function of a backend: op("norm", "triton") is norm() of kernels/norm/triton.py.

    kernels/NAME/__init__.py gives its arguments. Raises ValueError if the backend does not exist, or cannot run on
    `device`.
    """
    check(name in registry.ALL_OPS, f"op={name}: choose {', '.join(registry.ALL_OPS)}")
    return registry.load(name, impl, find_device(device))

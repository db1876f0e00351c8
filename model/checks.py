"""Compare what a source of weights says and holds with the model that is to be built from it."""

import torch
from torch import Tensor

from kernels.registry import OPS, Ops
from model.config import GPTConfig
from model.gpt import GPT
from runtime.config import check, value_text

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def read_sizes(values: dict, their_names: dict[str, str], source: str) -> dict[str, int]:
    """Return our name of each size -> its value. Raises UserError if a value is no integer."""
    for key in their_names.values():
        value = values.get(key)
        text = repr(value) if isinstance(value, str) else value_text(value)
        check(type(value) is int, f"{source} cannot be read: its {key} must be an integer, and is {text[:200]}")
    return {ours: values[theirs] for ours, theirs in their_names.items()}


def value_or(config: dict, key: str, default: object) -> object:
    """Return config[key], or the default if the key is missing or null, which means the same to transformers."""
    value = config.get(key)
    return default if value is None else value


def check_supported(config: dict, supported: dict, source: str) -> None:
    """Raise UserError if a key of a config is set to another value than the one that is computed here."""
    for key, value in supported.items():
        text = f"{source} has {key}={value_text(config.get(key))}, and only {key}={value_text(value)} is computed here"
        check(config.get(key) in (None, value), text)


def tensor_shapes(config: GPTConfig) -> dict[str, torch.Size]:
    """Return the shapes of the model's state dict. Raises UserError if a model of these sizes cannot be built."""
    with torch.device("meta"):
        model = GPT(config, Ops(*(None for _ in OPS)))  # it never runs, so it needs no kernels
    return {name: weight.shape for name, weight in model.state_dict().items()}


def check_tensors(weights: dict[str, Tensor], expected: dict[str, torch.Size], source: str) -> None:
    """Raise UserError if tensors are missing, unknown, of another shape, or quantized.

    It names the first three of each kind.
    """
    common = [name for name in expected if name in weights]
    problems = {
        "lacks": [name for name in expected if name not in weights],
        "also has": [name for name in weights if name not in expected],
        "has in another shape": [
            f"{name} {tuple(weights[name].shape)}, not {tuple(expected[name])}"
            for name in common
            if weights[name].shape != expected[name]
        ],
    }
    sentences = [f"it {problem} {first_three(names)}" for problem, names in problems.items() if names]
    check(not sentences, f"{source} is not this model: {'; '.join(sentences)}")
    for name, weight in weights.items():
        check(weight.dtype in FLOATS, f"{source} holds {name} as {weight.dtype}: quantized weights are not read")


def first_three(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(map(value_text, names[:3]))}{rest}"

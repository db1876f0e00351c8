"""Triton where it runs, and PyTorch elsewhere.

Other ops ask a table of measured times (kernels/fastest.py). Here no table is needed, because Triton's kernel moves
fewer bytes (triton.py). Triton's interpreter on a CPU is for tests, and `auto` does not choose it.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kernels.lookup import backend
from kernels.registry import describe_choice

_functions = {}  # device type -> the function. unavailable() fills it, because torch.compile cannot trace an import


def choose(device: torch.device, op: str = "adamw") -> str:
    """Return the name of the backend for `device`."""
    if device.type != "cuda" or not find_spec("triton"):
        return "eager"
    return "eager" if backend(op, "triton").unavailable(device) else "triton"


def unavailable(device: torch.device) -> None:
    _functions[device.type] = backend("adamw", choose(device)).adamw


def detail(master: Tensor, **inputs: Any) -> str:
    return describe_choice("adamw", choose(master.device), master=master, **inputs)


def adamw(master: Tensor, *arguments: Any, **options: Any) -> None:
    function = _functions[master.device.type]
    function(master, *arguments, **options)

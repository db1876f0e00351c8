"""Run a function of a model in eval mode."""

import functools
from collections.abc import Callable

from torch import nn

from runtime.config import check, value_text


def in_eval_mode(function: Callable) -> Callable:
    """Decorator: function(model, ...) runs in eval mode. Afterwards, even after an error, each has its own mode."""

    @functools.wraps(function)
    def call(model: nn.Module, *args, **options):
        check(isinstance(model, nn.Module) and hasattr(model, "wte"), f"model={value_text(model)}: it must be a GPT")
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            return function(model, *args, **options)
        finally:
            for module, training in modes:
                module.training = training

    return call

"""The command lines of the repo: runtime/config.py with the configs and the choices of kernels of this repo.

This file does not import torch, because --help needs it and has to be quick.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig

from common.terminal import override
from kernels.names import KernelError, backend_names, config_groups
from runtime import config

CONFIGS = Path(__file__).parents[1] / "configs"
T = TypeVar("T")


def command(schema: type[T], name: str, errors: tuple = (), complete: Callable[[DictConfig], None] | None = None):
    """Decorator: turn `main(cfg: schema)` into a program that reads `configs/name.yaml`. See runtime.config.cli()."""
    return config.cli(
        schema,
        configs=CONFIGS,
        name=name,
        groups=config_groups(),
        resolvers=backend_names(),
        errors=(KernelError, *errors),
        complete=complete,
    )


def compose(schema: type, name: str, words: list[str]) -> DictConfig:
    """Return the composed config of another command with these arguments. Call this in a command's main().

    Its paths are expanded, but its values are not checked: runtime.config.parse() does that. Raises UserError if the
    arguments are wrong.
    """
    config.store_named_choices(config_groups(), words)
    try:
        composed = hydra.compose(name, words)
    except HydraException as error:
        raise config.UserError(config.explain_error(error, schema)) from error
    config.expand_paths(composed)
    return composed


def take_training() -> None:
    """Make the arguments after `--`, which are train.py's, the value of `training`."""
    if "--" in sys.argv:
        split = sys.argv.index("--")
        sys.argv[split:] = [override("training", sys.argv[split + 1 :])]


def answer_help(name: str) -> None:
    """If the command line of `configs/name.yaml` asks for --help or a tab completion, print it and exit.

    A program calls this before it imports torch, which takes 3 s.
    """
    config.register(CONFIGS, config_groups(), backend_names())
    config.answer_help(CONFIGS, name)

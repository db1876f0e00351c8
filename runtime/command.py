"""The command that runs this job again, for its row and for the terminal. common/terminal.py quotes its words."""

import os
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from common.terminal import override, shell_command

# scripts.generate quotes this key's value for Hydra, so a command has it unquoted
UNQUOTED_KEY = "prompt"
config_flags: list[str] = []  # of Hydra, such as --config-dir=FOLDER. runtime.config.run_hydra() sets them
_program: list[str] = []  # in the process of a pickled task: the program that pickled it


def command_line(**changes: str) -> str:
    """Return the shell command that runs this job again, with other values for the keys in `changes`.

    In a sweep it is the command of the current job alone. A program below the current folder has a relative path, so
    that the command of a kept row names no folder of this machine.
    """
    unchanged = [as_typed(word) for word in arguments() if word.partition("=")[0].lstrip("+") not in changes]
    launcher = ["python"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        machines, address = os.environ.get("GROUP_WORLD_SIZE", "1"), os.environ["MASTER_ADDR"]
        several = [f"--nnodes={machines}", "--rdzv_backend=c10d", f"--rdzv_endpoint={address}"]
        rendezvous = ["--standalone"] if machines == "1" else several
        launcher = ["torchrun", *rendezvous, f"--nproc_per_node={os.environ['LOCAL_WORLD_SIZE']}"]
    changed = [f"{key}={value}" if key == UNQUOTED_KEY else override(key, value) for key, value in changes.items()]
    return shell_command(*launcher, *program(), *config_flags, *unchanged, *changed)


def arguments() -> list[str]:
    """Return the overrides of this job as they were typed, with ${...} and \\${...}; without Hydra all arguments."""
    if not HydraConfig.initialized():
        return sys.argv[1:]
    return OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)


def program() -> list[str]:
    """Return the words after `python` that start this program: train.py, or -m scripts.generate."""
    if _program:
        return _program
    module = getattr(sys.modules["__main__"].__spec__, "name", "")
    path, here = Path(sys.argv[0]), Path.cwd()
    file = path.relative_to(here) if path.is_relative_to(here) else path
    return ["-m", module] if module.startswith("scripts.") else [str(file)]


def use_program(words: list[str], hydra_flags: list[str]) -> None:
    """Let the commands of this process start another program than the process did, with these flags of Hydra."""
    _program[:] = words
    config_flags[:] = hydra_flags


def as_typed(word: str) -> str:
    """Return an override of UNQUOTED_KEY without the quotes for Hydra, and any other word as it is."""
    if not word.startswith(f"{UNQUOTED_KEY}="):
        return word
    quoted = {UNQUOTED_KEY: OverridesParser.create().parse_override(word).value()}
    return f"{UNQUOTED_KEY}={OmegaConf.to_container(OmegaConf.create(quoted), resolve=True)[UNQUOTED_KEY]}"

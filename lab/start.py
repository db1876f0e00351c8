"""The start of every command. This file imports nothing that takes long, such as torch (3 s) or Hydra (0.4 s)."""

from runtime.signals import exit_on_early_interrupt


def start_command(name: str) -> None:
    """Let Ctrl-C end the process with one line from now on, and answer --help if `configs/name.yaml` exists.

    A command calls this before its imports. A command without this file reads its command line with argparse.
    """
    exit_on_early_interrupt()
    from lab.commands import CONFIGS, answer_help

    if (CONFIGS / f"{name}.yaml").exists():
        answer_help(name)

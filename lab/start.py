"""The start of every command, before it imports torch (3 s) and Hydra (0.4 s)."""

import os

from runtime.interrupt import exit_on_early_interrupt

CONFIGS = os.path.join(os.path.dirname(__file__), "..", "configs")  # importing pathlib takes 10 ms


def start_command(name: str) -> None:
    """Let Ctrl-C end the process with one line from now on, and answer --help if `configs/name.yaml` exists.

    A command calls this before its imports. A command without a YAML file reads its command line with argparse.
    """
    exit_on_early_interrupt()
    if os.path.exists(os.path.join(CONFIGS, f"{name}.yaml")):
        from lab.commands import answer_help

        answer_help(name)

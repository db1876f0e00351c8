"""The start of every command, before it imports torch (3 s) and Hydra (0.4 s)."""

from pathlib import Path

from runtime.signals import exit_on_early_interrupt


def start_command(name: str) -> None:
    """Let Ctrl-C end the process with one line from now on, and answer --help if `configs/name.yaml` exists.

    A command calls this before its imports. A command without a YAML file reads its command line with argparse.
    """
    exit_on_early_interrupt()
    if (Path(__file__).parents[1] / f"configs/{name}.yaml").exists():
        from lab.commands import answer_help

        answer_help(name)

"""The commands. `python -m scripts.NAME` starts here, before NAME imports torch, which takes 3 s."""

import argparse
import sys

from common.terminal import shell_command
from lab.start import start_command

if sys.argv[0] == "-m":  # Python imports this package before it runs the command, and then puts the file's path here
    start_command(sys.orig_argv[-len(sys.argv)].rpartition(".")[2])


def flag_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a command that takes flags instead of keys. Its errors are one line."""
    from runtime import compat  # imports Hydra (0.4 s)

    compat.shorten_argparse_errors()
    formatter = argparse.RawDescriptionHelpFormatter
    command = shell_command("python", "-m", f"scripts.{name}")
    return argparse.ArgumentParser(command, description=description, formatter_class=formatter)

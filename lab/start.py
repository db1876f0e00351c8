"""The start of every command, before it imports torch (3 s) and Hydra (0.4 s)."""

import os
import sys
from contextlib import suppress

from common.terminal import set_up_streams, warn
from runtime.interrupt import exit_on_early_interrupt

ROOT = os.path.join(os.path.dirname(__file__), "..")  # importing pathlib takes 10 ms
CONFIGS = os.path.join(ROOT, "configs")


def start_command(name: str) -> None:
    """Let Ctrl-C end the process with one line from now on, answer --help and --version, and ensure_home().

    A command calls this before its imports. A command without a file `configs/name.yaml` answers --help itself.
    """
    exit_on_early_interrupt()
    set_up_streams()  # before a warning, and before another file gets the number of a closed stream
    if "--version" in sys.argv[1:]:
        from runtime.signals import exit_quietly

        with exit_quietly():
            print(versions())
        sys.exit()
    if os.path.exists(os.path.join(CONFIGS, f"{name}.yaml")):
        from lab.commands import answer_help

        answer_help(name)
    ensure_home()


def versions() -> str:
    """Return the versions of hotswap, torch, triton and Python in one line. It does not import torch."""
    import platform
    import re
    from importlib.metadata import PackageNotFoundError, version

    with open(os.path.join(ROOT, "hotswap", "__init__.py"), encoding="utf-8") as file:  # importing it imports torch
        parts = ["hotswap " + re.search('__version__ = "(.*)"', file.read())[1]]
    for name in ("torch", "triton"):
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            parts.append(f"no {name}")
    return ", ".join([*parts, f"Python {platform.python_version()}"])


def ensure_home() -> None:
    """Let HOME be .cache/home if this user has no home folder, as in a container with an unknown user id.

    Python, W&B, Hugging Face's and Triton's caches would raise errors.
    """
    home = os.path.expanduser("~")  # "~" if HOME is not set, and the password file does not have this user
    root = home == "/" and not os.access(home, os.W_OK)  # docker sets HOME=/ for such a user
    if home == "~" or root or not os.access(home, os.X_OK):  # /nonexistent is the home of Debian's `nobody`
        os.environ["HOME"] = os.path.abspath(".cache/home")
        with suppress(OSError):  # the libraries say it if they cannot write there
            os.makedirs(os.environ["HOME"], exist_ok=True)
        if os.environ.get("RANK", "0") == "0":
            warn(f"this user has no home folder, so caches go to {os.environ['HOME']}; HOME=FOLDER sets another one")

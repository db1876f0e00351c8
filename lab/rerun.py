"""The command of a row, to run again or to copy. A row may be from somebody else, so its command is not trusted.

Only programs of this repo and overrides of their keys remain, and they are quoted again. An override may not choose
Hydra's own settings, configs of another folder, or the code of a kernel that is not in kernels/, because such a word
runs any program.
"""

import re
import shlex
from pathlib import Path

from kernels.lookup import is_path
from runtime.config import UserError, check, value_text
from terminal import printable, shell_command

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = tuple(f"scripts.{name}" for name in ("generate", "max_context", "judge", "bench_kernels", "bench_attention"))
LONGEST = 100_000  # characters of a command. Linux takes 131,071 bytes for one word
TORCHRUN = re.compile(r"--nproc_per_node=[1-9]\d{0,3}")
OVERRIDE = re.compile(r"(\+\+?)?([A-Za-z_][\w./-]*)=(.*)|~([A-Za-z_][\w./-]*)(=.*)?", re.DOTALL)
TEXTS = {"prompt", "stop", "logger.notes", "logger.tags"}  # a text may hold anything
# Keys of one run. They name folders and accounts, and no figure depends on them
OWN_KEYS = {"out_dir", "train.resume", "train.replicate_to", "data.cache", "logger"}
CODE = re.compile(r"(kernels|attn)(\..*)?|op|impl|against")  # keys whose values are imported
GROUPS = {"model", "train", "optim", "data", "experiment", "logger", "kernels", "attn"}  # each choice is a config file


def rerun_words(row: dict) -> list[str]:
    """Return the words of a row's command, the program first: `python train.py`, or `torchrun ... -m scripts.NAME`.

    The words for OWN_KEYS are left out, so that a second run gets a folder of its own. Raises UserError if the row has
    no command, or one that this program would not run again.
    """
    command = row.get("command")
    check(isinstance(command, str) and command != "", f"its command is {value_text(command)}")
    check(len(command) <= LONGEST, f"its command has more than {LONGEST:,} characters")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"its command is no shell command ({error}): {brief(command)}") from None
    launcher, words = split_launcher(words)
    if words[:1] == ["-m"] and words[1:2] and words[1] in PROGRAMS:
        program, arguments = words[:2], words[2:]
    else:
        is_training = bool(words) and Path(words[0]).name == "train.py"
        check(is_training, f"its command is of none of train.py, {', '.join(PROGRAMS)}: {brief(command)}")
        program, arguments = ["train.py"], words[1:]
    is_judge = program[-1] == "scripts.judge"  # its words after -- are for train.py
    kept = [word for word in arguments if (is_judge and word == "--") or not is_own(check_word(word))]
    return [*launcher, *program, *kept]


def rerun_command(row: dict) -> str:
    """Return the shell command of rerun_words(); "" if the row has none that may run again."""
    try:
        return shell_command(*rerun_words(row))
    except UserError:
        return ""


def split_launcher(words: list[str]) -> tuple[list[str], list[str]]:
    """Return (`python`, or torchrun with its flags; the other words). Raises UserError if it is another program."""
    if words[:1] == ["python"]:
        return ["python"], words[1:]
    is_torchrun = words[:2] == ["torchrun", "--standalone"] and TORCHRUN.fullmatch("".join(words[2:3]))
    check(bool(is_torchrun), f"its command starts with {brief(' '.join(words[:3]))}, and not with python or torchrun")
    return words[:3], words[3:]


def check_word(word: str) -> str:
    """Return the key of an override. Raises UserError if it is none, or if it could run code that is not ours."""
    match, shown = OVERRIDE.fullmatch(word), brief(word)
    advice = f"{shown} in its command may run any code: if you trust it, run the command yourself"
    check(match is not None, f"{shown} in its command is no override of a key")
    key, value = match[2] or match[4], match[3] or ""
    check(printable(word) == word, f"{shown} in its command has control characters")
    check(re.split(r"[./]", key)[0] not in ("hydra", "sweep", "training"), advice)
    if key in TEXTS:
        return key
    check("${" not in value, advice)  # OmegaConf replaces it, for example by a variable of the environment
    names = re.split(r"[\[\]{},:\s'\"]+", value)
    if CODE.fullmatch(key):
        check(all(map(is_ours, names)), advice)
    elif key in GROUPS:  # a path would be a config file elsewhere, which may set hydra.*
        check(all(re.fullmatch(r"[\w-]*", name) for name in names), advice)
    else:
        check("/" not in key, advice)
    return key


def is_ours(name: str) -> bool:
    """Return whether the backend `name` is a name in kernels/, or the path of a file there."""
    if not is_path(name):
        return "." not in name  # a dotted name is a module that Python can import
    return Path(name).resolve().is_relative_to(ROOT / "kernels")  # a relative path starts at the current folder


def is_own(key: str) -> bool:
    return key in OWN_KEYS or key.startswith("logger.")


def brief(text: str) -> str:
    """Return the beginning of a text of a row, in one line."""
    return value_text(" ".join(text[:150].split()) + ("..." if len(text) > 150 else ""))

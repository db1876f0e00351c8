"""The command of a row, to run again or to copy. A row may be from somebody else, so its command is not trusted.

Only programs of this repo and overrides of their keys remain, and they are quoted again. An override may not choose
Hydra's own settings, configs of another folder, or the code of a kernel that is not in kernels/, because such a word
runs any program. The check reads a value as Hydra does, because Hydra reads $\\{prompt\\} as ${prompt}.
"""

import functools
import re
import shlex
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from common.terminal import printable, shell_command
from kernels.lookup import is_path
from runtime.config import UserError, check, value_text

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = tuple(f"scripts.{name}" for name in ("generate", "max_context", "judge", "bench_kernels", "bench_attention"))
LONGEST = 100_000  # characters of a command. Linux takes 131,071 bytes for one word
TORCHRUN = re.compile(r"--nproc_per_node=[1-9]\d{0,3}")
OVERRIDE = re.compile(r"(?:\+\+?|~)?([A-Za-z_][\w./-]*)=.*|~([A-Za-z_][\w./-]*)", re.DOTALL)
LONGEST_OVERRIDE = 4_000  # characters, except for a prompt. Hydra parses these in 0.1 s
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
    allowed = []
    for word in arguments:
        if program[-1] == "scripts.generate" and word.startswith("prompt="):  # it quotes this word for Hydra
            check(printable(word) == word, f"{brief(word)} in its command has control characters")
            allowed.append(word)
        elif (is_judge and word == "--") or not is_own(check_word(word)):
            allowed.append(word)
    return [*launcher, *program, *allowed]


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
    key = match[1] or match[2]
    check(printable(word) == word, f"{shown} in its command has control characters")
    check(re.split(r"[./]", key)[0] not in ("hydra", "sweep", "training"), advice)
    if is_own(key):  # the word is left out
        return key
    check(len(word) <= LONGEST_OVERRIDE, f"{shown} in its command has more than {LONGEST_OVERRIDE:,} characters")
    try:
        override = parse_override(word)
    except (HydraException, RecursionError):
        raise UserError(f"{shown} in its command is no override that Hydra can read") from None
    values = leaves(override.value())
    plain = all(value is None or isinstance(value, str | int | float) for value in values)
    check(plain and override.key_or_group == key, f"{shown} in its command is a sweep, or no plain value")
    texts = [value for value in values if isinstance(value, str)]
    # OmegaConf replaces ${...}, for example by another key or by a variable of the environment
    check(not any("${" in text if key == "stop" else "$" in text for text in texts), advice)
    if CODE.fullmatch(key):
        check(all(map(is_ours, texts)), advice)
    elif key in GROUPS:  # a path would be a config file elsewhere, which may set hydra.*
        check(all(re.fullmatch(r"[\w-]*", text) for text in texts), advice)
    else:
        check("/" not in key, advice)
    return key


@functools.lru_cache(10_000)  # the rows of a page have few different words, and Hydra takes 1 ms for each
def parse_override(word: str) -> Override:
    return OverridesParser.create().parse_override(word)


def leaves(value: object) -> list:
    """Return what nested lists and dicts hold, the keys of the dicts included."""
    found, parts = [], [value]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            parts += [*part, *part.values()]
        elif isinstance(part, list):
            parts += part
        else:
            found.append(part)
    return found


def is_ours(name: str) -> bool:
    """Return whether `name` is a word, or the path of a file in kernels/ or course/.

    A word is a backend of kernels/ or of an installed package, or a mode of torch.compile. It names no other code.
    """
    if not is_path(name):
        return bool(re.fullmatch(r"[\w-]+", name))  # a dotted name is a module that Python can import
    is_plain = re.fullmatch(r"[\w./-]+", name)  # without ~, which kernels/lookup.py expands
    # a relative path starts at the current folder
    path = Path(name).resolve()
    return bool(is_plain) and any(path.is_relative_to(ROOT / room) for room in ("kernels", "course"))


def check_backends(config: dict, where: str, advice: str) -> None:
    """Raise UserError if a row's config names a backend that is not of kernels/: `where`, the names, `advice`.

    Call this before runtime.config.parse(), which may import the backend.
    """
    names = [value for value in leaves([config.get("kernels"), config.get("attn")]) if isinstance(value, str)]
    foreign = [name for name in names if not is_ours(name)]
    check(not foreign, f"{where} names code outside of kernels/: {', '.join(map(brief, foreign[:3]))}; {advice}")


def is_own(key: str) -> bool:
    return key in OWN_KEYS or key.startswith("logger.")


def brief(text: str) -> str:
    """Return the beginning of a text of a row, in one line."""
    return value_text(" ".join(text[:150].split()) + ("..." if len(text) > 150 else ""))

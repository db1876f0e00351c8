"""The command line: from YAML files and overrides to a checked dataclass. A user's mistake is one line.

Hydra composes the config. But Hydra alone accepts unknown keys behind `+`, prints errors over several lines, and checks
no values. So the composed config is merged into a dataclass (OmegaConf's structured configs), whose __post_init__
checks the values.
"""

import argparse
import contextlib
import importlib
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from common.files import read_text
from common.terminal import LostOutput, printable, quote_exactly, shell_command
from runtime import command, compat
from runtime.interrupt import exit_on_early_interrupt
from runtime.keys import explain_key, key_names
from runtime.signals import exit_quietly

T = TypeVar("T")
TEXT_KEYS = {"prompt", "stop", "notes", "training"}  # their values are text, so `~` at the start is not expanded
# why a sweeper such as Optuna's is refused, whether its plugin is installed (lab/sweep/launcher.py) or not
NEEDS_RESULTS = "needs a result from each job, and sweeps here give it none (see lab/README.md)"
NEEDS_RESULTS += "; leave it out to run every combination"
made_folders: list[Path] = []  # the folders that this job has made. At its end, the empty ones are removed


class UserError(ValueError):
    """The user asked for something impossible. The message is one line: what happened, why, what to do."""


def check(ok: bool, message: str) -> None:
    """Raise UserError with this message if `ok` is false."""
    if not ok:
        raise UserError(message)


def field_defaults(schema: type) -> dict[str, Any]:
    """Return {field: its default} of a dataclass. The configs of old checkpoints and rows lack the newer fields."""
    return {field.name: field.default for field in fields(schema) if field.default is not MISSING}


def value_text(value: object) -> str:
    """Return a wrong value as text for a message of one line: the value if its text is short, otherwise its type.

    The whole text of nested lists can be larger than the memory, because a list may hold another list many times.
    """
    try:
        text = reprlib.repr(value) if isinstance(value, list | tuple | dict | set) else str(value)
    except ValueError:  # an integer of more than 4,300 digits
        text = ""
    is_long = len(text) > 200 or "\n" in text or (text == "" and value != "")
    return f"a {type(value).__name__}" if is_long else text


def cli(
    schema: type[T],
    configs: Path,
    name: str,
    groups: dict[str, dict] | None = None,
    resolvers: dict[str, dict[str, str]] | None = None,
    errors: tuple = (),
    complete: Callable[[DictConfig], None] | None = None,
):
    """Decorator: turn `main(cfg: schema)` into a Hydra program that reads `configs/name.yaml`.

    `groups` adds choices that have no YAML file: {"attn": {"mine": {"impl": "mine"}}}. The choice `*` stands for every
    other choice on the command line with a dot in its name, such as attn=path/to/mine.py. `resolvers` adds texts to the
    YAML files: with {"backends": {"norm": "eager, triton"}}, ${backends:norm} becomes `eager, triton`. The program
    prints the message of a UserError after `error: ` and exits with 1; `errors` are more exceptions of this kind.
    `complete` may change the composed config before it is checked. For other exit codes see signals.exit_quietly().
    """

    def decorate(main: Callable[[T], None]) -> Callable[[], None]:
        register(configs, groups or {}, resolvers or {})

        @exit_quietly()
        def program() -> None:
            task = program.new_task()
            store_named_choices(groups or {}, sys.argv[1:])
            try:
                run_hydra(configs, name, task)
            except Exception as error:
                is_mistake = not task.pickled or isinstance(error, (UserError, *errors))
                if task.jobs or not is_mistake or isinstance(error, LostOutput):
                    raise
                # before the first job, every error is a mistake on the command line or in a YAML file
                sys.exit(f"error: {printable(explain_error(error, schema))}")
            if task.failed:
                sys.exit(1)

        program.new_task = lambda: Task(main, schema, errors, complete)
        return program

    return decorate


class Task:
    """What Hydra calls with a composed config, maybe in another process (submitit): check it, and call `main`."""

    def __init__(self, main: Callable, schema: type, errors: tuple, complete: Callable | None):
        self.main, self.schema, self.errors, self.complete = main, schema, errors, complete
        self.jobs = self.failed = 0  # hydra/launcher=basic runs all jobs of a sweep in this process
        self.pickled = False  # its jobs may run in other processes
        self.unpickled = False

    def __call__(self, cfg: DictConfig) -> None:
        with exit_quietly():  # also here, because Hydra prints a line above a LostOutput
            self.jobs += 1
            parsed = None
            try:
                parsed = parse(cfg, self.schema, self.complete)
                self.main(parsed)
            except (UserError, *self.errors) as error:  # the next job still runs
                if self.unpickled:
                    raise
                self.failed += 1
                # all ranks find the same mistakes in the config, so only rank 0 prints these
                if parsed or os.environ.get("RANK", "0") == "0":
                    print(f"error: {printable(error)}", file=sys.stderr)
            finally:
                while made_folders:
                    with contextlib.suppress(OSError):  # it holds something
                        made_folders.pop().rmdir()

    def __reduce__(self):
        self.pickled = True
        module = self.main.__module__
        if module == "__main__":
            spec, file = sys.modules[module].__spec__, sys.modules[module].__file__
            module = spec.name if spec else Path(file).stem
        return import_task, (module, command.program(), [*command.config_flags])


def import_task(module: str, program: list[str], flags: list[str]) -> Task:
    """Return the task of a program in this process, whose commands start the program with these flags of Hydra."""
    task = importlib.import_module(module).main.new_task()
    task.unpickled = True
    command.use_program(program, flags)
    return task


def run_hydra(configs: Path, name: str, task: Callable[[DictConfig], None]) -> None:
    """Compose `configs/name.yaml` and the command line, and call `task` with it. Raises Hydra's errors."""
    OmegaConf.register_new_resolver(
        "commented_config", lambda *, _root_: commented_yaml(_root_, configs, name), replace=True
    )
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its errors instead of printing them
    compat.shorten_argparse_errors()
    flags, overrides = compat.split_flags(sys.argv[1:])
    sys.argv[1:] = [*flags, *overrides]
    command.config_flags[:] = [flag for flag in flags if flag.startswith("--config-")]
    hydra.main(version_base="1.3", config_path=str(configs), config_name=name)(task)()


@exit_quietly()
def answer_help(configs: Path, name: str) -> None:
    """Print what --help or a tab completion asks for, and exit. If that fails, the program explains the error."""
    if not {"-h", "--help", "-sc", "--shell-completion"}.intersection(sys.argv):
        exit_on_early_interrupt()
        return
    compat.list_groups_quickly()
    try:
        run_hydra(configs, name, lambda cfg: None)
    except LostOutput:
        raise
    except Exception:  # the full program, which starts next, explains it
        return
    sys.exit()


def register(configs: Path, groups: dict[str, dict], resolvers: dict[str, dict[str, str]]) -> None:
    """Let Hydra find the choices in `groups` that have no YAML file, and the texts in `resolvers`. See cli()."""
    for group, choices in groups.items():
        for choice, node in choices.items():
            if choice != "*" and not (configs / group / f"{choice}.yaml").exists():
                ConfigStore.instance().store(group=group, name=choice, node=node)
    for resolver, texts in resolvers.items():
        OmegaConf.register_new_resolver(resolver, texts.__getitem__, replace=True)


def store_named_choices(groups: dict[str, dict], words: list[str]) -> None:
    """Let Hydra find the choices with a dot in `words`, in the groups that have the choice `*`. See cli()."""
    for word in words:
        group, _, value = word.partition("=")
        if "*" not in groups.get(group, ()) or "." not in value:
            continue
        with contextlib.suppress(HydraException):  # Hydra reads the word again, and then explains the error
            override = OverridesParser.create().parse_override(word)
            names = override.sweep_string_iterator() if override.is_sweep_override() else [override.value()]
            for name in (str(name).strip("'\"") for name in names):
                folder, _, file = f"{group}/{name}".replace("//", "/").rpartition("/")
                if "." in name:
                    ConfigStore.instance().store(file, dict.fromkeys(groups[group]["*"], name), group=folder)


def parse(cfg: DictConfig | dict, schema: type[T], complete: Callable[[DictConfig], None] | None = None) -> T:
    """Return `cfg` as an instance of the dataclass `schema`, with the home folder for `~` in every path.

    `complete` may change it before. Raises UserError if a key is unknown, or a value is missing or wrong.
    """
    try:
        if isinstance(cfg, dict):
            cfg = OmegaConf.create(cfg)
        expand_paths(cfg)
        if complete:
            complete(cfg)
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), cfg))
    except OmegaConfBaseException as error:
        raise UserError(explain_error(error, schema)) from error
    except OverflowError as error:
        raise UserError("a number of the config is too large for a float") from error


def expand_paths(cfg: DictConfig | ListConfig) -> None:
    """Expand `~` in every value of a config, in place. TEXT_KEYS stay. Raises UserError as expand_home() does."""
    for key in range(len(cfg)) if isinstance(cfg, ListConfig) else cfg:
        if key in TEXT_KEYS or OmegaConf.is_missing(cfg, key):
            continue
        with contextlib.suppress(InterpolationResolutionError):  # parse() raises it, unless `complete` mends the config
            value = cfg[key]
            if OmegaConf.is_config(value):
                expand_paths(value)
            elif isinstance(value, str) and value.startswith("~"):
                cfg[key] = str(expand_home(value))


def expand_home(path: str) -> Path:
    """Return the path with the home folder for `~` or `~user` at its start.

    Raises UserError if the user of `~user/name` does not exist, or has no home folder. `~name` without a slash stays
    as it is if there is no such user, because it may be a file.
    """
    expanded = os.path.expanduser(path)
    if expanded == path and re.match("~[^/]*/|~$", path):
        raise UserError(
            f"{path}: the home folder of this user is not known; write ./{path} for a folder whose name begins with ~"
        )
    return Path(expanded)


def path_argument(text: str) -> Path:
    """Do what expand_home() does, for argparse, which shows the message of an ArgumentTypeError only."""
    try:
        return expand_home(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def explain_error(error: Exception, schema: type) -> str:
    """Return one line for the user about an error of Hydra or OmegaConf."""
    message = str(error)
    known = list(key_names(schema))
    if isinstance(error, ConfigKeyError | MissingMandatoryValue) and error.full_key:
        return explain_key(error.full_key, known)
    if isinstance(error, OmegaConfBaseException):
        where = f"{error.full_key}: " if error.full_key else ""
        return where + message.splitlines()[0]
    if isinstance(error, OverrideParseException):
        key, equals, value = re.sub(r"\s*\n\s*", " ", error.override).partition("=")
        if not equals:
            return f"{key}: arguments are key=value; --help lists the keys"
        reason = "Hydra reads ( ) [ ] { } = , ~ $ and quotes as syntax"
        if not value.isascii():
            reason += ", and letters beyond ASCII in quotes only"
        quoted = shell_command(f"{key}={quote_exactly(value)}")
        return f"{key}={value}: {reason}; quote the value for Hydra too, inside the quotes for the shell: {quoted}"
    if match := re.search(r"'(.*)'. No match in the defaults list.\nTo append to your default list use (\S+)", message):
        return f"{match[2].lstrip('+')}: this group has no default choice; add a choice with a plus: {match[2]}"
    if match := re.match(r"Could not override '([^']+)'", message):
        return explain_key(match[1].split("@")[0], known)
    if match := re.search(r"Could not find '((?:hydra/)?[^'/]+)/([^']*)'", message):
        options = re.search(r"Available options in '[^']+':\n((?:\t.*\n?)*)", message)
        choices = ", ".join(options[1].split()) if options else "no choices there"
        if match[1] == "hydra/sweeper":
            ours = choices.replace(", ", " and ")
            return f"{match[1]}={match[2]}: only {ours} run here, because a sweeper such as Optuna's {NEEDS_RESULTS}"
        return f"{match[1]}={match[2]}: no such choice; {match[1]} is one of: {choices}"
    return " ".join(message.split())


def command_line_values(cfg: DictConfig, group: str) -> dict:
    """Return the keys of `group` that the command line sets, one by one or by a choice of the group: {key: value}."""
    keys: list[str] = []
    for word in command.arguments():
        key, _, value = word.lstrip("+").partition("=")
        if key == group:
            keys.extend(choice_keys(group, value.strip("'\"")))
        elif key.startswith(f"{group}."):
            keys.append(key.removeprefix(f"{group}."))
    return {key: cfg[group][key] for key in keys if key in cfg[group]}


def choice_keys(group: str, choice: str) -> list[str]:
    """Return the keys that the file of a choice sets, also through its defaults. --config-dir may have added it."""
    folders = [Path(source.path) for source in HydraConfig.get().runtime.config_sources if source.schema == "file"]
    files = [file for folder in folders if (file := folder / group / f"{choice.removesuffix('.yaml')}.yaml").exists()]
    content = OmegaConf.create(read_text(files[0])) if files else {}
    defaults = [name for name in content.get("defaults", []) if isinstance(name, str) and name != "_self_"]
    return [*(key for name in defaults for key in choice_keys(group, name)), *content]


def commented_yaml(cfg: DictConfig, configs: Path, name: str) -> str:
    """Return the composed config as YAML for --help. Each key has its comment from `name`.yaml or its group's file."""

    def lines_by_key(text: str) -> Iterable[tuple[tuple[str, str], str]]:
        """Yield ((group or "", key), line) for each line of YAML with one level of groups."""
        group = ""
        for line in text.splitlines():
            key = line.split(":")[0].strip()
            is_nested = line.startswith(" ")
            yield (group if is_nested else "", key), line
            group = group if is_nested else key

    comments = {}
    for path in configs.rglob("*.yaml"):
        if path.parent == configs and path.stem != name:  # another program's config
            continue
        group_of_file = "" if path.parent == configs else path.parent.name
        for (group, key), line in lines_by_key(read_text(path)):
            if " #" in line:
                comments[group_of_file or group, key] = line.partition(" #")[2]
    shown = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
    lines = []
    for key, line in lines_by_key(OmegaConf.to_yaml(shown)):
        lines.append(f"{line:<36}#{comments[key]}" if key in comments else line)
    return "\n".join(lines).replace("$", "$$")  # Hydra's help is a string.Template

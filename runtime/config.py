"""The command line: Hydra composes YAML, a dataclass says what is allowed, and a user's mistake is one line.

Hydra alone lets unknown keys through behind `+`, prints errors over several lines, and does not check values;
here the composed config is merged into a dataclass (OmegaConf's structured configs), whose __post_init__ checks ranges.
"""

import argparse
import difflib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

T = TypeVar("T")


class UserError(ValueError):
    """What the user asked for cannot be done; the message is one line: what happened, why, what to do."""


def check(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


def cli(
    schema: type[T],
    configs: Path,
    name: str,
    groups: dict[str, dict] | None = None,
    errors: tuple = (),
    complete: Callable[[DictConfig], None] | None = None,
):
    """Decorator: `main(cfg: schema)` becomes a Hydra program that reads `configs/name.yaml`.

    `groups` adds choices that have no YAML file ({"attn": {"mine": {"impl": "mine"}}}); `errors` are the exceptions,
    besides UserError, whose message is for the user: it is printed after `error: ` and the program exits with 1.
    `complete` may change what was composed, before it is checked.
    """

    def decorate(main: Callable[[T], None]) -> Callable[[], None]:
        def program() -> None:
            for group, choices in (groups or {}).items():
                for choice, node in choices.items():
                    if not (configs / group / f"{choice}.yaml").exists():
                        ConfigStore.instance().store(group=group, name=choice, node=node)
            OmegaConf.register_new_resolver(
                "annotated", lambda *, _root_: annotated(_root_, configs, name), replace=True
            )
            jobs = failed = 0

            def job(cfg: DictConfig) -> None:  # in a sweep the next job runs all the same
                nonlocal jobs, failed
                jobs += 1
                parsed = None
                try:
                    if complete:
                        complete(cfg)
                    parsed = parse(cfg, schema)
                    main(parsed)
                except (UserError, *errors) as error:
                    failed += 1
                    if parsed or os.environ.get("RANK", "0") == "0":  # what is wrong with a config, all ranks see
                        print(f"error: {error}", file=sys.stderr)

            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would have printed
            argparse.ArgumentParser.error = lambda _, message: sys.exit(f"error: {message}")  # instead of 8 lines
            try:
                hydra.main(version_base="1.3", config_path=str(configs), config_name=name)(job)()
            except Exception as error:
                if jobs:
                    raise
                # before any job began, whatever is wrong is on the command line or in a YAML file
                sys.exit(f"error: {explain(error, schema)}")
            if failed:
                sys.exit(1)

        return program

    return decorate


def parse(cfg: DictConfig, schema: type[T]) -> T:
    """`cfg` as an instance of the dataclass `schema`. UserError: an unknown key, a missing or a wrong value."""
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), cfg))
    except OmegaConfBaseException as error:
        raise UserError(explain(error, schema)) from error


def explain(error: Exception, schema: type) -> str:
    """One line for an error of Hydra's or OmegaConf's."""
    message = str(error)
    known = list(keys(schema))
    if isinstance(error, ConfigKeyError | MissingMandatoryValue) and error.full_key:
        return unknown_key(error.full_key, known)
    if isinstance(error, OmegaConfBaseException):
        where = f"{error.full_key}: " if error.full_key else ""
        return where + message.splitlines()[0]
    if isinstance(error, OverrideParseException):
        key, equals, value = " ".join(error.override.split()).partition("=")
        if not equals:
            return f"{key}: arguments are key=value; --help lists the keys"
        return (
            f"{key}={value} is no plain text to Hydra, to which ( ) [ ] {{ }} = , ~ $ and quotes mean something: quote "
            f"it for Hydra, too, inside the quotes for the shell: {shlex.quote(f'{key}={literal(value)}')}"
        )
    if match := re.search(r"'(.*)'. No match in the defaults list.\nTo append to your default list use (\S+)", message):
        return f"{match[2].lstrip('+')}: this choice is added to the others, with a plus: {match[2]}"
    if match := re.match(r"Could not override '([^']+)'", message):
        return unknown_key(match[1].split("@")[0], known)
    if match := re.search(r"Could not find '([^']+)/([^'/]*)'", message):
        options = re.search(r"Available options in '[^']+':\n((?:\t.*\n?)*)", message)
        listed = ", ".join(options[1].split()) if options else "no choices there"
        return f"{match[1]}={match[2]}: no such choice; {match[1]} is one of: {listed}"
    return " ".join(message.split())


def unknown_key(key: str, known: list[str]) -> str:
    """The line for a key that the schema lacks, with the nearest ones that it has."""
    if key in known:
        return f"{key} is missing: neither the command line nor a file in configs/ gives it"
    last = {name.rsplit(".", 1)[-1]: name for name in known}
    near = difflib.get_close_matches(key, known, 1, 0.75)
    near = near or [last[name] for name in difflib.get_close_matches(key.rsplit(".", 1)[-1], last, 1, 0.6)]
    siblings = [name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0]]
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(siblings or known)}"
    return f"unknown key {key}; {hint}"


def command(**changes: str) -> str:
    """What a shell would run to have this job again, with other values for some keys; of a sweep, this one job."""
    arguments = HydraConfig.get().overrides.task if HydraConfig.initialized() else sys.argv[1:]
    kept = [word for word in arguments if word.partition("=")[0].lstrip("+") not in changes]
    module = getattr(sys.modules["__main__"].__spec__, "name", "")
    start = ["python", "-m", module] if module.startswith("scripts.") else ["python", sys.argv[0]]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        start = ["torchrun", "--standalone", f"--nproc_per_node={os.environ['LOCAL_WORLD_SIZE']}", sys.argv[0]]
    return shlex.join([*start, *kept, *(f"{key}={quoted(value)}" for key, value in changes.items())])


def quoted(value: str) -> str:
    """As Hydra's grammar wants a value with a comma or a parenthesis in it."""
    if re.fullmatch(r"[\w./:%@+-]*", value):
        return value
    return literal(value)


def literal(value: str) -> str:
    """The value in quotes for Hydra and OmegaConf, to whom ( , $ \\ and = would mean something: exactly this text."""
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # no interpolation
    return '"' + re.sub(r'(\\*)("|\Z)', lambda run: 2 * run[1] + run[2].replace('"', r"\""), value) + '"'


def given(cfg: DictConfig, group: str, configs: Path) -> dict:
    """The keys of `group` that the command line gives, one by one or by a choice of the group, with their values."""
    keys = {}
    for word in HydraConfig.get().overrides.task if HydraConfig.initialized() else ():
        key, _, value = word.lstrip("+").partition("=")
        if key == group:
            keys |= dict.fromkeys(OmegaConf.load(configs / group / f"{value}.yaml"))
        elif key.startswith(f"{group}."):
            keys[key.removeprefix(f"{group}.")] = None
    return {key: cfg[group][key] for key in keys if key in cfg[group]}


def annotated(cfg: DictConfig, configs: Path, name: str) -> str:
    """For --help: the composed config as YAML, each key with the comment beside it in `name`.yaml or its group."""

    def keyed(text: str) -> Iterable[tuple[tuple[str, str], str]]:
        """((group or "", key), line) of YAML with one level of groups."""
        group = ""
        for line in text.splitlines():
            key = line.split(":")[0]
            group = group if line.startswith(" ") else key
            yield (group if line.startswith(" ") else "", key.strip()), line

    comments = {}
    for path in configs.rglob("*.yaml"):
        if path.parent == configs and path.stem != name:  # another program's
            continue
        for (group, key), line in keyed(path.read_text()):
            if " #" in line:
                comments[group if path.parent == configs else path.parent.name, key] = line.partition(" #")[2]
    shown = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
    lines = (
        f"{line:<36}#{comments[key]}" if key in comments else line for key, line in keyed(OmegaConf.to_yaml(shown))
    )
    return "\n".join(lines).replace("$", "$$")  # Hydra's help is a string.Template


def keys(schema: type, prefix: str = "") -> Iterable[str]:
    """Every key of a dataclass, groups and leaves, dotted."""
    for field in fields(schema):
        yield prefix + field.name
        if is_dataclass(field.type):
            yield from keys(field.type, f"{prefix}{field.name}.")

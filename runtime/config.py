"""The command line: Hydra composes YAML, a dataclass says what is allowed, and a user's mistake is one line.

Hydra alone lets unknown keys through behind `+`, prints errors over several lines, and does not check values;
here the composed config is merged into a dataclass (OmegaConf's structured configs), whose __post_init__ checks ranges.
"""

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

T = TypeVar("T")


class UserError(ValueError):
    """What the user asked for cannot be done; the message is one line: what happened, why, what to do."""


def check(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


def cli(schema: type[T], configs: Path, name: str, groups: dict[str, dict] | None = None, errors: tuple = ()):
    """Decorator: `main(cfg: schema)` becomes a Hydra program that reads `configs/name.yaml`.

    `groups` adds choices that have no YAML file ({"attn": {"mine": {"impl": "mine"}}}); `errors` are the exceptions,
    besides UserError, whose message is for the user: it is printed after `error: ` and the program exits with 1.
    """

    def decorate(main: Callable[[T], None]) -> Callable[[], None]:
        def program() -> None:
            for group, choices in (groups or {}).items():
                for choice, node in choices.items():
                    if not (configs / group / f"{choice}.yaml").exists():
                        ConfigStore.instance().store(group=group, name=choice, node=node)
            mistakes = []

            def job(cfg: DictConfig) -> None:  # in a sweep the next job runs all the same
                try:
                    main(parse(cfg, schema))
                except (UserError, *errors) as error:
                    mistakes.append(error)
                    print(f"error: {error}", file=sys.stderr)

            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would have printed
            try:
                hydra.main(version_base="1.3", config_path=str(configs), config_name=name)(job)()
            except (HydraException, OmegaConfBaseException) as error:
                sys.exit(f"error: {explain(error, schema)}")
            if mistakes:
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
    if isinstance(error, ConfigKeyError):
        return unknown_key(error.full_key, known)
    if isinstance(error, OmegaConfBaseException):
        where = f"{error.full_key}: " if error.full_key else ""
        return where + message.splitlines()[0]
    if match := re.match(r"Could not override '([^']+)'", message):
        return unknown_key(match[1].split("@")[0], known)
    if match := re.search(r"Could not find '([^']+)/([^'/]+)'", message):
        options = re.search(r"Available options in '[^']+':\n((?:\t.*\n?)*)", message)
        listed = ", ".join(options[1].split()) if options else "no choices there"
        return f"{match[1]}={match[2]}: no such choice; {match[1]} is one of: {listed}"
    return " ".join(message.split())


def unknown_key(key: str, known: list[str]) -> str:
    """The line for a key that the schema lacks, with the nearest ones that it has."""
    last = {name.rsplit(".", 1)[-1]: name for name in known}
    near = difflib.get_close_matches(key, known, 1, 0.75)
    near = near or [last[name] for name in difflib.get_close_matches(key.rsplit(".", 1)[-1], last, 1, 0.6)]
    siblings = [name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0]]
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(siblings or known)}"
    return f"unknown key {key}; {hint}"


def keys(schema: type, prefix: str = "") -> Iterable[str]:
    """Every key of a dataclass, groups and leaves, dotted."""
    for field in fields(schema):
        yield prefix + field.name
        if is_dataclass(field.type):
            yield from keys(field.type, f"{prefix}{field.name}.")

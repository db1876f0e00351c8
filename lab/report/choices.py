"""Group runs into choices of kernels, name each choice, and compare it with its baseline."""

import contextlib
import math
import re
import shlex
from dataclasses import dataclass
from functools import cached_property

from lab.report.colours import FP8
from lab.report.describe import BASELINE, choice_name, commit, kernels_family, prefill_name, prompt_tokens
from lab.report.presets import model_title, preset_of
from lab.report.user_command import user_command
from lab.rerun import LONGEST, brief, is_own, rerun_command
from lab.sweep import compare
from lab.sweep.table import comparable_speed, has_figures, median_speed, shown_run, speed, speed_key, val_loss

# The names of baselines start with these. compile may have another mode: "compile, MODE · sdpa"
COMPILED, EAGER = re.compile(rf"{BASELINE[0]}(, [\w-]+)? · {BASELINE[1]}"), "eager ·"


@dataclass
class Choice:
    """Runs with equal settings on one machine, in the order in which they ran: of training, or of generation."""

    rows: list[dict]
    number: int = 0
    qualifier: str = ""  # the settings that distinguish it from choices of the same name: "124M · bf16"
    has_lowest_loss: bool = False  # of several choices, its validation loss is the lowest
    base: "Choice | None" = None  # the choice that it is compared with; None without a speed
    ratio: compare.Ratio | None = None  # of their speeds; None if there are too few timed intervals
    is_alone: bool = False  # no other choice is compared with its base
    from_results: bool = False  # the rows are of results/

    @property
    def row(self) -> dict:
        """The first run with a speed; the first run if none has one."""
        return next((row for row in self.rows if speed(row)), self.rows[0])

    @cached_property
    def name(self) -> str:
        """The kernels and the attention, or the decoder: "triton, mlp eager + compile · flash", "decode int8"."""
        return choice_name(self.row) or self.row.get("name", "a row without a name")

    @property
    def colour_key(self) -> str:
        """Its key in choice_colours(): its name, or FP8 for our kernels in fp8, whatever their backends."""
        is_ours = self.precision == FP8 and kernels_family(self.name) in ("triton", "gluon")
        return FP8 if is_ours else self.name

    @property
    def title(self) -> str:
        return f"{self.name} ({self.qualifier})" if self.qualifier else self.name

    @property
    def generates(self) -> bool:
        return compare.is_generation(self.row)

    @cached_property
    def preset(self) -> str:
        """The preset of the model, such as "gpt2_124m"; empty if the run ended before it had a model."""
        return preset_of(self.row)

    @property
    def precision(self) -> str:
        return str(self.row.get("config", {}).get("precision", ""))

    @property
    def speeds(self) -> list[float]:
        """The tokens/s of each run that has a speed."""
        return [speed(row) for row in self.rows if speed(row)]

    @property
    def speed(self) -> float | None:
        """The median of the runs, in tokens/s."""
        return median_speed(self.rows) or None

    @property
    def comparable_speed(self) -> float | None:
        """The tokens/s by which tables rank this choice, so that their order follows the ratios."""
        return comparable_speed(self.rows, self.base.rows, self.ratio) if self.base else self.speed

    @property
    def spread(self) -> tuple[float, float]:
        """The slowest and the fastest run in tokens/s; p20 and p80 of the steps if there is one run."""
        if len(self.speeds) > 1:
            return min(self.speeds), max(self.speeds)
        return tuple(self.row.get(f"{speed_key(self.row)}/{quantile}") or self.speed for quantile in ("p20", "p80"))

    @property
    def val_loss(self) -> float | None:
        """The validation loss that the sweep's table shows: of the run with the median speed; None without one."""
        runs = list(filter(has_figures, self.rows))
        return val_loss(shown_run(runs)) if runs else None

    @property
    def loss_text(self) -> str:
        """The validation loss, such as "best 2.5442" for the lowest of several choices; empty without one."""
        if self.val_loss is None:
            return ""
        return f"best {self.val_loss:.4f}" if self.has_lowest_loss else f"{self.val_loss:.4f}"

    @property
    def memory(self) -> float | None:
        """The largest peak of the runs, in GiB."""
        peaks = [row.get("mem/peak_allocated_gib") or row.get("mem/peak_rss_gib") for row in self.rows]
        return max(filter(None, peaks), default=None)

    @property
    def ratio_text(self) -> str:
        """The ratio of the speeds, such as "1.200x (1.194 to 1.206)", or "baseline"; empty if nothing is compared."""
        if self.base is None or self.is_alone:
            return ""
        if self.base is self:
            return "baseline"
        return str(self.ratio or f"{self.speed / self.base.speed:.2f}x")

    @cached_property
    def command(self) -> str:
        """The command to copy: the row's own; for results/, whose rows may name absent files, user_command()."""
        return user_command(self.row) if self.from_results else rerun_command(self.row)


def group_runs(rows: list[dict], from_results: bool = False) -> list[Choice]:
    """Make choices of rows, oldest first."""
    choices: list[Choice] = []
    for row in rows:
        match = next((choice for choice in choices if is_same_choice(row, choice.row)), None)
        if match:
            match.rows.append(row)
        else:
            choices.append(Choice([row], number=len(choices), from_results=from_results))
    return choices


def is_same_choice(row: dict, other: dict) -> bool:
    """Return whether both rows have the same config, the same machine, and the same system (scripts.peers).

    The row of a run that never started has no machine, and matches any machine.
    """
    if not ("config" in row and "config" in other) or compare.peer_name(row) != compare.peer_name(other):
        return False
    return compare.settings(row) == compare.settings(other) and not compare.differences(row, other)


def set_qualifiers(choices: list[Choice]) -> None:
    """Set the qualifier of each choice: the settings that distinguish it from the others.

    All choices are of training, or all of generation. The qualifier has the model, the precision and the length of a
    training's sequences if they vary among all choices. It has another setting only if the setting varies among choices
    whose titles are equal so far. If titles are still equal, it has the varying_overrides().
    """
    settings = [identifying_settings(choice) for choice in choices]
    for name in max(settings, key=len, default=()):  # a run that failed before it had a config has fewer
        if name == "number":
            add_qualifiers(choices, varying_overrides(choices))
        values = [each.get(name, "") for each in settings]
        titles = [choice.title for choice in choices]
        if name in ("model", "precision", "length"):
            if len({*values} - {""}) < 2:  # a run that never started has none
                continue
            titles = [""] * len(choices)
        add_qualifiers(choices, varying_texts(titles, values))


def add_qualifiers(choices: list[Choice], texts: list[str]) -> None:
    for choice, text in zip(choices, texts, strict=True):
        choice.qualifier = " · ".join(filter(None, (choice.qualifier, text)))


def varying_overrides(choices: list[Choice]) -> list[str]:
    """Return what varies in the commands of the choices with the same title: "optim.learning_rate=0.003"."""
    overrides = [command_overrides(choice.row) for choice in choices]
    same_title: dict[str, list[dict[str, str]]] = {}
    for choice, values in zip(choices, overrides, strict=True):
        same_title.setdefault(choice.title, []).append(values)
    texts = []
    for choice, values in zip(choices, overrides, strict=True):
        others = same_title[choice.title]
        varying = [key for key in values if any(other.get(key) != values[key] for other in others)]
        texts.append(", ".join(brief(f"{key}={values[key]}") for key in varying))
    return texts


def command_overrides(row: dict) -> dict[str, str]:
    """Return {key: value} of the overrides in a row's command, except keys without an effect on its figures."""
    command, words = row.get("command"), []
    if isinstance(command, str) and len(command) <= LONGEST:
        with contextlib.suppress(ValueError):  # it is no shell command
            words = shlex.split(command)
    pairs = (word.lstrip("+").split("=", 1) for word in words if "=" in word and not word.startswith("-"))
    return {key: value for key, value in pairs if not is_own(key)}


def varying_texts(titles: list[str], texts: list[str]) -> list[str]:
    """Return each text that varies among those with the same title; "" for the others."""
    variants: dict[str, set[str]] = {}
    for title, text in zip(titles, texts, strict=True):
        variants.setdefault(title, set()).add(text)
    return [text if len(variants[title]) > 1 else "" for title, text in zip(titles, texts, strict=True)]


def identifying_settings(choice: Choice) -> dict[str, str]:
    """Return the settings that a qualifier may have, the most important first. The last is unique."""
    row, config = choice.row, choice.row.get("config", {})
    settings = {"model": model_title(row), "precision": choice.precision}
    if choice.generates:
        settings["batch"] = f"batch {compare.sequences(row)}"
        settings["prompt"] = f"prompt {prompt_tokens(row):,}"
        settings["new tokens"] = f"{config['max_new_tokens']} new tokens"
        settings["prefill"] = prefill_name(row)
    elif config:
        train, gpus = config.get("train", {}), row.get("world_size", 1)
        settings["length"] = f"T {train.get('block_size')}"
        settings["batch"] = f"{train.get('batch_size')} x {train.get('block_size')}"
        settings["GPUs"] = f"{gpus} GPUs" if gpus > 1 else "1 GPU"
        settings["steps"] = f"{train.get('max_steps')} steps"
    settings["device"] = row.get("env", {}).get("device", "")
    settings["commit"] = commit(row) if "env" in row else ""
    return settings | {"number": f"choice {choice.number}"}


def mark_lowest_loss(choices: list[Choice]) -> None:
    """Mark the lowest validation loss, if several choices have one."""
    losses = [choice.val_loss for choice in choices if choice.val_loss is not None]
    for choice in choices:
        choice.has_lowest_loss = len(losses) > 1 and choice.val_loss == min(losses)


def add_unmeasured_losses(measured: list[Choice], choices: list[Choice], sort: str) -> list[Choice]:
    """Return the measured choices, and then those of `choices` that have a validation loss but no speed.

    With sort="val/loss" the lowest loss comes first. Among equal losses, the order stays.
    """
    listed = [*measured, *(choice for choice in choices if not choice.speed and choice.val_loss is not None)]
    if sort == "val/loss":
        listed.sort(key=lambda choice: math.inf if choice.val_loss is None else choice.val_loss)
    return listed


def compare_choices(choices: list[Choice], force: bool, from_results: bool) -> None:
    """Compare each choice with the baseline of its settings. All choices must have a speed.

    The baseline is the choice with the kernels of the sweep's first job, else compile · sdpa, else eager, else the
    choice that ran first. Rows from results/ have no first job. If compile · sdpa ran in several modes of
    torch.compile, the fastest is the baseline, also if the first job had another one. With `force`, the first choice is
    the only baseline.
    """
    first = None if from_results or not choices else choices[0].name
    for group in comparable_groups(choices):
        compiled = sorted((choice for choice in group if COMPILED.match(choice.name)), key=lambda choice: -choice.speed)
        as_first = [choice for choice in group if first and choice.name.startswith(first)]
        if as_first and as_first[0] in compiled:
            as_first = []
        eager = [choice for choice in group if choice.name.startswith(EAGER)]
        base = choices[0] if force else [*as_first, *compiled, *eager, *group][0]
        for choice in group:
            choice.base, choice.ratio = base, compare.ratio(choice.rows, base.rows)
            choice.is_alone = len(choices if force else group) == 1


def comparable_groups(choices: list[Choice]) -> list[list[Choice]]:
    """Group choices that differ in nothing but their kernels."""
    groups: list[list[Choice]] = []
    for choice in choices:
        group = next((group for group in groups if not compare.differences(choice.row, group[0].row)), None)
        if group:
            group.append(choice)
        else:
            groups.append([choice])
    return groups

"""Group runs into choices of kernels, name each choice, and compare it with its baseline."""

import json
import statistics
from dataclasses import dataclass, field

from lab.report.describe import BASELINE, choice_name, commit, model_size, prefill_name, prompt_tokens
from lab.rerun import rerun_command
from lab.sweep import compare
from lab.sweep.table import speed, speed_key

BASELINES = " · ".join(BASELINE), "eager ·"  # the names of baselines start with these


@dataclass
class Comparison:
    """A choice's speed over its baseline's."""

    base: "Choice"
    value: float
    ratio: compare.Ratio | None  # with a 95% interval; None if there are too few timed intervals for one
    differs: list[str]  # what differs besides the kernels; only --force compares such choices

    @property
    def short(self) -> str:
        """The ratio without the name of the baseline: "1.200x (1.194 to 1.206), other precision"."""
        text = str(self.ratio or f"{self.value:.2f}x")
        return f"{text}, other {setting_names(self.differs)}" if self.differs else text


@dataclass
class Choice:
    """Runs with equal settings on one machine, in the order in which they ran: of training, or of generation."""

    rows: list[dict]
    losses: dict[int, float] = field(default_factory=dict)  # step -> training loss, from the first run that has any
    times_training: bool = True  # False if the time of its steps includes evaluations
    number: int = 0
    model: str = ""  # "124M"
    qualifier: str = ""  # the settings that distinguish it from choices of the same name: "124M · bf16"
    comparison: Comparison | None = None  # None without a speed
    not_compared: str = ""  # why no other choice is compared with it

    @property
    def id(self) -> str:
        return f"choice{self.number}"

    @property
    def row(self) -> dict:
        """The first run with a speed; the first run if none has one."""
        return next((row for row in self.rows if speed(row)), self.rows[0])

    @property
    def name(self) -> str:
        """The kernels and the attention, or the decoder: "triton, mlp eager + compile · flash", "decode int8"."""
        return choice_name(self.row.get("config", {})) or self.row.get("name", "a row without a name")

    @property
    def title(self) -> str:
        return f"{self.name} ({self.qualifier})" if self.qualifier else self.name

    @property
    def generates(self) -> bool:
        return compare.is_generation(self.row)

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
        return statistics.median(self.speeds) if self.speeds else None

    @property
    def spread(self) -> tuple[float, float]:
        """The slowest and the fastest run in tokens/s; p20 and p80 of the steps if there is one run."""
        if len(self.speeds) > 1:
            return min(self.speeds), max(self.speeds)
        return tuple(self.row.get(f"{speed_key(self.row)}/{quantile}") or self.speed for quantile in ("p20", "p80"))

    @property
    def memory(self) -> float | None:
        """The largest peak of the runs, in GiB."""
        peaks = [row.get("mem/peak_allocated_gib") or row.get("mem/peak_rss_gib") for row in self.rows]
        return max(filter(None, peaks), default=None)

    @property
    def is_baseline(self) -> bool:
        return self.comparison is not None and self.comparison.base is self

    @property
    def comparison_text(self) -> str:
        """The ratio, "baseline", or why nothing is compared with it. The choice must have a comparison."""
        return (self.not_compared or "baseline") if self.is_baseline else self.comparison.short

    @property
    def command(self) -> str:
        return rerun_command(self.row)

    def differences(self, other: "Choice") -> list[str]:
        """Return what differs besides the kernels, a line each."""
        return compare.differences(self.row, other.row)

    def payback(self) -> float | None:
        """Return the steps after which this choice has caught up with its baseline: lab.sweep.compare.payback_steps.

        An old row without timed intervals counts as one interval, its median step. None for a baseline, and for a
        choice that never catches up or cannot be compared.
        """
        if self.comparison is None or self.comparison.differs or self.is_baseline:
            return None
        pair = self.row, self.comparison.base.row
        if any(row.get("perf/first_step_s") is None for row in pair):
            return None
        row, base = (row | {"perf/laps_s": compare.step_seconds(row) or [row["perf/step_ms"] / 1e3]} for row in pair)
        return compare.payback_steps(row, base)


def setting_names(differences: list[str]) -> str:
    """Return the names of the settings that differ, three at most."""
    names = [line.partition(":")[0].rpartition(".")[2] for line in differences]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def group_runs(runs: list[tuple[dict, dict[int, float]]]) -> list[Choice]:
    """Make choices of (row, losses by step), oldest first."""
    choices: list[Choice] = []
    sizes = {json.dumps(row["config"]["model"]): model_size(row) for row, _ in runs if row.get("parameters")}
    for row, losses in runs:
        choice = Choice([row], losses, number=len(choices))
        match = next((other for other in choices if is_same_choice(choice, other)), None)
        if match:
            match.rows.append(row)
            match.losses = match.losses or losses
        else:
            choice.model = model_size(row) or sizes.get(json.dumps(row.get("config", {}).get("model")), "")
            choices.append(choice)
    return choices


def is_same_choice(one: Choice, other: Choice) -> bool:
    """Return whether both have the same config and the same machine.

    A row of a run that never started has no machine, and matches any machine.
    """
    row, other_row = one.row, other.row
    if not ("config" in row and "config" in other_row):
        return False
    if compare.settings_key(row) != compare.settings_key(other_row):
        return False
    return not ("env" in row and "env" in other_row and one.differences(other))


def set_qualifiers(choices: list[Choice]) -> None:
    """Set the qualifier of each choice: the settings that distinguish it from the others.

    All choices are of training, or all of generation.
    The qualifier has the model and the precision if they vary among all choices. It has another setting only if the
    setting varies among choices whose titles are equal so far.
    """
    settings = [identifying_settings(choice).values() for choice in choices]
    for position, values in enumerate(zip(*settings, strict=True)):
        groups = [choice.title if position > 1 else "" for choice in choices]  # 0 and 1 are the model and the precision
        variants: dict[str, set[str]] = {}
        for group, value in zip(groups, values, strict=True):
            variants.setdefault(group, set()).add(value)
        for choice, group, value in zip(choices, groups, values, strict=True):
            if value and len(variants[group]) > 1:
                choice.qualifier = " · ".join(filter(None, (choice.qualifier, value)))


def identifying_settings(choice: Choice) -> dict[str, str]:
    """Return the settings that a qualifier may have, the most important first. The last is unique."""
    row = choice.row
    return {
        "model": choice.model,
        "precision": choice.precision,
        **(generation_sizes(row) if choice.generates else training_sizes(row)),
        "device": row.get("env", {}).get("device", ""),
        "commit": commit(row) if "env" in row else "",
        "id": choice.id,
    }


def training_sizes(row: dict) -> dict[str, str]:
    train, gpus = row.get("config", {}).get("train", {}), row.get("world_size", 1)
    return {
        "batch": f"{train.get('batch_size')} x {train.get('block_size')}" if train else "",
        "GPUs": f"{gpus} GPUs" if gpus > 1 else "1 GPU",
        "steps": f"{train.get('max_steps')} steps",
    }


def generation_sizes(row: dict) -> dict[str, str]:
    return {
        "batch": f"batch {compare.sequences(row)}",
        "prompt": f"prompt {prompt_tokens(row):,}",
        "new tokens": f"{row['config']['max_new_tokens']} new tokens",
        "prefill": prefill_name(row["config"]),
    }


def compare_choices(choices: list[Choice], force: bool, from_results: bool) -> None:
    """Compare each choice with the baseline of its settings. All choices must have a speed.

    The baseline is the choice with the kernels of the sweep's first job, else compile · sdpa, else eager, else the
    choice that ran first. Rows from results/ have no first job. With `force`, the first choice is the only baseline.
    """
    prefixes = BASELINES if from_results or not choices else (choices[0].name, *BASELINES)
    for group in comparable_groups(choices):
        candidates = [choice for prefix in prefixes for choice in group if choice.name.startswith(prefix)]
        base = choices[0] if force else [*candidates, *group][0]
        for choice in group:
            ratio = compare.ratio(choice.rows, base.rows)
            value = ratio.value if ratio else choice.speed / base.speed
            differs = [] if base in group else choice.differences(base)
            choice.comparison = Comparison(base, value, ratio, differs)
        if len(group) == 1 and base is group[0] and base is not choices[0]:
            reason = "alone at its settings" if from_results else f"other {setting_names(base.differences(choices[0]))}"
            base.not_compared = f"not compared: {reason}"


def comparable_groups(choices: list[Choice]) -> list[list[Choice]]:
    """Group choices that differ in nothing but their kernels."""
    groups: list[list[Choice]] = []
    for choice in choices:
        group = next((group for group in groups if not choice.differences(group[0])), None)
        if group:
            group.append(choice)
        else:
            groups.append([choice])
    return groups

"""The rows in a folder, the choices of kernels that they are runs of, and how these compare."""

import json
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from runtime import compare
from runtime.compare import Ratio
from runtime.config import UserError, check
from runtime.console import speed
from runtime.run import read_row
from scripts.report import YARDSTICK, commit, newest_choices

BASES = " · ".join(YARDSTICK), "eager ·"  # how names of baselines start
BENCHES = ("kernels", "context", "attention")  # names of .jsonl files besides train.jsonl
OPS = ("norm", "mlp", "loss")


@dataclass
class Comparison:
    """Of a choice with its baseline; `differs` says what else sets them apart, where that was forced."""

    base: "Choice"
    value: float
    interval: Ratio | None  # None: a row of them is older than its laps
    differs: list[str]

    @property
    def brief(self) -> str:
        told = str(self.interval or f"{self.value:.2f}x")
        return f"{told}, other {keys(self.differs)}" if self.differs else told

    def __str__(self) -> str:
        told = str(self.interval or f"{self.value:.2f}x, without an interval,")
        told = f"{told} of {self.base.title}"
        return f"{told}; but {'; '.join(self.differs)}" if self.differs else told


def again(row: dict) -> str:
    """The command of a row, for a folder of its own."""
    words = shlex.split(row.get("command", ""))
    return shlex.join(word for word in words if word.split("=")[0] not in ("out_dir", "train.resume", "logger.group"))


@dataclass
class Choice:
    """Runs of the same command on the same machine, in the order in which they ran."""

    rows: list[dict]
    losses: dict[int, float] = field(default_factory=dict)  # step -> training loss, of the first run
    timed: bool = True  # False: its time went into evaluations, too
    number: int = 0
    model: str = ""
    apart: str = ""  # what sets it apart from others of the same name
    against: Comparison | None = None
    uncompared: str = ""  # why with itself alone

    @property
    def id(self) -> str:
        return f"choice{self.number}"

    @property
    def row(self) -> dict:
        """The run that stands for it: the first that went well."""
        return next((row for row in self.rows if speed(row)), self.rows[0])

    @property
    def name(self) -> str:
        """`triton, mlp eager + compile · flash`"""
        return name(self.row.get("config", {})) or self.row.get("name", "a row without a name")

    @property
    def title(self) -> str:
        return f"{self.name} ({self.apart})" if self.apart else self.name

    @property
    def precision(self) -> str:
        return self.row.get("config", {}).get("precision", "")

    @property
    def speeds(self) -> list[float]:
        return [each for row in self.rows if (each := speed(row))]

    @property
    def speed(self) -> float | None:
        return statistics.median(self.speeds) if self.speeds else None

    @property
    def interval(self) -> tuple[float, float]:
        """Of the runs, or p20 to p80 of a single one."""
        if len(self.speeds) > 1:
            return min(self.speeds), max(self.speeds)
        return tuple(self.row.get(f"perf/tokens_per_sec/{p}") or self.speed for p in ("p20", "p80"))

    @property
    def memory(self) -> float | None:
        """GiB, the largest peak of the runs."""
        peaks = [row.get("mem/peak_allocated_gib") or row.get("mem/peak_rss_gib") for row in self.rows]
        return max(filter(None, peaks), default=None)

    @property
    def versus(self) -> str:
        """How it compares, in a few words."""
        return self.against.brief if self.against.base is not self else self.uncompared or "baseline"

    @property
    def command(self) -> str:
        """Runs it again, in a folder of its own."""
        return again(self.row)

    def differences(self, other: "Choice") -> list[str]:
        return compare.differences(self.row, other.row)

    def payback(self) -> float | None:
        """Steps, as runtime.compare.payback has it; of rows without laps, too."""
        if not self.against or self.against.differs or self is self.against.base:
            return None
        pair = [row for row in (self.row, self.against.base.row) if row.get("perf/first_step_s") is not None]
        pair = [row | {"perf/laps_s": compare.laps(row) or [row["perf/step_ms"] / 1e3]} for row in pair]
        return compare.payback(*pair) if len(pair) == 2 else None


@dataclass
class Source:
    """All that a folder holds."""

    folder: Path
    choices: list[Choice]
    benches: dict[str, list[dict]]  # kernels, context, attention: rows, oldest first
    kept: bool  # a folder of results/, and no sweep
    unread: list[Path] = field(default_factory=list)  # result.json that are no rows

    @property
    def timed(self) -> list[Choice]:
        """Those with a speed, by model and precision, fastest first."""
        found = [choice for choice in self.choices if choice.timed and choice.speed]
        return sorted(found, key=lambda each: (size(each.model), each.precision, -each.speed))

    @property
    def failed(self) -> Iterator[tuple[Choice, dict]]:
        """Rows without a speed."""
        return ((choice, row) for choice in self.choices for row in choice.rows if choice.timed and not speed(row))


def read(folder: Path, force: bool = False) -> Source:
    """The rows of a sweep's folder, of one run's, or of one in results/. UserError: there are none."""
    jobs = sorted({*folder.glob("*/result.json"), *folder.glob("result.json")}, key=lambda path: natural(path.parent))
    rows = [(row, path.parent) for path in jobs if (row := read_row(path.parent))]
    trained = [each for each in rows if "probe" not in each[0].get("config", {}) and "gen/tokens" not in each[0]]
    kept = (folder / "train.jsonl").exists()
    if kept:
        trained += [(row, None) for row in newest_choices(lines(folder / "train.jsonl"))]
    choices = grouped(trained, folder)
    benches = {kind: [] for kind in BENCHES}
    for kind, found in benches.items():
        for path in sorted({*folder.glob(f"*/{kind}.jsonl"), *folder.glob(f"{kind}.jsonl")}):
            found += lines(path)
    benches["context"] += [row for row, _ in rows if "probe" in row.get("config", {})]
    check(
        choices or any(benches.values()),
        f"{folder} has no */result.json and no train.jsonl: name the folder of a sweep, or one in results/",
    )
    if kept:
        for choice in choices:  # as in the README's table of throughput
            choice.timed = not choice.row["config"]["train"]["eval_every"]
    tell_apart(choices)
    compared([choice for choice in choices if choice.timed and choice.speed], force, kept)
    return Source(folder, choices, benches, kept, [path for path in jobs if not read_row(path.parent)])


def keys(differences: list[str]) -> str:
    """The names of the settings alone, of three at most."""
    found = [line.partition(":")[0].rpartition(".")[2] for line in differences]
    return ", ".join(found[:3]) + f" and {len(found) - 3} more" * (len(found) > 3)


def lines(path: Path) -> list[dict]:
    found = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
        try:
            found.append(json.loads(line))
            check(isinstance(found[-1], dict), "no object")
        except ValueError:
            raise UserError(f"{path}: line {number} is no row, but cut short or changed; delete it") from None
    return found


def grouped(rows: list[tuple[dict, Path | None]], folder: Path) -> list[Choice]:
    """Runs of one choice together."""
    choices: list[Choice] = []
    models = {json.dumps(row["config"]["model"]): millions(row) for row, _ in rows if row.get("parameters")}
    for row, path in rows:
        new = Choice([row], losses(row, path, folder), number=len(choices))
        home = next((choice for choice in choices if "config" in row and same(new, choice)), None)
        if home:
            home.rows.append(row)
            home.losses = home.losses or new.losses
        else:
            config = row.get("config", {})
            new.model = millions(row) or models.get(json.dumps(config.get("model")), "")
            choices.append(new)
    return choices


def same(one: Choice, other: Choice) -> bool:
    """Whether they are runs of one choice. A run that ended before it began does not know its machine."""
    mine, its = one.row, other.row
    if "config" not in its or compare.alike(mine) != compare.alike(its):
        return False
    return not ("env" in mine and "env" in its and one.differences(other))


def losses(row: dict, path: Path | None, folder: Path) -> dict[int, float]:
    """Of metrics.jsonl beside it, or of the curve that was kept of a run as long."""
    file = path / "metrics.jsonl" if path else folder / "curves" / f"{row['name']}.jsonl"
    found = {line["step"]: line["train/loss"] for line in lines(file) if line.get("train/loss") is not None}
    return found if path or max(found, default=0) == row.get("steps") else {}


def name(config: dict) -> str:
    """Of a choice: its kernels and its attention. Of other configs nothing."""
    if not {"kernels", "attn"} <= config.keys():
        return ""
    kernels, attn = config["kernels"], config["attn"]
    most = Counter(kernels[op] for op in OPS).most_common(1)[0][0]
    told = ", ".join([most, *(f"{op} {kernels[op]}" for op in OPS if kernels[op] != most)])
    if kernels["compile"]:
        told = "compile" if told == "eager" else f"{told} + compile"
    return f"{told} · {attn['impl']}" + (f" {attn['version']}" if attn.get("version") else "")


def millions(row: dict) -> str:
    return f"{row['parameters'] / 1e6:.0f}M" if row.get("parameters") else ""


def size(model: str) -> float:
    return float(model[:-1] or 0) if model else 0.0


def natural(path: Path) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def tell_apart(choices: list[Choice]) -> None:
    """Model and precision where they vary on the page, and then what it takes."""

    def settings(choice: Choice) -> list[str]:
        row, config = choice.row, choice.row.get("config", {})
        train, gpus = config.get("train", {}), row.get("world_size", 1)
        size = f"{train.get('batch_size')} x {train.get('block_size')}" if train else ""
        parts = [
            choice.model,
            choice.precision,
            size,
            f"{gpus} GPU{'s' * (gpus > 1)}",
            f"{train.get('max_steps')} steps",
        ]
        return [*parts, row.get("env", {}).get("device", ""), commit(row) if "env" in row else "", choice.id]

    told = {choice.id: settings(choice) for choice in choices}
    names: dict[str, tuple[str, ...]] = {choice.id: (choice.name,) for choice in choices}
    for place in range(len(told[choices[0].id]) if choices else 0):
        values: dict[tuple, set[str]] = {}
        for key, name in names.items():
            values.setdefault(name if place > 1 else (), set()).add(told[key][place])
        for key, name in names.items():
            if len(values[name if place > 1 else ()]) > 1 and told[key][place]:
                names[key] = (*name, told[key][place])
    for choice in choices:
        choice.apart = " · ".join(names[choice.id][1:])


def compared(choices: list[Choice], force: bool, kept: bool) -> None:
    """Each beside the baseline of its settings: the kernels of the sweep's first job; where these have no row, or rows
    are `kept` ones, which have no first, compile · sdpa, else eager, else the first that ran.

    With `force` every one beside the first choice of all.
    """
    starts = BASES if kept or not choices else (choices[0].name, *BASES)
    for group in alike(choices):
        usual = [each for start in starts for each in group if each.name.startswith(start)]
        base = choices[0] if force else [*usual, *group][0]
        for choice in group:
            interval, value = compare.ratio(choice.rows, base.rows), choice.speed / base.speed
            differs = choice.differences(base) if base not in group else []
            choice.against = Comparison(base, interval.value if interval else value, interval, differs)
            if len(group) == 1 and base is choice is not choices[0]:
                others = "alone at its settings" if kept else f"other {keys(choice.differences(choices[0]))}"
                choice.uncompared = f"not compared: {others}"


def alike(choices: list[Choice]) -> list[list[Choice]]:
    """Groups of choices of which nothing but the kernels differs."""
    groups: list[list[Choice]] = []
    for choice in choices:
        home = next((group for group in groups if not choice.differences(group[0])), None)
        if home is None:
            groups.append([choice])
        else:
            home.append(choice)
    return groups

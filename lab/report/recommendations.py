"""What to take: the fastest and the leanest choice for each kind of work, the commands for them, and the ladder.

Choices are compared within a session: one commit on one machine, with the same settings. Of the fastest sessions the
newest counts; a session of a single choice recommends nothing. Choices that round more than their precision, such as
fp8 or int8, are named apart. comparable_speed ranks the choices, so that their order follows the ratios.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from lab.report.choices import Choice
from lab.report.describe import prompt_tokens, sitting_text
from lab.report.peers import rounds_on_purpose
from lab.report.presets import model_title
from lab.report.user_command import user_command
from lab.sweep import compare

MACHINES = 0.06  # two machines of one kind differ by so much
LADDER = "choice", "tokens/s", "of the line above", "peak GiB"  # the columns of Recommendation.lines


@dataclass
class Pick:
    """A choice to take, and the others that tie with it."""

    label: str  # "Fastest"
    choice: Choice
    command: str
    ties: list[Choice]
    figures: str  # "640,219 tokens/s, 16.3 GiB, 1.157x (1.134 to 1.174) of compile · sdpa"


@dataclass
class Recommendation:
    """The picks of one kind of work, and the choices of their session, slowest first."""

    title: str
    picks: list[Pick]
    ladder: list[Choice]

    @property
    def preset(self) -> str:
        return self.ladder[0].preset

    @property
    def precision(self) -> str:
        """Empty if the ladder has several."""
        precisions = {choice.precision for choice in self.ladder}
        return "" if len(precisions) > 1 else precisions.pop()

    @property
    def sitting(self) -> str:
        """Where and when the session was measured: "one H200, commit af0db6f, 2026-11-27", of its newest row."""
        rows = [row for choice in self.ladder for row in choice.rows]
        return sitting_text(max(rows, key=lambda row: str(row.get("started", ""))))

    @property
    def lines(self) -> list[tuple[Choice, list[str]]]:
        """The ladder's lines: a choice, its tokens/s, the gain over the line above, and its GiB."""
        lines = []
        for before, choice in zip([None, *self.ladder], self.ladder, strict=False):
            gain = gain_text(choice, before) if before else ""
            name = choice.name if self.precision else f"{choice.name}, {choice.precision}"
            lines.append((choice, [name, f"{choice.speed:,.0f}", gain, memory_cell(choice)]))
        return lines


def recommendations(choices: list[Choice]) -> list[Recommendation]:
    """Return what to take for each kind of work of the choices, which all have a speed.

    A work is left out if its newest_session() has a single choice. For each preset, training on the shortest sequences
    and generation of the fewest come first. The others follow. tiny is last.
    """
    works: dict[Work, list[Choice]] = {}
    for choice in choices:
        if can_be_taken(choice):
            works.setdefault(work_of(choice), []).append(choice)
    found: list[tuple[tuple, tuple, Recommendation]] = []
    for work, members in works.items():
        session = newest_session(sessions_of(members))
        if len(session) > 1:
            own = recommend(session)
            kind = work.preset == "tiny", len(work.preset), work.preset, work.generates
            found.append((kind, (work.size, work.prompt, -own.picks[0].choice.comparable_speed), own))
    found.sort(key=lambda each: each[:2])
    count: Counter[tuple] = Counter()  # kind -> how many of it came before
    ranked = []
    for kind, _, own in found:
        ranked.append(((kind[0], count[kind]), own))  # tiny last, and the first of each kind before the second of any
        count[kind] += 1
    return [own for _, own in sorted(ranked, key=lambda each: each[0])]


def can_be_taken(choice: Choice) -> bool:
    """Return whether this version can run the choice."""
    return bool(user_command(choice.row))


def loses_precision(choice: Choice) -> bool:
    return choice.precision == "fp8" or (choice.generates and rounds_on_purpose(choice.row))


def sessions_of(choices: list[Choice]) -> list[list[Choice]]:
    """Group choices that differ in nothing but their kernels and in bf16 or fp8."""
    sessions: list[list[Choice]] = []
    for choice in choices:
        for session in sessions:
            lines = compare.differences(choice.row, session[0].row)
            if all(line.startswith("precision:") for line in lines):
                session.append(choice)
                break
        else:
            sessions.append([choice])
    return sessions


def newest_session(sessions: list[list[Choice]]) -> list[Choice]:
    """Return the newest session whose fastest choice is within MACHINES of the fastest of all; [] without one.

    A choice that rounds more does not count. Among these sessions, those of several choices come first.
    """
    fastest: list[tuple[float, list[Choice]]] = []
    for session in sessions:
        speeds = [choice.comparable_speed for choice in session if not loses_precision(choice)]
        if speeds:
            fastest.append((max(speeds), session))
    least = max((speed for speed, _ in fastest), default=0) * (1 - MACHINES)
    found = [(len(session) > 1, start_of(session), speed, session) for speed, session in fastest if speed >= least]
    return max(found, key=lambda each: each[:3])[-1] if found else []


def start_of(session: list[Choice]) -> str:
    return max(str(row.get("started", "")) for choice in session for row in choice.rows)


class Work(NamedTuple):
    """What a choice computes. Choices with equal works are compared."""

    preset: str
    generates: bool
    size: int  # tokens of a training's sequence, or sequences of a generation
    prompt: int  # tokens; 0 in training
    model: str
    device: str
    gpus: int
    precision: str  # bf16 for fp8, which has bf16's weights


def work_of(choice: Choice) -> Work:
    row = choice.row
    sizes = (compare.sequences(row), prompt_tokens(row)) if choice.generates else (block_size(row), 0)
    device, gpus = row.get("env", {}).get("device") or "", row.get("world_size", 1)
    precision = "bf16" if choice.precision == "fp8" else choice.precision
    return Work(choice.preset, choice.generates, *sizes, model_title(row), device, gpus, precision)


def block_size(row: dict) -> int:
    return int(row["config"]["train"]["block_size"])


def recommend(session: list[Choice]) -> Recommendation:
    """Return the picks of a session: the fastest, the leanest, and a faster one that rounds more, if there is one."""
    exact = [choice for choice in session if not loses_precision(choice)]
    fastest = max(exact, key=lambda choice: choice.comparable_speed)
    ties = [choice for choice in exact if choice is not fastest and is_tie(choice, fastest)]
    picks = [make_pick("Fastest", fastest, fastest.base, ties)]
    if len(exact) > 1 and all(choice.memory for choice in exact):
        least = min(choice.memory for choice in exact) * (1 + compare.RESOLUTION)
        lean = [choice for choice in exact if choice.memory <= least]
        leanest = max(lean, key=lambda choice: choice.comparable_speed)
        if leanest is fastest:
            picks[0].label = "Fastest and leanest"
        else:
            lean.remove(leanest)
            picks.append(make_pick("Leanest", leanest, leanest.base, lean))
    ladder = sorted(session, key=lambda choice: choice.comparable_speed)
    rounded = next((choice for choice in reversed(ladder) if loses_precision(choice)), None)
    if rounded and rounded.comparable_speed > fastest.comparable_speed and not is_tie(rounded, fastest):
        picks.append(make_pick("Faster, but it rounds more", rounded, fastest, []))
    return Recommendation(title_of(fastest), picks, ladder)


def make_pick(label: str, choice: Choice, base: Choice | None, ties: list[Choice]) -> Pick:
    """Return a pick whose figures compare it with `base`."""
    parts = [f"{choice.speed:,.0f} tokens/s", f"{memory_cell(choice)} GiB" if choice.memory else ""]
    if base and base is not choice:
        parts.append(f"{choice.ratio_text if base is choice.base else gain_text(choice, base)} of {base.name}")
    return Pick(label, choice, user_command(choice.row), ties, ", ".join(filter(None, parts)))


def memory_cell(choice: Choice) -> str:
    return f"{choice.memory:.{2 if choice.generates else 1}f}" if choice.memory else ""


def is_tie(one: Choice, other: Choice) -> bool:
    """Return whether the interval of the ratio contains 1; without timed intervals, whether the spreads overlap."""
    compared = compare.ratio(one.rows, other.rows)
    if compared:
        return compared.verdict == "tie"
    return one.spread[0] <= other.spread[1] and other.spread[0] <= one.spread[1]


def gain_text(choice: Choice, before: Choice) -> str:
    """Return the ratio of two speeds, such as "1.082x (1.075 to 1.090)"."""
    return str(compare.ratio(choice.rows, before.rows) or f"{choice.speed / before.speed:.2f}x")


def title_of(choice: Choice) -> str:
    """Return a title such as "Training gpt2_124m in bf16, sequences of 1,024 tokens"."""
    row, what = choice.row, f"{model_title(choice.row)} in {choice.precision}"
    if choice.generates:
        count = compare.sequences(row)
        sequences = f"{count:,} sequence{'s' if count > 1 else ''}"
        return f"Generating with {what}, {sequences} after {prompt_tokens(row):,} tokens"
    gpus = f", {row['world_size']} GPUs" if row.get("world_size", 1) > 1 else ""
    return f"Training {what}, sequences of {block_size(row):,} tokens{gpus}"

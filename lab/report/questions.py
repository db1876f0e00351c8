"""The first tables of results/README.md: which choice is fastest, which is leanest, how long a context, how fast it is.

Each has at most five rows and five columns, and a bar chart. They read a device's folders in results/: `h200`, and
those whose names start with `h200-`. The question whether choices train alike is in loss_curves.py.

A column of training is a model. Its rows are of one sitting: one GPU, one commit and one batch. Of a model's sittings,
the one with the most choices counts, and of these the newest.
"""

import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

from lab import rows as results
from lab.report.colours import CHOICE_COLOURS, FAMILY_COLOURS, FP8, assign_colours
from lab.report.describe import (
    SMALLEST,
    choice_name,
    commit,
    compile_mode,
    gpu_text,
    kernels_cell,
    kernels_family,
    sitting_text,
    time_of,
)
from lab.report.peers import rounds_on_purpose
from lab.report.plot import Figure, Point, Series, figure
from lab.report.png import draw_figures
from lab.report.presets import model_title, preset_of
from lab.report.rungs import DECODING, MODEL, newest_runs, rung_rows, title
from lab.report.tables import columns_table, markdown_table, markdown_text, ratio_cell
from lab.sweep.compare import peer_name, ratio
from lab.sweep.table import PEAK, Cell, median_speed, number_cell, shown_run, speed, speed_cell, token_ms_cell

MOST, MOST_MODELS = 5, 4  # rows and models of a table
# The models to show first, in this order, if they were measured; others follow, small ones first
MODELS = MODEL, "smollm2_135m", "gpt2_1558m", "modern_124m", "gpt2_350m"
# (kernels_cell(), attention, precision) -> the name of the choice in these tables
CHOICES = {
    ("eager", "sdpa", "bf16"): "eager PyTorch",
    ("compile", "sdpa", "bf16"): "torch.compile",
    ("triton", "triton", "bf16"): "triton",
    ("gluon", "gluon", "bf16"): "gluon",
    ("gluon+triton", "gluon", "fp8"): "fp8",
}
LEAN = "gluon, recomputing norms"
# Choices that mix backends, by the words of their commands; their kernels differ with the model's ops
MIXED = {
    "attn=gluon kernels.glu=triton kernels.loss=triton kernels=gluon precision=fp8": "fp8",
    "attn=gluon kernels.rms_norm=triton_recompute kernels.rope=triton_recompute kernels=gluon precision=bf16": LEAN,
}
BASELINE = "torch.compile"
NOT_MEASURED = "Not measured yet: `scripts/measure.sh ladder`."
NAMES = list(dict.fromkeys([*CHOICES.values(), *MIXED.values()]))
FASTEST = [name for name in NAMES if name != LEAN]  # the choices of the first table, and of the second
LEANEST = [name for name in NAMES if name != "fp8"]  # fp8 needs 1% less than bf16
# A choice has the colour of its family, as on the page
COLOURS = {name: FAMILY_COLOURS[FP8 if precision == "fp8" else key] for (key, _, precision), name in CHOICES.items()}
COLOURS[LEAN] = CHOICE_COLOURS[-1]
Runs = dict[str, list[dict]]  # name of a choice -> its runs of a sitting
Value = Callable[[list[dict]], float]  # of the runs of a choice


def label(row: dict) -> str:
    """Return the name of a row's choice in CHOICES or MIXED; without one, its kernels, attention and precision.

    A mode of torch.compile that is not the default follows: "torch.compile, max-autotune-no-cudagraphs".
    """
    mode = compile_mode(row["config"]["kernels"])
    key = kernels_cell(row).removesuffix(mode), row["config"]["attn"]["impl"], row["config"]["precision"]
    words = [word for word in shlex.split(row.get("command", "")) if re.match(r"kernels\b|attn|precision", word)]
    return (CHOICES.get(key) or MIXED.get(" ".join(sorted(words)), ", ".join(key))) + mode


def folders(device: str) -> list[str]:
    """Return the names of a device's folders in results/: "h200", "h200-fp8", ..."""
    names = sorted(path.name for path in results.RESULTS.glob(f"{device}*"))
    return [name for name in names if name == device or name.startswith(f"{device}-")]


def work_of(row: dict) -> tuple:
    """Return what a training computes, whatever computes it, the model's preset first."""
    config = row["config"]
    other = model_title(row), (config.get("optim") or {}).get("name", "adamw"), config.get("parallel", "ddp")
    return preset_of(row), batch(row), *other


def batch(row: dict) -> str:
    """Return the sequences and tokens of a step: "64 x 1024"."""
    train = row["config"]["train"]
    return f"{train['tokens_per_step'] // train['block_size']} x {train['block_size']}"


def sittings(device: str, value: Value = median_speed) -> list[Runs]:
    """Return the runs of each sitting: of one folder, work, commit and GPU. Runs of another system have its name.

    torch.compile's are those of the mode with the highest `value`.
    """
    found: dict[tuple, Runs] = {}
    for folder in folders(device):
        for row in results.read_rows(folder):
            wanted = row.get("parameters", 0) >= SMALLEST and row.get("world_size", 1) == 1
            if not wanted or row["config"]["train"]["eval_every"]:
                continue
            peer = peer_name(row)
            name = peer or label(row)
            if peer or name in NAMES or is_mode(name):
                sitting = folder, work_of(row), row["env"].get("git_commit"), row["env"].get("gpu")
                found.setdefault(sitting, {}).setdefault(name, []).append(row)
    return [take_best_mode(runs, value) for runs in found.values()]


def is_mode(name: str) -> bool:
    return name.startswith(f"{BASELINE}, ")


def take_best_mode(runs: Runs, value: Value) -> Runs:
    """Return a sitting's runs, with torch.compile's mode of the highest `value` as torch.compile if other modes ran.

    Each mode then also has a name of its own: "torch.compile, default", "torch.compile, max-autotune-no-cudagraphs".
    """
    modes = {name: each for name, each in runs.items() if (name == BASELINE or is_mode(name)) and any(map(speed, each))}
    if modes.keys() <= {BASELINE}:
        return runs
    default = {f"{BASELINE}, default": modes[BASELINE]} if BASELINE in modes else {}
    return runs | {BASELINE: max(modes.values(), key=value)} | default


def columns(device: str, value: Value = median_speed) -> dict[str, Runs]:
    """Return model -> the runs of its sitting, in the order of MODELS, then small models first.

    A model whose torch.compile was not measured comes last.
    """
    best: dict[str, Runs] = {}
    for runs in sittings(device, value):
        model = preset_of(first_row(runs))
        if measured(runs) and (model not in best or rank(runs) > rank(best[model])):
            best[model] = runs

    def order(model: str) -> tuple:
        number = MODELS.index(model) if model in MODELS else first_row(best[model])["parameters"]
        return BASELINE not in measured(best[model]), model not in MODELS, number

    return {model: best[model] for model in sorted(best, key=order)[:MOST_MODELS]}


def measured(runs: Runs) -> list[str]:
    """Return the choices of this repo that have a speed."""
    return [name for name in NAMES if any(map(speed, runs.get(name, ())))]


def rank(runs: Runs) -> tuple:
    return len(measured(runs)), first_row(runs)["started"]


def first_row(runs: Runs) -> dict:
    return next(row for each in runs.values() for row in each)


def training_table(
    device: str,
    found: dict[str, Runs],
    name: str,
    alt: str,
    choices: list[str],
    value: Callable[[list[dict], Runs], float],
    cell: Callable[[list[dict], Runs], str],
) -> str:
    """Return a picture, where it was measured, and a table: a line for each of `choices`, and a column for each model.

    `found` is of columns(). `name` is the picture's file, and `alt` its text. `value` is of a choice's runs and all
    runs of the model, higher if better. The best cell of a column is bold.
    """
    lines = []
    shown = {model: [choice for choice in measured(runs) if choice in choices] for model, runs in found.items()}
    best = {
        model: max(names, key=lambda name: value(found[model][name], found[model]))
        for model, names in shown.items()
        if names
    }
    for choice in choices:
        cells = []
        for model, runs in found.items():
            if choice in shown[model]:
                text = cell(runs[choice], runs)
                cells.append(f"**{text}**" if choice == best[model] else text)
            else:
                cells.append(runs[choice][-1]["status"].split(":")[0] if choice in runs else "")
        if any(cells):
            lines.append([choice, *cells])
    table = markdown_table(["choice", *(f"`{model}`" for model in found)], lines)
    return answer(device, name, alt, place(found), table) if found else NOT_MEASURED


def answer(device: str, name: str, alt: str, where: str, table: str) -> str:
    return f"![{alt}]({device}/{name}.png)\n\n{where}\n\n{table}"


def place(found: dict[str, Runs]) -> str:
    """Return the batch and the GPU, and the commit and the date, once for all models that have the same."""
    rows = {model: first_row(runs) for model, runs in found.items()}
    works = grouped(
        {model: f"{batch(row)} tokens a step on {markdown_text(gpu_text(row))}" for model, row in rows.items()}
    )
    times = grouped({model: time_of(row) for model, row in rows.items()})
    if len({time_of(row) for row in rows.values()}) == 1:
        return f"{works}, commit {times}."
    return f"{works}. All rows of a column were measured in one sitting: compare within a column. Commits: {times}."


def grouped(texts: dict[str, str]) -> str:
    """Return each text with its models: "one (`gpt2_124m`); two (`gpt2_350m`)"; a single text is bare."""
    models: dict[str, list[str]] = {}
    for model, text in texts.items():
        models.setdefault(text, []).append(f"`{model}`")
    if len(models) == 1:
        return next(iter(models))
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in models.items())


def of_baseline(runs: list[dict], base: list[dict]) -> str:
    """Return ", 1.153x (1.149 to 1.157)", the speed over the baseline's; "" for the baseline or without one."""
    text = ratio_cell(runs, base, ratio(runs, base)) if base and runs is not base else ""
    return f", {text}" if text else ""


def comparable_speed(runs: list[dict], all_runs: Runs) -> float:
    """Return the ratio to torch.compile, so that the order follows the ratios; without its speed, the tokens/s."""
    base = [run for run in all_runs.get(BASELINE, ()) if speed(run)]
    return ratio(runs, base).value if base else median_speed(runs)


def fastest(device: str) -> str:
    """Return the tokens/s of each choice and model, with the ratio to torch.compile's; then the lines of peers()."""

    def cell(own: list[dict], runs: Runs) -> str:
        return f"{median_speed(own):,.0f}{of_baseline(own, runs.get(BASELINE, []))}"

    alt = "tokens/s of each choice"
    table = training_table(device, columns(device), "fastest", alt, FASTEST, comparable_speed, cell)
    return "\n\n".join(filter(None, [table, peers(device)]))


def peers(device: str) -> str:
    """Return a line for each other system that trained a column's model: its speed, and our fastest in bf16 beside it.

    The fastest system is first. Both sides are of the newest sitting that has the system and rows of ours. If it is not
    the column's, the line names its commit. Each mode of torch.compile in the column's sitting has a line, too.
    """
    lines, oldest_first = [], sorted(sittings(device), key=lambda runs: first_row(runs)["started"])
    for model, column in columns(device).items():
        newest: dict[str, Runs] = {}
        for runs in oldest_first:
            if exact(runs) and work_of(first_row(runs)) == work_of(first_row(column)):
                known = NAMES if first_row(runs) == first_row(column) else [*NAMES, *filter(is_mode, runs)]
                newest |= {name: runs for name in runs if name not in known and any(map(speed, runs[name]))}
        for name, runs in sorted(newest.items(), key=lambda item: -median_speed(item[1][item[0]])):
            own = [choice for choice in exact(runs) if choice != BASELINE or not is_mode(name)]
            if not own:
                continue
            others, ours = runs[name], max(own, key=lambda choice: comparable_speed(runs[choice], runs))
            precision, ratio_text = shown_run(others)["config"]["precision"], of_baseline(runs[ours], others)
            own_sitting = first_row(runs) == first_row(column)
            lines.append(
                f"- `{model}`: {markdown_text(name)} in {precision} reaches {median_speed(others):,.0f} tokens/s "
                f"and {peak(others):.1f} GiB; {ours} is {ratio_text.removeprefix(', ')} as fast"
                + ("" if own_sitting else f", at commit {time_of(first_row(runs))}")
            )
    return "\n".join(lines)


def exact(runs: Runs) -> list[str]:
    """Return the measured choices of this repo in bf16 that the first table shows."""
    return [name for name in measured(runs) if name in FASTEST and name in LEANEST]


def peak(runs: list[dict]) -> float:
    """Return the largest peak of the runs, in GiB."""
    return max(next(row[key] for key in PEAK if row.get(key)) for row in runs if row["status"] == "ok")


def leanness(runs: list[dict]) -> float:
    return -peak(runs)


def memory(device: str) -> str:
    """Return the peak GiB of each choice and model, and beside those of torch.compile's leanest mode."""

    def cell(own: list[dict], runs: Runs) -> str:
        base = runs.get(BASELINE)
        return f"{peak(own):.1f} GiB" + (f", {peak(own) / peak(base):.2f}x" if base and own is not base else "")

    found, alt = columns(device, leanness), "peak GiB of each choice"
    return training_table(device, found, "memory", alt, LEANEST, lambda runs, _: leanness(runs), cell)


def searches(device: str) -> list[dict]:
    """Return the newest search for the longest training T of each choice, the longest T first.

    torch.compile's is always among them, because the others stand beside it.
    """
    rows = [row for folder in folders(device) for row in results.read_rows(folder, "context")]
    newest = {search_label(row): row for row in sorted(rows, key=lambda row: row["started"]) if longest_t(row)}
    shown = sorted(newest, key=lambda name: (name != BASELINE, -longest_t(newest[name])))[:MOST]
    return sorted((newest[name] for name in shown), key=lambda row: -longest_t(row))


def search_label(row: dict) -> str:
    """Return "checkpointing=block"; without checkpoints the name in CHOICES, or else kernels, attention and pos=rope.

    Then the model, if it is not GPT-2 124M.
    """
    config, fields = row["config"], row["config"]["model"]
    checkpointing, rope = fields.get("checkpointing") or "none", ", rope" if fields.get("pos") == "rope" else ""
    key = kernels_cell(row), config["attn"]["impl"]
    own = CHOICES.get((*key, config["precision"]), ", ".join(key)) + rope
    name = own if checkpointing == "none" else f"checkpointing={checkpointing}"
    model = preset_of(row)
    return name if model == MODEL else f"{name}, {model}"


def longest_t(row: dict) -> int:
    return row.get("context/max_train") or 0


def seconds_cell(row: dict) -> str:
    """Return the time of a step with full attention, which may be extrapolated from shorter sequences."""
    if full := row.get("context/train/seconds_of_full_attention"):
        return f"{time_text(full)} (extrapolated)"
    return time_text(row["context/train/seconds"])


def time_text(seconds: float) -> str:
    """Return "35 s", "24 minutes" or "3.0 hours"."""
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


LONGEST: dict[str, Cell] = {
    "choice": search_label,
    "longest T": lambda row: f"**{longest_t(row):,}**",
    "a step takes": seconds_cell,
    "GiB": number_cell("{:.1f}", "context/train/peak_gib"),
    "commit": time_of,
}


def longest(device: str) -> str:
    """Return the choices with the longest training step of one sequence."""
    rows = searches(device)
    if not rows:
        return NOT_MEASURED
    where = f"On {markdown_text(sitting_text(rows[0]))}."
    if len({commit(row) for row in rows}) > 1:
        gpu = markdown_text(gpu_text(rows[0]))
        where = f"The rows are of several sittings, each on {gpu}: the last column names them."
    return answer(device, "longest", "the longest T of a training step", where, columns_table(LONGEST, rows))


def decoders(device: str) -> Runs:
    """Return decoder -> its runs, of the newest sitting in results/DEVICE-rungs."""
    runs = newest_runs(rung_rows(f"{device}-rungs", "generate"), DECODING)
    return {decoder_label(each[-1]): each for each in runs.values() if any(map(speed, each))}


def decoder_label(row: dict) -> str:
    decode = row["config"]["kernels"].get("decode", "blocks")
    name = label(row) if decode == "blocks" else decode
    return f"{name} (rounds the weights)" if rounds_on_purpose(row) else name


def decoding(device: str) -> str:
    """Return the decoders of one sequence, in the order of the ladder."""
    found, lines = decoders(device), []
    if not found:
        return NOT_MEASURED
    for name, runs in found.items():
        row, ratio_text = shown_run(runs), of_baseline(runs, found.get(BASELINE, [])).removeprefix(", ")
        lines.append([name, f"**{speed_cell(row)}**", ratio_text, token_ms_cell(row), f"{peak(runs):.2f}"])
    row = first_row(found)
    where = f"{title(row)}, on {markdown_text(gpu_text(row))}:"
    table = markdown_table(["decoder", "tokens/s", f"of {BASELINE}", "ms a token p50 / p99", "GiB"], lines)
    return answer(device, "decoding", "tokens/s of each decoder", where, table)


def draw_questions(device: str) -> list[Path]:
    """Draw fastest.png, memory.png, longest.png and decoding.png of a device; return those that have rows."""
    folder = results.RESULTS / device

    def draw(x: str, choices: list[str], found: dict[str, Runs], value: Value) -> list[Figure | None]:
        return [
            bars(model, x, {name: runs[name] for name in measured(runs) if name in choices}, value)
            for model, runs in found.items()
        ]

    speeds = draw("tokens/s", FASTEST, columns(device), median_speed)
    peaks = draw("peak GiB", LEANEST, columns(device, leanness), peak)
    lengths = {search_label(row): [row] for row in searches(device)}
    drawn = draw_figures(full_first(speeds), folder / "fastest.png")
    drawn += draw_figures(full_first(peaks), folder / "memory.png")
    drawn += draw_figures([bars("", "tokens", lengths, lambda runs: longest_t(runs[0]))], folder / "longest.png")
    return drawn + draw_figures([bars("", "tokens/s", decoders(device), median_speed)], folder / "decoding.png")


def full_first(figures: Iterable[Figure | None]) -> list[Figure | None]:
    """Return the figure with the most bars first, because it names the bars of all."""
    return sorted(figures, key=lambda each: -len(each.series[0].points) if each else 0)


def picture_colours(runs: Runs) -> dict[str, str]:
    """Return a colour for each choice: its own, or its family's. Decoders and checkpointing get others."""
    fixed: dict[str, str] = {}
    for name, each in runs.items():
        family = "" if name.startswith("checkpointing=") else kernels_family(choice_name(each[0]))
        colour = COLOURS.get(name) or FAMILY_COLOURS.get(family)
        if colour and colour not in fixed.values():
            fixed[name] = colour
    return assign_colours(runs, fixed, reserved=COLOURS.values())


def bars(model: str, x: str, runs: Runs, value: Value) -> Figure | None:
    colours = picture_colours(runs)
    points = []
    for name, each in runs.items():
        number = value(each)
        text = f"{number:,.0f}" if number >= 1000 else f"{number:.1f}"
        points.append(Point(number, name, colour=colours[name], text=text))
    return figure(x, "", [Series("", "bars", points)], row=44, title=model)

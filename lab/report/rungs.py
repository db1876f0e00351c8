"""The first tables of README.md: one line a rung, from PyTorch to our fastest kernels, in training and in decoding.

The sweeps configs/sweep/rungs.yaml and decoding_rungs.yaml measure the rungs. The rows of a table must be of one
sitting: one GPU, one commit without changes, the same versions and settings, and all within SITTING_HOURS.
"""

import re
import shlex
from datetime import datetime

from kernels.names import OPTIMIZER_OPS
from kernels.registry import called_backend
from lab.report.describe import gpu_text, prompt_tokens, time_of
from lab.report.presets import model_title, preset_of
from lab.report.tables import markdown_table, markdown_text, ratio_cell
from lab.rows import read_rows
from lab.sweep import table
from lab.sweep.compare import MACHINE, differences, is_generation, ratio, sequences, value_differences
from lab.sweep.table import Cell, median_speed, shown_run, slower_cell, speed
from runtime.config import check

MEASURE = "scripts/measure.sh rungs"
SITTING_HOURS = 6
MODEL = "gpt2_124m"
# The words that distinguish the commands of the rungs -> the rung that it is compared with; None: the rung before
TRAINING: dict[str, str | None] = {
    "kernels=eager attn=sdpa": None,
    "kernels=compile attn=sdpa": None,
    "kernels=triton attn=triton": None,
    "kernels=gluon attn=gluon": None,
    "kernels=gluon attn=flash": None,
    "kernels=gluon kernels.loss=triton attn=gluon precision=fp8": "kernels=gluon attn=gluon",  # its bf16
}
DECODING: dict[str, str | None] = {
    "kernels=eager kernels.decode=blocks": None,
    "kernels=compile kernels.decode=blocks": None,
    "kernels=eager kernels.decode=triton": None,
    "kernels=eager kernels.decode=persistent": None,
    "kernels=eager kernels.decode=persistent_int8": None,
}
CHOICE = re.compile(r"(kernels|attn|precision)[\w.]*=")
# Words that do not tell rungs apart: those of all rungs, and one that has no effect, because GPT-2 has no glu
IGNORED_TRAINING, IGNORED_DECODING = {"precision=bf16", "kernels.glu=triton"}, {"precision=bf16", "attn=sdpa"}
VERSION = re.compile(r"(torch|triton|cudnn|cuda) [\d.]+\S*")
HEAD = ["rung", "what computes", "kernel lines", "tokens/s", "gain"]
TRAINING_COLUMNS = {"GiB": table.TRAINING["peak GiB"], "first step": table.TRAINING["first step"]}
TRAINING_COLUMNS["loss"] = table.TRAINING["loss"]
DECODING_COLUMNS = {"GiB": table.GENERATION["peak GiB"], "first step": table.GENERATION["start"]}


def rungs(device: str) -> str:
    """Return both tables and a note. Raises UserError if the newest rows of a table are not of one sitting."""
    training = newest_runs(rung_rows(device, "train"), TRAINING)
    decoding = newest_runs(rung_rows(device, "generate"), DECODING)
    if not any(speed(row) for runs in [*training.values(), *decoding.values()] for row in runs):
        return f"Not measured yet: `{MEASURE}`."
    for runs in (training, decoding):
        check_table(device, "rungs", MEASURE, {words: each[-1] for words, each in runs.items() if each})
    parts = []
    for ladder, runs, columns in ((TRAINING, training, TRAINING_COLUMNS), (DECODING, decoding, DECODING_COLUMNS)):
        if lines := ladder_lines(ladder, runs, columns):
            row = next(row for each in runs.values() for row in each if speed(row))
            parts += [f"{title(row)}:", markdown_table([*HEAD, *columns], lines)]
    return "\n\n".join([*parts, note(device, training | decoding)])


def title(row: dict) -> str:
    """Return what all lines of the row's table compute, and its sitting.

    For example "Training `gpt2_124m`, 64 sequences of 1,024 tokens a step, commit af0db6f, 2026-11-27".
    """
    model, config = f"`{model_title(row)}`", row["config"]
    if is_generation(row):
        count = sequences(row)
        work = f"{config['max_new_tokens']:,} tokens after a prompt of {prompt_tokens(row):,}"
        what = f"Decoding {model}, {count:,} {'sequence' if count == 1 else 'sequences'}, {work}"
    else:
        train = config["train"]
        count = train["tokens_per_step"] // train["block_size"]
        what = f"Training {model}, {count:,} sequences of {train['block_size']:,} tokens a step"
    return f"{what}, commit {time_of(row)}"


def rung_rows(device: str, kind: str) -> list[dict]:
    """Return the rows of GPT-2 124M: the folder has other models, too, for results/README.md."""
    return [row for row in read_rows(device, kind) if preset_of(row) == MODEL]


def newest_runs(rows: list[dict], ladder: dict[str, str | None]) -> dict[str, list[dict]]:
    """Return rung -> its newest run and the other runs of this run's sitting; [] without a run."""
    runs: dict[str, list[dict]] = {words: [] for words in ladder}
    for row in rows:
        for words in ladder:
            if choice_words(row) == set(words.split()):
                runs[words].append(row)
    return {words: [row for row in each if not sitting_differences(row, each[-1])] for words, each in runs.items()}


def choice_words(row: dict) -> set[str]:
    """Return the words of the row's command that choose kernels and precision, without the ignored ones."""
    ignored = IGNORED_DECODING if is_generation(row) else IGNORED_TRAINING
    return {word for word in shlex.split(row["command"]) if CHOICE.match(word)} - ignored


def sitting_differences(row: dict, other: dict) -> list[str]:
    """Return a line for each reason why two rows are not of one sitting, whatever they compute.

    The row of a run that never started names no machine, and matches any machine.
    """
    lines = []
    if "env" in row and "env" in other:
        for key in ("gpu", *MACHINE):
            lines += value_differences(key, row["env"].get(key), other["env"].get(key))
    started, other_started = (datetime.strptime(each["started"], "%Y-%m-%dT%H:%M:%S%z") for each in (row, other))
    if abs(started - other_started).total_seconds() > 3600 * SITTING_HOURS:
        lines += value_differences("started", row["started"], other["started"])
    return lines


def check_table(device: str, what: str, measure: str, rows: dict[str, dict]) -> None:
    """Raise UserError if the rows of a table, {name: row}, are not of one sitting, or of a tree with changes.

    They must be of the same settings besides their kernels and fp8. `measure` is the command that measures all of them.
    """
    first = next((name for name, row in rows.items() if "env" in row), None)
    if first is None:  # no run has started
        return
    for name, row in rows.items():
        settings = differences(row, rows[first]) if "config" in row else []
        lines = dict.fromkeys([*sitting_differences(row, rows[first]), *settings])
        reasons = "; ".join(line for line in lines if not line.startswith("precision:"))
        check(
            not reasons,
            f"results/{device}: the {what} are not of one sitting, because {name}, beside {first}, has {reasons}: "
            f"measure them together: {measure}",
        )
        sha = row["env"].get("git_commit") if "env" in row else "of a run that never started"
        check(
            sha and not sha.endswith("-dirty"),
            f"results/{device}: {name} is of the commit {sha}, with changes that no commit has: commit them, and "
            f"measure the {what} again: {measure}",
        )


def ladder_lines(
    ladder: dict[str, str | None], runs: dict[str, list[dict]], columns: dict[str, Cell]
) -> list[list[str]]:
    """Return the table's line of each rung with a speed, in the order of the ladder."""
    measured = [words for words in ladder if any(map(speed, runs[words]))]
    lines = []
    for before, words in zip([None, *measured], measured, strict=False):
        base = ladder[words] if ladder[words] in measured else before
        gain = ratio_cell(runs[words], runs[base], ratio(runs[words], runs[base])) if base else ""
        if base != before:
            gain += f" of `{base}`"
        row = shown_run(runs[words])
        first = min(filter(speed, runs[words]), key=lambda run: run["started"])  # the others find its kernels compiled
        cells = [f"`{words}`", what_computes(row), lines_cell(row), f"**{median_speed(runs[words]):,.0f}**", gain]
        lines.append([*cells, *(cell(first if name == "first step" else row) for name, cell in columns.items())])
    return lines


def computing_kernels(row: dict) -> dict[str, str]:
    """Return op -> what computed it, from the row: of a model's step, or of a decoder with kernels of its own."""
    # note() names the optimizer's
    kernels = {op: text for op, text in row["kernels"].items() if isinstance(text, str) and op not in OPTIMIZER_OPS}
    if is_generation(row):
        decode = kernels.pop("decode", "blocks")
        return kernels if called_backend(decode) == "blocks" else {"decode": decode}
    return kernels


def what_computes(row: dict) -> str:
    """Return a text such as "torch.compile; attention: sdpa (cudnn); the rest: eager"."""
    ops: dict[str, list[str]] = {}
    for op, text in computing_kernels(row).items():
        ops.setdefault(without_versions(text), []).append(op)
    [most, *others] = sorted(ops, key=lambda text: -len(ops[text]))
    parts = ["torch.compile"] if row["kernels"]["compile"] else []
    parts += [f"{', '.join(ops[text])}: {text}" for text in others]
    which = "the rest" if 2 * len(ops[most]) > sum(map(len, ops.values())) else ", ".join(ops[most])
    parts.append(f"{which}: {most}" if others else most)
    if slower := slower_cell(row):
        parts.append(f"slower than eager: {slower}")
    if why := (row.get("proof") or {}).get("why"):  # the text of a decoder that rounds the weights is not the model's
        parts.append(f"not exact: {why}")
    return "; ".join(parts)


def without_versions(text: str) -> str:
    """Return "sdpa (cudnn)" for "sdpa (cudnn, torch 2.11.0, cudnn 91900)": the note has the versions."""
    name, _, inside = text.partition(" (")
    words = [word for word in inside.removesuffix(")").split(", ") if word and not VERSION.fullmatch(word)]
    return f"{name} ({', '.join(words)})" if words else name


def lines_cell(row: dict) -> str:
    """Return the lines of our kernel code: "2,137", "1,023 and a library" if a library computes an op, or "library"."""
    lines = (row.get("receipt") or {}).get("lines")
    if lines is None:
        return ""
    kernels = computing_kernels(row)
    lines = {op: count for op, count in lines.items() if op in kernels}
    total = sum(lines.values())
    of_library = any(not count and "torch " not in kernels.get(op, "torch ") for op, count in lines.items())
    if of_library:
        return f"{total:,} and a library" if total else "library"
    return f"{total:,}"


def note(device: str, runs: dict[str, list[dict]]) -> str:
    """Return sentences: where the rungs were measured, what the columns mean, and which rungs are missing."""
    rows = [row for each in runs.values() for row in each if speed(row)]
    machines = dict.fromkeys(
        "{} (driver {driver}, torch {torch}, triton {triton})".format(gpu_text(row), **row["env"]) for row in rows
    )
    sentences = [
        f"All lines of a table are of one sitting on {markdown_text(', or '.join(machines))}: `{MEASURE}` "
        f"([rows](results/{device})).",
        "The gain is the median ratio of the same steps to the line above, unless it names another line. The loss is "
        "of the last step. The first step compiles all kernels; in decoding it is the whole warm-up.",
        "Kernel lines are the code in kernels/ that the model's ops need, without comments; the kernels of PyTorch and "
        "of torch.compile count as 0. The picture has torch.compile's fastest mode, and the table its default mode.",
    ]
    if any(len(list(filter(speed, each))) > 1 for each in runs.values()):
        sentences.append(
            "Several runs of a rung give the 95% interval of the gain, and it is a tie if the interval has 1 in it."
        )
    optimizers = {row["kernels"].get("adamw") for row in rows} - {None}
    if backends := sorted({called_backend(text) for text in optimizers}):
        sentences.append(f"All lines of training update the weights with adamw={' or '.join(backends)}.")
    for words, each in runs.items():
        if not any(map(speed, each)):
            reason = markdown_text(each[-1]["status"]) if each else "it was not measured"
            sentences.append(f"`{words}` is left out: {reason}.")
    return " ".join(sentences)

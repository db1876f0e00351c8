"""The verdict on a claim: a row that holds all evidence, and the page and the picture that are made from the row."""

import statistics
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from lab.bench.probe import ERRORS, first_word
from lab.judge.claim import Claim, undecided_answers, wrong_answers
from lab.report.colours import CHOICE_COLOURS, GREY
from lab.report.describe import attention_name, batch_cell, commit, kernels_name
from lab.report.png import plain, save, subplots
from lab.report.presets import model_title, preset_of_size
from lab.report.tables import markdown_table, peak_gib, shown_run
from lab.rows import read_rows
from lab.sweep.compare import Ratio, ratio
from lab.sweep.table import speed
from model.config import PRECISIONS

FASTER_NEEDS = 3  # runs of each side: with one, identical kernels were 2.6x as fast
BENCHMARK = "both/ms", "both/ms/p20", "both/ms/p80", "both/of_floor", "launched/ms", "extra_gib"
BENCHMARK += "error/out", "error/gradients"

COLUMNS = ["claim", "verdict", "right", "alone", "in training", "GiB in training", "last loss"]
FASTER, SLOWER = CHOICE_COLOURS[2:4]  # green, red


class Evidence(NamedTuple):
    """The evidence for a verdict."""

    statuses: dict[str, str]  # of the cases
    runs: dict[str, list[dict]]  # rows of both backends; empty if a case is wrong or undecided
    benchmark: list[dict]  # figures alone; empty without enough memory
    losses: dict[str, float] | None = None  # the result of compare_losses() in trial.py
    impossible: str | None = None  # why the speed cannot be true
    notes: tuple[str, ...] = ()  # lines for the page


def judge_claim(claim: Claim, evidence: Evidence) -> dict:
    """Return the row of a verdict: right and faster, a tie, slower, wrong, or none, with the reason."""
    row = {**claim._asdict(), "verdict": "wrong", "reason": None, "cases": evidence.statuses}
    row["notes"] = list(evidence.notes)
    runs = evidence.runs
    wrong = wrong_answers(evidence.statuses)
    wrong += [run["status"] for run in runs.get(claim.impl, []) if first_word(run["status"]) == "wrong"]
    if wrong:
        return row | {"reason": first_of(wrong)}
    if undecided := undecided_answers(evidence.statuses):
        remedy = "raise limit=SECONDS, or free memory"
        return row | {"verdict": "none", "reason": f"{first_of(undecided)}; {remedy}"}
    row["benchmark"] = {bench["impl"]: {key: bench.get(key) for key in BENCHMARK} for bench in evidence.benchmark}
    row["training"] = {name: training_figures(rows) if rows else {} for name, rows in runs.items()}
    row["baseline"] = training_text(runs[claim.against][0])
    failed = [run["status"] for rows in runs.values() for run in rows if run["status"] != "ok"]
    if failed or not all(runs.values()):
        return row | {"verdict": "none", "reason": failed[0] if failed else "a side has no run"}
    row["losses"] = evidence.losses
    if not evidence.losses["gap"] <= evidence.losses["bound"]:
        return row | {"reason": f"its losses leave those of {claim.against}: {losses_text(evidence.losses)}"}
    if evidence.impossible:
        return row | {"verdict": "none", "reason": f"too good to be true: {evidence.impossible}"}
    compared = ratio(runs[claim.impl], runs[claim.against])
    if compared is None:
        return row | {"verdict": "none", "reason": "the runs are too short to compare"}
    row["ratio"] = compared._asdict()
    if compared.verdict == "faster" and compared.runs < FASTER_NEEDS:
        reason = f"faster needs {FASTER_NEEDS} runs of each side, and {compared.runs} ran: repeats={FASTER_NEEDS}"
        return row | {"verdict": "none", "reason": reason}
    return row | {"verdict": compared.verdict}


def losses_text(losses: dict[str, float]) -> str:
    return f"they are {losses['gap']:.1e} apart, and two seeds of the baseline {losses['bound']:.1e}"


def first_of(answers: list[str]) -> str:
    return answers[0] + (f" (and {len(answers) - 1} more)" if len(answers) > 1 else "")


def training_figures(rows: list[dict]) -> dict:
    """Return the figures of the run with the median speed."""
    run = shown_run(rows)
    if not speed(run):
        return {"status": run["status"]}
    parity = run.get("parity") or {}
    compared = [row["parity"]["steps"] for row in rows if (row.get("parity") or {}).get("steps")]
    figures = {key: parity.get(key) for key in ("loss_error", "loss_bound", "gradient_error", "gradient_bound")}
    return figures | {
        "compared_steps": sum(compared) or None,  # of all runs
        "status": run["status"],
        "tokens_per_sec": statistics.median(speed(row) for row in rows if speed(row)),
        "peak_gib": peak_gib(run),
        "loss": run.get("train/loss"),
        "steps": run["steps"],
    }


def training_text(run: dict) -> str:
    """Return what a run trained, such as "gpt2_124m, bf16, 64 x 1024 tokens, triton, attention flash"."""
    config = run["config"]
    model = f"{model_title(run)}, {config['precision']}, {batch_cell(run)} tokens"
    return f"{model}, {kernels_name(run)}, attention {attention_name(config['attn'])}"


def trained_settings(row: dict) -> tuple[str, str]:
    """Return the preset and the precision of a verdict's training, from training_text(); empty without a training.

    Older rows have a size such as "124M" instead of the preset.
    """
    model, *others = row.get("baseline", "").split(", ")
    return preset_of_size(model), next((text for text in others if text in PRECISIONS), "")


def benchmark_ratio(row: dict) -> str:
    """Return the op's speed over the other backend's, in the benchmark; "tie" if the times overlap in p20 to p80.

    Empty without a benchmark.
    """
    if not row.get("benchmark"):
        return ""
    mine, other = (row["benchmark"][row[side]] for side in ("impl", "against"))
    if mine["both/ms/p80"] < other["both/ms/p20"] or mine["both/ms/p20"] > other["both/ms/p80"]:
        return f"{other['both/ms'] / mine['both/ms']:.3f}x"
    return "tie"


def verdict_sentence(row: dict) -> str:
    """Return the verdict in one to three sentences."""
    name = f"{row['op']}={row['impl']}"
    if row["verdict"] == "wrong":
        return f"{name} is wrong: {row['reason']}"
    if row["verdict"] == "none" and "training" not in row:
        return f"{name} could not be judged: {row['reason']}"
    if row["verdict"] == "none":
        return f"{name} passes every case that it covers, but gets no verdict: {row['reason']}"
    compared, alone = Ratio(**row["ratio"]), benchmark_ratio(row)
    verdict = "a tie" if compared.verdict == "tie" else compared.verdict
    refused = sum(first_word(status) == "unavailable" for status in row["cases"].values())
    covered = f" in the {len(row['cases']) - refused} of {len(row['cases'])} cases that it covers" if refused else ""
    sentences = [
        f"{name} is right{covered}.",
        f"Training with it runs at {compared.value:.3f}x the speed of training with {row['against']} "
        f"({compared.interval}), which is {verdict}.",
    ]
    if alone:
        speeds = "as fast as" if alone == "tie" else f"at {alone} the speed of"
        sentences.append(f"Alone, the op runs {speeds} {row['against']}.")
    return " ".join(sentences)


def page(row: dict) -> str:
    """Return the page in Markdown: the sentence, a table of both backends, the cases, and the command."""
    counts = Counter(map(first_word, row["cases"].values()))
    skipped = sorted({status for status in row["cases"].values() if first_word(status) == "unavailable"})
    lines = [f"# {row['op']}: {row['impl']} against {row['against']}", "", f"**{verdict_sentence(row)}**", ""]
    if "training" in row and row["verdict"] != "wrong":  # a wrong backend has no speed
        lines += [figures_table(row), "", f"The baseline is {row['baseline']}. {runs_note(row)}".strip(), ""]
    lines.append(
        f"The cases compare outputs and gradients with float64, on random inputs that nobody has seen before. Of "
        f"{counts.total()} cases, {', '.join(f'{count} {be(count)} {word}' for word, count in counts.items())}."
    )
    cases_of: dict[str, list[str]] = {}  # a kernel that cannot be imported gives every case the same status
    for case, status in row["cases"].items():
        if first_word(status) in ERRORS:
            cases_of.setdefault(status, []).append(case)
    lines += [f"- {', '.join(cases)}: {status}" for status, cases in cases_of.items()]
    lines += [f"- {status}" for status in skipped]
    lines += [f"- note: {note}" for note in row.get("notes", [])]
    if "isolation" in row:
        lines += ["", f"The backend ran in workers ({row['isolation']}). lab/judge/README.md says what that prevents."]
    env = row["env"]
    versions = f"torch {env['torch']} and triton {env['triton']}, at commit {env['git_commit']}"
    lines += ["", f"This command ran on {env['device']} with {versions}:", ""]
    return "\n".join([*lines, f"    {row['command']}", ""])


def be(count: int) -> str:
    return "is" if count == 1 else "are"


def figures_table(row: dict) -> str:
    sides = [(row["training"][name], row["benchmark"].get(name, {})) for name in (row["impl"], row["against"])]
    lines = [
        ["tokens/s in training", "{:,.0f}", [training.get("tokens_per_sec") for training, _ in sides]],
        ["peak GiB in training", "{:.2f}", [training.get("peak_gib") for training, _ in sides]],
        ["last loss", "{:.4f}", [training.get("loss") for training, _ in sides]],
        ["error of the losses", "{:.1e}", [training.get("loss_error") for training, _ in sides]],
        ["its bound", "{:.1e}", [training.get("loss_bound") for training, _ in sides]],
        ["error of the gradient", "{:.1e}", [training.get("gradient_error") for training, _ in sides]],
        ["its bound", "{:.1e}", [training.get("gradient_bound") for training, _ in sides]],
        ["ms alone, forward and backward", "{:.3f}", [alone.get("both/ms") for _, alone in sides]],
        ["the same, launched one by one", "{:.3f}", [alone.get("launched/ms") for _, alone in sides]],
        ["of the floor", "{:.1%}", [alone.get("both/of_floor") for _, alone in sides]],
        ["extra GiB alone", "{:.2f}", [alone.get("extra_gib") for _, alone in sides]],
    ]
    cells = [
        [name, *("" if value is None else form.format(value) for value in values)]
        for name, form, values in lines
        if any(value is not None for value in values)
    ]
    return markdown_table(["", row["impl"], row["against"]], cells)


def runs_note(row: dict) -> str:
    if "ratio" not in row:
        return ""
    runs, steps = row["ratio"]["runs"], row["training"][row["impl"]]["steps"]
    each = "1 run" if runs == 1 else f"{runs} runs in turns"
    note = f"Each side has {each}, of {steps} steps."
    compared = row["training"][row["impl"]].get("loss_error") is not None
    if compared:
        steps = row["training"][row["impl"]]["compared_steps"]
        note += f" Eager PyTorch in fp32 repeated {steps} steps of them from their own states, which gives the errors."
    if row.get("losses"):
        note += f" The losses of both sides, over the last half of the steps: {losses_text(row['losses'])}."
    return note


def verdict_table(device: str) -> str:
    """Return the table of the verdicts in results/<device>/judge.jsonl, the newest first."""
    rows = read_rows(device, "judge")[::-1]
    if not rows:
        return "No verdicts yet: `python -m scripts.judge op=norm impl=triton keep=true`."
    lines = []
    for row in rows:
        claim = [row["op"], row["impl"], row["against"], row["verdict"]]
        lines.append([*claim, training_cell(row), benchmark_ratio(row), commit(row)])
    return markdown_table(["op", "backend", "against", "verdict", "in training", "alone", "commit"], lines)


def verdict_cells(row: dict) -> list[str]:
    """Return the cells of a verdict under COLUMNS. A pair has the judged backend first."""
    training = [row["training"][row[side]] for side in ("impl", "against")] if "training" in row else []

    def pair(key: str, form: str) -> str:
        values = [figures.get(key) for figures in training]
        if not any(values):
            return ""
        return " and ".join("none" if value is None else form.format(value) for value in values)

    answers = [first_word(status) for status in row["cases"].values()]
    run = [word for word in answers if word != "unavailable"]
    return [
        str(Claim(row["op"], row["impl"], row["against"])),
        row["verdict"],
        f"{run.count('ok')} of {len(run)} cases",
        benchmark_ratio(row),
        training_cell(row),
        pair("peak_gib", "{:.2f}"),
        pair("loss", "{:.4f}"),
    ]


def training_cell(row: dict) -> str:
    """Return the ratio of the speeds with its interval, or why there is none."""
    return str(Ratio(**row["ratio"])) if "ratio" in row else row["reason"]


def speed_figure(row: dict, path: Path) -> Path:
    """Draw the ratio of the two speeds, in the benchmark (if there is one) and in training.

    The error bar in training is the 95% interval. In the benchmark it is the lowest and the highest ratio of the p20
    and p80 of the times.
    """
    training, bars = row["ratio"], []
    if row["benchmark"]:
        mine, other = (row["benchmark"][row[side]] for side in ("impl", "against"))
        median = other["both/ms"] / mine["both/ms"]
        lowest, highest = other["both/ms/p20"] / mine["both/ms/p80"], other["both/ms/p80"] / mine["both/ms/p20"]
        bars.append(("alone", median, lowest, highest))
    bars.append(("in training", training["value"], training["low"], training["high"]))
    figure, axes = subplots(figsize=(8, 2.6))
    for y, (name, value, low, high) in enumerate(bars):
        colour = GREY
        if low > 1:
            colour = FASTER
        elif high < 1:
            colour = SLOWER
        axes.errorbar(value, y, xerr=[[value - low], [high - value]], fmt="o", color=colour, capsize=4)
        axes.annotate(f"{name}: {value:.3f}x ({low:.3f} to {high:.3f})", (value, y), (0, 8), textcoords="offset points")
    axes.axvline(1, color=GREY, linewidth=1)
    values = [1.0, *(value for _, value, _, _ in bars)]
    axes.set_xlim(min(values) / 1.25, max(values) * 1.25)  # a wide interval runs over the edge
    label = plain(f"speed of {row['impl']} / speed of {row['against']}")
    axes.set(yticks=[], ylim=(-0.6, len(bars) - 0.2), xlabel=label)
    title = f"{row['op']}={row['impl']}: {row['verdict']}. The baseline is {row['baseline']}"
    axes.set_title(plain(title, 160), loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return save(figure, path)

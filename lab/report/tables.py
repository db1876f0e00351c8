"""Tables in Markdown for the READMEs. Most functions take the name of a folder in results/."""

import json
import re
from collections.abc import Iterable

from tabulate import tabulate

from common.terminal import printable
from kernels.lookup import files
from kernels.registry import TRAINING_OPS, contract
from lab import rows as results
from lab.bench import support
from lab.bench.op import UNITS
from lab.report.describe import (
    SMALLEST,
    attention_cell,
    attention_groups,
    attention_settings,
    batch_cell,
    cache_and_draft,
    choice_key,
    commit,
    decoder,
    is_baseline,
    kernels_cell,
    model_name,
    newest_attention,
    newest_choices,
    newest_kernels,
    prompt_tokens,
    sessions,
)
from lab.report.presets import model_title
from lab.sweep.compare import Ratio, ratio, sequences
from lab.sweep.table import (
    PEAK,
    Cell,
    comparable_speed,
    figure_columns,
    number_cell,
    shown_run,
    speed,
    speed_cell,
    spread_cell,
    sweep_table,
)

CONDITIONS = "at power limit", "SM MHz"  # columns of figures that tell how the machine was


def markdown_table(head: list[str], lines: Iterable[list[str]]) -> str:
    cells = [[markdown_text(cell) for cell in line] for line in [head, *lines]]
    return tabulate(cells[1:], cells[0], tablefmt="github", disable_numparse=True)


def columns_table(columns: dict[str, Cell], rows: Iterable[dict]) -> str:
    return markdown_table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def markdown_text(text: object) -> str:
    """Return a text of a row as text of a Markdown table or paragraph: no HTML, no link, no formula, no line break."""
    text = " ".join(printable(text).split("\n"))
    return re.sub(r"[|$\[]", r"\\\g<0>", text if len(text) <= 1000 else f"{text[:1000]}...").replace("<", "&lt;")


def peak_gib(row: dict) -> float:
    return row["mem/peak_allocated_gib"] or row["mem/peak_rss_gib"]


def throughput(device: str) -> str:
    """Return tables of training runs without evaluations."""
    rows = [row for row in results.read_rows(device) if not row["config"]["train"]["eval_every"]]
    last = {"step": lambda row: str(row.get("steps", "")), "commit": commit}

    def title(row: dict) -> str:
        return f"{model_title(row)}, {batch_cell(row)}, {row['config']['precision']}"

    columns = {"kernels": kernels_cell, "attn": attention_cell}
    return session_tables(rows, title, columns, "tokens/s (p20 to p80)", last)


def generation(device: str) -> str:
    """Return tables of the rows of scripts.generate."""

    def title(row: dict) -> str:
        count = sequences(row)
        work = f"{prompt_tokens(row):,} + {row['config']['max_new_tokens']:,} tokens"
        plural = "sequence" if count == 1 else "sequences"
        greedy = ", greedy" if row["config"].get("temperature") == 0 else ""
        return f"{model_title(row)}, {row['config']['precision']}, {count} {plural}, prompt + new: {work}{greedy}"

    columns: dict[str, Cell] = {
        "decode": lambda row: ", ".join([decoder(row["config"]) or "blocks", *cache_and_draft(row["config"])]),
        "kernels": lambda row: f"prefill: {kernels_cell(row)}" if decoder(row["config"]) else kernels_cell(row),
        "attn": attention_cell,
    }
    rows = results.read_rows(device, "generate")
    return (
        session_tables(rows, title, columns, "decode tokens/s (p20 to p80)", {"commit": commit}) or "Not measured yet."
    )


def session_tables(
    rows: list[dict], title: Cell, columns: dict[str, Cell], speed_name: str, last: dict[str, Cell]
) -> str:
    """Return a table for each title with the newest rows of each choice, session by session, fastest first.

    All rows are of training, or all of generation. `of compile` compares a choice with compile + sdpa of its session,
    and is empty in a session of one choice. Settings that all lines share stand beside the title. Models below SMALLEST
    come last. Without rows there is no table.
    """
    figures = figure_columns(rows) if rows else {}
    newest_first = reversed(sessions(newest_choices(rows)).items())
    groups: dict[str, list[list[str]]] = {}

    def order(session: tuple) -> tuple:
        key, rows = session
        return (rows[0].get("parameters") or SMALLEST) < SMALLEST, *key[:-1]  # without the commit

    # the sort is stable, so sessions of equal settings stay newest first
    for _, session in sorted(newest_first, key=order):
        choices: dict[tuple, list[dict]] = {}
        for row in session:
            choices.setdefault(choice_key(row), []).append(row)
        baselines = [runs for runs in choices.values() if is_baseline(runs[0])]
        bases, ranked = max(baselines, key=lambda runs: speed(shown_run(runs)) or 0, default=[]), []
        for runs in choices.values():
            compared = ratio(runs, bases) if runs is not bases else None
            ranked.append((comparable_speed(runs, bases, compared), runs, compared))
        for _, runs, compared in sorted(ranked, key=lambda each: -each[0]):
            row = shown_run(runs)
            cells = [rate_cell(row), ratio_cell(runs, bases, compared) if len(choices) > 1 else ""]
            cells += [cell(row) if row["status"] == "ok" else "" for cell in figures.values()]
            cells = [*(cell(row) for cell in columns.values()), *cells, *(cell(row) for cell in last.values())]
            groups.setdefault(title(row), []).append(cells)
    head, settings = [*columns, speed_name, "of compile", *figures, *last], {*columns, *last, *CONDITIONS}
    texts = (f"**{markdown_text(name)}**{short_table(head, lines, settings)}" for name, lines in groups.items())
    return "\n\n".join(texts)


def short_table(head: list[str], lines: list[list[str]], settings: set[str]) -> str:
    """Return the columns of `settings` with one text, as ", commit: a97852f", and below them the table of the others.

    A column without text is left out. The table of one line has all columns.
    """
    kept = [column for column in zip(head, *lines, strict=True) if any(column[1:])]
    shared = [column for column in kept if column[0] in settings and len({*column[1:]}) == 1 < len(lines)]
    head, *lines = map(list, zip(*(column for column in kept if column not in shared), strict=True))
    texts = [markdown_text(f", {name}: {text}") for name, text, *_ in shared]
    return f"{''.join(texts)}\n\n{markdown_table(head, lines)}"


def ratio_cell(runs: list[dict], bases: list[dict], compared: Ratio | None) -> str:
    """Return a choice's speed over the baseline's, with a 95% interval if both have several runs.

    Empty if one of them has no speed.
    """
    if compared and compared.runs > 1:
        return str(compared)
    if compared:
        return f"{compared.value:.3f}x, other GPU" if compared.other_gpu else f"{compared.value:.3f}x"
    speeds = [speed(shown_run(rows)) for rows in (runs, bases) if rows]  # the baseline, or rows without timed intervals
    return f"{speeds[0] / speeds[1]:.3f}x" if len(speeds) == 2 and all(speeds) else ""


def rate_cell(row: dict) -> str:
    """Return "**2,131** (2,128 to 2,134)"; a row without a speed gives its status."""
    if row["status"] != "ok":
        return " ".join(row["status"].split())
    return f"**{speed_cell(row)}** ({spread_cell(row)})" if speed(row) else speed_cell(row)


def scaling(device: str) -> str:
    """Return the table of runs on several GPUs.

    `efficiency` is the tokens/s of a GPU, over the row of one GPU with the same model, precision, kernels and batch.
    """

    def settings(row: dict) -> tuple:
        config, train = row["config"], row["config"]["train"]
        sizes = train["batch_size"], train["block_size"]
        return row["parameters"], model_name(row), config["precision"], json.dumps(config["kernels"]), *sizes

    def sequences_cell(row: dict) -> str:
        shared = f" / {row['world_size']}" if row["config"]["parallel"] == "context" else ""
        return f"{row['config']['train']['batch_size']}{shared}"

    def efficiency_cell(row: dict) -> str:
        single = one_gpu.get(settings(row))
        return f"{row['perf/tokens_per_sec_per_device'] / single:.3f}" if single else ""

    rows = [row for row in results.read_rows(device) if row.get("perf/tokens_per_sec_per_device")]
    one_gpu = {settings(row): row["perf/tokens_per_sec"] for row in rows if row["world_size"] == 1}
    rows.sort(key=lambda row: (row["parameters"], row["config"]["parallel"], row["world_size"]))
    columns: dict[str, Cell] = {
        "model": model_title,
        "GPUs": number_cell("{}", "world_size"),
        "parallel": lambda row: row["config"]["parallel"] if row["world_size"] > 1 else "",
        "sequences a GPU": sequences_cell,
        "kernels": kernels_cell,
        "tokens/s": number_cell("**{:,.0f}**", "perf/tokens_per_sec"),
        "a GPU": number_cell("{:,.0f}", "perf/tokens_per_sec_per_device"),
        "efficiency": efficiency_cell,
        "peak GiB a GPU": number_cell("{:.1f}", *PEAK),
    }
    return columns_table(columns, rows)


KERNEL_COLUMNS: dict[str, Cell] = {
    "op": lambda row: f"{row['op']} {row['dtype']}",
    "shape": lambda row: row["shape"],
    "backend": lambda row: row["impl"],
    "forward ms": number_cell("{:.3f}", "forward/ms"),
    "both ms": lambda row: f"**{row['both/ms']:.3f}** ({row['both/ms/p20']:.3f} to {row['both/ms/p80']:.3f})",
    "TB/s or TFLOP/s (forward, backward)": lambda row: rates(row),
    "of the floor": lambda row: f"{row['both/of_floor']:.1%}" if row["both/of_floor"] else "",
    "error": lambda row: f"{max(row['error/out'], row['error/gradients']):.1e}",
    "extra GiB": number_cell("{:.2f}", "extra_gib"),
    "commit": commit,
}


def kernel_rows(device: str) -> list[dict]:
    """Return the rows of scripts.bench_kernels, oldest first, with those of `scripts/measure.sh languages`."""
    rows = [row for folder in (device, f"{device}-languages") for row in results.read_rows(folder, "kernels")]
    return sorted(rows, key=lambda row: row.get("started", ""))  # rows without a time are old


def kernel_benchmarks(device: str) -> str:
    """Return the table of the newest rows of scripts.bench_kernels for each op, dtype, shape and backend but auto."""
    newest = newest_kernels([row for row in kernel_rows(device) if row["impl"] != "auto"])
    if not newest:
        return "No rows yet: `python -m scripts.bench_kernels op=norm keep=true`."
    rows = sorted(newest.items(), key=lambda item: (item[0][:3], item[1]["both/ms"]))
    return columns_table(KERNEL_COLUMNS, [row for _, row in rows])


def rates(row: dict) -> str:
    """Return TB/s or TFLOP/s, such as "2.00 (1.50, 2.25)": of both directions, of the forward, of the backward.

    An op without a backward, or whose forward may compute gradients, has only the first number.
    """
    module = contract(row["op"])
    unit, digits = UNITS[module.BOUND]
    both, *ways = (
        f"{row[way]:.{digits}f}" for way in (f"both/{unit}", f"forward/{unit}", f"backward/{unit}") if way in row
    )
    return both if len(ways) < 2 or getattr(module, "GRADIENTS_IN_FORWARD", False) else f"{both} ({', '.join(ways)})"


def same_norm_sweep(device: str) -> str:
    """Return the table that a sweep prints, for `scripts/measure.sh same`: a norm, a copy of it, a norm that sleeps."""
    choices: dict[str, list[dict]] = {}
    for row in results.read_rows(device):
        choices.setdefault(f"norm={row['config']['kernels']['norm']}", []).append(row)
    return f"```\n{sweep_table(choices)}\n```"


def attention_table(rows: list[dict]) -> str:
    """Return ms and peak GiB of forward + backward: a line for each T, a column for each backend.

    The rows are from scripts.bench_attention.
    """
    newest = newest_attention(rows)
    names, lengths = list(dict.fromkeys(impl for _, impl in newest)), list(dict.fromkeys(T for T, _ in newest))
    lines = []
    for length in lengths:
        cells = [attention_benchmark_cell(newest.get((length, name))) for name in names]
        lines.append([f"{length:,}", *cells])
    return markdown_table(["T", *names], lines)


def attention_benchmark_cell(row: dict | None) -> str:
    """Return "0.26 ms, 0.10 GiB"; a row without a time gives the first word of its status, and no row gives ""."""
    if row is None:
        return ""
    if "both/ms" not in row:
        return row["status"].split(":")[0]
    memory = row.get("both/peak_gib")
    return f"{row['both/ms']:.2f} ms" if memory is None else f"{row['both/ms']:.2f} ms, {memory:.2f} GiB"


def attention_benchmarks(device: str) -> str:
    """Return a table for each group of settings. The line above a later table says how it differs from the first."""
    rows = results.read_rows(device, "attention")
    if not rows:
        return "No rows yet: `python -m scripts.bench_attention keep=true`."
    first, *others = attention_groups(rows)
    parts, settings = [attention_table(first)], attention_settings(first[0])
    for group in others:
        other = attention_settings(group[0])
        words = [f"{key}={value or 'null'}" for key, value in other.items() if value != settings[key]]
        parts += [f"With `{' '.join(words)}`:", attention_table(group)]
    return "\n\n".join(parts)


def support_tables(device: str) -> str:
    """Return the tables of what each backend supports, from rows of scripts.doctor."""
    rows = results.read_rows(device, "support")
    return support.tables(rows) if rows else "No rows yet: `python -m scripts.doctor matrix=true keep=true`."


def environment(device: str) -> str:
    """Return sentences: the hardware and versions of the last row, the speed of a matmul, and the commits."""
    rows = results.read_rows(device)
    env = rows[-1]["env"]
    commits = sorted({commit(row) for row in rows})
    matmuls = [row["measured_peak_flops"] / 1e12 for row in rows if row.get("measured_peak_flops")]
    versions = ", ".join(f"{name} {env[name]}" for name in ("driver", "cuda", "cudnn", "torch", "triton") if env[name])
    return (
        f"{env['device']}, {versions}. A large matmul, timed in each run in the run's dtype, reached "
        f"{min(matmuls):.3g} to {max(matmuls):.3g} TFLOP/s. The commits are {', '.join(commits)}. "
        f"The `command` of a row in `results/{device}/train.jsonl` repeats the run."
    )


def ops(_: str) -> str:
    """Return the table of ops and their backends, which are the folders and files in kernels/."""
    lines = [
        [op, contract(op).__doc__.partition("\n")[0].partition(": ")[2], ", ".join(files(op))] for op in TRAINING_OPS
    ]
    return markdown_table(["op", "what it computes", "backends"], lines)

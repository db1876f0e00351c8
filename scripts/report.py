"""Tables and figures from rows: `python -m scripts.report`

Rewrites what stands in the README between `<!-- NAME: DEVICE -->` and `<!-- end -->`, and draws
results/<device>/curves.png. Nothing there is typed by hand. With a folder, `python -m scripts.report out/SWEEP`, it
writes that folder's report.html, report.md and PNGs: see scripts/page/.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from runtime.compare import ratio
from runtime.config import UserError
from runtime.console import FIGURES, figure_cells, speed, sweep_table, typical
from scripts.figures import context_plot, curves_plot, newest_context, newest_kernels, roofline
from scripts.support import tables as support_tables

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"


def rows(device: str, kind: str = "train") -> list[dict]:
    """The measured rows of a device, oldest first; none, where there is no file."""
    path = RESULTS / device / f"{kind}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


YARDSTICK = "compile", "sdpa"
COLUMNS = ["model", "batch", "precision", "kernels", "attn", "tokens/s (p20 to p80)", "of compile"]
COLUMNS += [*FIGURES[2:], "step", "commit"]


def throughput(device: str) -> str:
    """The table of training throughput: the newest rows of each choice that was measured without evaluations, those of
    a session together and fastest first, each beside the session's compile + sdpa."""
    kept = newest_choices([row for row in rows(device) if not row["config"]["train"]["eval_every"]])
    table = [COLUMNS, ["---"] * len(COLUMNS)]
    newest_first = [*reversed(sessions(kept).items())]
    for _, measured in sorted(newest_first, key=lambda item: item[0][:-1]):  # stable: so they are at the same settings
        choices: dict[tuple, list[dict]] = {}
        for row in measured:
            choices.setdefault(choice(row), []).append(row)
        lines = {which: standing(runs) for which, runs in choices.items()}
        for which, row in sorted(lines.items(), key=lambda item: -(speed(item[1]) or 0)):
            table.append(throughput_cells(row, beside_compile(choices[which], choices.get(YARDSTICK, []))))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def standing(runs: list[dict]) -> dict:
    """The run in the middle, by speed; where none has one, the first, which says why."""
    return typical([row for row in runs if speed(row)] or runs[:1])


def beside_compile(runs: list[dict], bases: list[dict]) -> str:
    """Of runs of a choice and of compile + sdpa the ratio of their speeds; of more than one each with its interval."""
    if (found := ratio(runs, bases)) and runs is not bases:
        return str(found) if found.runs > 1 else f"{found.value:.3f}x{', other GPU' * found.gpus}"
    speeds = [speed(standing(each)) for each in (runs, bases) if each]  # rows of before laps were kept
    return f"{speeds[0] / speeds[1]:.3f}x" if all(speeds) and len(speeds) == 2 else ""


def newest_choices(rows: list[dict]) -> list[dict]:
    """Of training rows, oldest first, those that no later session has measured again, and what they stand beside."""
    kept, later = set(), set()
    for (*settings, _), measured in reversed(sessions(rows).items()):
        choices = {(*settings, *choice(row)) for row in measured}
        if not choices <= later:
            kept |= {id(row) for row in measured if choice(row) == YARDSTICK or (*settings, *choice(row)) not in later}
            later |= choices
    return [row for row in rows if id(row) in kept]


def sessions(rows: list[dict]) -> dict[tuple, list[dict]]:
    """Rows that are compared together, by what they have in common, the commit last; the oldest first."""
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        config, train = row["config"], row["config"]["train"]
        sizes = train["block_size"], train["batch_size"], row.get("world_size", 1)
        found.setdefault((row["parameters"], config["precision"], *sizes, commit(row)), []).append(row)
    return found


def throughput_cells(row: dict, beside: str = "") -> list[str]:
    config = row["config"]
    cells = [
        f"{row['parameters'] / 1e6:.0f}M",
        f"{config['train']['batch_size']} x {config['train']['block_size']}",
        config["precision"],
        *who(row),
    ]
    tokens_per_sec, spread, *rest = figure_cells(row)
    rest += [str(row.get("steps", "")), commit(row)]
    return [*cells, f"**{tokens_per_sec}** ({spread})" if spread else tokens_per_sec, beside, *rest]


def who(row: dict) -> tuple[str, str]:
    """The kernels of a run, and its attention."""
    kernels = row["config"]["kernels"]
    ops = "+".join(sorted({kernels[op] for op in ("norm", "mlp", "loss")}))
    ops = (f"{ops}+compile" if ops != "eager" else "compile") if kernels["compile"] else ops
    return ops, re.sub(r",? ?torch [^,)]*", "", row["kernels"]["attention"]).replace(" ()", "")


def limits(row: dict) -> str:
    """What attention sees less of, or shares, where that is set."""
    model, told = row["config"]["model"], {"window": "window {}", "n_kv_head": "{} K/V heads"}
    return ", ".join(text.format(model[key]) for key, text in told.items() if model.get(key))


def choice(row: dict) -> tuple[str, str]:
    """The same as on the command line, without what it came to."""
    return who(row)[0], row["config"]["attn"]["impl"]


def commit(row: dict) -> str:
    return (row["env"].get("git_commit") or "unknown")[:7]


def scaling(device: str) -> str:
    """The table of several GPUs: each row beside the one-GPU row of the same machine, model, precision and kernels."""

    def alike(row: dict) -> tuple:
        config = row["config"]
        return row["parameters"], config["precision"], json.dumps(config["kernels"]), config["train"]["batch_size"]

    kept = [row for row in rows(device) if row.get("perf/tokens_per_sec_per_device")]
    alone = {alike(row): row["perf/tokens_per_sec"] for row in kept if row["world_size"] == 1}
    kept.sort(key=lambda row: (row["parameters"], row["config"]["parallel"], row["world_size"]))
    head = ["model", "GPUs", "parallel", "sequences a GPU", "kernels", "tokens/s", "a GPU", "efficiency"]
    head += ["peak GiB a GPU"]
    table = [head, ["---"] * len(head)]
    for row in kept:
        each, one = row["perf/tokens_per_sec_per_device"], alone.get(alike(row))
        model, _, _, kernels, _ = throughput_cells(row)[:5]
        table.append(
            [
                model,
                str(row["world_size"]),
                row["config"]["parallel"] if row["world_size"] > 1 else "",
                str(row["config"]["train"]["batch_size"]),
                kernels,
                f"**{row['perf/tokens_per_sec']:,.0f}**",
                f"{each:,.0f}",
                f"{each / one:.3f}" if one else "",
                f"{row['mem/peak_allocated_gib'] or row['mem/peak_rss_gib']:.1f}",
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def generation(device: str) -> str:
    """The table of scripts.generate, fastest first."""
    head = ["model", "precision", "kernels", "attn", "sequences", "first token", "decode tokens/s (p20 to p80)"]
    table = [[*head, "of the bound", "peak GiB"], ["---"] * (len(head) + 2)]
    kept = [row for row in rows(device, "generate") if row.get("gen/decode_tokens_per_sec")]
    for row in sorted(kept, key=lambda row: -row["gen/decode_tokens_per_sec"]):
        speed, p20, p80 = (f"{row[f'gen/decode_tokens_per_sec{p}']:,.0f}" for p in ("", "/p20", "/p80"))
        kernels, attention = who(row)
        cells = [row["name"].split("-")[1], row["config"]["precision"], kernels, attention, str(row["config"]["batch"])]
        cells += [f"{row['gen/ttft_ms']:.1f} ms", f"**{speed}** ({p20} to {p80})"]
        memory = row["mem/peak_allocated_gib"] or row["mem/peak_rss_gib"]
        table.append([*cells, f"{100 * row['gen/bandwidth_utilisation']:.1f}%", f"{memory:.2f}"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def kernels(device: str) -> str:
    """The table of kernels: the newest rows of each op, shape, backend and dtype."""
    newest = newest_kernels(rows(device, "kernels"))
    if not newest:
        return "No rows yet: `python -m scripts.bench_kernels op=norm keep=true`."
    head = ["op", "shape", "backend", "forward ms", "both ms", "TB/s or TFLOP/s (forward, backward)"]
    head += ["of the floor", "error", "extra GiB", "commit"]
    table = [head, ["---"] * len(head)]
    for (op, dtype, shape, impl), row in sorted(newest.items(), key=lambda item: (item[0][:3], item[1]["both/ms"])):
        share, extra = row["both/of_floor"], row["extra_gib"]
        table.append(
            [
                f"{op} {dtype}",
                shape,
                impl,
                f"{row['forward/ms']:.3f}",
                f"**{row['both/ms']:.3f}** ({row['both/ms/p20']:.3f} to {row['both/ms/p80']:.3f})",
                rates(row),
                f"{100 * share:.1f}%" if share else "",
                f"{max(row['error/out'], row['error/gradients']):.1e}",
                "" if extra is None else f"{extra:.2f}",
                commit(row),
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def same(device: str) -> str:
    """The table of `scripts/measure.sh same`, as a sweep prints it: a norm, its double, and one that naps."""
    choices: dict[str, list[dict]] = {}
    for row in rows(device):
        choices.setdefault(f"norm={row['config']['kernels']['norm']}", []).append(row)
    return f"```\n{sweep_table(choices)}\n```"


def rates(row: dict) -> str:
    """Of norm TB/s, of the others TFLOP/s. A loss has its gradients in its forward, or not: no rate is of one alone."""
    unit, digits = ("tb_per_s", 2) if row["op"] == "norm" else ("tflops", 0)
    both, forward, backward = (f"{row[f'{way}/{unit}']:.{digits}f}" for way in ("both", "forward", "backward"))
    return both if row["op"] == "loss" else f"{both} ({forward}, {backward})"


def context_table(rows: list[dict]) -> str:
    """Rows of scripts/bench_attention.py: forward + backward ms and peak GiB, a line a T and a column a backend."""
    found = newest_context(rows)
    names, lengths = (list(dict.fromkeys(key[i] for key in found)) for i in (1, 0))
    table = [["T", *names], ["---"] * (1 + len(names))]
    for length in lengths:
        cells = [f"{length:,}"]
        for row in (found.get((length, name), {"status": ""}) for name in names):
            memory = row.get("both/peak_gib")
            told = f"{row['both/ms']:.2f} ms" if "both/ms" in row else row["status"].split(":")[0]
            cells.append(f"{told}, {memory:.2f} GiB" if memory is not None and "both/ms" in row else told)
        table.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def context(device: str) -> str:
    """The table of attention against the context."""
    kept = rows(device, "attention")
    return context_table(kept) if kept else "No rows yet: `python -m scripts.bench_attention keep=true`."


def support(device: str) -> str:
    """The tables of what each backend can do."""
    kept = rows(device, "support")
    return support_tables(kept) if kept else "No rows yet: `python -m scripts.doctor matrix=true keep=true`."


def max_context(device: str) -> str:
    """The table of the longest contexts."""
    kept = rows(device, "context")
    return longest_table(kept) if kept else "No rows yet: `python -m scripts.max_context keep=true`."


def shown(row: dict, mode: str) -> str:
    """The longest T; where time ended the search before memory did, so much or more."""
    found, limit = row.get(f"context/max_{mode}"), row.get(f"context/{mode}/limit")
    return f"{found:,}" + " or more" * (limit == "timeout") if found else ""


def longest_table(rows: list[dict]) -> str:
    """In Markdown, the newest row of each choice, longest first."""
    head = ["model", "precision", "kernels", "attn", "pos", "checkpointing", "GiB"]
    head += ["longest T, training", "s a step", "peak GiB (predicted)", "longest T, generation"]
    found = {}
    for row in rows:
        model = row["config"]["model"]
        cells = f"{row['parameters'] / 1e6:.0f}M", row["config"]["precision"], *who(row)
        cells += (", ".join(filter(None, (model["pos"], limits(row)))),)
        kept = ", attention kept" * model.get("keep_attention", False)
        cells += model["checkpointing"] + kept, f"{row['memory_gib']:.4g}"
        found[cells] = row
    lines = [head, ["---"] * len(head)]
    for cells, row in sorted(found.items(), key=lambda item: -(item[1].get("context/max_train") or 0)):
        train = {key.removeprefix("context/train/"): value for key, value in row.items()}
        seconds = peak = ""
        if trained := shown(row, "train"):
            seconds = f"{train['seconds']:.3g}"
            if train.get("window") != row["config"]["model"].get("window"):
                seconds += f" with window {train['window']}"
            if whole := train.get("seconds_of_full_attention"):
                seconds = f"{whole:,.1f}, by shorter ones; {seconds}"
            foreseen, model = train.get("prediction"), " uncompiled" * row["config"]["kernels"]["compile"]
            peak = f"{train['peak_gib']:.2f}" + (f" ({foreseen['peak_gib']:.2f}{model})" if foreseen else "")
        trained = f"**{trained}**" if trained else train.get("limit") or ""
        stopped = "stopped" * row.get("status", "").startswith("stopped")
        lines.append([*cells, trained, seconds, peak, shown(row, "generate") or stopped])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def environment(device: str) -> str:
    """What the rows were measured with, on which commit, and how to measure one again."""
    env = rows(device)[-1]["env"]
    commits = sorted({commit(row) for row in rows(device)})
    measured = [row["measured_peak_flops"] / 1e12 for row in rows(device) if row.get("measured_peak_flops")]
    versions = ", ".join(f"{name} {env[name]}" for name in ("driver", "cuda", "cudnn", "torch", "triton") if env[name])
    return (
        f"{env['device']}, {versions}; a large matmul beside each run, in its dtype, reached {min(measured):.3g} to "
        f"{max(measured):.3g} TFLOP/s. Measured at commit {', '.join(commits)}; "
        f"a row's `command`, in `results/{device}/train.jsonl`, runs it again."
    )


def curves(device: str) -> dict[str, dict[int, float]]:
    """Run -> step -> training loss, in the order in which the runs were collected."""
    kept = {}
    for name in (row["name"] for row in rows(device)):
        path = RESULTS / device / "curves" / f"{name}.jsonl"
        if path.exists():
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            kept[name] = {line["step"]: line["train/loss"] for line in lines}
    return kept


def agreement(device: str) -> str:
    """How far the loss curves lie from the first one."""
    said = []
    (first, a), *others = curves(device).items()
    for name, b in others:
        steps = sorted(a.keys() & b.keys())
        apart = [abs(a[step] - b[step]) for step in steps]
        said.append(
            f"`{first}` and `{name}` over {len(apart)} steps: they differ by {sum(apart) / len(apart):.4f} in the "
            f"mean, by {max(apart):.4f} at most; the last are {a[steps[-1]]:.4f} and {b[steps[-1]]:.4f}."
        )
    return "\n".join(said) or "Only one run is kept."


def fill(text: str) -> str:
    """`text` with every marked section made anew."""
    sections = {"throughput": throughput, "scaling": scaling, "generation": generation, "kernels": kernels}
    sections |= {"context": context, "max_context": max_context, "support": support}
    sections |= {"environment": environment, "agreement": agreement, "same": same}

    def section(match: re.Match) -> str:
        return f"{match[1]}\n{sections[match[2]](match[3])}\n{match[4]}"

    return re.sub(r"(<!-- (\w+): ([\w-]+) -->)\n(?:.*?\n)??(<!-- end -->)", section, text, flags=re.DOTALL)


def readmes() -> None:
    """The README's sections, and the figures in results/."""
    for readme in (ROOT / "README.md", ROOT / "kernels" / "README.md"):
        readme.write_text(fill(readme.read_text()))
        print(readme)
    for file in sorted(RESULTS.glob("*/kernels.jsonl")):
        print(roofline(rows(file.parent.name, "kernels"), file.with_name("roofline.png")))
    for file in sorted(RESULTS.glob("*/attention.jsonl")):
        print(context_plot(rows(file.parent.name, "attention"), file.with_name("attention.png")))
    for folder in sorted(RESULTS.glob("*/curves")):
        print(curves_plot(curves(folder.parent.name), folder.parent / "curves.png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="out/SWEEP, out/RUN or results/DEVICE; none: the README's")
    parser.add_argument("--force", action="store_true", help="compare what differs in more than its kernels, too")
    modes = {"nargs": "?", "const": "offline", "choices": ["offline", "online"]}
    parser.add_argument("--wandb", help="the table and the page to W&B; offline, where no mode is given", **modes)
    arguments = parser.parse_args()
    if not arguments.folder:
        if arguments.force or arguments.wandb:
            parser.error("--force and --wandb need the folder of a sweep")
        readmes()
        return
    from scripts.page import publish, write

    try:
        files, source = write(arguments.folder, arguments.force)
        files += publish(source, arguments.wandb, files) if arguments.wandb else []
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
    print("\n".join(map(str, files)))


if __name__ == "__main__":
    main()

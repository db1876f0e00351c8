"""Tables and figures from the rows in results/: `python -m scripts.report`

Rewrites what stands in the README between `<!-- NAME: DEVICE -->` and `<!-- end -->`, and draws
results/<device>/curves.png. Nothing there is typed by hand.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"


def rows(device: str) -> list[dict]:
    """The measured rows of a device, oldest first."""
    return [json.loads(line) for line in (RESULTS / device / "train.jsonl").read_text().splitlines()]


def throughput(device: str) -> str:
    """The table of training throughput: rows of one full step without accumulation, grouped by model and precision."""
    measured = [row for row in rows(device) if not row["config"]["train"]["eval_every"]]
    measured.sort(key=lambda row: (row["parameters"], row["config"]["precision"], -(row["perf/tokens_per_sec"] or 0)))
    lines = [
        "| model | batch | precision | kernels | attn (it ran) | tokens/s (p20 to p80) | MFU | peak memory | first step | loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join(lines + [throughput_line(row) for row in measured])


def throughput_line(row: dict) -> str:
    config = row["config"]
    ops = {config["kernels"][op] for op in ("norm", "mlp", "loss")}
    kernels = "+".join(sorted(ops)) + ("+compile" if config["kernels"]["compile"] else "")
    attention = re.sub(r", torch [^,)]*", "", row["kernels"]["attention"])
    cells = [
        f"{row['parameters'] / 1e6:.0f}M",
        f"{config['train']['batch_size']} x {config['train']['block_size']}",
        config["precision"],
        {"eager+compile": "compile"}.get(kernels, kernels),
        attention.removesuffix(" ()").replace(f"({'torch'})", "").strip(),
    ]
    if row["status"] != "ok":
        return "| " + " | ".join([*cells, row["status"], "", "", "", ""]) + " |"
    p20, p50, p80 = (row[f"perf/tokens_per_sec{p}"] for p in ("/p20", "", "/p80"))
    cells += [
        f"**{p50:,.0f}** ({p20:,.0f} to {p80:,.0f})",
        f"{100 * row['perf/mfu']:.1f}%" if row["perf/mfu"] else "",
        f"{row['mem/peak_allocated_gib']:.1f} GiB",
        f"{row['perf/first_step_s']:.1f} s",
        f"{row['train/loss']:.4f}",
    ]
    return "| " + " | ".join(cells) + " |"


def environment(device: str) -> str:
    """What the rows were measured with, and how to measure one again."""
    env = rows(device)[-1]["env"]
    measured = [row["measured_peak_flops"] / 1e12 for row in rows(device)]
    return (
        f"{env['device']}, driver {env['driver']}, CUDA {env['cuda']}, cuDNN {env['cudnn']}, torch {env['torch']}, "
        f"triton {env['triton']}; the 8192^3 bf16 matmul beside the runs reached {min(measured):.0f} to "
        f"{max(measured):.0f} TFLOP/s. A row's `command` in `results/{device}/train.jsonl` runs it again."
    )


def curves(device: str) -> dict[str, dict[int, float]]:
    """Run -> step -> training loss."""
    kept = {}
    for path in sorted((RESULTS / device / "curves").glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kept[path.stem] = {line["step"]: line["train/loss"] for line in lines}
    return kept


def agreement(device: str) -> str:
    """How far the loss curves lie apart."""
    (first, a), *others = curves(device).items()
    said = []
    for name, b in others:
        apart = [abs(a[step] - b[step]) for step in a.keys() & b.keys()]
        said.append(
            f"`{first}` and `{name}`: over {len(apart)} steps the losses differ by {sum(apart) / len(apart):.4f} in the "
            f"mean and {max(apart):.4f} at most; the last are {a[max(a)]:.4f} and {b[max(b)]:.4f}."
        )
    return "\n".join(said)


def fill(text: str) -> str:
    """`text` with every marked section made anew."""
    sections = {"throughput": throughput, "environment": environment, "agreement": agreement}

    def section(match: re.Match) -> str:
        return f"{match[1]}\n{sections[match[2]](match[3])}\n{match[4]}"

    return re.sub(r"(<!-- (\w+): (\w+) -->)\n.*?\n(<!-- end -->)", section, text, flags=re.DOTALL)


def plot_curves(device: str) -> None:
    """results/<device>/curves.png: the losses, and their difference from the first run's below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    (first, reference), *_ = kept = list(curves(device).items())
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=[3, 1])
    for name, losses in kept:
        steps = sorted(losses)
        above.plot(steps, [losses[s] for s in steps], label=name, linewidth=1)
        if name != first:
            below.plot(steps, [losses[s] - reference[s] for s in steps], label=f"{name} - {first}", linewidth=1)
    above.set_ylabel("training loss")
    below.set_ylabel("difference")
    below.set_xlabel("step")
    above.legend()
    below.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / device / "curves.png", dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(fill(readme.read_text()))
    for folder in sorted(RESULTS.glob("*/curves")):
        plot_curves(folder.parent.name)
        print(f"{folder.parent / 'curves.png'}")
    print(readme)

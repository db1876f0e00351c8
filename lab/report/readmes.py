"""Write the generated sections of the READMEs, and draw the figures in results/.

A section stands between `<!-- NAME: DEVICE -->` and `<!-- end -->`. For `compiled`, DEVICE is a word of compiled().
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from common.files import read_text, write_atomically
from lab import rows
from lab.judge.verdict import verdict_table
from lab.report import tables
from lab.report.bench_panels import draw_attention, draw_roofline
from lab.report.compiled_table import compiled
from lab.report.course import course
from lab.report.languages import language_tables
from lab.report.loss_curves import agreement, draw_curves, long_runs, optimizers
from lab.report.max_context_table import max_context
from lab.report.optimizers import muon_steps
from lab.report.peers import peers
from lab.report.questions import decoding, draw_questions, fastest, longest, memory
from lab.report.rungs import rungs

ROOT = Path(__file__).resolve().parents[2]
# NAME -> the function that makes the section from DEVICE, which mostly is the name of a folder in results/
SECTIONS: dict[str, Callable[[str], str]] = {
    "rungs": rungs,
    "fastest": fastest,
    "memory": memory,
    "longest": longest,
    "decoding": decoding,
    "agreement": agreement,
    "course": course,
    "languages": language_tables,
    "peers": peers,
    "throughput": tables.throughput,
    "scaling": tables.scaling,
    "generation": tables.generation,
    "kernels": tables.kernel_benchmarks,
    "compiled": compiled,
    "context": tables.attention_benchmarks,
    "max_context": max_context,
    "support": tables.support_tables,
    "environment": tables.environment,
    "long_runs": long_runs,
    "optimizers": optimizers,
    "muon_steps": muon_steps,
    "verdicts": verdict_table,
    "same": tables.same_norm_sweep,
    "ops": tables.ops,
}
MARKED = re.compile(r"(<!-- (\w+): ([\w-]+) -->)\n(?:.*?\n)??(<!-- end -->)", re.DOTALL)


def fill(text: str) -> str:
    """Return `text` with new contents for every marked section."""

    def section(match: re.Match) -> str:
        return f"{match[1]}\n{SECTIONS[match[2]](match[3])}\n{match[4]}"

    return MARKED.sub(section, text)


def read_readmes() -> Iterator[tuple[Path, str]]:
    """Yield README.md and each */README.md with its text."""
    for readme in (ROOT / "README.md", *sorted(ROOT.glob("*/README.md"))):
        yield readme, read_text(readme)


def write_readmes() -> Iterator[Path]:
    """Fill the generated sections of README.md and */README.md; yield each file that was written."""
    for readme, text in read_readmes():
        if MARKED.search(text):
            write_atomically(readme, fill(text).encode())
            yield readme


def draw_results() -> Iterator[Path]:
    """Draw the PNGs of each folder in results/ that has such rows, and of each section `fastest`; yield each file."""
    marks = [match for _, text in read_readmes() for match in MARKED.finditer(text)]
    for device in dict.fromkeys(match[3] for match in marks if match[2] == "fastest"):
        yield from draw_questions(device)
    for file in sorted(rows.RESULTS.glob("*/kernels.jsonl")):
        yield from draw_roofline(tables.kernel_rows(file.parent.name), file.with_name("roofline.png"))
    for file in sorted(rows.RESULTS.glob("*/attention.jsonl")):
        yield from draw_attention(rows.read_rows(file.parent.name, "attention"), file.with_name("attention.png"))
    for folder in sorted(rows.RESULTS.glob("*/curves")):
        yield from draw_curves(folder.parent.name, folder.with_name("curves.png"))

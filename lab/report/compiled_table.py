"""The tables of what our Triton kernels need on each compute capability, from results/compiled.json.

The kernels are compiled, not run: ptxas compiles for GPUs that are not here. `make compiled` writes the file, and the
tests compare it with what the compiler says.
"""

import json
import re

from common.files import add_sha256, read_json, write_atomically
from lab import rows
from lab.report.tables import markdown_table

# compute capability -> (KB of shared memory that a program may use, GPUs)
GPUS = {
    80: (163, ["A100", "A30"]),
    86: (99, ["RTX 30", "RTX A", "A10", "A40"]),
    89: (99, ["RTX 40", "RTX 4000 to 6000 Ada", "L4", "L40"]),
    90: (227, ["H100", "H200", "GH200"]),
    100: (227, ["B200", "GB200"]),
    120: (99, ["RTX 50", "RTX PRO"]),
}
Usage = dict[str, list[int]]  # name of a kernel -> [registers of a thread, bytes of stack, bytes of shared memory]


def write_usage(triton: str, sources: str, usage: dict[int, Usage]) -> None:
    """Write results/compiled.json, one line for a kernel and a capability.

    `triton` is the version that compiled, and `sources` the digest of what it compiled.
    """
    entries = {f"{capability} {name}": used for capability in usage for name, used in usage[capability].items()}
    entries = {"triton": triton, "sources": sources, **entries}
    lines = [json.dumps({name: value})[1:-1] for name, value in entries.items()]
    write_atomically(rows.RESULTS / "compiled.json", add_sha256("{\n" + ",\n".join(lines) + "\n}"))


def read_usage() -> tuple[str, str, dict[int, Usage]]:
    """Return what write_usage() wrote."""
    entries = read_json(rows.RESULTS / "compiled.json")
    triton, sources, usage = entries.pop("triton"), entries.pop("sources"), {capability: {} for capability in GPUS}
    for entry, used in entries.items():
        capability, _, name = entry.partition(" ")
        usage[int(capability)][name] = used
    return triton, sources, usage


def timed_devices() -> set[str]:
    """Return the names of the GPUs in results/ on which single kernels or training runs were timed: "NVIDIA H200"."""
    folders = [folder.name for folder in sorted(rows.RESULTS.iterdir()) if folder.is_dir()]
    timed = [row for folder in folders for kind in ("kernels", "train") for row in rows.read_rows(folder, kind)]
    return {row["env"]["device"] for row in timed}


def is_of(device: str, gpu: str) -> bool:
    """Return whether a device's name is of a GPU, or of a series: "NVIDIA GeForce RTX 4090" of "RTX 40"."""
    end = "" if gpu.startswith("RTX") else r"(?!\d)"  # an L40 is no L4
    return re.search(rf"\b{re.escape(gpu)}{end}", device) is not None


def compiled(what: str) -> str:
    """Return a table: of the capabilities if `what` is "capabilities", and of the kernels if it is "kernels"."""
    triton, _, usage = read_usage()
    table = capability_table(usage) if what == "capabilities" else kernel_table(usage)
    return f"{table}\n\nCompiled with triton {triton}."


def capability_table(usage: dict[int, Usage]) -> str:
    """Return the table of the capabilities. It leaves out fp32, which may spill, because it is not for speed."""
    head = ["compute capability", "GPUs", "kernels", "most registers", "most shared memory", "spilled", "timed on"]
    lines, devices = [], timed_devices()
    for capability, (kilobytes, gpus) in GPUS.items():
        used = {name: numbers for name, numbers in usage[capability].items() if not name.endswith(" in fp32")}
        spills = {name: stack for name, (_, stack, _) in used.items() if stack}
        most = max(shared for _, _, shared in used.values()) / 1024
        lines.append(
            [
                f"{capability / 10}",
                ", ".join(gpus),
                f"{len(used)}",
                f"{max(registers for registers, _, _ in used.values())}",
                f"{most:.0f} of {kilobytes} KB",
                f"kernels: {len(spills)}, bytes: {max(spills.values())} or fewer" if spills else "nothing",
                ", ".join(gpu for gpu in gpus if any(is_of(device, gpu) for device in devices)) or "never timed",
            ]
        )
    return markdown_table(head, lines)


def kernel_table(usage: dict[int, Usage]) -> str:
    """Return the table of the kernels that are compiled for several capabilities, with empty cells for the others."""
    names = dict.fromkeys(name for used in usage.values() for name in used)
    shared_names = [name for name in names if sum(name in used for used in usage.values()) > 1]
    lines = [[name, *(usage_cell(usage[capability].get(name)) for capability in GPUS)] for name in shared_names]
    return markdown_table(["kernel", *(f"{capability / 10}" for capability in GPUS)], lines)


def usage_cell(used: list[int] | None) -> str:
    """Return "255, 28 KB" for 255 registers and 28 KB of shared memory; a spill of 8 bytes adds ", 8 B spilled"."""
    if used is None:
        return ""
    registers, stack, shared = used
    return f"{registers}, {shared / 1024:.0f} KB" + (f", {stack} B spilled" if stack else "")

"""Which backends are known to be slower than eager on this GPU. A run looks this up and says so; it times nothing.

`python -m scripts.doctor speed=true` measures the calls of a model's training step and of a decoding step, and
`python -m scripts.tune auto=true` the calls that it chooses backends for. Both store the times of each backend beside
eager's:

    ~/.cache/hotswap/speeds/h200.json     the user's table
    kernels/tables/speeds/h200.json       the repo's table; scripts.doctor speed=true keep=true writes it

The tables have the form of those in tuned.py. The name of an entry has the backend, the dtypes and the sizes of a call:
"mlp=triton bfloat16 C=768 F=3072 at rows=65536". "times" has the milliseconds of the forward and of both ways.

An entry counts only on a GPU of the same name, with the same versions of PyTorch and Triton, the same files in kernels/
and in the op's folder, and the same launch parameters. It also counts for calls of up to 4 times as many or as few
rows, queries or keys; the other sizes must be equal.
"""

import hashlib
import json
import math
import time
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from common.files import read_bytes
from kernels import tuned
from kernels.arguments import match_shape
from kernels.fastest import entry_name
from kernels.lookup import ROOT, is_path, shared_files, source_file
from kernels.registry import contract
from kernels.tuned import is_choice, merged_table, read_table, user_cache, write_table

NEAR = 4  # the largest ratio between the amounts of a call and of a measured call that stands for it
WAYS = "forward", "both"
TIE = 0.02  # two sittings on H200s gave Triton's linear 1.002 and 1.009 of eager's time


def compare(ms: float, baseline: list[float]) -> str:
    """Return "slower", "tie" or "faster" for a median beside (p20, median, p80) of the baseline.

    It is a tie from p20 to p80, and within TIE of the median.
    """
    p20, median, p80 = baseline
    if ms > max(p80, (1 + TIE) * median):
        return "slower"
    return "faster" if ms < min(p20, (1 - TIE) * median) else "tie"


def table_paths(device: torch.device) -> tuple[Path, Path]:
    """Return the paths of the user's and the repo's table for this GPU. The files may not exist."""
    name = tuned.table_paths(device)[0].name
    return user_cache() / "speeds" / name, tuned.TABLES / "speeds" / name


def describe_call(op: str, inputs: dict) -> tuple[str, dict[str, int]] | None:
    """Return (dtypes and fixed sizes, amounts) of a call: ("bfloat16 C=768 F=3072", {"rows": 65536}).

    `inputs` are the arguments of the op, maybe fake. The amounts are the rows (of attention: the sequences), queries
    and keys. None if the op's contract has no TENSORS.
    """
    module, sizes = contract(op), {}
    if not hasattr(module, "TENSORS"):
        return None
    for name, dims in module.TENSORS.items():
        if isinstance(inputs.get(name), Tensor):
            match_shape(inputs[name].shape, dims.split(), sizes)
    leading = sizes.pop("...", None) or (sizes.pop("B", 1),)
    amounts = {"rows": math.prod(leading), **{dim: size for dim, size in sizes.items() if dim.startswith("T")}}
    words = entry_name(op, inputs.values()).split()[1:]
    words += [f"{dim}={size}" for dim, size in sizes.items() if dim not in amounts]
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            if not value.is_floating_point():
                words.append(name)
        elif value is not None:
            words.append(f"{name}={value}")
    return " ".join(words), amounts


def amounts_text(amounts: dict[str, int]) -> str:
    return " ".join(f"{name}={amount}" for name, amount in amounts.items())


def conditions(op: str, impl: str, device: torch.device) -> dict[str, str | None]:
    """Return what the speed of a backend depends on besides the call: the GPU, the versions, its code."""
    triton = version("triton") if find_spec("triton") else None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "triton": triton, "code": code_digest(op, impl, device)}


def code_digest(op: str, impl: str, device: torch.device) -> str:
    """Return a digest of the launch parameters and of the code: another file; or the op's folder and what ops share."""
    parameters = {name: values for name, values in merged_table(device).items() if not is_choice(name)}
    digest, file = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()), source_file(op, impl)
    paths = [file]
    if file.is_relative_to(ROOT / op):
        files = [*(ROOT / op).rglob("*"), *shared_files()]
        files = (path for path in files if path.suffix in (".py", ".cu", ".cuh", ".h"))
        paths = sorted(path for path in files if path.is_file())
    for path in paths:
        digest.update(path.name.encode() + read_bytes(path))
    return digest.hexdigest()[:16]


def backend_name(op: str, impl: str) -> str:
    """Return "mlp=triton"; a path becomes absolute, so that it is found again from another folder."""
    return f"{op}={source_file(op, impl) if is_path(impl) else impl}"


def store_speeds(op: str, inputs: dict, rows: Iterable[dict], device: torch.device, path: Path | None = None) -> None:
    """Store the times of backends, measured together at one call, in the user's table or in the table at `path`.

    A row has "impl", and "forward/ms", "both/ms", or both, with "/p20" and "/p80" of each. The rows are of one sitting.
    Without a row of eager there is nothing to store. Raises KernelError if the table cannot be read or written.
    """
    call = describe_call(op, inputs)
    times = {row["impl"]: {way: quantiles(row, way) for way in WAYS if f"{way}/ms" in row} for row in rows}
    baselines = {name: times[name] for name in ("eager", "compile") if name in times}
    if call is None or "eager" not in times:
        return
    words, amounts = call
    entries = {}
    for impl in times.keys() - {"eager", "compile", "auto"}:
        ways = {}
        for way in times[impl].keys() & times["eager"].keys():
            beside = {name: spreads[way] for name, spreads in baselines.items() if way in spreads}
            ways[way] = {"ms": times[impl][way][1], **beside}
        facts = {**conditions(op, impl, device), "date": time.strftime("%Y-%m-%d")}
        entries[f"{backend_name(op, impl)} {words} at {amounts_text(amounts)}"] = {"times": ways, **facts}
    write_table(path or table_paths(device)[0], entries, "times")


def quantiles(row: dict, way: str) -> list[float]:
    """Return (p20, median, p80) in milliseconds, with four significant digits."""
    return [float(f"{row[f'{way}/ms{suffix}']:.4g}") for suffix in ("/p20", "", "/p80")]


def find_slower(
    op: str, impl: str, inputs: dict, device: torch.device, way: str, compiled: bool = False
) -> dict | None:
    """Return what is known if this backend is slower than eager in this call, or None.

    The facts are "ms", "baseline_ms", the "date", "at" (the measured rows if the call has others, else None), and
    "baseline": "eager", or "compile" if the model is `compiled` and torch.compile of eager was measured too. Raises
    KernelError if a table cannot be used.
    """
    if impl in ("eager", "auto") or (call := describe_call(op, inputs)) is None:
        return None
    words, amounts = call
    found = find_entry(f"{backend_name(op, impl)} {words} at ", amounts, op, impl, device)
    if found is None or way not in found[1]["times"]:
        return None
    measured, entry = found
    times = entry["times"][way]
    baseline = "compile" if compiled and "compile" in times else "eager"
    if compare(times["ms"], times[baseline]) != "slower":
        return None
    at = None if measured == amounts else amounts_text(measured)
    facts = {"ms": times["ms"], "baseline": baseline, "baseline_ms": times[baseline][1]}
    return {**facts, "at": at, "date": entry["date"]}


def find_entry(
    prefix: str, amounts: dict[str, int], op: str, impl: str, device: torch.device
) -> tuple[dict[str, int], dict] | None:
    """Return (amounts, entry) of the nearest entry that counts, or None. If two are equally near, the user's wins.

    Raises KernelError if a table cannot be used.
    """
    best, best_distance, now = None, None, None
    for path in table_paths(device):
        for name, entry in read_table(path, "times").items():
            if not name.startswith(prefix):
                continue
            measured = {key: int(value) for key, value in (word.split("=") for word in name[len(prefix) :].split())}
            if measured.keys() != amounts.keys():
                continue
            ratios = [abs(math.log(measured[key] / amounts[key])) for key in amounts]
            if max(ratios) > math.log(NEAR) + 1e-9:
                continue
            now = now or conditions(op, impl, device)
            is_current = all(entry.get(key) == value for key, value in now.items())
            if is_current and (best is None or sum(ratios) < best_distance):
                best, best_distance = (measured, entry), sum(ratios)
    return best

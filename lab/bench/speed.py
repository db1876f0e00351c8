"""Time each backend of an op beside eager, at the shapes that a model's step gives the op.

The backends that are right in a small probe take turns. Every probe has a process of its own, so a backend that crashes
or hangs there is a line, and the rest goes on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from common.terminal import class_and_message
from kernels.compat import FakeTensorMode
from kernels.fp8 import choose_ptxas
from kernels.registry import KernelsConfig, Unavailable, contract, cpp_compiler, impls, load
from kernels.speeds import compare, store_speeds
from lab.bench.op import backend_of, forward_and_backward, optional_arguments, outputs, random_gradients
from lab.bench.probe import Probe, first_word, run_probes
from model.config import PRECISIONS, GPTConfig
from model.cost import parameters
from model.executed import call_shapes
from runtime.config import check
from runtime.device import is_out_of_memory, reset_peak_memory
from runtime.meter import quantiles
from runtime.schedule import DEFAULT_TOKENS
from runtime.timing import time_in_turns

PROBE_ROWS = 256
CPU_TOKENS = 64  # of a training step on a CPU


@dataclass(frozen=True)
class Call:
    """A call that a model makes of an op: the arguments of the contract's inputs()."""

    op: str
    arguments: dict
    dtype: torch.dtype
    trains: bool  # forward and backward; otherwise a decoding step's forward

    @property
    def rows(self) -> int:
        """The number of rows; of attention, the number of sequences."""
        return self.arguments["shape"][0]

    @property
    def size(self) -> str:
        keys = self.arguments.get("keys")
        return " x ".join(f"{side:,}" for side in self.arguments["shape"]) + (f", {keys:,} keys" if keys else "")

    def with_rows(self, rows: int) -> "Call":
        changes = {"shape": (rows, *self.arguments["shape"][1:])}
        if self.arguments.get("lengths"):
            changes["lengths"] = self.arguments["lengths"][:1] * rows
        return Call(self.op, self.arguments | changes, self.dtype, self.trains)

    def inputs(self, device: torch.device) -> dict:
        return contract(self.op).inputs(**self.arguments, dtype=self.dtype, device=device)

    def fake_inputs(self, device: torch.device) -> dict:
        """Return inputs() as fake tensors, which take no memory."""
        with FakeTensorMode():
            return self.inputs(device)


def step_shape(config: GPTConfig, device: torch.device) -> tuple[int, int]:
    """Return (sequences, tokens of each) of a training step: what train.py takes on a GPU, and few tokens on a CPU."""
    if device.type == "cpu":
        return 1, min(CPU_TOKENS, config.block_size)
    return max(1, DEFAULT_TOKENS["cuda"] // config.block_size), config.block_size


def model_calls(config: GPTConfig, precision: str, device: torch.device, trains: bool) -> dict[str, Call]:
    """Return op -> its call in a training step, or in the decoding step of one token after block_size - 1 others."""
    batch, length = step_shape(config, device)
    shape, keys = ((batch, length), None) if trains else ((1, 1), length)
    calls = {}
    for op, arguments in call_shapes(config, KernelsConfig(), precision, shape, keys).items():
        size = arguments["shape"]
        if len(size) == 3:  # the tokens of all sequences are rows
            size = (size[0] * size[1], size[2])
        calls[op] = Call(op, arguments | {"shape": size}, PRECISIONS[precision][1], trains)
    return calls


def time_model(
    config: GPTConfig,
    precision: str,
    ops: list[str],
    names: list[str],
    rounds: int,
    device: torch.device,
    limit: float,
    table: Path,
) -> Iterator[tuple[list[str], list[dict]]]:
    """Yield (lines to print, rows) of each op, in a training step and then in a decoding step, and store the times.

    Without `ops`, they are all that the step calls; without `names`, they are all backends. A probe may take `limit`
    seconds. Raises UserError if a training step does not call one of the ops.
    """
    called = model_calls(config, precision, device, trains=True)
    wrong = [op for op in ops if op not in called]
    check(not wrong, f"op={','.join(wrong)} with speed=true: choose {', '.join(called)}")
    lines = ["", f"speed    {parameters(config) / 1e6:.0f}M, precision {precision}, medians of {rounds} rounds"]
    if device.type == "cpu":
        lines.append(f"cpu      a small step of {CPU_TOKENS} tokens: its times say nothing about a GPU")
    yield lines, []
    for trains in (True, False):
        heading = "forward and backward, training step" if trains else "forward, decoding step of one token"
        yield ["", f"op         backend           {heading}"], []
        for op, call in model_calls(config, precision, device, trains).items():
            if ops and op not in ops:
                continue
            timed, rows = time_backends(call, names, rounds, device, limit)
            store(timed, rows, device, table)
            lines = [f"{op:<10} at {timed.size}" + (", the largest that fits" if timed != call else "")]
            yield [*lines, *(f"{op:<10} {row['impl']:<17} {describe_row(row, rows)}" for row in rows)], rows


def time_backends(
    call: Call, names: list[str], rounds: int, device: torch.device, limit: float
) -> tuple[Call, list[dict]]:
    """Return (the call that was timed, a row for each backend).

    Without names, the backends are all of the op but auto, and `compile`, which is eager under torch.compile. Eager is
    always among them. If eager does not fit into the memory, the timed call has fewer rows. A row has a "status" as in
    lab/bench/probe.py. With the status ok it has "forward/ms", and in training "both/ms", with "/p20" and "/p80".
    """
    names = names or [*(impl for impl in impls(call.op) if impl != "auto"), "compile"]
    statuses = probe_backends(call, list(dict.fromkeys(["eager", *names])), device, limit)
    torch.compiler.reset()
    call, works, statuses = prepare(call, statuses, device)
    rows, samples = [], time_in_turns(works, device, rounds)
    for name, status in statuses.items():
        row = {"op": call.op, "impl": name, "step": "training" if call.trains else "decoding", "status": status}
        for way in ("forward", "both"):
            if seconds := samples.get(f"{name} {way}"):
                p20, median, p80 = (1e3 * second for second in quantiles(seconds))
                row |= {f"{way}/ms": median, f"{way}/ms/p20": p20, f"{way}/ms/p80": p80}
        rows.append(row)
    return call, rows


def probe_backends(call: Call, names: list[str], device: torch.device, limit: float) -> dict[str, str]:
    """Return name -> status, from a probe with few rows of this call."""
    small = call.with_rows(1 if call.op == "attention" else min(PROBE_ROWS, call.rows))
    groups, statuses = {}, {}
    for name in names:
        reason = None
        if name == "compile":
            reason = None if cpp_compiler() else "it needs g++ or clang++; install one"
            reason = reason or (choose_ptxas(device) if call.arguments.get("fp8") else None)
        if reason:
            statuses[name] = f"unavailable: {reason}"
        else:
            probe = Probe(call.op, backend_of(name), small.arguments, call.dtype, call.trains, name == "compile")
            groups[name] = [probe]
    for name, [status] in zip(groups, run_probes(list(groups.values()), device, limit), strict=True):
        statuses[name] = status
    return {name: statuses[name] for name in names}


def prepare(
    call: Call, statuses: dict[str, str], device: torch.device
) -> tuple[Call, dict[str, Callable[[], object]], dict[str, str]]:
    """Return (the call that fits, name and way -> the work to time, the statuses with what does not fit).

    While eager does not fit into the memory, the call gets half as many rows.
    """
    while True:
        inputs, works, found = call.inputs(device), {}, dict(statuses)
        right = [name for name, status in statuses.items() if first_word(status) == "ok"]
        for name in right:
            try:
                prepared = prepare_works(call, name, inputs, device)
                for work in prepared.values():
                    work()
            except Unavailable as reason:
                found[name] = f"unavailable: {reason}"
            except Exception as error:  # a backend may raise any error at a size that its probe did not have
                is_full = is_out_of_memory(error)
                found[name] = f"oom: out of memory at {call.size}" if is_full else f"failed: {class_and_message(error)}"
            else:
                works |= {f"{name} {way}": work for way, work in prepared.items()}
            reset_peak_memory(device)  # frees what a failed backend left
            if name == "eager" and first_word(found[name]) == "oom" and call.rows > 1:
                break
        else:
            return call, works, found
        inputs = works = prepared = work = None  # the smaller call needs their memory
        reset_peak_memory(device)
        call = call.with_rows(call.rows // 2)


def prepare_works(call: Call, name: str, inputs: dict, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the functions to time: "forward", and in training "both" ways. Raises Unavailable if it cannot run."""
    function = load(call.op, backend_of(name), device, optional_arguments(call.op, inputs))
    if name == "compile":
        function = torch.compile(function, fullgraph=True)
    if not call.trains:
        return {"forward": torch.no_grad()(lambda: outputs(function, inputs))}
    douts = random_gradients(outputs(function, inputs), inputs)
    return {
        "forward": lambda: outputs(function, inputs),
        "both": lambda: forward_and_backward(function, inputs, douts),
    }


def describe_row(row: dict, rows: list[dict]) -> str:
    """Return the line of a row: "7.290 ms (7.280 to 7.310)  2.13x of eager, slower than eager", or its status."""
    way = "both" if row["step"] == "training" else "forward"
    if f"{way}/ms" not in row:
        word, _, text = row["status"].partition(": ")
        return f"{word:<12} {text}"
    ms, p20, p80 = (row[f"{way}/ms{suffix}"] for suffix in ("", "/p20", "/p80"))
    line = f"{ms:9.3f} ms ({p20:.3f} to {p80:.3f})"
    eager = next((other for other in rows if other["impl"] == "eager" and f"{way}/ms" in other), None)
    if row is eager or eager is None:
        return line
    verdict = compare(ms, [eager[f"{way}/ms{suffix}"] for suffix in ("/p20", "", "/p80")])
    words = {"slower": "slower than eager", "tie": "a tie with eager", "faster": "faster"}
    return f"{line:<34} {ms / eager[f'{way}/ms']:5.2f}x of eager, {words[verdict]}"


def store(call: Call, rows: list[dict], device: torch.device, path: Path | None = None) -> None:
    """Store the times of time_backends() as kernels.speeds.store_speeds() does."""
    store_speeds(call.op, call.fake_inputs(device), [row for row in rows if "forward/ms" in row], device, path)

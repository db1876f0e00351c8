"""Test whether a backend is right in all cases of its contract. Workers call it, and this process compares the results.

Each case has two random inputs, whose seeds come from the system's entropy. The backend gets the first, the second and
the first again at the same addresses, then one of them under no_grad and one in inference mode, and at last the second
at other addresses (CALLS in op_worker.py). The rule of kernels/check.py, with bounds SLACK times as wide, compares all
results with float64. After the calls, the worker's inputs must have the same bits as the judge's own.
"""

import secrets
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor

from common.terminal import class_and_message
from kernels.check import float64_results, out_of_place, outputs_and_gradients, why_inexact
from kernels.registry import contract
from kernels.registry import load as load_backend
from lab.bench.probe import ENDED, Probe, first_word
from lab.judge.op_worker import CALLS, Case, tensors_of
from lab.judge.sandbox import Ended, Sandbox
from lab.proof.receipt import profile_step
from runtime.device import is_out_of_memory

WORKER = ["-m", "lab.judge.op_worker"]
SLACK = 2.0  # a factor of the rule's bounds. With 1, sdpa broke the rule in one of 170 cases of new inputs (fp32, D=80)
MOST_FAILURES = 3  # of a group: each takes another worker, which starts in 2 s
HEADROOM = 2**20  # bytes of a file of results besides its tensors
MOST_PATTERNS = 20  # of RUNS; each takes a process, 0.02 s
SEARCH_SECONDS = 10  # for one pattern, which may backtrack without end
MOST_TENSORS = 64  # the results of all calls take at most so many times the bytes of the inputs

# Prints the first name that a pattern matches. It runs in another process, because a search may take for ever
SEARCH = "import re, sys; print(next(filter(re.compile(sys.argv[1]).search, sys.argv[2:]), ''))"

DESCRIPTIONS = {  # of the calls in op_worker.py, for an error that the first call does not have
    "second": "a call with other numbers at the same addresses",
    "third": "a third call, with the first numbers",
    "no_grad": "a call under torch.no_grad()",
    "inference": "a call under torch.inference_mode()",
    "elsewhere": "a call with inputs at other addresses",
}


def draw_seed() -> int:
    return secrets.randbelow(2**31)


def judge_cases(
    groups: list[dict[str, Probe]], device: torch.device, limit: float, folder: Path
) -> Iterator[dict[str, str]]:
    """Yield {name: status} of each group of probes. Each group has a worker, and all workers run at the same time.

    `limit` is the time of one case, in seconds. A status is as in lab/bench/probe.py. After a failure, the rest of the
    group runs in another worker.
    """
    with ExitStack() as stack:
        workers = [
            stack.enter_context(CaseWorker(group, device, folder / f"cases-{number}", limit))
            for number, group in enumerate(groups)
        ]
        for group, worker in zip(groups, workers, strict=True):
            statuses = worker.statuses()
            while len(statuses) < len(group) and not has_failed(statuses):
                worker.kill()
                rest = dict(list(group.items())[len(statuses) :])
                with CaseWorker(rest, device, worker.folder, limit) as worker:
                    statuses |= worker.statuses()
            yield dict.fromkeys(group, "failed: it was not run after the failures of other cases") | statuses


def has_failed(statuses: dict[str, str]) -> bool:
    """Return whether so many cases failed, or had no answer in time, that the others need not run."""
    words = [first_word(status) for status in statuses.values()]
    return words.count("failed") + words.count("undecided") >= MOST_FAILURES


class CaseWorker(Sandbox):
    """A worker that runs the cases of a group, one after the other."""

    def __init__(self, probes: dict[str, Probe], device: torch.device, folder: Path, limit: float):
        super().__init__(WORKER, folder, limit)
        self.device, self.cases = device, {}
        for number, (name, probe) in enumerate(probes.items()):
            self.cases[name] = Case(probe, (draw_seed(), draw_seed()), f"results-{number}")

    def __enter__(self) -> "CaseWorker":
        super().__enter__()
        self.send(("cases", str(self.device), list(self.cases.values())))
        return self

    def statuses(self) -> dict[str, str]:
        """Return the statuses of the cases, up to the first one that ends the worker."""
        statuses = {}
        for name, case in self.cases.items():
            try:
                statuses[name] = self.status(case)
            except Ended as reason:
                no_time = str(reason).startswith("no answer") or "SIGKILL" in str(reason)  # or the memory was full
                statuses[name] = f"{'undecided' if no_time else 'failed'}: {reason}"
            except (TypeError, ValueError) as error:
                statuses[name] = f"failed: its answer is not that of a worker: {error}"
            if first_word(statuses[name]) in ENDED:
                break
        if changed := self.changed_files():
            statuses = dict.fromkeys(statuses, f"wrong: it changed files of the repo: {', '.join(changed)}")
        return statuses

    def status(self, case: Case) -> str:
        facts = self.receive()
        if facts.get("replaced"):
            return f"wrong: it replaced {', '.join(map(str, facts['replaced']))}"
        for word in ("unavailable", "undecided", "failed"):
            if word in facts:
                return f"{word}: {facts[word]}"
        shape = {**case.probe.shape, "dtype": case.probe.dtype, "device": self.device}
        inputs = [contract(case.probe.op).inputs(**shape, seed=seed) for seed in case.seeds]
        size = sum(tensor.nbytes for tensor in tensors_of(inputs[0]).values())
        try:
            results = load(self.read_file(case.file, HEADROOM + MOST_TENSORS * size))
        except Exception as error:  # safetensors raises several classes for a damaged file
            raise Ended(f"it wrote no tensors: {error}") from None
        (self.folder / case.file).unlink(missing_ok=True)
        try:
            wrong = why_wrong(case, inputs, results, facts)
        except Exception as error:
            if is_out_of_memory(error):
                return "undecided: the judge has not the memory for the reference"
            raise
        if wrong:
            return f"wrong: {wrong}"
        if facts.get("changed"):
            return f"wrong: it changes the process around it: {', '.join(map(str, facts['changed']))}"
        executed = str(facts.get("executed", "")).removeprefix(f"{case.probe.impl} (").removesuffix(")")
        return f"ok: {executed}"


def why_wrong(case: Case, inputs: list[dict], results: dict[str, Tensor], facts: dict) -> str | None:
    """Return, in one line, why the results of a case are wrong; None if all of them are right.

    `inputs` are the two inputs, `results` has the tensors of run_calls(), and `facts` is the worker's answer about the
    backend.
    """
    op, dtype, device = case.probe.op, case.probe.dtype, next(iter(tensors_of(inputs[0]).values())).device
    by_call: dict[str, dict[str, Tensor]] = {}
    for key, tensor in results.items():
        call, _, name = key.partition("/")
        by_call.setdefault(call, {})[name] = tensor.to(device)
    if by_call.keys() != {*CALLS, "inputs"}:
        return f"it gave results of {', '.join(by_call)} instead of {', '.join(CALLS)}"
    for name, tensor in tensors_of(inputs[CALLS["inference"][1]]).items():
        if name not in by_call["inputs"] or not same_bits(tensor, by_call["inputs"][name]):
            return f"it writes to its input {name}"
    expected = []
    for values, seed in zip(inputs, case.seeds, strict=True):
        eager = outputs_and_gradients(load_eager(op, device), values, seed=seed)
        expected.append((eager, float64_results(op, values, bool(facts.get("own_scales")), seed=seed)))
    for call, (way, number) in CALLS.items():
        eager, truth = expected[number]
        if way != "gradients":
            eager, truth = outputs_of(eager), outputs_of(truth)
        if reason := why_inexact(op, by_call[call], eager, truth, inputs[number], dtype, SLACK):
            return reason if call == "first" else f"{reason} (in {DESCRIPTIONS[call]})"
    if reason := names_eager_kernel(op, case.probe.impl, inputs[0], facts.get("runs") or []):
        return reason
    changed = [name for name in by_call["first"] if not same_bits(by_call["first"][name], by_call["third"][name])]
    if changed and facts.get("deterministic", True) and not case.probe.compiled:
        return f"two calls give other bits in {', '.join(changed)}; `deterministic = False` allows it"
    return None


def load_eager(op: str, device: torch.device) -> Callable:
    return out_of_place(contract(op), load_backend(op, "eager", device))


def names_eager_kernel(op: str, impl: str, inputs: dict, patterns: list) -> str | None:
    """Return which pattern of RUNS matches a kernel that eager PyTorch runs for this op; None if no pattern does.

    Such a pattern would prove nothing: a backend that only calls PyTorch matches it, too.
    """
    if not patterns or impl == "eager":
        return None
    device = next(iter(tensors_of(inputs).values())).device
    eager = load_eager(op, device)
    with warnings.catch_warnings(action="ignore"):  # PyTorch 2.11 warns that it clears events
        profiled = profile_step(lambda: outputs_and_gradients(eager, inputs), device, {})
    names = [kernel["name"] for kernel in profiled["kernels"]]
    if len(patterns) > MOST_PATTERNS:
        return f"its RUNS has {len(patterns)} patterns, and at most {MOST_PATTERNS} are searched"
    for pattern in map(str, patterns):
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", SEARCH, pattern, *names], capture_output=True, timeout=SEARCH_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired, ValueError) as error:
            return f"its RUNS has the pattern {pattern}, which cannot be searched: {class_and_message(error)[:200]}"
        if done.returncode:
            return f"its RUNS has the pattern {pattern}, which is no regular expression"
        if found := done.stdout.decode(errors="replace").strip():
            return f"its RUNS has the pattern {pattern}, which {found}, a kernel of eager PyTorch, matches"
    return None


def outputs_of(results: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in results.items() if name.startswith("out")}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal; a NaN equals a NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())

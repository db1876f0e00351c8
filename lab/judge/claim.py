"""A claim, the evidence for it, and the verdict.

The evidence is the answers of probes (lab/bench/probe.py), the rows of a sweep that trains with both backends in
turns, and a benchmark of the op, at the shape that it has in this training.
"""

from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from common.terminal import quote_override
from kernels.registry import OPS, TRAINING_OPS, check_name, override_key, runs_in_fp8
from lab.bench.op import DTYPES, measure
from lab.bench.probe import PROBE_DTYPES, PROCESSES, Probe, case_probes, first_word, run_probes
from lab.recipe import Recipe
from lab.rows import read_run
from model.config import PRECISIONS
from model.executed import call_shapes
from runtime.config import check

# The cases run in so many processes at once. On a GPU each process has a CUDA context of half a GiB
GROUPS = min(8, PROCESSES)
# The exit code of scripts.judge. 1 is an error, as in every command
EXIT_CODES = {"faster": 0, "tie": 2, "slower": 3, "wrong": 4}
ON_GPU = ["+experiment=throughput", "precision=bf16"]
ON_CPU = ["+experiment=throughput", "precision=fp32", "device=cpu", "model=tiny", "train.batch_size=16"]
ON_CPU += ["train.tokens_per_step=4096", "train.max_steps=40", "train.log_every=2"]


class Claim(NamedTuple):
    """`impl` is compared with `against`. With against="compile" both models are compiled, and the other op is eager."""

    op: str
    impl: str
    against: str

    @property
    def backends(self) -> tuple[str, str]:
        """The values of the op's key in the two jobs: (`against`, `impl`)."""
        return ("eager" if self.against == "compile" else self.against), self.impl

    def __str__(self) -> str:
        return f"{self.op}: {self.impl} against {self.against}"


def check_claim(claim: Claim) -> None:
    """Raise UserError or KernelError if there is nothing to compare."""
    op, impl, against = claim
    check(op != "decode", "op=decode: python -m scripts.generate -m kernels.decode=blocks,triton compares decoders")
    others = f"python -m scripts.bench_kernels op={op} compares backends of the optimizer's op"
    check(op not in TRAINING_OPS or op in OPS, f"op={op}: {others}")
    check(op in OPS, f"op={op}: choose {', '.join(OPS)}")
    check(impl is not None, f"impl is missing: name the backend of {op} to judge")
    for key, name in (("impl", impl), ("against", claim.backends[0])):
        check_name(op, name, key)
    remedy = "eager is already its baseline" if against == "compile" else "name two different backends"
    check(impl != claim.backends[0], f"impl={impl} against={against}: {remedy}")


def training_call(op: str, recipe: Recipe, shape: tuple[int, int]) -> tuple[dict, torch.dtype]:
    """Return (the arguments of the contract's inputs(), the dtype) of the op's call in a training step of (B, T)."""
    calls = call_shapes(recipe.model, recipe.kernels, recipe.precision, shape, documents=recipe.documents)
    return calls[op], PRECISIONS[recipe.precision][1]


def ignored_settings(op: str, recipe: Recipe) -> list[str]:
    """Return a line for each setting of the training that does not reach the op."""
    lines = []
    if recipe.precision == "fp8" and not runs_in_fp8(op, recipe.kernels):
        lines.append(f"precision=fp8 changes no product of {op}, which computes in bf16 in this training")
    if recipe.documents and op != "attention":
        lines.append(f"data.mask_documents=true does not reach {op}: only attention knows the documents")
    return lines


def probe_cases(claim: Claim, recipe: Recipe, length: int, device: torch.device, limit: float) -> dict[str, str]:
    """Return {"fp32 768": status of the backend, ...}: every case of the op in fp32 and in bf16.

    The last case, such as "fp8 training", is the op's call in this training, for one sequence of `length` tokens.
    `limit` is the time of one answer, in seconds. The cases run in GROUPS processes, because most of their time goes
    into compilation, which uses one core.
    """
    probes = {
        f"{precision} {case}": probe
        for precision in ("fp32", "bf16")
        for case, probe in case_probes(claim.op, claim.impl, PROBE_DTYPES[precision]).items()
    }
    call, dtype = training_call(claim.op, recipe, (1, length))
    probes[f"{recipe.precision} training"] = Probe(claim.op, claim.impl, call, dtype)
    cases = list(probes)
    groups = [cases[first::GROUPS] for first in range(GROUPS)]
    answers = run_probes([[probes[case] for case in group] for group in groups], device, limit)
    statuses = dict(zip(chain(*groups), chain(*answers), strict=True))
    return {case: statuses[case] for case in cases}


def wrong_answers(statuses: dict[str, str]) -> list[str]:
    """Return "case: status" of the answers that are wrong or failed."""
    return answers_with(statuses, "wrong", "failed")


def undecided_answers(statuses: dict[str, str]) -> list[str]:
    """Return "case: status" of the cases for which the time or the memory did not suffice."""
    return answers_with(statuses, "undecided")


def answers_with(statuses: dict[str, str], *words: str) -> list[str]:
    """Return "case: status" of the statuses with one of these first words."""
    return [f"{case}: {status}" for case, status in statuses.items() if first_word(status) in words]


def training_words(claim: Claim, device: torch.device, words: list[str]) -> list[str]:
    """Return the arguments of train.py that are the same in both runs. `words` are the user's, and come last.

    Both runs use kernels=triton on a GPU and kernels=eager on a CPU, or kernels=compile with against="compile".
    """
    settings, others = (ON_GPU, "triton") if device.type == "cuda" else (ON_CPU, "eager")
    if claim.against == "compile":
        others = "compile"
    if device.index:
        settings = [*settings, f"device={device}"]
    return [*settings, f"kernels={others}", *words]


def choose_backends(claim: Claim, *impls: str) -> str:
    """Return the argument of train.py that chooses the op's backend, or several in a sweep."""
    return f"{override_key(claim.op)}={','.join(map(quote_override, impls))}"


def read_training(claim: Claim, folder: Path) -> dict[str, list[dict]]:
    """Return {against: rows, impl: rows} of the sweep in this folder, in the order in which they ran."""
    rows = sorted(filter(None, map(read_run, folder.iterdir())), key=lambda row: row.get("started", ""))
    values = dict(zip(claim.backends, (claim.against, claim.impl), strict=True))
    runs: dict[str, list[dict]] = {claim.against: [], claim.impl: []}
    for row in rows:
        if "config" in row:
            config = row["config"]
            value = config["attn"]["impl"] if claim.op == "attention" else config["kernels"][claim.op]
            check(value in values, f"out_dir={folder} has the runs of another claim: choose another folder")
            runs[values[value]].append(row)
    return runs


def benchmark_op(claim: Claim, recipe: Recipe, shape: tuple[int, int], rounds: int, device: torch.device) -> list[dict]:
    """Return the benchmark's rows of both backends, for the op's call in a training step of `shape`, (B, T)."""
    call, dtype = training_call(claim.op, recipe, shape)
    [dtype_name] = [name for name, value in DTYPES.items() if value == dtype]
    return measure(claim.op, "training", call, [claim.against, claim.impl], dtype_name, rounds, device)[0]

"""A claim, the probes and the training that it needs, and the exit codes of its verdict."""

import importlib.machinery
from typing import NamedTuple

import torch

from common.terminal import quote_override
from kernels.registry import OPS, TRAINING_OPS, KernelError, check_name, contract, override_key, runs_in_fp8
from lab.bench.probe import PROBE_DTYPES, Probe, case_probes, first_word
from lab.recipe import Recipe
from model.config import PRECISIONS
from model.executed import call_shapes
from runtime.config import check

BATCH_TOKENS = 16384  # a batch of at most so many tokens is also probed as a whole. The replay covers larger batches
# The exit code of scripts.judge. 1 is an error, as in every command
EXIT_CODES = {"faster": 0, "tie": 2, "slower": 3, "wrong": 4}
ON_GPU = ["+experiment=throughput", "precision=bf16", "train.max_steps=40"]
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
    check_name(op, claim.backends[0], "against")
    check_unimported_name(op, impl)
    remedy = "eager is already its baseline" if against == "compile" else "name two different backends"
    check(impl != claim.backends[0], f"impl={impl} against={against}: {remedy}")


def check_unimported_name(op: str, impl: str) -> None:
    """Raise KernelError if there is no backend `impl`, as check_name() does, but import no package around it."""
    if "." not in impl or impl.endswith(".py") or "/" in impl:
        check_name(op, impl, "impl")
        return
    path = None
    for number in range(1, impl.count(".") + 2):
        spec = importlib.machinery.PathFinder.find_spec(".".join(impl.split(".")[:number]), path)
        if spec is None:
            raise KernelError(f"impl={impl}: no module {impl}; install its package, or add its folder to PYTHONPATH")
        path = spec.submodule_search_locations


def training_call(op: str, recipe: Recipe, shape: tuple[int, int]) -> tuple[dict, torch.dtype]:
    """Return (the arguments of the contract's inputs(), the dtype) of the op's call in a training step of (B, T)."""
    calls = call_shapes(recipe.model, recipe.kernels, recipe.precision, shape, documents=recipe.documents)
    remedy = " ".join(model_words(op)) or "other fields of model, by default GPT-2's"
    check(op in calls, f"this model does not call {op}: pass {remedy}")
    return calls[op], PRECISIONS[recipe.precision][1]


def model_words(op: str) -> list[str]:
    """Return the arguments of train.py for a model that calls the op."""
    return [f"model.{key}={value}" for key, value in getattr(contract(op), "MODEL", {}).items()]


def ignored_settings(op: str, recipe: Recipe) -> list[str]:
    """Return a line for each setting of the training that does not reach the op."""
    lines = []
    if recipe.precision == "fp8" and not runs_in_fp8(op, recipe.kernels):
        lines.append(f"precision=fp8 changes no product of {op}, which computes in bf16 in this training")
    if recipe.documents and op != "attention":
        lines.append(f"data.mask_documents=true does not reach {op}: only attention knows the documents")
    return lines


def make_probes(claim: Claim, recipe: Recipe, shape: tuple[int, int]) -> dict[str, Probe]:
    """Return {"fp32 768": probe, ...}: every case of the op in fp32 and in bf16, and the call of this training.

    The last cases, such as "fp8 training", are the op's call for one sequence and, if it is small enough, for the whole
    batch of `shape`, (B, T).
    """
    probes = {
        f"{precision} {case}": probe
        for precision in ("fp32", "bf16")
        for case, probe in case_probes(claim.op, claim.impl, PROBE_DTYPES[precision]).items()
    }
    batches = {"training": 1} | ({"batch": shape[0]} if shape[0] > 1 and shape[0] * shape[1] <= BATCH_TOKENS else {})
    for name, batch in batches.items():
        call, dtype = training_call(claim.op, recipe, (batch, shape[1]))
        probes[f"{recipe.precision} {name}"] = Probe(claim.op, claim.impl, call, dtype)
    return probes


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
    return [*settings, f"kernels={others}", *model_words(claim.op), *words]


def choose_backends(claim: Claim, *impls: str) -> str:
    """Return the argument of train.py that chooses the op's backend, or several in a sweep."""
    return f"{override_key(claim.op)}={','.join(map(quote_override, impls))}"

"""The ops and their backends, and the choices that the config makes from their names.

This file does not import torch, because --help needs it and has to be quick.
"""

import ast
import functools
import textwrap
from collections.abc import Sequence
from typing import Any

from common.files import read_text
from kernels.lookup import ROOT, KernelError, impls  # noqa: F401  for those who import names

# The order of the model; all other ops follow, sorted by name
FIRST = "norm", "rms_norm", "linear", "rope", "attention", "mlp", "glu", "loss"
ALL_OPS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
ALL_OPS.sort(key=lambda op: FIRST.index(op) if op in FIRST else len(FIRST))


parse = functools.cache(ast.parse)  # the page of a device asks for a contract's constants a hundred times


def read_constant(op: str, name: str, default: Any) -> Any:
    """Return the value of `name` at the top level of the op's contract. Its file is read and not imported."""
    for node in parse(read_text(ROOT / op / "__init__.py")).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        # TRAINS = False is an Assign, and TRAINS: bool = False an AnnAssign
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return ast.literal_eval(node.value)
    return default


INSTEAD = {"gluon": "triton"}  # preset -> what it takes for an op without a backend of its name, if not eager
TRAINING_OPS = [op for op in ALL_OPS if read_constant(op, "TRAINS", True)]  # the ops of a training step
GENERATION_OPS = [op for op in ALL_OPS if not read_constant(op, "OPTIMIZER", False)]
OPS = [op for op in TRAINING_OPS if op in GENERATION_OPS]  # the ones that the model calls in training
OPTIMIZER_OPS = [op for op in ALL_OPS if op not in GENERATION_OPS]


def config_key(op: str) -> str:
    """Return the config key that chooses the op's backend: "kernels.norm", "attn.impl"."""
    return "attn.impl" if op == "attention" else f"kernels.{op}"


def override_key(op: str) -> str:
    """Return the key that chooses the op's backend on the command line: "kernels.norm", "attn"."""
    return "attn" if op == "attention" else config_key(op)


def default_impl(op: str) -> str:
    """Return the backend that runs if the config names none."""
    return read_constant(op, "DEFAULT", "eager")


def ops_with_a_choice() -> list[str]:
    """Return the model's ops without attention that have several backends. A run's name lists them."""
    return [op for op in OPS if op != "attention" and len(impls(op)) > 1]


def preset(name: str) -> dict[str, str]:
    """Return {op: backend} of kernels=NAME, for the model's ops in a training step but attention."""
    choices = {op: (name, INSTEAD.get(name), "eager") for op in OPS if op != "attention"}
    return {op: next(impl for impl in names if impl in impls(op)) for op, names in choices.items()}


def preset_name(backends: dict[str, str]) -> str | None:
    """Return the name of the preset that chooses these backends of ops: "eager", "triton", "gluon"; None if none does.

    "gluon" has Triton for the ops that Gluon lacks.
    """
    for name in dict.fromkeys(backends.values()):
        same = set(backends.values()) == {name}
        if same or (name in INSTEAD and backends.items() <= preset(name).items()):
            return name
    return None


# Language -> the backends that are written in it, the first choice of an op first. NAME_* is a variant of NAME. Another
# backend, such as a new one, is a language of its own name. `compile` is eager under torch.compile; auto only chooses
LANGUAGES = {
    "PyTorch": ["sdpa", "eager", "blocks", "math", "torch_chunked", "torchao", "huggingface"],
    "Inductor": ["compile", "flex"],
    "Triton": ["triton", "int8"],
    "Gluon": ["gluon"],
    "CUDA C++": ["persistent"],
    "Helion": ["helion"],
    "cuTile": ["cutile"],
    "TileLang": ["tilelang"],
    "Pallas": ["pallas"],
    "CuTe DSL": ["quack", "liger_cute", "flash", "gram"],
    "Liger's Triton": ["liger"],
    "XLA": ["xla"],
    "CUDA libraries": ["cudnn", "cudnn_frontend", "nvmath", "mem_efficient", "flashinfer"],
}


def language_of(impl: str) -> str:
    """Return the language of a backend: by its name in LANGUAGES, or that of the backend whose variant it is."""
    listed = {name: language for language, names in LANGUAGES.items() for name in names}
    variant_of = impl.partition("_")[0]
    if variant_of not in listed and not any(variant_of in impls(op) for op in ALL_OPS):
        variant_of = impl
    return listed.get(impl) or listed.get(variant_of) or variant_of


def by_language(op: str) -> dict[str, list[str]]:
    """Return {language: its backends of the op}, and `compile`, in the order of LANGUAGES. New languages come last."""
    order = [name for names in LANGUAGES.values() for name in names]
    names = {*impls(op), "compile"} - {"auto"}
    found: dict[str, list[str]] = {}
    for impl in sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name)):
        found.setdefault(language_of(impl), []).append(impl)
    return found


def languages(ops: Sequence[str] = ALL_OPS) -> dict[str, dict[str, list[str]]]:
    """Return {language: {op: its backends}} for LANGUAGES and the new ones."""
    found: dict[str, dict[str, list[str]]] = {language: {} for language in LANGUAGES}
    for op in ops:
        for language, names in by_language(op).items():
            found.setdefault(language, {})[op] = names
    return found


def training_overrides() -> dict[str, list[str]]:
    """Return {language: the overrides that select its backends}. Skip languages that have only an attention backend.

    PyTorch computes the ops that the language lacks: kernels=nvmath attn=cudnn.
    """
    words = {}
    for language, backends in languages(OPS).items():
        attentions = [name for name in backends.pop("attention", ()) if name != "compile"] or ["sdpa"]
        if backends:
            own = {op: names[0] for op, names in backends.items()}
            [name, *others] = dict.fromkeys(own.values())
            more = [f"kernels.{op}={impl}" for op, impl in own.items() if impl in others]
            words[language] = [f"kernels={name}", *more, f"attn={attentions[0]}"]
    return words


def decoding_overrides() -> dict[str, list[str]]:
    """Return {language: the overrides that select its first kernel}. PyTorch and Inductor take the model's blocks."""
    blocks = {"PyTorch": "eager", "Inductor": "compile"}
    own = {language: names[0] for language, names in by_language("decode").items() if language not in blocks}
    words = {language: [f"kernels={name}", "kernels.decode=blocks"] for language, name in blocks.items()}
    return words | {language: ["kernels=eager", f"kernels.decode={name}"] for language, name in own.items()}


def config_groups() -> dict[str, dict]:
    """Return {group: {choice: config}} for the config groups that need no YAML files: `kernels`, `attn`, ablations.

    `kernels=NAME` takes the backend NAME for every op that has one, and eager for the others; kernels=gluon takes
    Triton for the others. `kernels=compile` is eager under torch.compile. The choice `*` of `attn` stands for paths and
    dotted names: see runtime.config.store_named_choices(). The group `hydra/ablation` is for configs/sweep/:
    ablation.yaml starts from eager ops and swaps one op at a time; languages.yaml and decoding_languages.yaml run
    training_overrides() and decoding_overrides().
    """
    per_op = {op: impls(op) for op in OPS if op != "attention"}
    others = {op: default_impl(op) for op in ALL_OPS if op not in OPS}  # a preset does not choose them
    settings = {"compile": False, "compile_mode": "default", "check": True, "fp8": None}
    groups = {"kernels": {}, "attn": {name: {"impl": name} for name in [*impls("attention"), "*"]}}
    for name in sorted({name for names in per_op.values() for name in names}):
        groups["kernels"][name] = {**preset(name), **others, **settings}
    groups["kernels"]["compile"] = {**groups["kernels"]["eager"], "compile": True}
    swaps = [f"{config_key(op)}={','.join(names)}" for op, names in per_op.items()]
    swaps.append(f"attn={','.join(impls('attention'))}")
    groups["hydra/ablation"] = {"ops": {"params": {config_key(op): "eager" for op in per_op}, "ablations": swaps}}
    for name, overrides in (("languages", training_overrides()), ("decoders", decoding_overrides())):
        [first, *words] = overrides.values()
        params = dict(word.split("=") for word in first)
        groups["hydra/ablation"][name] = {"params": params, "ablations": words}
    return groups


def backend_names() -> dict[str, dict[str, str]]:
    """Return what ${backends:OP} stands for in YAML (sweeps, --help). ${backends:table} has a line for each op."""
    names = {op: ", ".join(impls(op)) for op in ALL_OPS}
    lines = (textwrap.fill(f"  {op:<10} {names[op]}", width=100, subsequent_indent=" " * 13) for op in ALL_OPS)
    return {"backends": {**names, "table": "\n".join(lines)}}

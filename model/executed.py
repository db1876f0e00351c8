"""Which backend computes each op of a model, at the shapes that the op has in the model."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from common.terminal import warn
from kernels import fastest
from kernels.compat import FakeTensorMode
from kernels.names import KernelError, config_key
from kernels.registry import OPS, AttnConfig, KernelsConfig, contract, describe, impl_by_op, label, runs_in_fp8
from kernels.speeds import find_slower
from model.config import PRECISIONS, GPTConfig
from runtime import command


def call_shapes(
    config: GPTConfig,
    kernels: KernelsConfig,
    precision: str,
    shape: tuple[int, int],
    keys: int | None = None,
    documents: bool = False,
) -> dict[str, dict]:
    """Return op -> the arguments of its contract's inputs(), for the call that the model makes. It may call fewer ops.

    The tokens have `shape`, (B, T). With `keys`, a decoding step of one token reads `keys` keys. With `documents`,
    attention stays inside documents.
    """
    sizes = {
        "batch": shape[0],
        "length": 1 if keys else shape[1],
        "n_embd": config.n_embd,
        "n_head": config.n_head,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "softcap": config.logit_softcap,
        "window": None if keys else config.window,  # the cache has no other keys
        "pos": config.pos,
        "qk_norm": config.qk_norm,
        "mlp": config.mlp,
        "hidden": config.hidden_size,
        "residual_dtype": PRECISIONS[precision][0],
        "norm": config.norm,
        "eps": config.norm_eps,
        "documents": documents,
        "keys": keys,
    }
    calls = {op: contract(op).in_model(**sizes) for op in OPS if hasattr(contract(op), "in_model")}
    calls = {op: arguments for op, arguments in calls.items() if arguments is not None}
    in_fp8 = [op for op in calls if precision == "fp8" and runs_in_fp8(op, kernels)]
    return calls | {op: {**calls[op], "fp8": True} for op in in_fp8}


def called_ops(config: GPTConfig, ops: Sequence[str] = OPS) -> list[str]:
    """Return `ops` without the ones in OPS that this model does not call.

    decode and the ops of the optimizer are not in OPS, so they stay.
    """
    called = call_shapes(config, KernelsConfig(), "fp32", (1, 1))
    return [op for op in ops if op in called or op not in OPS]


def kernels_label(config: GPTConfig, kernels: KernelsConfig, attn: AttnConfig) -> str:
    """Return registry.label() of the ops that this model calls."""
    return label(kernels, attn, called_ops(config))


def called_kernels(config: GPTConfig, kernels: KernelsConfig) -> KernelsConfig:
    """Return `kernels` with eager for the ops that this model does not call: their backends need not run here."""
    called = called_ops(config)
    return replace(kernels, **{op: "eager" for op in OPS if op not in called and op != "attention"})


def warn_of_uncalled_ops(called: Sequence[str], ops: Sequence[str] = OPS) -> None:
    """Warn if the command line chooses the backend of an op of `ops` that is not among the `called` ones."""
    uncalled = {config_key(op): op for op in ops if op not in called}
    for word in command.arguments():
        if op := uncalled.get(word.lstrip("+").partition("=")[0]):
            warn(f"{word} has no effect, because this run does not call {op}; it calls {', '.join(called)}")


def name_backends(config: GPTConfig, kernels: KernelsConfig, precision: str, device: torch.device) -> KernelsConfig:
    """Return `kernels` with the names of the backends that `auto` chooses for this model: see kernels/fastest.py.

    Call it after check_available(), which reads the tables. Raises Unavailable if these dtypes were not measured.
    """
    names, dtype = {}, PRECISIONS[precision][1]
    for op, arguments in call_shapes(config, kernels, precision, (1, 1)).items():
        if getattr(kernels, op, None) != "auto":
            continue
        fp8, calls = arguments.pop("fp8", False), [arguments]
        if op == "linear":  # these are the arguments of the projection to q, k and v; the other one has other widths
            width = config.n_head * config.head_size
            calls.append(arguments | {"shape": (1, 1, width), "out": config.n_embd})
        with FakeTensorMode():
            inputs = [contract(op).inputs(**call, dtype=dtype, device=device) for call in calls]
        # the first that takes all calls: q, k and v have at least half of the FLOPs
        chosen = [fastest.choose_for(op, arguments, fp8) for arguments in inputs]
        names[op] = next(
            (
                impl
                for impl, module in chosen
                if not any(fastest.refuses(module, *arguments.values(), fp8=fp8) for arguments in inputs)
            ),
            "eager",
        )
    return replace(kernels, **names)


def executed_kernels(
    config: GPTConfig,
    kernels: KernelsConfig,
    attn: AttnConfig,
    precision: str,
    shape: tuple[int, int],
    device: torch.device,
    keys: int | None = None,
    documents: bool = False,
) -> dict[str, str | bool]:
    """Return op -> backend and version, and "compile" -> whether torch.compile is on. The tokens have `shape`, (B, T).

    With `keys`, describe a decoding step that reads `keys` keys, after a prefill of `shape`. If the decoder is not
    blocks, only the prefill runs the ops besides decode. With `documents`, attention stays inside documents.
    """
    keys_of_blocks = keys if kernels.decode == "blocks" else None
    impls, dtype, descriptions = impl_by_op(kernels, attn), PRECISIONS[precision][1], {}
    named = impl_by_op(name_backends(config, kernels, precision, device), attn)
    for op, arguments in call_shapes(config, kernels, precision, shape, keys_of_blocks, documents).items():
        version = attn.version if op == "attention" else None
        descriptions[op] = describe(op, impls[op], version, named[op], **arguments, dtype=dtype, device=device)
    if keys:
        descriptions.pop("loss", None)
        descriptions["decode"] = describe("decode", kernels.decode)
    return {**descriptions, "compile": kernels.compile}


def slower_kernels(
    config: GPTConfig,
    kernels: KernelsConfig,
    attn: AttnConfig,
    precision: str,
    shape: tuple[int, int],
    device: torch.device,
    keys: int | None = None,
    documents: bool = False,
    trains: bool = False,
) -> dict[str, dict]:
    """Return op -> what is known (kernels.speeds.find_slower()), for the ops whose backend is slower than eager here.

    The arguments are as in executed_kernels(). With `trains`, the times are of forward and backward. A table that
    cannot be used is a warning, because the run computes the same without it.
    """
    impls, dtype, slower = impl_by_op(kernels, attn), PRECISIONS[precision][1], {}
    keys = keys if kernels.decode == "blocks" else None
    for op, arguments in call_shapes(config, kernels, precision, shape, keys, documents).items():
        if op == "attention" and attn.version:  # the times are of the version that the backend chooses
            continue
        with FakeTensorMode():
            inputs = contract(op).inputs(**arguments, dtype=dtype, device=device)
        try:
            found = find_slower(op, impls[op], inputs, device, "both" if trains else "forward", kernels.compile)
        except KernelError as error:
            warn(error)
            break
        if found:
            slower[op] = found
    return slower

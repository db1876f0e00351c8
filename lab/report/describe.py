"""Name a row's model, kernels and settings, and select the newest rows."""

import os
import re
from collections import Counter
from pathlib import Path, PurePath

from kernels.names import OPTIMIZER_OPS, default_impl, ops_with_a_choice, preset_name
from lab.sweep.compare import is_generation, peer_name, sequences
from lab.sweep.table import has_failed
from model.config import GPTConfig

BASELINE = "compile", "sdpa"  # the choice that others are compared with
SMALLEST = 1e8  # parameters: the time of a smaller model is mostly the host's
NAMED_OPS = ops_with_a_choice()
SEARCH_MODES = "train", "generate"  # of scripts.max_context


def log_path(folder: Path, row: dict) -> str:
    """Return the path of a failed job's log.txt in a sweep's `folder`; empty if there is none.

    Without a config, the row's name is that of the job's folder.
    """
    out_dir = row.get("config", {}).get("out_dir") or row.get("name") or ""
    path = os.path.join(PurePath(out_dir).name, "log.txt")
    exists = os.path.exists(folder / path)  # False for a name that no file can have
    return path if exists and has_failed(row) else ""


def model_size(row: dict) -> str:
    """Return a name such as "124M"; empty if the row has no parameters. A row of generation has it in its name."""
    if row.get("parameters"):
        return f"{row['parameters'] / 1e6:.0f}M"
    name = re.match(r"generate-(\d+M)-", row.get("name", ""))
    return name[1] if name else ""


def model_name(row: dict) -> str:
    """Return model_size() and the fields of the model that are not the default: "135M, norm=rmsnorm, head_dim=64"."""
    changes = GPTConfig.changes(row.get("config", {}).get("model") or {})
    return ", ".join([model_size(row), *(f"{key}={value}" for key, value in changes.items())])


def commit(row: dict) -> str:
    """Return "5918f41"; "5918f41+" if the tree had uncommitted changes."""
    name = row["env"].get("git_commit") or "unknown"
    return f"{name[:7]}+" if name.endswith("-dirty") else name[:7]


def gpu_text(row: dict) -> str:
    """Return the machine without its maker: "one H200", "2 H200"; "one machine" if the row names none."""
    gpus, device = row.get("world_size", 1), row["env"].get("device") or "machine"
    return f"{'one' if gpus == 1 else gpus} {device.removeprefix('NVIDIA ')}"


def time_of(row: dict) -> str:
    """Return "af0db6f, 2026-11-27"; without the date if the row has none."""
    return ", ".join(filter(None, [commit(row), row.get("started", "")[:10]]))


def sitting_text(row: dict) -> str:
    """Return where and when a row was measured, as plain text: "one H200, commit af0db6f, 2026-11-27"."""
    return f"{gpu_text(row)}, commit {time_of(row)}"


def batch_cell(row: dict) -> str:
    """Return "64 x 1024": the sequences of a micro-batch, and their length."""
    train = row["config"]["train"]
    return f"{train['batch_size']} x {train['block_size']}"


def prompt_tokens(row: dict) -> int:
    """Return the tokens of a generation's longest prompt; 0 if the run ended before it counted them."""
    return row.get("gen/prompt_tokens") or row["config"].get("prompt_tokens") or 0


def backends_of(row: dict) -> dict[str, str]:
    """Return op -> backend for the ops that name a choice and that the run called. An old row may lack an op.

    If the row says of none of them that it ran, they are all there: the run ended before it knew its model.
    """
    kernels = row["config"]["kernels"]
    chosen = {op: kernels[op] for op in NAMED_OPS if op in kernels}
    return {op: impl for op, impl in chosen.items() if op in row.get("kernels", ())} or chosen


def kernels_cell(row: dict) -> str:
    """Return a name such as "triton", "eager+triton" or "triton+compile"; eager under torch.compile is "compile".

    For a row of scripts.peers, return what ran instead of our model: "transformers 5.17.0 + torch.compile".
    With train.cuda_graph=false the name ends with "no CUDA graph". Other runs capture their steps where it is possible.
    """
    if peer := peer_name(row):
        return peer
    kernels, train = row["config"]["kernels"], row["config"].get("train", {})
    backends = backends_of(row)
    names = preset_name(backends) or "+".join(sorted(set(backends.values())))
    if kernels["compile"]:
        names = "compile" if names == "eager" else f"{names}+compile"
    names += compile_mode(kernels)
    names += fp8_and_optimizer(kernels) + (", no CUDA graph" if train.get("cuda_graph") is False else "")
    return names + (", Muon" if row["config"].get("optim", {}).get("name") == "muon" else "")


def fp8_and_optimizer(kernels: dict) -> str:
    """Return the choices of kernels.fp8 and of the optimizer's ops that are not the default, such as ", adamw eager".

    `kernels` is a row's config.kernels. An old row has none of these keys.
    """
    ops, chosen = kernels.get("fp8"), {op: kernels.get(op, default_impl(op)) for op in OPTIMIZER_OPS}
    fp8 = "" if ops is None else f", fp8 in {' and '.join(ops) or 'no op'}"
    return fp8 + "".join(f", {op} {impl}" for op, impl in chosen.items() if impl != default_impl(op))


def attention_cell(row: dict) -> str:
    """Return which attention ran, such as "sdpa (cudnn, cudnn 91900)", without PyTorch's version."""
    return re.sub(r",? ?torch [^,)]*", "", row["kernels"]["attention"]).replace(" ()", "")


def choice_key(row: dict) -> tuple[str, ...]:
    """Return (kernels, attention), as in BASELINE, and then a generation's decoder, cache and draft unless default."""
    config = row["config"]
    return kernels_cell(row), config["attn"]["impl"], *filter(None, (decoder(config),)), *cache_and_draft(config)


def decoder(config: dict) -> str:
    """Return the backend of the op decode, such as "int8"; empty for blocks, and for a config without generation."""
    name = config["kernels"].get("decode", "blocks") if "max_new_tokens" in config else "blocks"
    return "" if name == "blocks" else name


def cache_and_draft(config: dict) -> list[str]:
    """Return a generation's other choices, such as ["fp8 cache", "ngram draft of 4"]; usually empty."""
    options, choices = config.get("generate") or {}, []
    if options.get("kv", "auto") != "auto":
        choices.append(f"{options['kv']} cache")
    if options.get("speculate"):
        choices.append(f"{Path(options['speculate']).name} draft of {options['draft_tokens']}")
    return choices


def choice_name(row: dict) -> str:
    """Return a name such as "triton, mlp eager + compile · flash"; empty for a row whose config has no kernels.

    A decoder other than blocks runs none of these kernels, so the name is the decoder's: "decode int8".
    """
    config = row.get("config", {})
    if not {"kernels", "attn"} <= config.keys():
        return ""
    if decoder(config):
        return ", ".join([f"decode {decoder(config)}", *cache_and_draft(config)])
    kernels = ", ".join([kernels_name(row), *cache_and_draft(config)])
    return f"{kernels} · {attention_name(config['attn'])}"


def prefill_name(row: dict) -> str:
    """Return the kernels and attention of the prefill if the decoder is not blocks; otherwise ""."""
    if not decoder(row["config"]):
        return ""
    return f"prefill {kernels_name(row)} · {attention_name(row['config']['attn'])}"


def kernels_name(row: dict) -> str:
    """Return a name such as "triton, mlp eager + compile", or peer_name()."""
    if peer := peer_name(row):
        return peer
    kernels, backends = row["config"]["kernels"], backends_of(row)
    name = preset_name(backends)
    if name is None:
        [(usual, _)] = Counter(backends.values()).most_common(1)
        name = ", ".join([usual, *(f"{op} {impl}" for op, impl in backends.items() if impl != usual)])
    if kernels["compile"]:
        name = "compile" if name == "eager" else f"{name} + compile"
    return name + compile_mode(kernels) + fp8_and_optimizer(kernels)


def compile_mode(kernels: dict) -> str:
    """Return the suffix for a mode that is not the default: ", max-autotune-no-cudagraphs"; otherwise ""."""
    mode = kernels.get("compile_mode", "default")
    return "" if mode == "default" else f", {mode}"


def is_baseline(row: dict) -> bool:
    """Return whether the row's choice is BASELINE, or BASELINE with another mode of torch.compile."""
    kernels, *others = choice_key(row)
    return (kernels.removesuffix(compile_mode(row["config"]["kernels"])), *others) == BASELINE


def kernels_family(name: str) -> str:
    """Return the family of a choice_name(): "triton + compile" for "triton, mlp eager + compile · flash"."""
    kernels = name.split(" · ")[0]
    usual = kernels.split(",")[0].removesuffix(" + compile")
    return f"{usual} + compile" if " + compile" in kernels else usual


def attention_name(attn: dict) -> str:
    """Return a name such as "flash fa4" for a row's config.attn."""
    return f"{attn['impl']} {attn['version']}" if attn.get("version") else attn["impl"]


def sessions(rows: list[dict]) -> dict[tuple, list[dict]]:
    """Group the rows that the tables compare: rows of equal settings and of one commit; the oldest session first.

    All rows are of training, or all of generation. A key is (*session_settings(), commit).
    """
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((*session_settings(row), commit(row)), []).append(row)
    return groups


def session_settings(row: dict) -> tuple:
    """Return (parameters, model_name(), precision, T, batch size, GPUs).

    For a row of generation, return (model_name(), precision, sequences, prompt tokens, new tokens).
    """
    config, model = row["config"], model_name(row)
    if is_generation(row):
        return model, config["precision"], sequences(row), prompt_tokens(row), config["max_new_tokens"] or 0
    sizes = config["train"]["block_size"], config["train"]["batch_size"], row.get("world_size", 1)
    return row["parameters"], model, config["precision"], *sizes


def newest_choices(rows: list[dict]) -> list[dict]:
    """Return the rows whose choice no later session measured, and the baselines of their sessions.

    All rows are of training, or all of generation.
    """
    newest, measured_later = set(), set()
    for (*settings, _), session in reversed(sessions(rows).items()):
        choices = {(*settings, *choice_key(row)) for row in session}
        if choices <= measured_later:
            continue
        for row in session:
            if is_baseline(row) or (*settings, *choice_key(row)) not in measured_later:
                newest.add(id(row))
        measured_later |= choices
    return [row for row in rows if id(row) in newest]


def newest_kernels(rows: list[dict]) -> dict[tuple[str, ...], dict]:
    """Return (op, dtype, shape, backend) -> its newest row with times."""
    return {(row["op"], row["dtype"], row["shape"], row["impl"]): row for row in rows if "both/ms" in row}


def attention_settings(row: dict) -> dict:
    """Return the settings of a row of scripts.bench_attention, without T and the backend."""
    return {key: row[key] for key in ("batch", "heads", "kv_heads", "head_dim", "window", "documents", "dtype")}


def attention_groups(rows: list[dict]) -> list[list[dict]]:
    """Return the rows of scripts.bench_attention in groups of the same settings: those with the most T first."""
    groups: dict[tuple, list[dict]] = {}
    for row in reversed(rows):  # of groups with equally many T, the newest comes first
        groups.setdefault(tuple(attention_settings(row).values()), []).insert(0, row)
    return sorted(groups.values(), key=lambda group: -len({row["T"] for row in group}))


def newest_attention(rows: list[dict]) -> dict[tuple[int, str], dict]:
    """Return (T, backend) -> its newest row of the first group of attention_groups(), the shortest T first."""
    first = next(iter(attention_groups(rows)), [])
    return dict(sorted({(row["T"], row["impl"]): row for row in first}.items()))


def newest_searches(rows: list[dict]) -> list[dict]:
    """Return the newest search of each choice in each mode, of rows of scripts.max_context, the longest training first.

    A row that searched in both modes is one line. If a newer row searched one of them, the older row lacks its figures.
    """
    newest: dict[tuple, int] = {}  # (*search_settings(), mode) -> the place of its newest row
    for place, row in enumerate(rows):
        for mode in SEARCH_MODES:
            if row.get(f"context/max_{mode}") or row.get(f"context/{mode}/limit"):
                newest[*search_settings(row), mode] = place
    shown = []
    for place, row in enumerate(rows):
        places = {mode: newest.get((*search_settings(row), mode)) for mode in SEARCH_MODES}
        if place in places.values():
            others = [mode for mode, other in places.items() if other not in (None, place)]
            replaced = tuple(f"context/{mode}/" for mode in others)
            left = {key: value for key, value in row.items() if not key.startswith(replaced)}
            shown.append(left | dict.fromkeys(f"context/max_{mode}" for mode in others))
    return sorted(shown, key=lambda row: -(row.get("context/max_train") or 0))


def search_settings(row: dict) -> list[str]:
    """Return a search's [model, precision, kernels, attention, positions and limits, checkpointing, GiB].

    The limits are those of attention, such as "window 64, 4 K/V heads", and then the other fields of the model that are
    not the default. After the kernels come a generation's decoder, cache and draft that are not the default. A setting
    that the row does not have is "".
    """
    model, memory = row["config"]["model"], f"{row['memory_gib']:.4g}" if row.get("memory_gib") else ""
    limits = [model.get("pos")]
    if model.get("window"):
        limits.append(f"window {model['window']}")
    if model.get("n_kv_head"):
        limits.append(f"{model['n_kv_head']} K/V heads")
    named = "window", "n_kv_head", "checkpointing", "keep_attention"
    limits += [f"{key}={value}" for key, value in GPTConfig.changes(model).items() if key not in named]
    checkpointing = (model.get("checkpointing") or "") + (", attention kept" if model.get("keep_attention") else "")
    if row.get("world_size", 1) > 1:
        memory = f"{row['world_size']} x {memory}"
    decode = row["config"]["kernels"].get("decode", "blocks")
    decoders = [] if decode == "blocks" else [f"decode {decode}"]
    kernels = ", ".join([kernels_cell(row), *decoders, *cache_and_draft(row["config"])])
    cells = [model_size(row), row["config"]["precision"], kernels, attention_cell(row)]
    return [*cells, ", ".join(filter(None, limits)), checkpointing, memory]

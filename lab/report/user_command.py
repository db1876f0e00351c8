"""The command for a choice of kernels: its model, kernels and sizes, with the data that every clone has."""

import functools

from common.terminal import override, shell_command
from kernels.names import ALL_OPS, config_groups, impls
from lab.report.describe import prompt_tokens
from lab.report.presets import differing_fields, preset_of, presets
from lab.rerun import rerun_command
from lab.sweep.compare import is_generation

TOKENS_PER_STEP = 65536  # the default, and the default micro-step of a GPU
kernel_presets = functools.cache(lambda: config_groups()["kernels"])  # reading the folders takes 10 ms


def user_command(row: dict) -> str:
    """Return the command with a row's model, kernels and sizes, and the data that every clone has.

    Empty if this version lacks a backend of the row, or if the command may run code that is not ours.
    """
    config = row["config"]
    backends = {**config["kernels"], "attention": config["attn"]["impl"]}
    if any(op in ALL_OPS and name not in (*impls(op), "auto") for op, name in backends.items()):
        return ""
    words = generation_words(row) if is_generation(row) else training_words(row)
    command = shell_command(*words, *model_words(row), *kernel_words(config))
    return rerun_command({"command": command})


def training_words(row: dict) -> list[str]:
    config, gpus = row["config"], row.get("world_size", 1)
    launcher = ["torchrun", "--standalone", f"--nproc_per_node={gpus}"] if gpus > 1 else ["python"]
    train, words = config["train"], [*launcher, "train.py"]
    if config.get("parallel", "ddp") != "ddp":
        words.append(override("parallel", config["parallel"]))
    if config.get("optim", {}).get("name", "adamw") != "adamw":
        words.append(override("optim", config["optim"]["name"]))
    if train["block_size"] != (config.get("model") or {}).get("block_size"):
        words.append(override("train.block_size", train["block_size"]))
    if train["batch_size"] * train["block_size"] != TOKENS_PER_STEP:
        words.append(override("train.batch_size", train["batch_size"]))
    if train["tokens_per_step"] != TOKENS_PER_STEP:
        words.append(override("train.tokens_per_step", train["tokens_per_step"]))
    return words


def generation_words(row: dict) -> list[str]:
    config = row["config"]
    words = ["python", "-m", "scripts.generate", "checkpoint=random"]
    words.append(override("prompt_tokens", prompt_tokens(row) or 1))
    if config.get("max_new_tokens"):
        words.append(override("max_new_tokens", config["max_new_tokens"]))
    if config.get("batch", 1) != 1:
        words.append(override("batch", config["batch"]))
    if (kv := (config.get("generate") or {}).get("kv", "auto")) != "auto":
        words.append(override("generate.kv", kv))
    return words


def model_words(row: dict) -> list[str]:
    """Return the words of the preset and of what differs from it. The size of the vocabulary follows the text."""
    config, preset = row["config"], preset_of(row)
    model = config.get("model") or {}
    if preset not in presets():
        return [override(f"model.{key}", value) for key, value in model.items() if key != "vocab_size"]
    fields, table = differing_fields(model, preset), presets()[preset]["block_size"]
    is_needed = model.get("block_size", table) != table
    if is_generation(row):  # a longer table than the text needs has no effect
        is_needed = is_needed and prompt_tokens(row) + (config.get("max_new_tokens") or 0) > table
    if is_needed:
        fields["block_size"] = model["block_size"]
    return [override("model", preset), *(override(f"model.{key}", value) for key, value in fields.items())]


def kernel_words(config: dict) -> list[str]:
    """Return the shortest choice of a row's kernels, its attention and its precision.

    A preset, and the ops for which the row has another backend.
    """
    found = []
    for name, fields in kernel_presets().items():
        chosen = {key: value for key, value in config["kernels"].items() if key in fields and value != fields[key]}
        found.append([override("kernels", name), *(override(f"kernels.{key}", each) for key, each in chosen.items())])
    words, attn = min(found, key=len), config["attn"]
    words.append(override("attn", attn["impl"]))
    if attn.get("version"):
        words.append(override("attn.version", attn["version"]))
    return [*words, override("precision", config["precision"])]

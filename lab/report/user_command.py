"""The commands that a page of results/ copies. They run in a fresh clone: they name no file that only we have."""

import functools
import re
import shlex

from common.terminal import override, shell_command
from kernels.lookup import is_path
from kernels.names import ALL_OPS, config_groups, impls
from lab.report.describe import prompt_tokens
from lab.report.presets import differing_fields, preset_of, presets
from lab.rerun import ROOT, rerun_command
from lab.sweep.compare import is_generation, peer_name

TOKENS_PER_STEP = 65536  # the default, and the default micro-step of a GPU
FLASH_VERSION = re.compile(r"flash \((PyTorch's )?(fa\d)\b")  # as kernels/attention/flash.py names it in a row
kernel_presets = functools.cache(lambda: config_groups()["kernels"])  # reading the folders takes 10 ms


def user_command(row: dict) -> str:
    """Return the command with a row's model, kernels and sizes, and the data that every clone has.

    Empty if the row has no config, if another system ran, or a draft (its speed depends on the text), if this version
    lacks a backend of the row, or if the command may run code that is not ours.
    """
    config = row.get("config", {})
    drafts = (config.get("generate") or {}).get("speculate")
    if not {"kernels", "attn"} <= config.keys() or peer_name(row) or drafts:
        return ""
    backends = {**config["kernels"], "attention": config["attn"]["impl"]}
    if not all(has_backend(op, name) for op, name in backends.items() if op in ALL_OPS):
        return ""
    words = generation_words(row) if is_generation(row) else training_words(row)
    command = shell_command(*words, *model_words(row), *kernel_words(row))
    return rerun_command({"command": command})


def clone_command(row: dict) -> str:
    """Return the command of a row of another program, such as scripts.judge, with the data that every clone has.

    Empty if rerun_command() is empty.
    """
    words = shlex.split(rerun_command(row))
    if any(word.startswith("data.path=") for word in words):
        words = [word for word in words if not word.startswith(("data=", "data."))]
    version = flash_version(row)
    if version and "attn=flash" in words and not any(word.startswith("attn.version=") for word in words):
        words.append(override("attn.version", version))
    return shell_command(*words) if words else ""


def benchmark_command(script: str, op: str, settings: dict) -> str:
    """Return the command of a benchmark; "" if this version lacks settings["impl"]."""
    if "impl" in settings and settings["impl"] != "compile" and not has_backend(op, settings["impl"]):
        return ""
    words = [override(key, value) for key, value in settings.items()]
    return rerun_command({"command": shell_command("python", "-m", f"scripts.{script}", *words)})


def has_backend(op: str, name: str) -> bool:
    """Return whether this version has the backend: a name in kernels/, or a file such as course/05_norm.py."""
    name = str(name)
    is_file = is_path(name) and (ROOT / name).is_file()  # rerun_command() refuses a file elsewhere
    return op in ALL_OPS and (is_file or name in (*impls(op), "auto"))


def flash_version(row: dict) -> str:
    """Return the version of FlashAttention that ran, as attn.version names it; "" if the row names none."""
    ran = row.get("kernels") or {}
    match = FLASH_VERSION.match(str(ran.get("attention", "")))
    if match is None:
        return ""
    return "torch" if match[1] else match[2]


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
    if train.get("cuda_graph") is False:
        words.append(override("train.cuda_graph", value=False))
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


def kernel_words(row: dict) -> list[str]:
    """Return the shortest choice of a row's kernels, its attention and its precision.

    A preset, and the ops for which the row has another backend. The version of FlashAttention is the one that ran,
    because attn=flash takes another version where that one is not installed.
    """
    config, found = row["config"], []
    for name, fields in kernel_presets().items():
        chosen = {key: value for key, value in config["kernels"].items() if key in fields and value != fields[key]}
        found.append([override("kernels", name), *(override(f"kernels.{key}", each) for key, each in chosen.items())])
    words, attn = min(found, key=len), config["attn"]
    words.append(override("attn.impl" if is_path(attn["impl"]) else "attn", attn["impl"]))
    if version := attn.get("version") or flash_version(row):
        words.append(override("attn.version", version))
    return [*words, override("precision", config["precision"])]

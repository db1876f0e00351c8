"""Choose the text that a model is evaluated on, and measure how well the model predicts it.

The loss is in nats a token. Bits per byte = loss x tokens / (bytes of text x ln 2) does not depend on how a tokenizer
cuts the text. The tokenizer's `lengths` give the bytes of each token. An end of text has 0 bytes, and its loss counts.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import OmegaConf

from common.terminal import shell_command
from data import DataConfig, Dataset, config_arguments, open_dataset
from data.loader import IGNORED, Batch, Windows, count_targets
from model.gpt import GPT
from model.pretrained import Pretrained, tokenizer_of
from runtime import checkpoint
from runtime.config import check, parse


class EvaluationText(NamedTuple):
    """The text of an evaluation. `windows` are its sequences."""

    dataset: Dataset
    windows: Windows
    batch_size: int
    summary: str  # how much text, for people


def open_text(
    source: Pretrained, overrides: dict | None, tokenizer: str | None, block_size: int | None, batch_size: int | None
) -> EvaluationText:
    """Open the validation split of the data that `overrides` names, or of the data of the checkpoint's own run.

    `overrides` are keys of the group `data`; null keeps the value of the checkpoint's run. Raises UserError or
    DataError if there is no such text, if it is too short, or if the run's data has changed after the training.
    """
    own_config = source.run_config
    own_train = own_config.get("train", {})
    positions = source.model["block_size"]
    length = block_size or own_train.get("block_size", positions)
    check(
        source.model["pos"] == "rope" or length <= positions,
        f"block_size={length}: {source.name} has {positions} positions, pass block_size={positions} or less",
    )
    tokenizer_of(source, tokenizer)  # raises if it does not fit
    config = data_config(source, overrides or {}, own_config, tokenizer or source.tokenizer)
    dataset = open_dataset(config)
    changed = tokenizer or any(value for key, value in (overrides or {}).items() if key not in ("prepare", "cache"))
    if not changed:
        recorded = checkpoint.read_manifest(source.checkpoint)["data"] if source.checkpoint else {}
        check_same_text(source, recorded, dataset, config)
    held_out, rest = (sum(map(len, shards)) for shards in (dataset.val, dataset.train))
    share = "" if config.source == "nanogpt" else f" (data.val_fraction={config.val_fraction:g})"
    summary = f"{held_out:,} validation tokens of {held_out + rest:,}{share}, in sequences of {length:,}"
    eot = dataset.tokenizer.eot if config.mask_documents else None
    windows = Windows(dataset.val, length, "validation", "block_size", eot)
    return EvaluationText(dataset, windows, batch_size or own_train.get("batch_size", 16), summary)


def check_same_text(source: Pretrained, recorded: dict, dataset: Dataset, config: DataConfig) -> None:
    """Raise UserError if the run's data no longer has the fingerprint that its checkpoint recorded."""
    differ = [key for key, value in recorded.items() if dataset.fingerprint[key] != value]
    check(
        not differ,
        f"the data of {source.name} changed after its training (different: {', '.join(differ)}): restore it, or "
        f"evaluate on the new data with {shell_command(*config_arguments(config))}",
    )


def data_config(source: Pretrained, overrides: dict[str, Any], own_config: dict, tokenizer: str) -> DataConfig:
    """Return the config of the data that `overrides` names, or of the run's own data with these overrides."""
    if not overrides.get("source"):
        check(bool(own_config), f"{source.name} has no record of its data: pass another, data=text data.path=...")
        overrides = own_config["data"] | {key: value for key, value in overrides.items() if value is not None}
    if overrides.get("mask_documents") is None:  # an old checkpoint's data, or data=... without this key
        overrides = overrides | {"mask_documents": own_config.get("data", {}).get("mask_documents", False)}
    return parse(OmegaConf.create(overrides | {"tokenizer": tokenizer}), DataConfig)


@torch.no_grad()
def score(model: GPT, batches: Iterable[Batch], lengths: np.ndarray, device: torch.device) -> dict[str, float]:
    """Return the figures over all targets that are not ignored.

    `lengths` (n_vocab,) has the bytes of text of each id.
    """
    nats, tokens, text_bytes = torch.zeros((), dtype=torch.float64, device=device), 0, 0
    for batch in batches:
        targets, count = batch[1], count_targets(batch)
        nats += model(*(tensor.to(device) for tensor in batch)).double() * count
        tokens += count
        text_bytes += int(lengths[targets[targets != IGNORED].numpy()].sum())
    loss = nats.item() / tokens
    return {
        "val/loss": loss,
        "val/perplexity": math.exp(min(loss, 700)),  # e^709 is the largest float
        "val/bits_per_byte": nats.item() / (text_bytes * math.log(2)) if text_bytes else None,
        "tokens": tokens,
        "bytes": text_bytes,
    }


def summary(figures: dict) -> str:
    """Return the figures in one line."""
    bits = figures["val/bits_per_byte"]
    bits = "no" if bits is None else f"{bits:.4f}"
    return (
        f"val      loss {figures['val/loss']:.4f} nats a token, perplexity {figures['val/perplexity']:,.2f}, "
        f"{bits} bits per byte; {figures['tokens']:,} tokens, {figures['bytes']:,} bytes of text"
    )

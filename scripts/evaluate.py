"""How well a model predicts: `python -m scripts.evaluate checkpoint=out/RUN`.

Loss in nats a token, and bits per byte = loss x tokens / (bytes of text x ln 2), which does not depend on how a
tokenizer cuts the text (bytes as by the tokenizer's `lengths`; an end of text is 0 bytes long, and its loss counts).
"""

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from data import DataConfig, DataError, Dataset, open_dataset, overrides
from data.loader import Batch, Windows, evaluation
from kernels.registry import AttnConfig, KernelError, KernelsConfig, choices, label
from model import cost, pretrained
from model.executed import executed
from model.gpt import GPT, PRECISIONS, GPTConfig
from model.pretrained import Pretrained, build, tokenizer_of
from runtime import checkpoint
from runtime.config import check, cli, parse
from runtime.device import environment, memory, out_of_memory, pick, reset_memory
from runtime.ranks import Ranks
from runtime.resume import place
from runtime.run import Run
from runtime.trackers import Tracker

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Config:
    checkpoint: str | None
    data: Any  # as train.py's; a null source: the data of the checkpoint's own run
    batches: int | None
    batch_size: int | None
    block_size: int | None
    tokenizer: str | None
    out_dir: str | None
    device: str
    precision: str
    kernels: KernelsConfig
    attn: AttnConfig

    def __post_init__(self):
        check(bool(self.checkpoint), "checkpoint is missing: name a run (out/RUN), a checkpoint, gpt2, or a folder")
        for key in ("batches", "batch_size", "block_size"):
            value = getattr(self, key)
            check(value is None or value >= 1, f"{key}={value}: it must be at least 1")
        check(self.precision in PRECISIONS, f"precision={self.precision}: choose {', '.join(PRECISIONS)}")


class Text(NamedTuple):
    """What a model is judged on."""

    dataset: Dataset
    windows: Windows
    batch_size: int
    about: str  # for people: how much of it


def text(cfg: Config, source: Pretrained) -> Text:
    """UserError or DataError: there is none, it is too short, or it is not that of the training any more."""
    manifest = checkpoint.manifest(source.checkpoint) if source.checkpoint else {}
    own = manifest.get("config", {})
    train = own.get("train", {})
    tokenizer = tokenizer_of(source, cfg.tokenizer).name
    positions = source.model["block_size"]
    length = cfg.block_size or train.get("block_size", positions)
    check(
        source.model["pos"] == "rope" or length <= positions,
        f"block_size={length}: {source.name} has {positions} positions, pass block_size={positions} or less",
    )
    config = data_config(cfg, source, own, tokenizer)
    dataset = open_dataset(config)
    same_text(cfg, source, manifest.get("data", {}), dataset, config)
    held, rest = (sum(map(len, shards)) for shards in (dataset.val, dataset.train))
    share = "" if config.source == "nanogpt" else f" (data.val_fraction={config.val_fraction:g})"
    about = f"{held:,} validation tokens of {held + rest:,}{share}, in sequences of {length:,}"
    eot = dataset.tokenizer.eot if config.mask_documents else None
    windows = Windows(dataset.val, length, "validation", "block_size", eot)
    return Text(dataset, windows, cfg.batch_size or train.get("batch_size", 16), about)


def same_text(cfg: Config, source: Pretrained, then: dict, dataset: Dataset, config: DataConfig) -> None:
    """UserError: the run's own data, unless the command line says what to take, is no longer that of its training."""
    if cfg.tokenizer or any(value for key, value in (cfg.data or {}).items() if key not in ("prepare", "cache")):
        return
    differ = [key for key, value in then.items() if dataset.fingerprint[key] != value]
    check(
        not differ,
        f"the data of {source.name} is no longer that of its training (other: {', '.join(differ)}): put it back, or "
        f"evaluate on it all the same with {shlex.join(overrides(config))}",
    )


def data_config(cfg: Config, source: Pretrained, own: dict, tokenizer: str) -> DataConfig:
    """What to evaluate on: the data asked for, or else the run's own with the keys that are given."""
    asked = cfg.data or {}
    if not asked.get("source"):
        check(bool(own), f"{source.name} does not say what text to evaluate it on: pass data=text data.path=...")
        asked = own["data"] | {key: value for key, value in asked.items() if value is not None}
    if asked.get("mask_documents") is None:  # an old checkpoint's, or text without a choice of the group
        asked = asked | {"mask_documents": own.get("data", {}).get("mask_documents", False)}
    return parse(OmegaConf.create(asked | {"tokenizer": tokenizer}), DataConfig)


def batches(windows: Windows, size: int, count: int | None) -> Iterator[Batch]:
    """A fixed set of `count` batches, as train.py's, or every window once (the last batch may be smaller)."""
    if count is not None:
        yield from evaluation(windows, size, count * size)
        return
    for first in range(0, len(windows), size):
        yield windows.batch(np.arange(first, min(first + size, len(windows))))


@torch.no_grad()
def evaluate(model: GPT, batches: Iterator[Batch], lengths: np.ndarray, device: torch.device) -> dict[str, float]:
    """The figures over the batches; `lengths` (n_vocab,) are bytes of text an id."""
    nats, tokens, size = torch.zeros((), dtype=torch.float64, device=device), 0, 0
    for batch in batches:
        y = batch[1]
        nats += model(*(each.to(device) for each in batch)).double() * y.numel()
        tokens += y.numel()
        size += int(lengths[y.numpy()].sum())
    loss = nats.item() / tokens
    return {
        "val/loss": loss,
        "val/perplexity": math.exp(min(loss, 700)),  # e^709 is the last
        "val/bits_per_byte": nats.item() / (size * math.log(2)) if size else None,
        "tokens": tokens,
        "bytes": size,
    }


def judge(cfg: Config, source: Pretrained, text: Text, device: torch.device, run: Run) -> None:
    """Load the model, and leave the figures in `run.row`."""
    tokenizer, windows, size = text.dataset.tokenizer, text.windows, text.batch_size
    reset_memory(device)
    masked = windows.eot is not None
    model = build(source, cfg.kernels, cfg.attn, cfg.precision, device, ["starts"] * masked)
    if cfg.kernels.compile:
        model.compile(fullgraph=True)
    shape = (size, windows.block_size)
    kernels = executed(model.config, cfg.kernels, cfg.attn, cfg.precision, shape, device, documents=masked)
    run.begin(kernels=kernels, env=environment(device), source=source.name)
    ops = " | ".join(f"{op} {who}" for op, who in run.row["kernels"].items() if op != "compile")
    print(f"device   {run.row['env']['device']}, torch {torch.__version__}, precision {cfg.precision}")
    print(f"model    {source.name}: {cost.parameters(model.config) / 1e6:.1f}M")
    print(f"data     {text.dataset.name}, {tokenizer.name}: {text.about}")
    print(f"kernels  {ops}{' | torch.compile' * cfg.kernels.compile}")

    chosen = tqdm(batches(windows, size, cfg.batches), unit="batch", disable=None, leave=False)
    figures = evaluate(model, chosen, tokenizer.lengths, device)
    run.row |= figures | memory(device, Ranks())
    run.log(1, figures)
    bits = figures["val/bits_per_byte"]
    print(
        f"val      loss {figures['val/loss']:.4f} nats a token, perplexity {figures['val/perplexity']:,.2f}, "
        f"{'no' if bits is None else f'{bits:.4f}'} bits per byte; {figures['tokens']:,} tokens, "
        f"{figures['bytes']:,} bytes of text"
    )


@cli(
    Config,
    configs=ROOT / "configs",
    name="evaluate",
    groups=choices(),
    errors=(KernelError, DataError),
)
def main(cfg: Config) -> None:
    device = pick(cfg.device)
    source = pretrained.read(cfg.checkpoint)
    size = cost.parameters(GPTConfig(**source.model, dropout=0.0)) / 1e6
    name = f"evaluate-{size:.0f}M-{label(cfg.kernels, cfg.attn)}-{cfg.precision}"
    held_out = text(cfg, source)  # what cannot be leaves no folder
    torch.compiler.reset()  # a sweep's jobs share the code of GPT.forward
    folder, _ = place(cfg.out_dir, None, name)
    with Run(folder, name, cfg, Tracker(None)) as run, out_of_memory(name, "batch_size or block_size"):
        judge(cfg, source, held_out, device, run)
    print(f"done     {run.folder / 'result.json'}")


if __name__ == "__main__":
    main()

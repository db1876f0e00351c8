"""Measure how well a model predicts a text: `python -m scripts.evaluate checkpoint=out/RUN`.

It reports the loss in nats a token, the perplexity, and bits per byte. lab/evaluation.py defines them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from data.errors import DataError
from data.loader import evaluation_batches
from kernels.registry import AttnConfig, KernelsConfig
from lab import evaluation
from lab.bench.new_backends import check_new_backends
from lab.commands import command
from model import cost, pretrained
from model.config import PRECISIONS
from model.executed import (
    called_kernels,
    called_ops,
    executed_kernels,
    kernels_label,
    slower_kernels,
    warn_of_uncalled_ops,
)
from model.step import build
from runtime.config import check
from runtime.console import model_header
from runtime.device import environment, explain_out_of_memory, peak_memory, reset_peak_memory, select_device
from runtime.ranks import Ranks
from runtime.resume import choose_folder
from runtime.run import Run
from runtime.trackers import LoggerConfig, Tracker


@dataclass
class Config:
    checkpoint: str | None
    data: Any  # the keys of DataConfig; without a source, the text of the checkpoint's own run
    batches: int | None
    batch_size: int | None
    block_size: int | None
    tokenizer: str | None
    out_dir: str | None
    device: str
    precision: str | None
    kernels: KernelsConfig
    attn: AttnConfig
    logger: LoggerConfig

    def __post_init__(self):
        check(bool(self.checkpoint), "checkpoint is missing: pass a run (out/RUN), a checkpoint, gpt2, or a folder")
        for key in ("batches", "batch_size", "block_size"):
            value = getattr(self, key)
            check(value is None or value >= 1, f"{key}={value}: it must be at least 1")
        choices = f"choose {', '.join(PRECISIONS)}, or null: the run's own"
        check(self.precision in (None, *PRECISIONS), f"precision={self.precision}: {choices}")


@command(Config, "evaluate", errors=(DataError,))
def main(cfg: Config) -> None:
    device = select_device(cfg.device)
    source = pretrained.read_pretrained(cfg.checkpoint)
    config = source.config
    warn_of_uncalled_ops(called_ops(config))
    if cfg.precision is None:
        cfg.precision = source.run_config.get("precision", "amp")
        cfg.kernels = replace(cfg.kernels, fp8=cfg.kernels.fp8 or source.run_config.get("kernels", {}).get("fp8"))
    choice = f"{kernels_label(config, cfg.kernels, cfg.attn)}-{cfg.precision}"
    name = f"evaluate-{cost.parameters(config) / 1e6:.0f}M-{choice}"
    text = evaluation.open_text(source, cfg.data, cfg.tokenizer, cfg.block_size, cfg.batch_size)
    documents = text.windows.eot is not None
    shape = text.batch_size, text.windows.block_size
    torch.compiler.reset()  # with -m, all jobs run in this process, and Dynamo limits how often it compiles GPT.forward
    folder, _ = choose_folder(cfg.out_dir, None, name)  # only now, so that a mistake leaves no empty folder
    with (
        Run(folder, name, cfg, Tracker(cfg.logger)) as run,
        explain_out_of_memory(name, "batch_size or block_size"),
    ):
        run.row["checks"] = check_new_backends(called_kernels(config, cfg.kernels), cfg.attn, device)
        reset_peak_memory(device)
        groups = config, cfg.kernels, cfg.attn, cfg.precision
        model = build(*groups, device, weights=source, needs=["starts"] if documents else []).eval()
        if cfg.kernels.compile:
            model.compile(fullgraph=True)
        call = {"shape": shape, "device": device, "documents": documents}
        facts = {"kernels": executed_kernels(*groups, **call), "slower": slower_kernels(*groups, **call)}
        run.begin(**facts, env=environment(device), source=source.name)
        model_text = f"{source.name}: {cost.parameters(config) / 1e6:.1f}M"
        data_line = f"data     {text.dataset.name}, {text.dataset.tokenizer.name}: {text.summary}"
        print(model_header(run.row, model_text, data_line))
        samples = len(text.windows) if cfg.batches is None else cfg.batches * text.batch_size
        batches = evaluation_batches(text.windows, text.batch_size, samples)
        bar = tqdm(batches, unit="batch", disable=None, leave=False)
        figures = evaluation.score(model, bar, text.dataset.tokenizer.lengths, device)
        run.row |= figures | peak_memory(device, Ranks())
        run.log(1, figures)
        print(evaluation.summary(figures))
    print(f"done     {run.folder / 'result.json'}")


if __name__ == "__main__":
    main()

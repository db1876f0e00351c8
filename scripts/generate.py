"""Generate text from a model: `python -m scripts.generate checkpoint=out/RUN prompt="def main(" max_new_tokens=200`.

It streams the text, and measures the decoding steps: their tokens/s, and how near they come to the bound. The bound is
the time to read the weights and the KV cache at the bandwidth of a copy on this machine. The figures go into a run's
folder.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.errors import DataError
from kernels.registry import AttnConfig, KernelError, KernelsConfig, backend_names, config_groups, label
from lab import generation
from model import cost, pretrained
from model.executed import executed_kernels
from model.generate import Decoder, Sampling
from model.gpt import PRECISIONS
from model.step import build
from model.text import Text
from runtime.config import check, cli, command_line, quote_exactly
from runtime.console import model_header
from runtime.device import environment, explain_out_of_memory, reset_peak_memory, select_device
from runtime.resume import choose_folder
from runtime.run import Run
from runtime.timing import measured_bandwidth
from runtime.trackers import Tracker

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Config:
    checkpoint: str | None
    prompt: str
    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int
    batch: int
    stop: Any
    tokenizer: str | None
    out_dir: str | None
    device: str
    precision: str
    kernels: KernelsConfig
    attn: AttnConfig

    def __post_init__(self):
        check(bool(self.checkpoint), "checkpoint is missing: pass a run (out/RUN), a checkpoint, gpt2, or a folder")
        for key, value in {"max_new_tokens": self.max_new_tokens, "batch": self.batch}.items():
            check(value is None or 1 <= value < 2**31, f"{key}={value}: it must be in [1, 2^31)")
        check(
            self.temperature == 0 or 1e-4 <= self.temperature <= 1e4,
            f"temperature={self.temperature}: it must be 0 (the most probable token each time) or in [0.0001, 10000]",
        )
        check(self.top_k >= 0, f"top_k={self.top_k}: it must be at least 1, or 0 for no limit")
        check(0 < self.top_p <= 1, f"top_p={self.top_p}: it must be in (0, 1]; 1 is no limit")
        check(0 <= self.seed < 2**63, f"seed={self.seed}: it must be in [0, 2^63)")
        check(self.precision in PRECISIONS, f"precision={self.precision}: choose {', '.join(PRECISIONS)}")
        if self.stop is None:
            self.stop = []
        stops = self.stop if isinstance(self.stop, list) else [self.stop]
        self.stop = [stop.replace("\\n", "\n") if isinstance(stop, str) else stop for stop in stops]
        check(
            all(type(stop) in (int, str) and stop != "" for stop in self.stop),
            f"stop={self.stop}: it must be a list of texts and token ids",
        )


@cli(
    Config,
    configs=ROOT / "configs",
    name="generate",
    groups=config_groups(),
    resolvers=backend_names(),
    errors=(KernelError, DataError),
)
def main(cfg: Config) -> None:
    device = select_device(cfg.device)
    source = pretrained.read_pretrained(cfg.checkpoint)
    tokenizer, config = pretrained.tokenizer_of(source, cfg.tokenizer), source.config
    name = f"generate-{cost.parameters(config) / 1e6:.0f}M-{label(cfg.kernels, cfg.attn)}-{cfg.precision}"
    ids, new_tokens = generation.encode_prompt(cfg.prompt, cfg.max_new_tokens, source, tokenizer)
    cfg.max_new_tokens = new_tokens  # so that the row has the number, and not null
    idx, prompt_length = torch.tensor([ids]).repeat(cfg.batch, 1), len(ids)
    torch.compiler.reset()  # with -m, all jobs run in this process, and Dynamo limits how often it compiles a step
    folder, _ = choose_folder(cfg.out_dir, None, name)  # only now, so that a mistake leaves no empty folder
    work = f"batch={cfg.batch}, max_new_tokens={new_tokens}, {name}"
    with (
        Run(folder, name, cfg, Tracker(None)) as run,
        explain_out_of_memory(work, "one of them, or choose precision=bf16"),
    ):
        # quoted for a shell only: main_with_exact_prompt() adds Hydra's quotes again
        run.row["command"] = command_line(prompt="") + shlex.quote(cfg.prompt)
        idx, bandwidth = idx.to(device), measured_bandwidth(device)
        reset_peak_memory(device)
        model = build(config, cfg.kernels, cfg.attn, cfg.precision, device, weights=source).eval()
        sampling = Sampling(tokenizer.n_vocab, cfg.temperature, cfg.top_k, cfg.top_p)
        decoder = Decoder(model, cfg.batch, prompt_length + new_tokens, sampling, cfg.seed, cfg.kernels.compile)
        keys = decoder.bucket(prompt_length + 1)
        kernels = executed_kernels(config, cfg.kernels, cfg.attn, cfg.precision, (cfg.batch, 1), device, keys)
        run.begin(kernels=kernels, env=environment(device), measured_bandwidth=bandwidth, source=source.name)
        model_text = f"{source.name}: {cost.parameters(config) / 1e6:.1f}M, tokenizer {tokenizer.name}"
        print(f"{model_header(run.row, model_text, compiled='torch.compile around a step')}\n")
        figures, first_token = generation.warm_up(decoder, idx, new_tokens)
        texts = [Text(tokenizer, cfg.stop) for _ in range(cfg.batch)]
        arrivals, first = generation.write_text(decoder, idx, cfg.prompt, texts, new_tokens, run.folder / "sample.txt")
        least = generation.least_bytes(decoder, cfg.precision, cfg.batch, prompt_length, len(arrivals))
        figures |= generation.figures(decoder, idx, [*first_token, first], arrivals, least, bandwidth)
        run.row |= figures
        run.log(len(arrivals), figures)
        print(f"\n\n{generation.summary(figures, cfg.batch, least, bandwidth)}")
    print(f"done     {run.folder / 'result.json'}")


def main_with_exact_prompt() -> None:
    """Call main() so that the model gets the prompt exactly as the shell passes it, whatever it means to Hydra."""
    for i, word in enumerate(sys.argv):
        if word.startswith("prompt="):
            sys.argv[i] = f"prompt={quote_exactly(word.removeprefix('prompt='))}"
    main()


if __name__ == "__main__":
    main_with_exact_prompt()

"""Text from a model: `python -m scripts.generate checkpoint=out/RUN prompt="def main(" max_new_tokens=200`.

It streams the text, and says what a decoding step is worth: its tokens/s beside the bytes that the step must read at
least, over the bandwidth of a copy on this very machine. The figures go into a run's folder like any other.
"""

import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from data.errors import DataError
from data.tokenizer import Tokenizer
from kernels.registry import AttnConfig, KernelError, KernelsConfig, choices, impls, label
from model import cost, pretrained
from model.executed import executed
from model.generate import Decoder, Sampling, stream
from model.gpt import PRECISIONS, GPTConfig
from model.pretrained import Pretrained, build, tokenizer_of
from model.text import Text
from runtime.config import check, cli, command, literal
from runtime.device import GIB, environment, memory, out_of_memory, pick, reset_memory
from runtime.meter import quantiles
from runtime.ranks import Ranks
from runtime.resume import place
from runtime.run import Run
from runtime.timing import measured_bandwidth, synchronize
from runtime.trackers import Tracker

ROOT = Path(__file__).resolve().parent.parent
GROUP = 16  # tokens a sample of the speed, so that a slow terminal's hiccup is in the mean of few
NEW_TOKENS = 128  # for max_new_tokens=null, or as many as fit
PREFILLS, PREFILL_S = 5, 1.0  # first tokens that the median is of, and seconds after which it is of fewer


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
        check(bool(self.checkpoint), "checkpoint is missing: name a run (out/RUN), a checkpoint, gpt2, or a folder")
        for key, value in {"max_new_tokens": self.max_new_tokens, "batch": self.batch}.items():
            check(value is None or 1 <= value < 2**31, f"{key}={value}: it must be at least 1")
        check(
            self.temperature == 0 or 1e-4 <= self.temperature <= 1e4,
            f"temperature={self.temperature}: it must be 0 (the best token each time) or in [0.0001, 10000]",
        )
        check(self.top_k >= 0, f"top_k={self.top_k}: it must be at least 1, or 0 for no limit")
        check(0 < self.top_p <= 1, f"top_p={self.top_p}: it must be in (0, 1]; 1 is no limit")
        check(0 <= self.seed < 2**63, f"seed={self.seed}: it must be in [0, 2^63)")
        check(self.precision in PRECISIONS, f"precision={self.precision}: choose {', '.join(PRECISIONS)}")
        stops = self.stop if isinstance(self.stop, list) else [] if self.stop is None else [self.stop]
        self.stop = [stop.replace("\\n", "\n") if isinstance(stop, str) else stop for stop in stops]
        check(
            all(type(stop) in (int, str) and stop != "" for stop in self.stop),
            f"stop={self.stop}: it must be a list of texts and token ids",
        )


def encode(cfg: Config, source: Pretrained, tokenizer: Tokenizer) -> Tensor:
    """The prompt, (batch, T) int64; sets max_new_tokens where it is null. UserError: both go beyond the positions."""
    ids = tokenizer.encode(cfg.prompt).tolist() or [tokenizer.eot]
    if source.model["pos"] == "learned":
        longest = source.model["block_size"]
        room, ends = longest - len(ids), f"{source.name} has {longest} positions"
        check(room > 0, f"the prompt has {len(ids)} tokens, and {ends}: shorten it")
        cfg.max_new_tokens = cfg.max_new_tokens or min(NEW_TOKENS, room)
        check(
            cfg.max_new_tokens <= room,
            f"the prompt's {len(ids)} tokens and max_new_tokens={cfg.max_new_tokens} are too many, as {ends}: "
            f"pass max_new_tokens={room} or a shorter prompt",
        )
    cfg.max_new_tokens = cfg.max_new_tokens or NEW_TOKENS
    return torch.tensor([ids]).repeat(cfg.batch, 1)


def warm_up(decoder: Decoder, idx: Tensor, max_new_tokens: int) -> tuple[dict, list[float]]:
    """Everything once that happens once; then first tokens, the prompt again each time: their seconds."""
    start, prompt = time.perf_counter(), idx.shape[1]
    for _ in range(2):
        decoder.prefill(idx)
    buckets = decoder.warm_up(prompt + 1, prompt + max_new_tokens - 1)
    synchronize(idx.device)
    figures = {"gen/warmup_s": time.perf_counter() - start, "gen/step_buckets": len(buckets)}
    seconds = []
    while len(seconds) < PREFILLS and sum(seconds) < PREFILL_S:
        start = time.perf_counter()
        decoder.prefill(idx).cpu()
        seconds.append(time.perf_counter() - start)
    return figures, seconds


def watch(tokens: Iterator[Tensor], texts: list[Text], show: bool) -> tuple[list[str], list[float]]:
    """Streams until all texts have stopped: (the texts, the moment of each step's arrival)."""
    written, arrivals = ["" for _ in texts], []

    def put(row: int, text: str) -> None:
        written[row] += text
        if show and text:
            print(text, end="", flush=True)

    for step in tokens:
        arrivals.append(time.perf_counter())
        for row, (text, token) in enumerate(zip(texts, step.tolist(), strict=True)):
            if not text.stopped:
                put(row, text.add(token))
        if all(text.stopped for text in texts):
            break
    for row, text in enumerate(texts):
        if not text.stopped:
            put(row, text.finish())
    return written, arrivals


def speed(arrivals: list[float], batch: int) -> dict:
    """Decoding: medians over groups of GROUP steps (all steps, where they are fewer)."""
    group = min(GROUP, len(arrivals) - 1)
    if group < 1:
        return {"gen/decode_tokens_per_sec": None, "gen/step_ms": None}
    marks = arrivals[::group]
    p20, median, p80 = quantiles([(b - a) / group for a, b in pairwise(marks)])
    return {
        "gen/decode_tokens_per_sec": batch / median,
        "gen/decode_tokens_per_sec/p20": batch / p80,
        "gen/decode_tokens_per_sec/p80": batch / p20,
        "gen/step_ms": 1e3 * median,
    }


def generate(
    cfg: Config, source: Pretrained, tokenizer: Tokenizer, idx: Tensor, device: torch.device, run: Run
) -> None:
    """Load, warm up, stream, and leave the figures in `run.row`; idx (batch, T) is the prompt."""
    idx, prompt, compute = idx.to(device), idx.shape[1], PRECISIONS[cfg.precision][1]
    bandwidth = measured_bandwidth(device)
    reset_memory(device)
    model = build(source, cfg.kernels, cfg.attn, cfg.precision, device)
    how = Sampling(tokenizer.n_vocab, cfg.temperature, cfg.top_k, cfg.top_p)
    decoder = Decoder(model, cfg.batch, prompt + cfg.max_new_tokens, how, cfg.seed, cfg.kernels.compile)
    keys = decoder.bucket(prompt + 1)
    kernels = executed(model.config, cfg.kernels, cfg.attn, cfg.precision, (cfg.batch, 1), device, keys)
    run.begin(kernels=kernels, env=environment(device), measured_bandwidth=bandwidth, source=source.name)
    ops = " | ".join(f"{op} {who}" for op, who in kernels.items() if op != "compile")
    print(f"device   {run.row['env']['device']}, torch {torch.__version__}, precision {cfg.precision}")
    print(f"model    {source.name}: {cost.parameters(model.config) / 1e6:.1f}M, tokenizer {tokenizer.name}")
    print(f"kernels  {ops}{' | torch.compile around a step' * cfg.kernels.compile}\n")

    figures, firsts = warm_up(decoder, idx, cfg.max_new_tokens)
    if cfg.batch == 1:
        print(cfg.prompt, end="", flush=True)
    start = time.perf_counter()
    texts = [Text(tokenizer, cfg.stop) for _ in range(cfg.batch)]
    written, arrivals = watch(stream(decoder, idx, cfg.max_new_tokens), texts, show=cfg.batch == 1)
    if cfg.batch > 1:
        print("\n".join(f"--- {number}\n{cfg.prompt}{text}" for number, text in enumerate(written, 1)), end="")
    first = statistics.median([*firsts, arrivals[0] - start])
    figures |= {"gen/ttft_ms": 1e3 * first, "gen/prefill_tokens_per_sec": idx.numel() / first}
    figures |= {"gen/prompt_tokens": prompt, "gen/tokens": len(arrivals), **speed(arrivals, cfg.batch)}
    # the middle step: its cache holds the prompt and half of what was generated
    least = cost.decode_bytes(model.config, cfg.batch, prompt + len(arrivals) // 2, compute)
    step_ms = figures["gen/step_ms"]
    figures["gen/bandwidth_utilisation"] = least / (1e-3 * step_ms) / bandwidth if step_ms else None
    held = {"weights": model.parameters(), "kv_cache": chain(*decoder.kv)}
    figures |= {f"mem/{name}_gib": sum(tensor.nbytes for tensor in tensors) / GIB for name, tensors in held.items()}
    figures |= memory(device, Ranks())
    run.row |= figures
    run.log(len(arrivals), figures)
    (run.folder / "sample.txt").write_text("".join(cfg.prompt + text + "\n" for text in written), encoding="utf-8")
    print(f"\n\n{summary(figures, cfg.batch, least, bandwidth)}")


def summary(figures: dict, batch: int, least: int, bandwidth: float) -> str:
    """What it was worth, in four lines."""
    peak = figures["mem/peak_allocated_gib"] or figures.get("mem/peak_rss_gib")
    steps = "not measured: it takes two tokens"
    if figures["gen/step_ms"]:
        p20, median, p80 = (figures[f"gen/decode_tokens_per_sec{part}"] for part in ("/p20", "", "/p80"))
        steps = (
            f"{median:,.0f} tok/s median (p20 {p20:,.0f}, p80 {p80:,.0f}), {figures['gen/step_ms']:.3f} ms a step of "
            f"{batch}; {100 * figures['gen/bandwidth_utilisation']:.1f}% of the bound: {least / 1e6:,.1f} MB at the "
            f"{bandwidth / 1e9:,.0f} GB/s of a copy here"
        )
    return (
        f"decode   {steps}\n"
        f"prefill  {figures['gen/ttft_ms']:.2f} ms to the first token; "
        f"{figures['gen/prefill_tokens_per_sec']:,.0f} tok/s of {batch} x {figures['gen/prompt_tokens']} tokens\n"
        f"memory   GiB: weights {figures['mem/weights_gib']:.3f}, KV cache {figures['mem/kv_cache_gib']:.3f}, "
        f"peak {peak:.3f}\n"
        f"start    {figures['gen/warmup_s']:.1f} s of warm-up, for {figures['gen/step_buckets']} lengths of the cache"
    )


OmegaConf.register_new_resolver("backends", lambda op: ", ".join(impls(op)), replace=True)  # for --help


@cli(
    Config,
    configs=ROOT / "configs",
    name="generate",
    groups=choices(),
    errors=(KernelError, DataError),
)
def main(cfg: Config) -> None:
    device = pick(cfg.device)
    source = pretrained.read(cfg.checkpoint)
    tokenizer = tokenizer_of(source, cfg.tokenizer)
    size = cost.parameters(GPTConfig(**source.model, dropout=0.0)) / 1e6
    name = f"generate-{size:.0f}M-{label(cfg.kernels, cfg.attn)}-{cfg.precision}"
    idx = encode(cfg, source, tokenizer)  # what cannot be leaves no folder
    torch.compiler.reset()  # a sweep's jobs share the code of a step
    folder, _ = place(cfg.out_dir, None, name)
    tried = f"batch={cfg.batch}, max_new_tokens={cfg.max_new_tokens}, {name}"
    with Run(folder, name, cfg, Tracker(None)) as run, out_of_memory(tried, "one of them, or choose precision=bf16"):
        run.row["command"] = command(prompt="") + shlex.quote(cfg.prompt)  # as a shell gives it, not quoted for Hydra
        generate(cfg, source, tokenizer, idx, device, run)
    print(f"done     {run.folder / 'result.json'}")


def program() -> None:
    """main(), and the prompt is what the shell hands over, whatever that means to Hydra."""
    for i, word in enumerate(sys.argv):
        if word.startswith("prompt="):
            sys.argv[i] = f"prompt={literal(word.removeprefix('prompt='))}"
    main()


if __name__ == "__main__":
    program()

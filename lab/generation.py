"""Generate text, and measure the time to the first token and the speed of decoding beside its memory bound."""

import statistics
import time
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

from torch import Tensor

from data.tokenizer import Tokenizer
from model import cost
from model.generate import Decoder, stream
from model.gpt import PRECISIONS
from model.pretrained import Pretrained
from model.text import Text
from runtime.config import check
from runtime.device import GIB, peak_memory
from runtime.meter import quantiles
from runtime.ranks import Ranks
from runtime.timing import synchronize

NEW_TOKENS = 128  # if no number is given; fewer if the model has too few positions
SAMPLE_STEPS = 16  # decoding steps in one sample of the speed; a pause of a slow terminal then spoils few samples
PREFILLS, PREFILL_SECONDS = 5, 1.0  # at most this many prefills are timed; after this many seconds no further one


def encode_prompt(
    prompt: str, max_new_tokens: int | None, source: Pretrained, tokenizer: Tokenizer
) -> tuple[list[int], int]:
    """Return the prompt's ids, and max_new_tokens or its default. The ids of an empty prompt are an end of text.

    Raises UserError if together they exceed the model's learned positions.
    """
    ids = tokenizer.encode(prompt).tolist() or [tokenizer.eot]
    if source.model["pos"] != "learned":
        return ids, max_new_tokens or NEW_TOKENS
    positions = source.model["block_size"]
    room, limit = positions - len(ids), f"{source.name} has {positions} positions"
    check(room > 0, f"the prompt has {len(ids)} tokens, but {limit}: shorten it")
    max_new_tokens = max_new_tokens or min(NEW_TOKENS, room)
    check(
        max_new_tokens <= room,
        f"the prompt's {len(ids)} tokens and max_new_tokens={max_new_tokens} are too many, because {limit}: "
        f"pass max_new_tokens={room} or a shorter prompt",
    )
    return ids, max_new_tokens


def warm_up(decoder: Decoder, idx: Tensor, max_new_tokens: int) -> tuple[dict, list[float]]:
    """Compile and warm up, then time prefills of the prompt. Return (figures, seconds to the first token of each)."""
    start, prompt = time.perf_counter(), idx.shape[1]
    for _ in range(2):
        decoder.prefill(idx)
    buckets = decoder.warm_up(prompt + 1, prompt + max_new_tokens - 1)
    synchronize(idx.device)
    figures = {"gen/warmup_s": time.perf_counter() - start, "gen/step_buckets": len(buckets)}
    seconds = []
    while len(seconds) < PREFILLS and sum(seconds) < PREFILL_SECONDS:
        start = time.perf_counter()
        decoder.prefill(idx).cpu()
        seconds.append(time.perf_counter() - start)
    return figures, seconds


def read_stream(tokens: Iterator[Tensor], texts: list[Text], show: bool) -> tuple[list[str], list[float]]:
    """Read tokens until all texts have stopped. Return (the texts, the time at which each step's tokens arrived).

    `show` prints the texts as they grow.
    """
    written, arrivals = ["" for _ in texts], []

    def add(row: int, text: str) -> None:
        written[row] += text
        if show and text:
            print(text, end="", flush=True)

    for step in tokens:
        arrivals.append(time.perf_counter())
        for row, (text, token) in enumerate(zip(texts, step.tolist(), strict=True)):
            if not text.stopped:
                add(row, text.add(token))
        if all(text.stopped for text in texts):
            break
    for row, text in enumerate(texts):
        if not text.stopped:
            add(row, text.finish())
    return written, arrivals


def write_text(
    decoder: Decoder, idx: Tensor, prompt: str, texts: list[Text], new_tokens: int, path: Path
) -> tuple[list[float], float]:
    """Generate, print and save the texts. Return the arrival time of each step, and the seconds to the first one.

    One text is printed token by token; several are printed at the end. `idx` (B, T) holds the prompt's ids B times,
    and `texts` are B.
    """
    if len(texts) == 1:
        print(prompt, end="", flush=True)
    start = time.perf_counter()
    written, arrivals = read_stream(stream(decoder, idx, new_tokens), texts, show=len(texts) == 1)
    if len(texts) > 1:
        print("\n".join(f"--- {number}\n{prompt}{text}" for number, text in enumerate(written, 1)), end="")
    path.write_text("".join(f"{prompt}{text}\n" for text in written), encoding="utf-8")
    return arrivals, arrivals[0] - start


def decode_speed(arrivals: list[float], batch: int) -> dict:
    """Return medians over groups of SAMPLE_STEPS steps; fewer steps are one group. None without two arrivals."""
    group = min(SAMPLE_STEPS, len(arrivals) - 1)
    if group < 1:
        return {"gen/decode_tokens_per_sec": None, "gen/step_ms": None}
    p20, median, p80 = quantiles([(b - a) / group for a, b in pairwise(arrivals[::group])])
    return {
        "gen/decode_tokens_per_sec": batch / median,
        "gen/decode_tokens_per_sec/p20": batch / p80,
        "gen/decode_tokens_per_sec/p80": batch / p20,
        "gen/step_ms": 1e3 * median,
    }


def least_bytes(decoder: Decoder, precision: str, batch: int, prompt: int, new_tokens: int) -> int:
    """Return the bytes that a decoding step must read: the weights, and a cache with half of the new tokens."""
    compute = PRECISIONS[precision][1]
    return cost.decode_bytes(decoder.model.config, batch, prompt + new_tokens // 2, compute)


def figures(
    decoder: Decoder, idx: Tensor, first_token: list[float], arrivals: list[float], least: int, bandwidth: float
) -> dict:
    """Return the row's figures. `least` is the bytes that a step must read; `bandwidth` is a copy's, in bytes/s."""
    batch, prompt = idx.shape
    first = statistics.median(first_token)
    result = {"gen/ttft_ms": 1e3 * first, "gen/prefill_tokens_per_sec": idx.numel() / first}
    result |= {"gen/prompt_tokens": prompt, "gen/tokens": len(arrivals), **decode_speed(arrivals, batch)}
    step_ms = result["gen/step_ms"]
    result["gen/bandwidth_utilisation"] = least / (1e-3 * step_ms) / bandwidth if step_ms else None
    for name, tensors in {"weights": decoder.model.parameters(), "kv_cache": chain(*decoder.kv)}.items():
        result[f"mem/{name}_gib"] = sum(tensor.nbytes for tensor in tensors) / GIB
    return result | peak_memory(idx.device, Ranks())


def summary(figures: dict, batch: int, least: int, bandwidth: float) -> str:
    """Return the figures in four lines."""
    peak = figures["mem/peak_allocated_gib"] or figures.get("mem/peak_rss_gib")
    steps = "not measured: decoding starts with the second new token"
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

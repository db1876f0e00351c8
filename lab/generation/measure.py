"""Measure a generation: the time to the first token, and the speed of decoding beside its memory bound."""

import statistics
import time
from dataclasses import replace
from itertools import chain, pairwise

import torch
from torch import Tensor

from kernels.registry import AttnConfig, KernelsConfig, called_backends
from lab.generation.writing import Arrival, make_arrival
from lab.proof.memory import in_gib
from lab.proof.receipt import make_receipt
from model import cost
from model.config import PRECISIONS
from model.decoder import Decoder
from model.generate import stream
from model.weights import copied_bytes
from runtime.device import GIB, peak_flops, peak_memory
from runtime.meter import quantiles
from runtime.power import PowerMeter
from runtime.ranks import Ranks
from runtime.timing import synchronize

SAMPLE_STEPS = 16  # decoding steps in one sample of the speed, so a pause of a slow terminal spoils few samples
PREFILLS, PREFILL_SECONDS = 5, 1.0  # time at most this many prefills, and start none after this many seconds
GAIN_TURNS = 3  # texts with drafts, and as many without
POWER_SECONDS = 1.5  # of a generation, or of its repetitions: 128 tokens of 124M take 20 ms


def warm_up(decoder: Decoder, idx: Tensor, lengths: Tensor, max_new_tokens: int) -> tuple[dict, list[float]]:
    """Compile, warm up and time prefills. Return (figures, the seconds to the first token of each prefill)."""
    start = time.perf_counter()
    buckets = decoder.warm_up(idx.shape[1], max_new_tokens)
    for _ in range(2):
        decoder.prefill(idx, lengths)
    synchronize(idx.device)
    figures = {"gen/warmup_s": time.perf_counter() - start, "gen/step_buckets": len(buckets)}
    seconds = []
    while len(seconds) < PREFILLS and sum(seconds) < PREFILL_SECONDS:
        start = time.perf_counter()
        decoder.prefill(idx, lengths).cpu()
        seconds.append(time.perf_counter() - start)
    return figures, seconds


def decode_speed(arrivals: list[Arrival], batch: int, drafts: bool, graph_tokens: int = 1) -> dict:
    """Return figures over groups of SAMPLE_STEPS steps; fewer steps are one group. None without two arrivals.

    A step reads the weights once. With a draft, each arrival is one step, which may make several tokens of a sequence.
    Otherwise an arrival of several tokens is one launch of as many steps. If a CUDA graph makes `graph_tokens` of each
    sequence, the last arrival does not count if it has fewer, because stream() left some out.
    """
    if not drafts and arrivals[-1].tokens < graph_tokens * batch:
        arrivals = arrivals[:-1]
    per_arrival = 1 if drafts else max((step.tokens // batch for step in arrivals[1:]), default=1)
    group = min(max(1, SAMPLE_STEPS // per_arrival), len(arrivals) - 1)
    if group < 1:
        return {"gen/decode_tokens_per_sec": None, "gen/step_ms": None, "gen/laps_s": []}
    intervals, step_seconds, token_ms = [], [], []
    for start in range(0, len(arrivals) - group, group):
        seconds = arrivals[start + group].time - arrivals[start].time
        tokens = sum(step.tokens for step in arrivals[start + 1 : start + 1 + group])
        intervals.append(seconds * batch / tokens)
        step_seconds.append(seconds / group if drafts else intervals[-1])
    for before, step in pairwise(arrivals):
        token_ms.append(1e3 * (step.time - before.time) * step.sequences / step.tokens)
    token_ms.sort()
    tails = {f"gen/token_ms/p{p}": token_ms[min(len(token_ms) - 1, len(token_ms) * p // 100)] for p in (50, 95, 99)}
    p20, median, p80 = quantiles([batch / seconds for seconds in intervals])
    return {
        "gen/decode_tokens_per_sec": median,
        "gen/decode_tokens_per_sec/p20": p20,
        "gen/decode_tokens_per_sec/p80": p80,
        "gen/step_ms": 1e3 * statistics.median(step_seconds),
        "gen/laps_s": intervals,
        **tails,
    }


def least_bytes(decoder: Decoder, precision: str, lengths: Tensor, steps: int) -> int:
    """Return the bytes that the middle one of `steps` steps must read: the weights, and the keys and values so far.

    A draft model's are read once for each token of a draft.
    """
    config, weights_dtype = decoder.model.config, PRECISIONS[precision][1]
    weights = decoder.weight_bytes or cost.decode_bytes(config, 0, 0, weights_dtype)
    keys = [min(length + steps // 2, config.window or length + steps) for length in lengths.tolist()]
    cache = cost.kv_cache_bytes(config, 1, sum(keys), decoder.kv[0][0].dtype)
    draft = least_bytes(decoder.drafter, precision, lengths, steps) if decoder.drafter else 0
    return weights + cache + (decoder.step_tokens - 1) * draft


def figures(
    decoder: Decoder,
    idx: Tensor,
    lengths: Tensor,
    first_token: list[float],
    arrivals: list[Arrival],
    least: int,
    bandwidth: float,
) -> dict:
    """Return the row's figures. `least` is the bytes that a step must read; `bandwidth` is a copy's, in bytes/s."""
    batch, prompt = idx.shape
    first, peak = statistics.median(first_token), peak_flops(idx.device)
    flops = sum(cost.prefill_flops(decoder.model.config, 1, length) for length in lengths.tolist())
    result = {"gen/ttft_ms": 1e3 * first, "gen/prefill_tokens_per_sec": int(lengths.sum()) / first}
    result["gen/prefill_mfu"] = flops / first / peak if peak else None
    result |= {
        "gen/prompt_tokens": prompt,
        "gen/tokens": sum(step.tokens for step in arrivals) // batch,
        "gen/sequences": batch,
    }
    drafts = decoder.step_tokens > 1
    result |= decode_speed(arrivals, batch, drafts, decoder.graph_tokens)
    made, sequences = sum(step.tokens for step in arrivals[1:]), sum(step.sequences for step in arrivals[1:])
    result["gen/accepted_tokens"] = made / sequences if drafts and sequences else 1.0
    step_ms = result["gen/step_ms"]
    result["gen/bandwidth_utilisation"] = least / (1e-3 * step_ms) / bandwidth if step_ms else None
    for name, tensors in decoder.memory().items():
        result[f"mem/{name}_gib"] = sum(tensor.nbytes for tensor in tensors) / GIB
    result["mem/packed_gib"] = sum(copied_bytes(each.packed, each.model) for each in decoder.decoders) / GIB
    return result | peak_memory(idx.device, Ranks())


def power_figures(power: PowerMeter, decoder: Decoder, idx: Tensor, lengths: Tensor, max_new_tokens: int) -> dict:
    """Return the figures of runtime/power.py for a generation. It is repeated until it has taken POWER_SECONDS.

    `power` has measured it once.
    """
    tokens = len(idx) * max_new_tokens
    with power:
        while power.sensors and power.seconds < POWER_SECONDS:
            power.start()
            tokens += sum(map(len, chain(*stream(decoder, idx, max_new_tokens, lengths))))
            power.stop()
    return power.figures(tokens, Ranks())


def gain_of_drafts(decoder: Decoder, options: dict, idx: Tensor, lengths: Tensor, max_new_tokens: int) -> dict:
    """Generate with drafts and without, in turns. Return the speed without, the speed-up, and how alike the texts are.

    `options` are the keyword arguments of the decoder's constructor. The speeds are medians of GAIN_TURNS texts, over
    all tokens after the first: what a draft saves varies along a text. gen/same_tokens is the share of a text before
    its first different token. It is 1 unless a step of several tokens rounds the logits differently.
    """
    options = options | {"options": replace(options["options"], speculate=None), "draft": None}
    plain = Decoder(decoder.model, len(idx), decoder.capacity, decoder.sampling, **options)
    plain.first_seeds = decoder.first_seeds
    warm_up(plain, idx, lengths, max_new_tokens)
    speeds, texts = {decoder: [], plain: []}, {}
    for turn in range(GAIN_TURNS):
        for each in (decoder, plain) if turn % 2 == 0 else (plain, decoder):
            arrivals, sequences = [], [[] for _ in idx]
            for step in stream(each, idx, max_new_tokens, lengths):
                arrivals.append(make_arrival(step))
                for sequence, tokens in zip(sequences, step, strict=True):
                    sequence += tokens
            if len(arrivals) > 1:
                tokens = sum(arrival.tokens for arrival in arrivals[1:])
                speeds[each].append(tokens / (arrivals[-1].time - arrivals[0].time))
            texts[each] = torch.tensor(sequences)
    gain = {"gen/same_tokens": (texts[decoder] == texts[plain]).cumprod(1).double().mean().item()}
    if speeds[decoder] and speeds[plain]:
        drafted, undrafted = (statistics.median(speeds[each]) for each in (decoder, plain))
        gain |= {"gen/undrafted_tokens_per_sec": undrafted, "gen/speedup": drafted / undrafted}
    return gain


def gain_line(gain: dict) -> str:
    """Return gain_of_drafts() as a line for the terminal."""
    alike = f"the texts agree in their first {100 * gain['gen/same_tokens']:.1f}%"
    if "gen/speedup" not in gain:
        return f"drafts   not timed; {alike}"
    return f"drafts   {gain['gen/speedup']:.2f}x the {gain['gen/undrafted_tokens_per_sec']:,.0f} tok/s without; {alike}"


def measured_memory(figures: dict) -> dict[str, float] | None:
    """Return the GiB on a GPU by part, as the prediction in scripts.generate. None on a CPU."""
    if figures["mem/peak_allocated_gib"] is None:
        return None
    keys = {name: f"mem/{name}_gib" for name in ("weights", "packed", "kv_cache")} | {"peak": "mem/peak_allocated_gib"}
    return in_gib({name: GIB * figures[key] for name, key in keys.items()})


def receipt_of_step(decoder: Decoder, row: dict, kernels: KernelsConfig, attn: AttnConfig) -> dict:
    """Profile one more Decoder.step(), and return the row's receipt of one token, or of one draft."""
    impls = {"decode": kernels.decode}
    if kernels.decode == "blocks":
        impls = called_backends(kernels, attn, row["kernels"])

    def count() -> int:
        return 1 if decoder.step_tokens > 1 else int(decoder.output[0, 0])

    device = decoder.positions.device
    receipt = make_receipt(decoder.step, device, impls, row["kernels"], forward_only=True, count=count)
    return {"step_ms": row.get("gen/step_ms"), **receipt}


def summary(figures: dict, least: int, bandwidth: float) -> str:
    """Return the figures in four lines."""
    peak, batch = figures["mem/peak_allocated_gib"] or figures.get("mem/peak_rss_gib"), figures["gen/sequences"]
    steps = "not measured: decoding starts with the second new token"
    if figures["gen/step_ms"]:
        p20, median, p80 = (figures[f"gen/decode_tokens_per_sec{part}"] for part in ("/p20", "", "/p80"))
        accepted = figures["gen/accepted_tokens"]
        guessed = f", {accepted:.2f} tokens of a sequence a step" if accepted > 1 else ""
        steps = (
            f"{median:,.0f} tok/s median (p20 {p20:,.0f}, p80 {p80:,.0f}), {figures['gen/step_ms']:.3f} ms a step of "
            f"{batch}{guessed}; {100 * figures['gen/bandwidth_utilisation']:.1f}% of the bound: {least / 1e6:,.1f} MB "
            f"at the {bandwidth / 1e9:,.0f} GB/s of a copy here"
        )
    mfu = f", mfu {100 * figures['gen/prefill_mfu']:.1f}%" if figures["gen/prefill_mfu"] else ""
    copies = f", packed copies {figures['mem/packed_gib']:.3f}" if figures["mem/packed_gib"] else ""
    return (
        f"decode   {steps}\n"
        f"prefill  {figures['gen/ttft_ms']:.2f} ms to the first token; "
        f"{figures['gen/prefill_tokens_per_sec']:,.0f} tok/s of {batch} x {figures['gen/prompt_tokens']} tokens{mfu}\n"
        f"memory   GiB: weights {figures['mem/weights_gib']:.3f}{copies}, KV cache {figures['mem/kv_cache_gib']:.3f}, "
        f"peak {peak:.3f}\n"
        f"start    {figures['gen/warmup_s']:.1f} s of warm-up, for {figures['gen/step_buckets']} lengths of the cache"
    )

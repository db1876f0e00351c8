"""Race decoders: each decodes the same prompt, alone on the device. Then compare their speeds and texts."""

import time
from dataclasses import dataclass, field, replace

import torch

from kernels.registry import KernelError, check_name
from lab.generation import measure
from lab.generation.prompts import Prompt, make_batch
from lab.generation.recipe import GenerationRecipe
from lab.generation.writing import read_stream
from lab.proof.generation import lossy
from model.generate import stream
from runtime.config import UserError, check
from runtime.device import explain_out_of_memory, reset_peak_memory
from runtime.row import status_of

ADDITIONS = ("compile", "ngram", "fp8")  # what an entry of decoders= may add to a decoder: blocks+compile+ngram
NEW_TOKENS = 256  # the default of max_new_tokens
FEWEST_LAPS = 3  # groups of steps that a verdict needs; fewer show no spread


@dataclass
class Racer:
    """A decoder and its result: times[i] seconds after the start it has counts[i] tokens, and writes pieces[i]."""

    name: str
    status: str = "ok"
    exact: bool = True  # whether it rounds neither weights nor the cache on purpose
    kernels: dict = field(default_factory=dict)  # op -> backend and version
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    figures: dict = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def speed(self) -> float:
        """The tokens/s of decoding: the median over groups of steps; 0 without a second token."""
        return self.figures["gen/decode_tokens_per_sec"] or 0.0


def with_decoder(recipe: GenerationRecipe, entry: str) -> GenerationRecipe:
    """Return the recipe with the decoder of an entry of decoders=. A wrong entry raises KernelError or UserError."""
    name, *additions = entry.split("+")
    check_name("decode", name, "decoders")
    wrong = [addition for addition in additions if addition not in ADDITIONS]
    check(not wrong, f"decoders={entry}: a decoder can be followed by +{', +'.join(ADDITIONS)}")
    generate = recipe.generate
    if "ngram" in additions:
        generate = replace(generate, speculate="ngram")
    if "fp8" in additions:
        generate = replace(generate, kv="fp8")
    kernels = replace(recipe.kernels, decode=name, compile="compile" in additions)
    return replace(recipe, kernels=kernels, generate=generate)


def run_alone(name: str, recipe: GenerationRecipe, prompt: Prompt, new_tokens: int, device: torch.device) -> Racer:
    """Decode the prompt, and return the result. If the decoder cannot run here, its status says why."""
    torch.compiler.reset()
    reset_peak_memory(device)  # this also frees the memory of the decoder before
    racer = Racer(name, exact=lossy(recipe.decoder_options) is None)
    try:
        with explain_out_of_memory(name, "max_new_tokens"):
            run_decoder(racer, recipe, prompt, new_tokens, device)
    except (KernelError, UserError) as error:
        racer.status = status_of(error)
    return racer


def run_decoder(racer: Racer, recipe: GenerationRecipe, prompt: Prompt, new_tokens: int, device: torch.device) -> None:
    idx, lengths = (tensor.to(device) for tensor in make_batch([prompt]))
    decoder = recipe.build_decoder(1, idx.shape[1] + new_tokens, device)
    racer.kernels = recipe.executed_kernels(decoder, tuple(idx.shape), device)
    racer.figures, _ = measure.warm_up(decoder, idx, lengths, new_tokens)
    [text] = recipe.make_texts(1)
    arrivals = []
    start = time.perf_counter()
    for arrival, [piece] in read_stream(stream(decoder, idx, new_tokens, lengths), [text]):
        arrivals.append(arrival)
        racer.times.append(arrival.time - start)
        racer.counts.append(len(text.tokens))
        racer.pieces.append(piece)
    racer.pieces[-1] += text.finish()
    racer.tokens = text.tokens
    racer.figures |= measure.decode_speed(arrivals, 1, decoder.step_tokens > 1, decoder.graph_tokens)


def kernels_lines(racers: list[Racer]) -> str:
    """Return two lines: the backend of each op, as the first decoder runs it, and the decoders, each once."""
    ran = [racer.kernels for racer in racers if racer.kernels]
    common = [f"{op} {description}" for op, description in ran[0].items() if op not in ("decode", "compile")]
    decoders = dict.fromkeys(kernels["decode"] for kernels in ran)
    return f"kernels  {' | '.join(common)}\ndecode   {' | '.join(decoders)}"


def first_difference(tokens: list[int], others: list[int]) -> int | None:
    """Return the number of the first token that differs, counted from 1, or None."""
    for number, (token, other) in enumerate(zip(tokens, others, strict=False), 1):
        if token != other:
            return number
    return None if len(tokens) == len(others) else min(len(tokens), len(others)) + 1


def judge(racers: list[Racer], must_agree: bool) -> None:
    """If must_agree, set the status `wrong` of each exact decoder that differs from the first exact one.

    A decoder that rounds on purpose is not exact, and may write another text.
    """
    exact = [racer for racer in racers if racer.status == "ok" and racer.exact]
    for racer in exact[1:]:
        number = first_difference(exact[0].tokens, racer.tokens)
        if must_agree and number:
            racer.status = f"wrong: new token {number} differs from {exact[0].name}, and in fp32 it must not"


def table(racers: list[Racer]) -> str:
    """Return a table of the decoders' figures, fastest first. Decoders without figures come last, with reasons."""
    finished = [racer for racer in racers if racer.status == "ok"]
    lines = [["decoder", "tok/s", "p20 to p80", "ms a step", "first token", "in all", "warm-up", "tokens", "text"]]
    for racer in sorted(finished, key=lambda racer: -racer.speed):
        number = first_difference(finished[0].tokens, racer.tokens)
        text = f"differs from {finished[0].name} at token {number}" if number else "same"
        lines.append([racer.name, *figure_cells(racer), text])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[0] = max(widths[0], *(len(racer.name) for racer in racers))
    rows = []
    for name, *cells, text in lines:
        rows.append("  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:]), text]))
    rows += [f"{racer.name.ljust(widths[0])}  {racer.status}" for racer in racers if racer.status != "ok"]
    return "\n".join(rows)


def figure_cells(racer: Racer) -> list[str]:
    """Return the cells of a decoder's figures. Without a second token, the speed is "too short"."""
    figures, speed = racer.figures, ["too short", "", ""]
    if racer.speed:
        p20, p80 = (figures[f"gen/decode_tokens_per_sec/{p}"] for p in ("p20", "p80"))
        speed = [f"{racer.speed:,.0f}", f"{p20:,.0f} to {p80:,.0f}", f"{figures['gen/step_ms']:.3f}"]
    times = [f"{1e3 * racer.times[0]:.1f} ms", f"{racer.times[-1]:.2f} s", f"{figures['gen/warmup_s']:.1f} s"]
    return [*speed, *times, f"{len(racer.tokens):,}"]


def verdict(racers: list[Racer]) -> str:
    """Return a line with the winner and its lead. If the two best overlap between p20 and p80, it is a tie."""
    finished = sorted((racer for racer in racers if racer.status == "ok"), key=lambda racer: -racer.speed)
    if len(finished) == 1:
        return f"winner   none, because only {finished[0].name} has a speed"
    first, second, *_ = finished
    if min(len(racer.figures["gen/laps_s"]) for racer in (first, second)) < FEWEST_LAPS:
        steps = FEWEST_LAPS * measure.SAMPLE_STEPS
        return f"winner   not judged, because that needs {steps} decoding steps: pass a larger max_new_tokens"
    if first.figures["gen/decode_tokens_per_sec/p20"] <= second.figures["gen/decode_tokens_per_sec/p80"]:
        return f"winner   tie of {first.name} and {second.name}: their speeds overlap between p20 and p80"
    ratios = ", ".join(f"{first.speed / racer.speed:.2f}x {racer.name}" for racer in finished[1:] if racer.speed)
    return f"winner   {first.name}: {ratios} (median tok/s)"

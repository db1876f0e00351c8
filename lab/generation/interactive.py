"""A conversation on a terminal: read a prompt, stream the answer, and ask again."""

import contextlib
import time
from collections.abc import Iterator

import torch

from common.terminal import printable
from kernels.names import GENERATION_OPS
from kernels.sampling import seeds_of
from lab.bench.new_backends import check_new_backends
from lab.generation.prompts import NEW_TOKENS, Prompt, check_room, encode_prompt, make_batch
from lab.generation.recipe import GenerationRecipe
from lab.generation.writing import Arrival, end_line_at_error, read_stream, show
from model.decoder import Decoder
from model.executed import called_kernels
from model.generate import stream
from model.text import Text
from runtime.config import UserError, check
from runtime.console import model_header
from runtime.device import environment

ROPE_PROMPT = 4096  # tokens of the longest prompt of a model with rope, which has no table of positions
HELP = "Type a prompt. Enter alone begins a document, Ctrl-C stops an answer, Ctrl-D ends."


def answer_prompts(recipe: GenerationRecipe, max_new_tokens: int | None, device: torch.device, raw: bool) -> None:
    """Read one prompt after another from the terminal, and stream the answers, until Ctrl-D.

    Answer n, counted from 0, is the text of a run with seed + n. It has at most max_new_tokens tokens, or fewer if the
    model has too few positions. The warm-up compiles and captures everything before the first prompt.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing and a history
    most = max_new_tokens or NEW_TOKENS
    shape = recipe.shortest.model
    capacity = shape["block_size"] if shape["pos"] == "learned" else ROPE_PROMPT + most
    called = called_kernels(recipe.source.config, recipe.kernels)
    check_new_backends(called, recipe.attn, device, GENERATION_OPS)
    decoder = recipe.build_decoder(1, capacity, device)
    row = {**recipe.kernel_facts(decoder, (1, 1), device), "env": environment(device)}
    row["config"] = {"precision": recipe.precision}
    print(model_header(row, recipe.model_text, compiled="torch.compile around a step"))
    print(f"start    {warm_up(decoder):.1f} s of warm-up, for prompt and answer of up to {capacity:,} tokens")
    print(f"\n{HELP}", flush=True)
    for number, (prompt, room) in enumerate(read_prompts(recipe, capacity)):
        decoder.first_seeds = seeds_of(recipe.seed + number, 1, device)
        [text] = recipe.make_texts(1)
        print(f"\n[{stream_answer(decoder, prompt, text, min(most, room), raw)}]", flush=True)


def warm_up(decoder: Decoder) -> float:
    """Compile and capture the prefills and the steps of every length. Return the seconds of the warm-up."""
    start = time.perf_counter()
    decoder.warm_up(1, decoder.capacity - 1)
    lengths = {decoder.padded(1, length) for length in range(1, decoder.capacity)} - {None}  # of captured prefills
    for length in sorted(lengths) or [1]:
        decoder.prefill(torch.zeros(1, length, dtype=torch.int64, device=decoder.positions.device)).cpu()
    return time.perf_counter() - start


def read_prompts(recipe: GenerationRecipe, capacity: int) -> Iterator[tuple[Prompt, int]]:
    """Yield each prompt that the user types, and how many tokens fit after it. Ctrl-D and Ctrl-C end the loop.

    A prompt that is too long, or not UTF-8, prints one line.
    """
    while True:
        try:
            prompt = encode_prompt(input("> "), recipe.tokenizer)
            room = check_room(len(prompt.ids), prompt.where, recipe.shortest)
            if room is None:
                tokens = len(prompt.ids)
                check(tokens <= ROPE_PROMPT, f"the prompt has {tokens} tokens: shorten it to {ROPE_PROMPT}")
                room = capacity - tokens
        except (EOFError, KeyboardInterrupt):
            print()
            return
        except UnicodeDecodeError:
            print("error: the prompt is not UTF-8 text")
        except UserError as error:
            print(f"error: {printable(error)}")
        else:
            yield prompt, room


def stream_answer(decoder: Decoder, prompt: Prompt, text: Text, new_tokens: int, raw: bool) -> str:
    """Print the answer while it arrives, until it ends or Ctrl-C stops it. Return a line with its figures."""
    idx, lengths = (tensor.to(decoder.positions.device) for tensor in make_batch([prompt]))
    arrivals, counts = [], []
    start = time.perf_counter()
    with contextlib.suppress(KeyboardInterrupt), end_line_at_error():
        for arrival, [piece] in read_stream(stream(decoder, idx, new_tokens, lengths), [text]):
            arrivals.append(arrival)
            counts.append(len(text.tokens))
            show(piece, raw)
    show(text.finish(), raw)
    return answer_line(start, arrivals, counts)


def answer_line(start: float, arrivals: list[Arrival], counts: list[int]) -> str:
    """Return "N tokens, X tok/s, first token Y ms". The answer has counts[i] tokens at arrival i."""
    if not arrivals:
        return "stopped before the first token"
    tokens, first = counts[-1], arrivals[0].time
    rate = ""
    if len(arrivals) > 1:
        rate = f", {(tokens - counts[0]) / (arrivals[-1].time - first):,.0f} tok/s"
    return f"{tokens} {'token' if tokens == 1 else 'tokens'}{rate}, first token {1e3 * (first - start):.1f} ms"

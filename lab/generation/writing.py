"""Turn the tokens of a Decoder into texts: on the terminal while they arrive, and in the run's folder."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from common.files import write_atomically
from common.terminal import printable
from lab.generation.prompts import Prompt
from model.text import Text
from runtime.folders import explain_unwritable


class Arrival(NamedTuple):
    """A step's tokens, as they arrive at the host."""

    time: float  # perf_counter()'s seconds
    tokens: int  # new tokens of all sequences
    sequences: int  # sequences that got a token


def make_arrival(step: list[list[int]]) -> Arrival:
    """Return the arrival, now, of a step's new tokens of each sequence."""
    return Arrival(time.perf_counter(), sum(map(len, step)), sum(map(bool, step)))


def read_stream(steps: Iterator[list[list[int]]], texts: list[Text]) -> Iterator[tuple[Arrival, list[str]]]:
    """Add the tokens to the texts until all texts have stopped. Yield each step's arrival and each text's new part."""
    for step in steps:
        arrival = make_arrival(step)
        yield arrival, [text.add(tokens) for text, tokens in zip(texts, step, strict=True)]
        if all(text.stopped for text in texts):
            return


@contextmanager
def end_line_at_error() -> Iterator[None]:
    """If this context raises an error, end the line of the text so far, because the error has a line of its own."""
    try:
        yield
    except Exception:
        print(flush=True)
        raise


def show(text: str, raw: bool) -> None:
    """Print text at once. Without `raw`, a terminal gets \\x1b for ESC, which a model of bytes may write."""
    print(printable(text) if sys.stdout.isatty() and not raw else text, end="", flush=True)


def write_texts(
    steps: Iterator[list[list[int]]], prompts: list[Prompt], texts: list[Text], folder: Path, raw: bool = False
) -> tuple[list[str], list[Arrival]]:
    """Print the texts after their prompts, and save them. Return the texts and the arrivals of the steps.

    A single text is printed while its tokens arrive; several are printed at the end. sample.txt has the same texts with
    their prompts. samples.jsonl has a line {"prompt", "text", "tokens"} for each text; `tokens` counts its new tokens.
    Raises UserError if the files cannot be written.
    """
    arrivals, pieces = [], [[] for _ in texts]
    is_single = len(texts) == 1
    if is_single:
        show(prompts[0].text, raw)
    with end_line_at_error():
        for arrival, new in read_stream(steps, texts):
            arrivals.append(arrival)
            for parts, piece in zip(pieces, new, strict=True):
                parts.append(piece)
            if is_single and new[0]:
                show(new[0], raw)
    rest = [text.finish() for text in texts]
    written = ["".join([*parts, end]) for parts, end in zip(pieces, rest, strict=True)]
    whole = [prompt.text + text for prompt, text in zip(prompts, written, strict=True)]
    if not is_single:
        whole = [f"--- {number}\n{text}" for number, text in enumerate(whole, 1)]
    show(rest[0] if is_single else "\n".join(whole), raw)
    samples = [
        {"prompt": prompt.text, "text": text, "tokens": len(sequence.tokens)}
        for prompt, text, sequence in zip(prompts, written, texts, strict=True)
    ]
    lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    with explain_unwritable(folder):
        write_atomically(folder / "sample.txt", "".join(f"{text}\n" for text in whole).encode())
        write_atomically(folder / "samples.jsonl", lines.encode())
    return written, arrivals

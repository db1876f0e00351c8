"""Read prompts from the command line, a file or stdin, or draw random ids. Make one batch of token ids of them."""

import errno
import json
import os
import select
import stat
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from common.files import MOST_BYTES, read_bytes, read_up_to
from common.terminal import quote_exactly, warn
from data.tokenizer import Tokenizer
from model.sources import Pretrained, local_path
from runtime.config import check

NEW_TOKENS = 128  # scripts.generate's default; fewer if the model has too few positions
PROMPT_KEYS = "prompt=", "prompts=", "prompt_tokens="
STDIN_SECONDS = 5  # how long a pipe on stdin may be silent


class Prompt(NamedTuple):
    """A prompt, and its ids. An empty prompt begins a document: its only id is the end of text (eot).

    `where` names the prompt in messages: "the prompt", or "line 3 of FILE".
    """

    text: str
    ids: list[int]
    where: str = "the prompt"


def quote_prompt(arguments: list[str]) -> None:
    """Quote prompt=... for Hydra, in place, so that the model gets the prompt exactly as the shell passes it."""
    for i, word in enumerate(arguments):
        if word.startswith("prompt="):
            arguments[i] = f"prompt={quote_exactly(word.removeprefix('prompt='))}"


def take_stdin(arguments: list[str]) -> None:
    """If the arguments name no prompt, add prompt=TEXT with the text of a pipe or a file on stdin, in place.

    The text loses one line end at its end. No text adds nothing: stdin may be closed, /dev/null, or a pipe that stays
    silent, as under cron and in CI. Raises UserError if the text is not UTF-8.
    """
    if any(word.lstrip("+").startswith(PROMPT_KEYS) for word in arguments):
        return
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # no stdin, or not a real file
        return
    is_pipe = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    if not (is_pipe or stat.S_ISREG(mode)):
        return
    if is_pipe and not select.select([sys.stdin], [], [], STDIN_SECONDS)[0]:
        warn(f"no prompt came from the pipe on stdin within {STDIN_SECONDS} s: prompts=- waits for it")
        return
    if text := decode_utf8(read_stdin(), "stdin").removesuffix("\n"):
        arguments.append(f"prompt={text}")


def check_stdin(arguments: list[str]) -> None:
    """Raise UserError if the arguments start a sweep whose jobs would read prompts from stdin."""
    is_sweep = any(word in ("-m", "--multirun") or word.startswith("+sweep=") for word in arguments)
    files = [word.removeprefix("prompts=").split(",") for word in arguments if word.startswith("prompts=")]
    check(
        not (is_sweep and any("-" in names for names in files)),
        "prompts=- cannot run in a sweep, because its jobs have no stdin: write the prompts to a file",
    )


def read_prompts(path: str, tokenizer: Tokenizer) -> list[Prompt]:
    """Return the prompts in a file, or on stdin if the path is "-".

    Each line is a prompt. If the first line is a JSON object with a text under "prompt", or if the file's name ends in
    .jsonl, every line must be such an object. Blank lines are skipped. Raises UserError if the file cannot be read, has
    no prompt, or has a wrong line.
    """
    name = "stdin" if path == "-" else path
    lines = {n: line for n, line in enumerate(decode_utf8(read_source(path), name).split("\n"), 1) if line.strip()}
    check(bool(lines), f"prompts={path}: {name} has no prompt; write a prompt a line, or JSON lines with a key prompt")
    if path.endswith(".jsonl") or json_prompt(next(iter(lines.values()))) is not None:
        for number, line in lines.items():
            prompt = json_prompt(line)
            check(prompt is not None, f'line {number} of {name} is not a JSON object with a text under "prompt"')
            lines[number] = prompt
    return [encode_prompt(text, tokenizer, f"line {number} of {name}") for number, text in lines.items()]


def read_source(path: str) -> bytes:
    """Return the bytes of a file, or of stdin if the path is "-". Raises UserError if they cannot be read."""
    if path == "-":
        check(not sys.stdin.isatty(), "prompts=- reads prompts from a pipe, and stdin is a terminal: pass prompts=FILE")
        return read_stdin()
    try:
        return read_bytes(local_path(path))
    except OSError as error:
        advice = "; prompts=- reads a pipe on stdin" if error.errno == errno.EINVAL else ""
        check(False, f"prompts={path} cannot be read: {error.strerror}{advice}")


def read_stdin() -> bytes:
    """Return the bytes of stdin. Raises UserError if they never seem to end, as those of /dev/zero."""
    data = read_up_to(sys.stdin.buffer, MOST_BYTES)
    check(data is not None, f"stdin has more than {MOST_BYTES:,} bytes: pass shorter prompts")
    return data


def decode_utf8(data: bytes, name: str) -> str:
    """Return the text with Unix line ends and without a byte order mark. Raises UserError if it is not UTF-8."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        check(False, f"line {number} of {name} is not UTF-8 text: it has the byte {data[error.start]:#04x}")
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def json_prompt(line: str) -> str | None:
    """Return the text under "prompt" if the line is a JSON object that has one."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    text = value.get("prompt") if isinstance(value, dict) else None
    return text if isinstance(text, str) else None


def encode_prompt(text: str, tokenizer: Tokenizer, where: str = "the prompt") -> Prompt:
    """Return the prompt of a text. Raises UserError if UTF-8 cannot encode a character (a lone surrogate)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        check(False, f"{where} is not UTF-8 text: character {error.start + 1} is {text[error.start]!a}")
    return Prompt(text, tokenizer.encode_prompt(text).tolist() or [tokenizer.eot], where)


def random_prompt(length: int, n_vocab: int, tokenizer: Tokenizer, seed: int) -> Prompt:
    """Return a prompt of `length` random ids below n_vocab, without the tokenizer's ends of text.

    Its text is only a label; it does not decode the ids.
    """
    stops, generator = sorted(tokenizer.stops), torch.Generator().manual_seed(seed)
    ids = torch.randint(n_vocab - len(stops), (length,), generator=generator)
    for stop in stops:  # in this order, each moves the ids from it on past it
        ids += ids >= stop
    return Prompt(f"({length:,} random tokens)", ids.tolist())


def make_prompts(
    text: str | None,
    file: str | None,
    length: int | None,
    source: Pretrained,
    n_vocab: int,
    tokenizer: Tokenizer,
    seed: int,
) -> list[Prompt]:
    """Return the prompts of a file, a prompt of `length` random ids, or the prompt `text`. Raises UserError.

    The random ids are those that the model may draw, below n_vocab.
    """
    if length is not None:
        check_room(length, "the prompt", source)  # before the draw, because 2^31 ids would fill the memory
        return [random_prompt(length, n_vocab, tokenizer, seed)]
    if file is not None:
        return read_prompts(file, tokenizer)
    return [encode_prompt(text or "", tokenizer)]


def check_room(tokens: int, where: str, source: Pretrained) -> int | None:
    """Return how many tokens fit after a prompt of `tokens` tokens; None: any number. Raises UserError if none fits."""
    if source.model["pos"] != "learned":
        return None
    room = source.model["block_size"] - tokens
    count = "1 token" if tokens == 1 else f"{tokens} tokens"
    check(room > 0, f"{where} has {count}, but {source.name} has {source.model['block_size']} positions: shorten it")
    return room


def longest_prompt(prompts: list[Prompt]) -> Prompt:
    return max(prompts, key=lambda prompt: len(prompt.ids))


def fit_new_tokens(prompts: list[Prompt], max_new_tokens: int | None, source: Pretrained) -> int:
    """Return max_new_tokens; if it is None, NEW_TOKENS or the smaller number that fits.

    Raises UserError if max_new_tokens do not fit into the learned positions.
    """
    longest = longest_prompt(prompts)
    tokens = len(longest.ids)
    room = check_room(tokens, longest.where, source)
    if room is None:
        return max_new_tokens or NEW_TOKENS
    max_new_tokens = max_new_tokens or min(NEW_TOKENS, room)
    check(
        max_new_tokens <= room,
        f"{longest.where} has {tokens} tokens, and with max_new_tokens={max_new_tokens} these are more than the "
        f"{room + tokens} positions of {source.name}: pass max_new_tokens={room} or a shorter prompt",
    )
    return max_new_tokens


def make_batch(prompts: list[Prompt]) -> tuple[Tensor, Tensor]:
    """Return the ids (B, T) int64, zeros after a shorter prompt's end, and the lengths (B,) int64."""
    lengths = torch.tensor([len(prompt.ids) for prompt in prompts])
    idx = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in zip(idx, prompts, strict=True):
        row[: len(prompt.ids)] = torch.tensor(prompt.ids)
    return idx, lengths

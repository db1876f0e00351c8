"""From documents to shards in one pass: this process reads and writes, in order, and `workers` processes tokenize.

The result does not depend on their number; one worker is a thread, which needs no start (GPT-2 tokens on two cores:
5.4 M/s with one, 8.3 M/s with two). Until all is whole it lies in `<folder>.partial`, beside `progress.json`, which
says how far it is: an interrupted preparation goes on from there, and gives the same bytes.
"""

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data.corpus import Source
from data.errors import DataError
from data.shards import SHARD_TOKENS, Writer, read_json, write_json
from data.tokenizer import PIECE, Tokenizer, pieces

SPLITS = ("train", "val")
PROGRESS = "progress.json"
SYNC_TOKENS = 10_000_000  # between two records of the progress; an interruption costs so many at most
Piece = tuple[str, str, bool]  # split, text, and whether a document begins with it


def complete(folder: Path) -> bool:
    """Whether both splits are there."""
    return all((folder / split).is_dir() for split in SPLITS)


def recorded(folder: Path) -> int:
    """The documents behind which an interrupted preparation goes on."""
    return read_json(partial_folder(folder) / PROGRESS).get("documents", 0)


def partial_folder(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def write(
    folder: Path,
    source: Source,
    tokenizer: Tokenizer,
    workers: int,
    watch: Callable[[int, int], None] = lambda documents, tokens: None,
    wait: bool = True,
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Tokenize `source` into the shards `folder/train` and `folder/val`, both or none, unless they are there.

    `watch(documents, tokens)` is told how many are done, those of an earlier, interrupted call included. If another
    process is at it, wait for its result, or with wait=False refuse. DataError: the source or the disk failed, or a
    split would be empty (that for training may be where source.val_fraction is 1).
    """
    if complete(folder):
        return
    unfinished = partial_folder(folder)
    try:
        with locked(unfinished, wait):
            if complete(folder):  # the other process's
                shutil.rmtree(unfinished)
                return
            try:
                tokenize(unfinished, source, tokenizer, workers, watch, shard_tokens)
            except BaseException as error:
                changed = isinstance(error, DataError) and source.files  # once mended they are other files
                if changed or not (unfinished / PROGRESS).exists():
                    shutil.rmtree(unfinished, ignore_errors=True)
                raise
            if folder.exists():  # half of it: somebody deleted a split
                shutil.rmtree(folder)
            unfinished.rename(folder)
            (folder / PROGRESS).unlink(missing_ok=True)
    except BrokenProcessPool:
        raise DataError(
            "a process that tokenizes was killed, perhaps for want of memory: the same command goes on, or pass fewer "
            "workers"
        ) from None
    except OSError as error:
        raise DataError(f"token shards cannot be written to data.cache={folder.parent}: {error.strerror}") from None


@contextlib.contextmanager
def locked(folder: Path, wait: bool) -> Iterator[None]:
    """Hold `folder`, made if need be, against other processes; the lock goes with the process, however that ends."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise DataError(
                        f"another process is preparing {folder}: wait for it, or end it and run this again"
                    ) from None
                print(f"waiting for another process, which is preparing {folder}", file=sys.stderr)
                fcntl.flock(handle, fcntl.LOCK_EX)
            if is_still(folder, handle):
                yield
                return
        finally:
            os.close(handle)


def is_still(folder: Path, handle: int) -> bool:
    """Whether the opened folder is the one of this name: the process that had the lock may have renamed it."""
    try:
        return os.path.samestat(os.fstat(handle), folder.stat())
    except FileNotFoundError:
        return False


def tokenize(
    folder: Path, source: Source, tokenizer: Tokenizer, workers: int, watch: Callable, shard_tokens: int
) -> None:
    """Fill `folder` from where its progress stands to the end of `source`."""
    done = read_json(folder / PROGRESS) or {"position": None, "documents": 0, "splits": {}}
    documents, position = done["documents"], done["position"]
    with contextlib.ExitStack() as stack:
        writers = {split: Writer(folder / split, shard_tokens, done["splits"].get(split)) for split in SPLITS}
        for writer in writers.values():
            stack.callback(writer.close)
        synced = total = sum(writer.tokens for writer in writers.values())
        watch(documents, total)
        pool = stack.enter_context(executor(workers))
        encoded = in_order(pool, partial(encode, tokenizer), batches(source, position), ahead=3 * workers)
        stack.enter_context(contextlib.closing(encoded))
        for (part, position), ids in encoded:
            for split, tokens in ids.items():
                writers[split].append(tokens)
                total += len(tokens)
            documents += sum(first for _, _, first in part)
            watch(documents, total)
            if position is not None and total - synced >= SYNC_TOKENS:
                state = {split: writer.sync() for split, writer in writers.items()}
                write_json(folder / PROGRESS, {"position": position, "documents": documents, "splits": state})
                synced = total
        for split, writer in writers.items():
            if not writer.tokens and (split == "val" or source.val_fraction < 1):
                raise DataError(
                    f"none of the {documents} documents fell to the {split} split: use more text, or another "
                    "data.val_fraction"
                )
            writer.finish()


def batches(source: Source, position: Any) -> Iterator[tuple[list[Piece], Any]]:
    """Documents from `position` on, as lists of pieces of about PIECE characters together, and the position behind
    each list (None where a list ends in the midst of a document)."""
    held, size = [], 0
    for split, text in source.documents(position):
        parts = list(pieces(text, PIECE))
        for number, part in enumerate(parts, 1):
            held.append((split, part, number == 1))
            size += len(part)
            if size >= PIECE:
                yield held, source.position() if number == len(parts) else None
                held, size = [], 0
    if held:
        yield held, source.position()


def encode(tokenizer: Tokenizer, part: list[Piece]) -> dict[str, np.ndarray]:
    """The uint16 ids of each split's pieces, each document behind an end of text."""
    ids = {split: [np.zeros(0, np.uint16)] for split in SPLITS}
    for split, text, first in part:
        ids[split] += [np.array([tokenizer.eot], np.uint16)] * first + [tokenizer.encode(text)]
    return {split: np.concatenate(arrays) for split, arrays in ids.items()}


def in_order(pool: Executor, function: Callable, items: Iterator, ahead: int) -> Iterator[tuple[Any, Any]]:
    """(item, function(item[0])) in the order of `items`, of which at most `ahead` are in memory."""
    pending = deque()
    for item in items:
        pending.append((item, pool.submit(function, item[0])))
        if len(pending) >= ahead:
            oldest, result = pending.popleft()
            yield oldest, result.result()
    for oldest, result in pending:
        yield oldest, result.result()


def executor(workers: int) -> Executor:
    """Processes, which are started anew: a fork of a process with threads (pyarrow's) may hang."""
    if workers == 1:
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), begin_worker)


def begin_worker() -> None:
    """Ctrl-C is the parent's to answer; and when that is gone, even by SIGKILL, so is this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()

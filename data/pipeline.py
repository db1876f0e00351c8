"""Tokenize documents into shards in one pass. This process reads and writes in order; `workers` processes tokenize.

On two cores, one worker gives 5.4 M GPT-2 tokens/s and two give 8.3 M/s. The shards are in `<folder>.partial` until all
are complete. An interrupted preparation resumes from the last record in that folder (progress.py).
"""

import contextlib
import errno
import multiprocessing
import os
import shutil
import signal
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from common.files import remove_temporaries
from common.terminal import class_and_message, one_line, printable, warn
from data.corpus import Source
from data.errors import BadText, DataError, read_error
from data.progress import PROGRESS, SPLITS, Progress
from data.shards import SHARD_TOKENS
from data.tokenizer import PIECE_CHARACTERS, Tokenizer, split_into_pieces

RECORD_EVERY_TOKENS = 10_000_000  # an interruption loses about this many tokens at most


class Piece(NamedTuple):
    """A part of a document."""

    split: str
    text: str
    after_eot: bool  # it is the first part of its document in this split
    ends_document: bool


Chunk = list[Piece]  # about PIECE_CHARACTERS characters in total; a worker tokenizes one chunk at a time


def is_complete(folder: Path) -> bool:
    """Return whether both splits are in `folder`. Raises DataError if it cannot be read."""
    try:
        return all(stat.S_ISDIR(os.stat(folder / split).st_mode) for split in SPLITS)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise read_error(folder, error) from None


def is_missing(path: Path) -> bool:
    """Return whether nothing is at `path`. If the operating system cannot tell, something may be there."""
    try:
        os.lstat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def write_shards(
    folder: Path,
    source: Source,
    tokenizer: Tokenizer,
    workers: int,
    watch: Callable[[int, int], None] = lambda documents, tokens: None,
    wait: bool = True,
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Tokenize `source` into the shards `folder/train` and `folder/val`, unless both exist.

    Both folders appear at the same time. Calls `watch(documents, tokens)` with the numbers so far, which include those
    of an earlier, interrupted call. If another process prepares the same folder, waits for it; if `wait` is false,
    raises DataError instead. Also raises DataError if the source or the disk fails, or if a split would be empty
    (`train` may be empty if source.val_fraction is 1).
    """
    if is_complete(folder):
        with contextlib.suppress(OSError):  # a process was killed after it had completed the folder
            (folder / PROGRESS).unlink()
        return
    unfinished = folder.with_name(f"{folder.name}.partial")
    try:
        with preparation_lock(unfinished, wait):
            if is_complete(folder):  # the process that had the lock completed it
                return
            for path in (folder, unfinished):
                if path.exists() and not path.is_dir():  # shutil.rmtree() would wait for the writer of a FIFO
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            try:
                tokenize(unfinished, source, tokenizer, workers, watch, shard_tokens)
            except BaseException as error:
                # The shards of a corrected local file get another folder, so no later call resumes from this folder.
                # A file that cannot be read now may be intact, so its folder stays
                local_file_is_broken = isinstance(error, BadText) and source.files
                if local_file_is_broken or is_missing(unfinished / PROGRESS):
                    shutil.rmtree(unfinished, ignore_errors=True)
                raise
            remove_temporaries(unfinished / PROGRESS)
            if not is_missing(folder):  # it has only one split, because somebody deleted the other
                shutil.rmtree(folder)
            unfinished.rename(folder)
            (folder / PROGRESS).unlink(missing_ok=True)
    except MemoryError:
        raise DataError(
            "the memory is full: end other programs, pass fewer workers, or use smaller documents; the same command "
            "resumes"
        ) from None
    except BrokenProcessPool:
        raise DataError(
            "a process that tokenizes was killed, perhaps because the memory is full: run the same command again to "
            "resume, or pass fewer workers"
        ) from None
    except OSError as error:
        # FileExistsError: data.cache is a file
        reason = "Not a directory" if isinstance(error, FileExistsError) else one_line(error)
        place = f" ({error.filename})" if error.filename else ""
        raise DataError(f"token shards cannot be written to data.cache={folder.parent}: {reason}{place}") from None


def preparation_lock(folder: Path, wait: bool) -> contextlib.AbstractContextManager:
    """Lock the file `.<folder>.lock` beside `folder` for a `with` block. A process that ends releases its lock.

    Raises DataError if another process has the lock and `wait` is false.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        if not wait:
            raise DataError(
                f"another process is preparing {folder}: wait for it, or end it and run this again"
            ) from None
    print(printable(f"waiting for another process, which is preparing {folder}"), file=sys.stderr)
    return lock.acquire()


def tokenize(
    folder: Path, source: Source, tokenizer: Tokenizer, workers: int, watch: Callable, shard_tokens: int
) -> None:
    """Write the shards of `source` into `folder`, from the last good record in progress.json to the end of `source`."""
    progress = Progress(folder)
    with contextlib.ExitStack() as stack:
        writers = progress.open_writers(shard_tokens, tokenizer.dtype)
        for writer in writers.values():
            stack.callback(writer.close)
        documents = progress.last["documents"]
        recorded_tokens = tokens = sum(writer.tokens for writer in writers.values())
        watch(documents, tokens)
        pool = stack.enter_context(worker_pool(workers))
        chunks = read_chunks(source, progress.last["position"])
        encoded = encode_in_order(pool, partial(encode_chunk, tokenizer), chunks, ahead=3 * workers)
        stack.enter_context(contextlib.closing(encoded))
        for chunk, position, ids in encoded:
            for split, split_ids in ids.items():
                writers[split].append(split_ids)
                tokens += len(split_ids)
            documents += sum(piece.ends_document for piece in chunk)
            watch(documents, tokens)
            if position is not None and tokens - recorded_tokens >= RECORD_EVERY_TOKENS:
                progress.add(position, documents, {split: writer.sync() for split, writer in writers.items()})
                recorded_tokens = tokens
        if not documents:
            raise DataError("there is no document in data.path: add text")
        for split, writer in writers.items():
            if not writer.tokens and (split == "val" or source.val_fraction < 1):
                raise DataError(
                    f"none of the {documents} documents is in the {split} split: use more text, or another "
                    "data.val_fraction"
                )
            writer.finish()


def read_chunks(source: Source, position: Any) -> Iterator[tuple[Chunk, Any]]:
    """Yield (chunk, position after it, or None inside a text) for the documents after `position`."""
    chunk, size = [], 0
    for split, text, goes_on in source.documents(position):
        piece_texts = list(split_into_pieces(text, PIECE_CHARACTERS))
        for number, piece_text in enumerate(piece_texts, 1):
            ends_text = number == len(piece_texts)
            chunk.append(Piece(split, piece_text, after_eot=number == 1, ends_document=ends_text and not goes_on))
            size += len(piece_text)
            if size >= PIECE_CHARACTERS:
                yield chunk, (source.position() if ends_text else None)
                chunk, size = [], 0
    if chunk:
        yield chunk, source.position()


def encode_chunk(tokenizer: Tokenizer, chunk: Chunk) -> dict[str, np.ndarray]:
    """Return the ids of each split, (n,) of tokenizer.dtype, with an eot before each document."""
    eot = np.array([tokenizer.eot], tokenizer.dtype)
    ids = {split: [np.zeros(0, tokenizer.dtype)] for split in SPLITS}  # np.concatenate needs at least one array
    for piece in chunk:
        if piece.after_eot:
            ids[piece.split].append(eot)
        ids[piece.split].append(tokenizer.encode(piece.text))
    return {split: np.concatenate(arrays) for split, arrays in ids.items()}


def encode_in_order(
    pool: Executor, encode: Callable, chunks: Iterator[tuple[Chunk, Any]], ahead: int
) -> Iterator[tuple[Chunk, Any, Any]]:
    """Yield (chunk, position, encode(chunk)) in order. At most `ahead` chunks are in memory."""
    pending = deque()
    for chunk, position in chunks:
        pending.append((chunk, position, pool.submit(encode, chunk)))
        if len(pending) >= ahead:
            chunk, position, future = pending.popleft()
            yield chunk, position, future.result()
    for chunk, position, future in pending:
        yield chunk, position, future.result()


def worker_pool(workers: int) -> Executor:
    """Return a pool of one thread, which starts at once, or of several processes.

    They are spawned, because a process that is forked from a process with threads may hang, and pyarrow starts threads.
    """
    if workers == 1:
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initialize_worker)


def initialize_worker() -> None:
    """Make this process ignore Ctrl-C, which its parent handles, and exit when its parent ends, even by SIGKILL."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def exit_with_parent():
        try:
            multiprocessing.parent_process().join()
        except Exception as error:
            warn(f"a process that tokenizes ends, because it cannot wait for its parent: {class_and_message(error)}")
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()

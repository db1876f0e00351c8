"""Batches of token ids, as a pure function of (seed, step, rank).

So a checkpoint holds no state of the loader. (Only a judge moves the order of a run: Loader.shift().) A sample is a
window of block_size + 1 tokens of one shard. The last target of a window is the first input of the next one. An epoch
visits every sample once, in a random order that depends only on (seed, epoch). The samples of a step do not depend on
how it is divided into micro-batches and ranks.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch

from data import Dataset
from data.errors import DataError
from data.shards import Shard

PREFETCHED_STEPS = 3
IGNORED = -1  # the op loss ignores these targets
# (x, y), both (batch_size, block_size) int64, where y is x shifted by one token. If attention must stay inside
# documents, (x, y, starts): starts, (batch_size, block_size) int32, gives for each token the index in the row at which
# the token's document begins.
Batch = tuple[torch.Tensor, ...]


class Windows:
    """The samples of the shards of one split, numbered from 0.

    `eot` is the id that opens every document. Batches have `starts` only if `eot` is given. If a sample begins inside a
    document, the start of that document counts as index 0. Error messages name `split` and `key`, the config key that
    sets block_size. Raises DataError if the shards have fewer tokens than one sample.
    """

    def __init__(
        self, shards: list[Shard], block_size: int, split: str, key: str = "train.block_size", eot: int | None = None
    ):
        self.shards, self.block_size, self.eot = shards, block_size, eot
        if not shards:
            raise DataError(f"there is no {split} text: data.val_fraction=1 puts all text into validation; lower it")
        samples_per_shard = [max(0, len(shard) - 1) // block_size for shard in shards]
        self.sample_ends = np.cumsum(samples_per_shard)  # for each shard, the number of its last sample + 1
        if len(self) == 0:
            tokens = sum(map(len, shards))
            raise DataError(
                f"the {split} text has {tokens} tokens, and one sample takes {block_size + 1} ({key} + 1): "
                f"use more text, or lower {key}"
            )

    def __len__(self) -> int:
        return int(self.sample_ends[-1])

    def batch(self, samples: np.ndarray) -> Batch:
        """Return the samples with these numbers, (batch_size,) int64. Raises DataError if one of the shards changed."""
        shard_numbers = np.searchsorted(self.sample_ends, samples, side="right")
        for number in np.unique(shard_numbers):
            self.shards[number].check_unchanged()  # takes about 1 us
        rows = [self._row(int(number), int(sample)) for number, sample in zip(shard_numbers, samples, strict=True)]
        rows = torch.from_numpy(np.stack(rows).astype(np.int64))
        x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if self.eot is None:
            return x, y
        indices = torch.arange(self.block_size, dtype=torch.int32)
        starts = torch.where(x == self.eot, indices, 0).cummax(1).values
        return x, y, starts

    def _row(self, shard_number: int, sample: int) -> np.ndarray:
        """Return the tokens of one sample, (block_size + 1,) of ids."""
        first_sample = int(self.sample_ends[shard_number - 1]) if shard_number else 0
        start = (sample - first_sample) * self.block_size
        return self.shards[shard_number].read(start, start + self.block_size + 1)


class Loader:
    """The training batches of one rank. `loader(step)` returns the micro-batches of an optimizer step.

    Steps are counted from 1. `tokens_per_step` counts the tokens of all ranks. With `overfit`, every step gets the
    micro-batches of step 1.
    """

    def __init__(
        self,
        windows: Windows,
        batch_size: int,
        tokens_per_step: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        overfit: bool = False,
    ):
        self.windows, self.batch_size, self.seed = windows, batch_size, seed
        self.rank, self.world_size, self.overfit = rank, world_size, overfit
        self.samples_per_step = tokens_per_step // windows.block_size
        self.shifts: list[tuple[int, int]] = []

    def __call__(self, step: int) -> list[Batch]:
        if self.overfit:
            step = 1
        positions = range((step - 1) * self.samples_per_step, step * self.samples_per_step)
        offset = sum(samples for first_step, samples in self.shifts if first_step <= step)
        samples = np.array([self.sample_at(position, offset) for position in positions])
        samples = samples.reshape(-1, self.world_size, self.batch_size)  # (micro-batches, ranks, samples)
        return [self.windows.batch(micro_batch) for micro_batch in samples[:, self.rank]]

    def shift(self, first_step: int, samples: int) -> None:
        """From `first_step` on, start each epoch's order `samples` further on. Earlier shifts stay.

        A judge shifts the batches of a run while it trains, so that the run cannot know them in advance.
        """
        self.shifts = [*self.shifts, (first_step, samples)]  # a new list: a thread may read the old one

    def sample_at(self, position: int, offset: int = 0) -> int:
        """Return the number of the sample at `position` in the endless sequence of epochs.

        `offset` is the place in each epoch's order at which the epoch starts.
        """
        epoch, index = divmod(position, len(self.windows))
        return int(epoch_order(self.seed, epoch, len(self.windows))[(index + offset) % len(self.windows)])


def open_splits(
    dataset: Dataset, block_size: int, mask_documents: bool = False, evaluate: bool = False
) -> tuple[Windows, Windows | None]:
    """Return the samples of the training text and of the validation text (None if `evaluate` is false).

    With `mask_documents`, batches have `starts`. Raises DataError if a split has fewer tokens than one sample.
    """
    eot = dataset.tokenizer.eot if mask_documents else None
    train = Windows(dataset.train, block_size, "training", eot=eot)
    val = Windows(dataset.val, block_size, "validation", eot=eot) if evaluate else None
    return train, val


@lru_cache(maxsize=2)  # a step may span two epochs
def epoch_order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """Return the order of an epoch: a permutation of the sample numbers 0 to samples - 1, (samples,) int64."""
    return np.random.default_rng([seed, epoch]).permutation(samples)


def prefetch(loader: Loader, first_step: int, device: torch.device) -> Iterator[tuple[list[Batch], float]]:
    """Yield (micro-batches on `device`, seconds that the caller waited for them) for each step from `first_step` on.

    A thread reads the next PREFETCHED_STEPS steps, and after a shift of the loader it reads them again. For a GPU it
    puts the batches into pinned memory, so that the host does not wait for the copy.
    """

    def read(step: int) -> list[Batch]:
        batches = loader(step)
        if device.type != "cuda":
            return batches
        return [tuple(tensor.pin_memory() for tensor in batch) for batch in batches]

    with ThreadPoolExecutor(1) as thread:
        pending, shifts = deque(), None
        for step in itertools.count(first_step):
            if shifts is not loader.shifts:  # what the thread has read is of the old order
                shifts = loader.shifts
                for reading in pending:
                    reading.cancel()
                pending = deque(thread.submit(read, step + i) for i in range(PREFETCHED_STEPS))
            start = time.perf_counter()
            batches = pending.popleft().result()
            wait_seconds = time.perf_counter() - start
            pending.append(thread.submit(read, step + PREFETCHED_STEPS))
            yield [tuple(tensor.to(device, non_blocking=True) for tensor in batch) for batch in batches], wait_seconds


def evaluation_batches(windows: Windows, batch_size: int, samples: int) -> Iterator[Batch]:
    """Yield a fixed set of samples, spread evenly over the split: `samples` of them, or all if the split has fewer.

    Every batch has `batch_size` rows, because another shape would be compiled once more. The rows of the last batch for
    which no sample is left repeat its last sample, with IGNORED as their targets.
    """
    count = min(samples, len(windows))
    numbers = np.arange(count) * len(windows) // count
    for first in range(0, count, batch_size):
        rows = numbers[first : first + batch_size]
        batch = windows.batch(np.pad(rows, (0, batch_size - len(rows)), mode="edge"))
        batch[1][len(rows) :] = IGNORED
        yield batch


def count_targets(batch: Batch) -> int:
    """Return the number of targets of a batch that are not ignored. Its loss is the mean over these."""
    return int((batch[1] != IGNORED).sum())

"""Batches as a pure function of (seed, step, rank): no state to save, and a resumed run sees what it would have seen.

A sample is a window of block_size + 1 tokens of one shard; windows overlap by the one token that is a target here and
an input there. An epoch visits every sample once, in an order drawn from (seed, epoch). The samples of a step do not
depend on how it is divided into micro-batches and ranks.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch

from data.errors import DataError
from data.shards import Shard

AHEAD = 3  # steps read before they are asked for
# x and y, (batch_size, block_size) int64: y is x one token on. And, if attention is to stay inside documents, starts,
# int32 of the same shape: where in its row each token's document begins
Batch = tuple[torch.Tensor, ...]


class Windows:
    """The samples of some shards, numbered from 0. DataError: there is not even one; `key` is what sets block_size.

    With `eot`, the token between documents, batches have starts; it counts as the first of the document behind it, as
    where a sample begins with it.
    """

    def __init__(
        self, shards: list[Shard], block_size: int, split: str, key: str = "train.block_size", eot: int | None = None
    ):
        self.shards, self.block_size, self.eot = shards, block_size, eot
        if not shards:
            raise DataError(f"there is no {split} text: data.val_fraction=1 holds all of it out; lower it")
        counts = [max(0, len(shard) - 1) // block_size for shard in shards]
        self.ends = np.cumsum(counts)
        if sum(counts) == 0:
            tokens = sum(map(len, shards))
            raise DataError(
                f"the {split} text has {tokens} tokens, and one sample takes {block_size + 1} ({key} + 1): "
                f"use more text, or lower {key}"
            )

    def __len__(self) -> int:
        return int(self.ends[-1])

    def batch(self, samples: np.ndarray) -> Batch:
        """The samples with these numbers. DataError: a shard that they lie in is not what was opened any more."""
        where = np.searchsorted(self.ends, samples, side="right")
        for shard in np.unique(where):  # a stat each, about 1 us
            self.shards[shard].check()
        rows = [self._row(int(shard), int(i)) for shard, i in zip(where, samples, strict=True)]
        rows = torch.from_numpy(np.stack(rows).astype(np.int64))
        x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if self.eot is None:
            return x, y
        begins = torch.where(x == self.eot, torch.arange(self.block_size, dtype=torch.int32), 0)
        return x, y, begins.cummax(1).values

    def _row(self, shard: int, sample: int) -> np.ndarray:
        first = int(self.ends[shard - 1]) if shard else 0
        start = (sample - first) * self.block_size
        return self.shards[shard].tokens[start : start + self.block_size + 1]


class Loader:
    """The training batches of one rank; `loader(step)` gives the micro-batches of an optimizer step (from 1)."""

    def __init__(
        self, windows: Windows, batch_size: int, tokens_per_step: int, seed: int, rank: int = 0, world_size: int = 1
    ):
        self.windows, self.batch_size, self.seed = windows, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.samples_per_step = tokens_per_step // windows.block_size

    def __call__(self, step: int) -> list[Batch]:
        positions = np.arange((step - 1) * self.samples_per_step, step * self.samples_per_step)
        samples = np.array([self.sample(int(position)) for position in positions])
        mine = samples.reshape(-1, self.world_size, self.batch_size)[:, self.rank]  # (micro-steps, batch_size)
        return [self.windows.batch(micro) for micro in mine]

    def sample(self, position: int) -> int:
        """The number of the sample at this position of the endless training stream."""
        epoch, index = divmod(position, len(self.windows))
        return int(order(self.seed, epoch, len(self.windows))[index])


@lru_cache(maxsize=2)  # a step may lie across two epochs
def order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The order of an epoch: a permutation of its samples."""
    return np.random.default_rng([seed, epoch]).permutation(samples)


def prefetch(loader: Loader, first: int, device: torch.device) -> Iterator[tuple[list[Batch], float]]:
    """(micro-batches on `device`, seconds that the caller waited for them), for the steps first, first + 1, ...

    A thread reads the next AHEAD steps while this one is computed; for a GPU it leaves them in pinned memory, so that
    the host does not wait for the copy.
    """

    def read(step: int) -> list[Batch]:
        batches = loader(step)
        return [tuple(t.pin_memory() for t in batch) for batch in batches] if device.type == "cuda" else batches

    with ThreadPoolExecutor(1) as thread:
        pending = deque(thread.submit(read, first + i) for i in range(AHEAD))
        for step in itertools.count(first + AHEAD):
            start = time.perf_counter()
            batches = pending.popleft().result()
            waited = time.perf_counter() - start
            pending.append(thread.submit(read, step))
            yield [tuple(t.to(device, non_blocking=True) for t in batch) for batch in batches], waited


def evaluation(windows: Windows, batch_size: int, samples: int) -> Iterator[Batch]:
    """A fixed set, in full batches: `samples` spread evenly over the split, fewer where it has fewer."""
    size = min(batch_size, len(windows))
    count = max(1, min(samples, len(windows)) // size) * size
    for samples in np.split(np.arange(count) * len(windows) // count, count // size):
        yield windows.batch(samples)

"""Tokenize a data set into token shards: `python -m scripts.prepare data=tinystories`.

Documents are streamed, from the hub or from files, and only their tokens are kept. An interrupted preparation goes on
from its last record when the same command is given again. The last lines say how much there is, how fast, and where.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from data import DataConfig, DataError, goes_on_after, open_dataset, prepare
from runtime.config import check, cli

ROOT = Path(__file__).resolve().parents[1]
EVERY_SECONDS = 10  # a plain line, where there is no terminal for a bar


@dataclass
class Config:
    data: DataConfig
    workers: int | None  # processes that tokenize; null: one a core

    def __post_init__(self):
        check(self.workers is None or self.workers >= 1, f"workers={self.workers}: it must be at least 1")


class Progress:
    """Told (documents, tokens), shows them: a bar on a terminal, else a line now and then."""

    def __init__(self):
        self.start = self.said = time.perf_counter()
        self.before = None  # tokens of an earlier, interrupted call
        self.documents = self.tokens = 0
        self.bar = tqdm(unit="tok", unit_scale=True, disable=not sys.stdout.isatty(), leave=False, file=sys.stdout)

    def __call__(self, documents: int, tokens: int) -> None:
        if self.before is None:
            self.before = tokens
            self.bar.initial = self.bar.n = tokens  # its rate is of this call alone
            if tokens:
                self.bar.write(f"goes on after {documents:,} documents, {tokens:,} tokens", file=sys.stdout)
        self.documents, self.tokens = documents, tokens
        self.bar.set_postfix_str(f"{documents:,} documents", refresh=False)
        self.bar.update(tokens - self.bar.n)
        if self.bar.disable and time.perf_counter() - self.said >= EVERY_SECONDS:
            self.said = time.perf_counter()
            print(f"{documents:,} documents, {tokens:,} tokens, {self.rate():,.0f} tokens/s", flush=True)

    def rate(self) -> float:
        """Tokens/s of this call."""
        return (self.tokens - (self.before or 0)) / (time.perf_counter() - self.start)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@cli(Config, configs=ROOT / "configs", name="prepare", errors=(DataError,))
def main(cfg: Config) -> None:
    workers, progress = cfg.workers or cores(), Progress()
    try:
        folder = prepare(cfg.data, workers, progress)
    except KeyboardInterrupt:
        done = goes_on_after(cfg.data) if progress.documents else 0
        again = f"goes on after {done:,} documents" if done else "begins again"
        print(f"interrupted: the same command {again}", file=sys.stderr)
        sys.exit(130)
    finally:
        progress.bar.close()
    seconds, rate = time.perf_counter() - progress.start, progress.rate()
    dataset = open_dataset(cfg.data)
    train, val = (sum(map(len, shards)) for shards in (dataset.train, dataset.val))
    print(f"data     {dataset.name}, {dataset.tokenizer.name}: {train:,} training tokens, {val:,} validation tokens")
    if progress.documents:
        print(f"speed    {rate:,.0f} tokens/s: {progress.documents:,} documents, {seconds:.1f} s, {workers} workers")
    else:
        print("speed    nothing to do: it is there")
    print(f"folder   {folder}")


if __name__ == "__main__":
    main()

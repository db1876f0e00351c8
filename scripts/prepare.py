"""Tokenize a data set into token shards: `python -m scripts.prepare data=tinystories`.

It streams documents from the hub or from files, and stores only their tokens. After an interruption, the same command
resumes. The last lines give the number of tokens, the speed, and the folder. It reads new
shards again and compares their SHA-256; verify=true checks existing shards, too.
"""

import sys
import time
from dataclasses import dataclass

from tqdm import tqdm

from common.terminal import outlive_output, printable
from data import DataConfig, DataError, open_dataset, prepare
from lab.commands import command
from runtime.config import check
from runtime.device import usable_cores

LINE_SECONDS = 10  # between two lines of progress, if there is no terminal for a bar


@dataclass
class Config:
    data: DataConfig
    workers: int | None  # processes that tokenize; None: one per core
    verify: bool  # read the tokens of existing shards, too, and compare their SHA-256

    def __post_init__(self):
        check(self.workers is None or self.workers >= 1, f"workers={self.workers}: it must be at least 1")


class Progress:
    """Shows the progress: a bar on a terminal, elsewhere a line every LINE_SECONDS.

    A call passes the numbers of documents and tokens so far, including earlier, interrupted preparations.
    """

    def __init__(self):
        self.start = self.last_line = time.perf_counter()
        self.tokens_before = None  # tokens of earlier, interrupted preparations; None before the first call
        self.documents = self.tokens = 0
        self.bar = tqdm(unit="tok", unit_scale=True, disable=not sys.stdout.isatty(), leave=False, file=sys.stdout)

    def __call__(self, documents: int, tokens: int) -> None:
        if self.tokens_before is None:
            self.tokens_before = tokens
            self.bar.initial = self.bar.n = tokens  # so that the bar's rate excludes the earlier tokens
            if tokens:
                self.bar.write(f"resumes after {documents:,} documents, {tokens:,} tokens", file=sys.stdout)
        self.documents, self.tokens = documents, tokens
        self.bar.set_postfix_str(f"{documents:,} documents", refresh=False)
        self.bar.update(tokens - self.bar.n)
        if self.bar.disable and time.perf_counter() - self.last_line >= LINE_SECONDS:
            self.last_line = time.perf_counter()
            print(f"{documents:,} documents, {tokens:,} tokens, {self.rate():,.0f} tokens/s", flush=True)

    def rate(self) -> float:
        """Return the tokens/s of this process, without the tokens of earlier preparations."""
        return (self.tokens - (self.tokens_before or 0)) / (time.perf_counter() - self.start)


@command(Config, "prepare", errors=(DataError,))
def main(cfg: Config) -> None:
    outlive_output()
    workers, progress = cfg.workers or usable_cores(), Progress()
    try:
        folder = prepare(cfg.data, workers, progress)
    except KeyboardInterrupt:
        print("interrupted: the same command resumes from its last record", file=sys.stderr)
        sys.exit(130)
    finally:
        progress.bar.close()
    seconds, rate = time.perf_counter() - progress.start, progress.rate()
    verify = cfg.verify or progress.documents > 0
    summary = open_dataset(cfg.data, verify).summary
    print(printable(f"data     {summary}{', verified' if verify else ''}"))
    if progress.documents:
        print(f"speed    {rate:,.0f} tokens/s: {progress.documents:,} documents, {seconds:.1f} s, {workers} workers")
    else:
        print("speed    not measured: the shards existed already")
    print(printable(f"folder   {folder}"))


if __name__ == "__main__":
    main()

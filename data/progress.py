"""The records of an unfinished preparation, in progress.json. The same command resumes from the last good record.

A record has a position in the source, and for each split the number of complete shards and the facts of the open shard,
such as the SHA-256 of its tokens so far. The last record of each number of shards stays. So a shard that changed on the
disk costs what was written after it, and not everything.
"""

import contextlib
from itertools import islice
from pathlib import Path
from typing import Any

from common.files import write_json
from common.terminal import warn
from data.shards import read_if_valid
from data.writer import ChangedShard, Writer, count_unchanged

SPLITS = ("train", "val")
PROGRESS = "progress.json"
START = {"position": None, "documents": 0, "splits": {}}  # the record of a preparation that has not begun


class Progress:
    """The records of the preparation in `folder`. Raises DataError if progress.json cannot be read."""

    def __init__(self, folder: Path):
        self.folder = folder
        facts = read_if_valid(folder / PROGRESS, then="the preparation starts again")
        self.index: dict[str, dict] = facts.get("index", {})  # facts of the complete shards of each split
        self.records: list[dict] = facts.get("records", [])

    @property
    def last(self) -> dict:
        return self.records[-1] if self.records else START

    def add(self, position: Any, documents: int, states: dict[str, dict]) -> None:
        """Record the states that Writer.sync() returned for each split."""
        self.index = {split: state["index"] for split, state in states.items()}
        splits = {split: {"shards": len(state["index"]), "open": state["open"]} for split, state in states.items()}
        if self.records and count_shards(self.last["splits"]) == count_shards(splits):
            self.records.pop()
        self.records.append({"position": position, "documents": documents, "splits": splits})
        write_json(self.folder / PROGRESS, {"index": self.index, "records": self.records})

    def open_writers(self, shard_tokens: int, dtype: type) -> dict[str, Writer]:
        """Drop the records after a changed shard, with a warning. Return the writers that resume from the last record.

        Raises DataError if a shard cannot be read.
        """
        unchanged = {split: count_unchanged(self.folder / split, index, dtype) for split, index in self.index.items()}
        complete, why = count_shards(self.last["splits"]), None
        for split in SPLITS:
            if unchanged.get(split, 0) < complete.get(split, 0):
                why = f"shard {unchanged[split]} of {self.folder / split} changed after it was written"
        while True:
            complete = count_shards(self.last["splits"])
            if all(count <= unchanged[split] for split, count in complete.items()):
                try:
                    writers = self._try_to_open(shard_tokens, dtype)
                    break
                except ChangedShard as error:
                    why = why or str(error)
            self.records.pop()
        if why:
            resumes = f"resumes after {self.last['documents']:,} documents" if self.records else "starts again"
            warn(f"{why}: the preparation {resumes}")
        return writers

    def _try_to_open(self, shard_tokens: int, dtype: type) -> dict[str, Writer]:
        """Return the writers that resume from the last record. Raises ChangedShard if an open shard has changed."""
        writers = {}
        with contextlib.ExitStack() as stack:
            for split in SPLITS:
                state = self.last["splits"].get(split)
                if state:
                    index = dict(islice(self.index[split].items(), state["shards"]))
                    state = {"index": index, "open": state["open"]}
                writers[split] = Writer(self.folder / split, shard_tokens, state, dtype)
                stack.callback(writers[split].close)
            stack.pop_all()
        return writers


def count_shards(splits: dict[str, dict]) -> dict[str, int]:
    """Return the number of complete shards of each split of a record."""
    return {split: state["shards"] for split, state in splits.items()}

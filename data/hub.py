"""Documents of a data set of the Hugging Face hub, streamed through `datasets`: nothing is stored but their tokens.

A local folder of parquet, JSON or text files goes the same way, without a network.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec

from data.corpus import Source, file_stamps, local, side, text_of
from data.errors import DataError, line
from data.tokenizer import reachable


class Hub(Source):
    """The split `train` of `path` (owner/name, or a local folder); `column` holds the text, null is no document.

    Making one asks nobody; documents() does. DataError: no network, no such data set, subset or column, `datasets` not
    installed, or a stream that breaks off.
    """

    def __init__(self, path: str | None, subset: str | None = None, column: str = "text", val_fraction: float = 0.1):
        if not path or not isinstance(path, str):
            raise DataError("data=hub needs data.path=owner/name, as the data set is called on the Hugging Face hub")
        folder = local(path)
        self.local = folder.is_dir()
        self.path, self.subset = str(folder.resolve()) if self.local else path, subset
        self.column, self.val_fraction = column, val_fraction
        self.files = sorted(file for file in folder.rglob("*") if file.is_file()) if self.local else []
        self.identity = [self.path, subset, column, file_stamps(self.files)]

    def documents(self, position: dict | None = None) -> Iterator[tuple[str, str]]:
        if find_spec("datasets") is None:
            raise DataError(f"{self.path} needs Hugging Face's datasets: pip install datasets")
        if not self.local:
            check_network(self.path)
        self.revision = position["revision"] if position else None
        self.stream = self.load()
        if position:
            self.stream.load_state_dict(position["stream"])
        for row in self.rows():
            if (text := text_of(row, self.column, f"data set {self.path}")) is not None:
                yield side(text, self.val_fraction), text

    def position(self) -> dict:
        return {"revision": self.revision, "stream": self.stream.state_dict()}

    def load(self):
        """The stream of rows, of one revision of the data set, whatever is uploaded meanwhile."""
        import datasets
        from huggingface_hub import HfApi

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it would print is in the error
        where = {}
        try:
            if not self.local:
                self.revision = self.revision or HfApi().dataset_info(self.path, timeout=10).sha
                where = {"revision": self.revision}
            return datasets.load_dataset(self.path, self.subset, split="train", streaming=True, **where)
        except failures() as error:
            raise DataError(f"data set {self.path} cannot be opened: {line(error)}") from error

    def rows(self) -> Iterator[dict]:
        try:
            yield from self.stream
        except failures() as error:
            raise DataError(
                f"data set {self.path} broke off: {line(error)}; the same command goes on where it ended"
            ) from error


def check_network(path: str) -> None:
    """DataError: the hub is not to be reached."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        why = "HF_HUB_OFFLINE forbids the network"
    elif not reachable(endpoint):
        why = f"{endpoint} does not answer"
    else:
        return
    raise DataError(
        f"data set {path} is not prepared here, and {why}: run `python -m scripts.prepare` where there is a network "
        "and copy data.cache from there, name a mirror in HF_ENDPOINT, or choose data=stdlib or data=text"
    )


def failures() -> tuple[type[Exception], ...]:
    """What `datasets` raises for a wrong name, a broken file or a lost network; the bases of the hub's own error are
    those of whichever HTTP library it is built on."""
    from huggingface_hub.errors import HfHubHTTPError

    return OSError, ValueError, RuntimeError, *HfHubHTTPError.__bases__

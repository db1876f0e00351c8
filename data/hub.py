"""Documents of a data set on the Hugging Face hub, streamed with `datasets`. Only their tokens are stored.

A local folder of parquet, JSON or text files is read in the same way, without a network.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec

from data.corpus import Document, Source, file_stamps, local_path, split_of, text_of
from data.errors import DataError, one_line
from data.tokenizer import is_reachable


class Hub(Source):
    """The split `train` of the data set `path` (owner/name, or a local folder).

    `column` holds the text. A row whose text is null is not a document. `encoding_errors` has no effect. The
    constructor uses no network. It raises DataError if there is no `path`. documents() uses the network. It raises
    DataError if there is no network, if the data set, the subset or the column does not exist, if `datasets` is not
    installed, or if the stream stops early.
    """

    def __init__(
        self,
        path: str | None,
        subset: str | None = None,
        column: str = "text",
        val_fraction: float = 0.1,
        encoding_errors: str = "strict",
    ):
        if not path or not isinstance(path, str):
            raise DataError("data=hub needs data.path=owner/name, the name of the data set on the Hugging Face hub")
        folder = local_path(path)
        self.is_local = folder.is_dir()
        self.path = str(folder.resolve()) if self.is_local else path
        self.subset, self.column, self.val_fraction = subset, column, val_fraction
        self.files = sorted(file for file in folder.rglob("*") if file.is_file()) if self.is_local else []
        self.identity = [self.path, subset, column, file_stamps(self.files)]

    def documents(self, position: dict | None = None) -> Iterator[Document]:
        if find_spec("datasets") is None:
            raise DataError(f"{self.path} needs Hugging Face's datasets: pip install datasets")
        if not self.is_local:
            check_network(self.path)
        self.revision = position["revision"] if position else None
        self.stream = self.open_stream()
        if position:
            self.stream.load_state_dict(position["stream"])
        for row in self.rows():
            if (text := text_of(row, self.column, f"data set {self.path}")) is not None:
                yield Document(split_of(text, self.val_fraction), text)

    def position(self) -> dict:
        return {"revision": self.revision, "stream": self.stream.state_dict()}

    def open_stream(self):
        """Open the stream of rows. A resumed stream reads the same revision, even if a newer revision was uploaded."""
        import datasets
        from huggingface_hub import HfApi

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # no log lines: the DataError reports the error
        options = {}
        try:
            if not self.is_local:
                self.revision = self.revision or HfApi().dataset_info(self.path, timeout=10).sha
                options = {"revision": self.revision}
            return datasets.load_dataset(self.path, self.subset, split="train", streaming=True, **options)
        except stream_errors() as error:
            raise DataError(f"data set {self.path} cannot be opened: {one_line(error)}") from error

    def rows(self) -> Iterator[dict]:
        """Yield the rows of the stream. Raises DataError if it stops early."""
        try:
            yield from self.stream
        except stream_errors() as error:
            raise DataError(
                f"data set {self.path}: the stream stopped early: {one_line(error)}; run the same command again"
            ) from error


def check_network(data_set: str) -> None:
    """Raise DataError if the hub cannot be reached. The message names `data_set`."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        reason = "HF_HUB_OFFLINE forbids the network"
    elif not is_reachable(endpoint):
        reason = f"{endpoint} does not answer"
    else:
        return
    raise DataError(
        f"data set {data_set} is not prepared here, and {reason}: run `python -m scripts.prepare` on a machine with a "
        "network and copy its data.cache here, set HF_ENDPOINT to a mirror, or choose data=stdlib or data=text"
    )


def stream_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that `datasets` raises for a wrong name, a broken file or a lost network.

    A lost network raises an error of the HTTP library, which depends on the version of huggingface_hub. The base
    classes of HfHubHTTPError include the base class of this library's errors.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return OSError, ValueError, RuntimeError, *HfHubHTTPError.__bases__

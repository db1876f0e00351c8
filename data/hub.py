"""Documents of a data set on the Hugging Face hub, streamed with `datasets`. Only their tokens are stored.

A local folder of parquet, JSON or text files is read in the same way, without a network.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from common.terminal import warn
from data.corpus import Document, Source, split_of, text_of
from data.errors import DataError, hub_error
from data.paths import ROW_SUFFIXES, file_stamps, files_below, known_suffix, local_path
from data.tokenizer import is_reachable

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
HUB_SECONDS = 1.5  # the hub must answer within this time


class Hub(Source):
    """The split `train` of the data set `path` (owner/name, or a local folder).

    A row whose text is null is not a document. Only documents() uses the network. It raises DataError if the data set
    cannot be read, or has no such subset or column.
    """

    def __init__(self, path: str | None, subset: str | None = None, column: str = "text", val_fraction: float = 0.1):
        if not path or not isinstance(path, str):
            raise DataError("data=hub needs data.path=owner/name, the name of the data set on the Hugging Face hub")
        folder = local_path(path)
        self.is_local = folder.is_dir()
        if folder.is_file():
            raise DataError(f"data.path={path} is a file: name its folder, or choose data=text")
        if not self.is_local and not HUB_NAME.fullmatch(path):
            raise DataError(f"data.path={path}: there is no such folder, and it is not a name on the hub (owner/name)")
        self.path = str(folder.resolve()) if self.is_local else path
        if self.is_local and re.search(r"\[.+\]", self.path):
            raise DataError(f"data.path={path}: datasets reads [ ] in a path as a pattern; rename the folder")
        self.name = f"data set {self.path}"  # for messages
        self.subset, self.column, self.val_fraction = subset, column, val_fraction
        self.files = files_below(folder.resolve()) if self.is_local else []
        self.data_files: list[str] = []  # the files of the stream, if `datasets` tells them
        self.identity = [self.path, subset, column, file_stamps(self.files)]

    def documents(self, position: dict | None = None) -> Iterator[Document]:
        if not self.is_local and (reason := why_hub_is_unreachable()):
            raise DataError(
                f"{self.name} is not prepared here, and {reason}: run scripts.prepare on a machine with a "
                "network and copy its data.cache here, set HF_ENDPOINT to a mirror, or choose data=stdlib or data=text"
            )
        self.revision = position["revision"] if position else None
        self.stream = self.open_stream()
        if position:
            self.stream.load_state_dict(position["stream"])
        for row in self.rows():
            where = "" if isinstance(row.get(self.column), str) else self.place()  # not for every row: it takes 20 us
            if (text := text_of(row, self.column, where)) is not None:
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
            builder = datasets.load_dataset_builder(self.path, self.subset, **options)
            files_by_split = builder.config.data_files or {}
            self.data_files = files_by_split.get("train", [])
            self.warn_of_unread_files({file for files in files_by_split.values() for file in files})
            return builder.as_streaming_dataset(split="train")
        except Exception as error:  # `datasets` calls many libraries, and passes on any error of theirs
            raise DataError(f"{self.name} cannot be opened: {hub_error(error)}") from error

    def rows(self) -> Iterator[dict]:
        """Yield the rows of the stream. Raises DataError if it stops early."""
        try:
            yield from self.stream
        except Exception as error:
            remedy = "" if self.is_local else "; run the same command again"
            raise DataError(f"{self.place()}: the stream stopped early: {hub_error(error)}{remedy}") from error

    def place(self) -> str:
        """Return the file that the stream reads, or the data set if that is not known, for an error message."""
        state = self.stream.state_dict()
        while "examples_iterable" in state:
            state = state["examples_iterable"]
        number = state.get("shard_idx", len(self.data_files))
        if len(self.data_files) == self.stream.num_shards and number < len(self.data_files):
            return self.data_files[number]
        return self.name

    def warn_of_unread_files(self, read: set[str]) -> None:
        """Print a warning if local files may hold text, but are not among the files that are `read`."""
        text_files = (file for file in self.files if known_suffix(file) in (".txt", *ROW_SUFFIXES))
        unread = [file for file in text_files if str(file) not in read]
        if unread:
            more = f" and {len(unread) - 1} more files" if unread[1:] else ""
            warn(
                f"{unread[0]}{more} are not read: with data=hub, all files of a folder need the same ending, in lower "
                "case, and none may be in a linked folder"
            )


def why_hub_is_unreachable() -> str | None:
    """Return why the hub cannot be reached; None if it answers. huggingface_hub alone would try for 23 s."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids the download"
    return None if is_reachable(constants.ENDPOINT, HUB_SECONDS) else f"{constants.ENDPOINT} does not answer"


def snapshot(name: str, patterns: Sequence[str], is_complete: Callable[[Path], bool], instead: str) -> Path:
    """Return the folder of a hub's model in the cache, with its files that match `patterns`.

    If `is_complete(folder)` is true of the folder in the cache, nothing is sent to the hub. huggingface_hub obeys
    HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE. Raises DataError, which advises to name `instead`, if the files cannot be
    downloaded.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        if is_complete(folder):
            return folder
    except errors.LocalEntryNotFoundError:
        pass  # not in the cache
    except errors.HFValidationError as error:
        raise DataError(
            f"{name}: there is no such file or folder, and it cannot be a name on the hub: {error}"
        ) from error
    missing = f"{name}: there is no such file or folder, it is not in the hub's cache, and"
    if reason := why_hub_is_unreachable():
        raise DataError(f"{missing} {reason}: fetch it once with a network, or name {instead}")
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except errors.GatedRepoError as error:  # before its base class, RepositoryNotFoundError
        raise DataError(
            f"{name} is gated: accept its licence on {constants.ENDPOINT}/{name}, then log in with `hf auth login` or "
            "set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        status = error.response.status_code
        raise DataError(f"{missing} {constants.ENDPOINT} answers {status}: check the name") from error
    except (OSError, errors.HTTPError) as error:
        raise DataError(f"{name} could not be downloaded from {constants.ENDPOINT}: {hub_error(error)}") from error

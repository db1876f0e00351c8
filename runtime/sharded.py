"""Read the shards of a checkpoint, and run nothing that they say.

torch.distributed.checkpoint (DCP) lists its shards in .metadata, a pickle. A pickle may name any function and call it.
So it is read with an empty class in the place of each name. Sizes and places are then taken from it, as text and
integers only. With these, DCP reads the tensors, by torch.load(weights_only=True).

The import of this module takes 1.5 s.
"""

import io
import math
import os
import pickle
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from common.files import check_regular, open_regular, read_bytes
from common.terminal import class_and_message
from runtime.config import UserError, value_text
from runtime.pickles import check_opcodes, check_saved

METADATA = ".metadata"
MOST_BYTES = 2**28  # of .metadata. GPT-2 XL on 8 ranks has 3 MB
DCP = "torch.distributed.checkpoint"
MODULES = {f"{DCP}.metadata", f"{DCP}.filesystem", "torch", "torch.serialization", "pathlib", "pathlib._local"}
FLOAT_BYTES = 4


class Inert:
    """Stands for a class or a function that a pickle names. It only keeps what the pickle gives it."""

    name = ""  # such as "torch.Size"
    state: Any = None

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class InertUnpickler(pickle.Unpickler):
    """Reads a pickle of DCP. Each name becomes a new subclass of Inert, so it calls and changes nothing else."""

    def find_class(self, module: str, name: str) -> type[Inert]:
        if module not in MODULES:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return type(name, (Inert,), {"name": f"{module}.{name}"})


class Place(NamedTuple):
    """Where a shard lies. The names are those of DCP's own class, which is private."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class ShardReader(FileSystemReader):
    """Reads the tensors in the folder `shards`, and opens no other files than `names`, which are in this folder.

    Raises UserError if .metadata is damaged, or names anything else than tensors in these files.
    """

    def __init__(self, folder: Path, names: set[str]):
        super().__init__(folder)
        self.folder, path = folder, folder / METADATA
        try:
            bytes_on_disk = sum(check_regular(folder / name).st_size for name in names)
            self.metadata = parse(read_bytes(path, MOST_BYTES), names, bytes_on_disk)
        except Exception as error:  # an unpickler may raise any exception
            reason = getattr(error, "strerror", None) or class_and_message(error)
            raise UserError(f"{path} cannot be read: {reason}; choose another checkpoint") from error

    @property
    def sizes(self) -> dict[str, torch.Size]:
        """The shape of each tensor."""
        return {name: entry.size for name, entry in self.metadata.state_dict_metadata.items()}

    def read_metadata(self) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of this rank's plan, after a check of each part of a shard that it needs."""
        for place in (self.storage_data[item.storage_index] for item in plan.items):
            with open_regular(self.folder / place.relative_path) as file:
                file.seek(place.offset)
                content = file.read(min(place.length, os.fstat(file.fileno()).st_size))
            try:
                check_saved(io.BytesIO(content))
            except Exception as error:
                raise pickle.UnpicklingError("it is no file of torch.save") from error
        return super().read_data(plan, planner)

    def load(self, state: dict[str, Tensor]) -> None:
        """Fill the tensors of `state`, on any number of ranks. Raises UserError if a shard does not hold them."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process")  # it is
                load(state, storage_reader=self, no_dist=not dist.is_initialized())
        except CheckpointException as error:
            raise UserError(f"{self.folder} cannot be loaded: {reason_of(error)}; choose another checkpoint") from error


def reason_of(error: CheckpointException) -> str:
    """Return why the first rank failed, in one line."""
    cause, _ = next(iter(error.failures.values()))
    if isinstance(cause, pickle.UnpicklingError):  # PyTorch's message tells how to run the program in the file
        return "a shard is damaged, or holds more than tensors"
    return getattr(cause, "strerror", None) or class_and_message(cause)[:300]


def parse(content: bytes, names: set[str], bytes_on_disk: int) -> Metadata:
    """Return DCP's description of the fp32 tensors in the files `names`. Raises any exception if it is wrong."""
    check_opcodes(content)
    top = state_of(InertUnpickler(io.BytesIO(content)).load(), f"{DCP}.metadata.Metadata")
    tensors, places, numbers = {}, {}, 0
    for name, value in top["state_dict_metadata"].items():
        entry = state_of(value, f"{DCP}.metadata.TensorStorageMetadata")
        chunks = [state_of(chunk, f"{DCP}.metadata.ChunkStorageMetadata") for chunk in entry["chunks"]]
        chunks = [ChunkStorageMetadata(size_of(chunk["offsets"]), size_of(chunk["sizes"])) for chunk in chunks]
        tensors[name] = TensorStorageMetadata(TensorProperties(), size_of(entry["size"]), chunks)
        if not is_whole(tensors[name]):  # a part of it would keep what was in the memory
            raise ValueError(f"its parts do not make up the tensor {value_text(name)}")
        numbers += math.prod(tensors[name].size)
    if FLOAT_BYTES * numbers > bytes_on_disk:
        raise ValueError(f"its tensors have {numbers:,} numbers, and its files only {bytes_on_disk:,} bytes")
    for index, value in top["storage_data"].items():
        key = state_of(index, f"{DCP}.metadata.MetadataIndex")
        entry = state_of(value, f"{DCP}.filesystem._StorageInfo")
        place = Place(entry["relative_path"], *count(entry["offset"], entry["length"]))
        if place.relative_path not in names:
            raise ValueError(f"it names the file {value_text(place.relative_path)}")
        places[MetadataIndex(key["fqn"], size_of(key["offset"]))] = place
    return Metadata(tensors, storage_data=places)


def is_whole(tensor: TensorStorageMetadata) -> bool:
    """Return whether the chunks are the rows of the tensor, as FSDP cuts it: none is missing, none is there twice."""
    row, end, rest = 0, math.prod(tensor.size[:1]), tensor.size[1:]  # a scalar is one row
    filled = [chunk for chunk in tensor.chunks if math.prod(chunk.sizes)]  # with more ranks than rows, some are empty
    for chunk in sorted(filled, key=lambda chunk: chunk.offsets):
        if len(chunk.sizes) != len(tensor.size) or chunk.sizes[1:] != rest:
            return False
        if chunk.offsets != (row, *[0] * len(rest))[: len(tensor.size)]:
            return False
        row += math.prod(chunk.sizes[:1])
    return row == end or math.prod(tensor.size) == 0


def state_of(value: Any, name: str) -> dict:
    """Return the attributes of an object of this class. Raises ValueError if the pickle has something else."""
    if not (isinstance(value, Inert) and value.name == name and isinstance(value.state, dict)):
        raise ValueError(f"it has no {name} where DCP has one")
    return value.state


def size_of(value: Any) -> torch.Size:
    """Return a torch.Size. Raises ValueError if the pickle has something else."""
    if not (isinstance(value, Inert) and value.name == "torch.Size"):
        raise ValueError("it has no torch.Size where DCP has one")
    [numbers] = value.arguments
    return torch.Size(count(*numbers))


def count(*values: Any) -> tuple[int, ...]:
    """Return the values. Raises ValueError unless each is an integer in [0, 2^63)."""
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError("it has no count where DCP has one")
    return values

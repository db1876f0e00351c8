"""Files with the batch of a refused step, or of a step with a spike of the loss, in the run's folder.

out/<run>/nonfinite-step-000012.pt   {"step", "batches", "weights" unless they are sharded or the run goes on}
          spike-step-000014.pt       {"step", "batches", "loss", "grad_norm"}

They are files of torch.save, and end with a line that has the SHA-256 of the rest. torch.load passes over this line.
"""

import hashlib
import os
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from common.files import open_regular, replace_file
from common.terminal import warn
from runtime.config import UserError
from runtime.pickles import check_saved

MARK = b"\nsha256: "
LINE_BYTES = len(MARK) + 64 + 1
CHUNK = 2**20


class Digested:
    """A file that is open for writing, with the SHA-256 of all that was written."""

    def __init__(self, file: IO):
        self.file, self.sha256 = file, hashlib.sha256()

    def write(self, data) -> int:
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def write_kept(path: Path, content: dict) -> None:
    """Write the file. A kill leaves all of it, or nothing. Raises OSError or RuntimeError, as on a full disk."""
    with replace_file(path) as file:
        digested = Digested(file)
        torch.save(content, digested)
        file.write(MARK + digested.sha256.hexdigest().encode() + b"\n")


def read_kept(path: Path) -> dict:
    """Return the content of the file, on the CPU. Raises UserError if it is damaged, or is no such file.

    Older versions wrote no SHA-256. Then a warning says that the file is not verified.
    """
    try:
        with open_regular(path) as file:
            if not has_digest(file):
                warn(f"{path} has no SHA-256, because an older hotswap wrote it: damage may go unnoticed")
            file.seek(0)
            check_saved(file)
            file.seek(0)
            content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # the unpickler may raise any exception
        reason = error if isinstance(error, UserError) else "PyTorch cannot read it"
        raise UserError(f"{path} is damaged: {reason}; the step cannot run again from it") from error
    if not has_form(content):
        raise UserError(f"{path} has no batches of a step: it is of another program, or damaged")
    return content


def has_digest(file: IO) -> bool:
    """Return whether the file ends with its SHA-256. Raises UserError if the SHA-256 is of another content."""
    rest, sha256 = os.fstat(file.fileno()).st_size - LINE_BYTES, hashlib.sha256()
    for start in range(0, rest, CHUNK):
        sha256.update(file.read(min(CHUNK, rest - start)))
    line = file.read()
    if not line.startswith(MARK):
        return False
    if line != MARK + sha256.hexdigest().encode() + b"\n":
        raise UserError("its SHA-256 is wrong")
    return True


def has_form(content: object) -> bool:
    """Return whether this is what model.divergence.keep_batch() writes, but for the values of the ids."""
    if not (isinstance(content, dict) and isinstance(content.get("step"), int)):
        return False
    batches, weights = content.get("batches"), content.get("weights", {})
    tensors = [*weights.values()] if isinstance(weights, dict) else [None]
    if not (isinstance(batches, list) and batches and all(map(is_batch, batches))):
        return False
    return all(map(is_plain, tensors)) and all(isinstance(name, str) for name in weights)


def is_batch(batch: object) -> bool:
    """Return whether this is a data.loader.Batch: (x, y) or (x, y, starts), all (B, T)."""
    if not (isinstance(batch, tuple | list) and 2 <= len(batch) <= 3 and all(map(is_plain, batch))):
        return False
    dtypes = [tensor.dtype for tensor in batch]
    shapes = {tensor.shape for tensor in batch}
    return dtypes == [torch.int64, torch.int64, torch.int32][: len(batch)] and [len(s) for s in shapes] == [2]


def is_plain(value: object) -> bool:
    """Return whether this is a tensor whose values are all in the file. A stride of 0 gives any number of them."""
    if not (isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"):
        return False
    return value.nbytes <= value.untyped_storage().nbytes()

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
from runtime.config import UserError
from runtime.pickles import check_saved

MARK = b"\nsha256: "
LINE_BYTES = len(MARK) + 64 + 1
CHUNK = 2**20


def write_step(path: Path, content: dict) -> None:
    """Write the file. A kill leaves all of it, or nothing. Raises OSError or RuntimeError, as on a full disk."""
    with replace_file(path) as file:
        torch.save(content, file)
        file.flush()
        with open_regular(file.name) as written:
            sha256 = hashlib.file_digest(written, "sha256")
        file.write(MARK + sha256.hexdigest().encode() + b"\n")


def read_step(path: Path) -> dict:
    """Return the content of the file, on the CPU. Raises UserError if it is damaged, or is no such file."""
    try:
        with open_regular(path) as file:
            check_sha256(file)
            file.seek(0)
            check_saved(file)
            file.seek(0)
            content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # the unpickler may raise any exception
        reason = error if isinstance(error, UserError) else "PyTorch cannot read it"
        raise UserError(f"{path} is damaged: {reason}; the step cannot run again from it") from error
    if not is_step(content):
        raise UserError(f"{path} has no batches of a step: it is of another program, or damaged")
    return content


def check_sha256(file: IO) -> None:
    """Raise UserError unless the file ends with the SHA-256 of the rest."""
    rest, sha256 = os.fstat(file.fileno()).st_size - LINE_BYTES, hashlib.sha256()
    for start in range(0, rest, CHUNK):
        sha256.update(file.read(min(CHUNK, rest - start)))
    if file.read() != MARK + sha256.hexdigest().encode() + b"\n":
        raise UserError("its SHA-256 is wrong, or missing")


def is_step(content: object) -> bool:
    """Return whether this is what model.divergence.keep_batch() writes, but for the values of the ids."""
    if not isinstance(content, dict):
        return False
    step, batches, weights = content.get("step"), content.get("batches"), content.get("weights", {})
    if not (isinstance(step, int) and isinstance(batches, list) and batches and isinstance(weights, dict)):
        return False
    return all(map(is_batch, batches)) and all(map(is_plain, weights.values()))


def is_batch(batch: object) -> bool:
    """Return whether this is a data.loader.Batch: (x, y) or (x, y, starts), all (B, T)."""
    if not (isinstance(batch, tuple) and 2 <= len(batch) <= 3 and all(map(is_plain, batch))):
        return False
    dtypes = [tensor.dtype for tensor in batch]
    is_one_shape = batch[0].dim() == 2 and len({tensor.shape for tensor in batch}) == 1
    return is_one_shape and dtypes == [torch.int64, torch.int64, torch.int32][: len(batch)]


def is_plain(value: object) -> bool:
    """Return whether this is a tensor whose values are all in the file. A stride of 0 gives any number of them."""
    if not (isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"):
        return False
    return value.nbytes <= value.untyped_storage().nbytes()

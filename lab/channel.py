"""The worker's end of the channel to the judge: lab/judge/sandbox.py has the other end.

The judge sends objects. The worker answers in JSON, and writes tensors into files, because a pickle could run code in
the judge.
"""

import json
import os
import struct
import time
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket

from safetensors.torch import save_file
from torch import Tensor

CHANNEL = "HOTSWAP_CHANNEL"  # the variable with the number of the worker's end
FOLDER = "HOTSWAP_WORKER_FOLDER"  # the variable with the folder for files
MOST_ANSWER_BYTES = 2**24


class Channel:
    """receive() waits for the judge's next message; answer() and write() are what the judge reads."""

    def __init__(self):
        # a process that this one starts is no worker
        self.connection, self.folder = Connection(int(os.environ.pop(CHANNEL))), Path(os.environ.pop(FOLDER))

    def receive(self) -> object:
        return self.connection.recv()

    def answer(self, **facts: object) -> None:
        self.connection.send_bytes(json.dumps(facts).encode())

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Write the tensors, as they are now, into a file of the worker's folder."""
        save_file(
            {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}, self.folder / name
        )


def is_worker() -> bool:
    """Return whether a judge started this process."""
    return CHANNEL in os.environ


def send_message(channel: socket, message: bytes, limit: float) -> None:
    """Send a message as Connection.send_bytes() does. Raises OSError, also if it takes more than `limit` seconds."""
    channel.settimeout(limit)
    channel.sendall(struct.pack("!i", len(message)) + message)


def read_answer(channel: socket, limit: float) -> dict:
    """Return the next answer of a worker, which may stop within it.

    Raises TimeoutError after `limit` seconds, ValueError or RecursionError if it is not a JSON object, EOFError or
    OSError.
    """
    deadline = time.monotonic() + limit
    [size] = struct.unpack("!i", read_exactly(channel, 4, deadline))
    if not 0 <= size <= MOST_ANSWER_BYTES:
        raise ValueError("too large")
    answer = json.loads(read_exactly(channel, size, deadline))
    if not isinstance(answer, dict):
        raise ValueError("not an object")
    return answer


def read_exactly(channel: socket, size: int, deadline: float) -> bytes:
    content = bytearray()
    while len(content) < size:
        channel.settimeout(max(1e-3, deadline - time.monotonic()))
        part = channel.recv(min(size - len(content), 2**20))
        if not part:
            raise EOFError
        content += part
    return bytes(content)

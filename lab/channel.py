"""The channel between the judge and a worker. lab/judge/sandbox.py starts the worker and has the judge's end.

The judge sends pickles. The worker answers in JSON, and writes tensors into safetensors files, because a pickle could
run code in the judge's process.
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
DEEPEST_ANSWER = 8  # lists and objects inside of each other


class Channel:
    """The worker's end."""

    def __init__(self):
        # a process that the worker starts is not a worker, so the variables are removed
        self.connection, self.folder = Connection(int(os.environ.pop(CHANNEL))), Path(os.environ.pop(FOLDER))

    def receive(self) -> object:
        """Wait for the judge's next message, and return it. Raises EOFError if the judge has closed the channel."""
        return self.connection.recv()

    def answer(self, **facts: object) -> None:
        """Send the facts to the judge, as a JSON object."""
        self.connection.send_bytes(json.dumps(facts).encode())

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Write copies of the tensors into the file `name` of the worker's folder."""
        save_file(
            {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}, self.folder / name
        )


def is_worker() -> bool:
    """Return whether a judge started this process."""
    return CHANNEL in os.environ


def send_message(channel: socket, message: bytes, limit: float) -> None:
    """Send a message in the format of Connection.send_bytes().

    Raises OSError if the worker has closed the channel, and TimeoutError after `limit` seconds.
    """
    channel.settimeout(limit)
    channel.sendall(struct.pack("!i", len(message)) + message)


def read_answer(channel: socket, limit: float) -> dict:
    """Return the next answer of a worker.

    Raises TimeoutError after `limit` seconds, even if a part of the answer has arrived. Raises ValueError or
    RecursionError if it is not a JSON object, and EOFError or another OSError if the worker has closed the channel.
    """
    deadline = time.monotonic() + limit
    [size] = struct.unpack("!i", read_exactly(channel, 4, deadline))
    if not 0 <= size <= MOST_ANSWER_BYTES:
        raise ValueError("too large")
    # an integer of 400 digits would be too large for a float
    answer = json.loads(read_exactly(channel, size, deadline), parse_int=lambda digits: int(digits[:18]))
    if not isinstance(answer, dict):
        raise ValueError("not an object")
    return clean(answer, DEEPEST_ANSWER)


def clean(value: object, levels: int) -> object:
    """Return a value of JSON with each string in one line, so that no string looks like a part of a page.

    Raises ValueError if it has more levels of lists and objects, or a string that cannot be written in UTF-8.
    """
    if isinstance(value, str):
        return " ".join(value.encode().decode().split())
    if isinstance(value, (dict, list)) and not levels:
        raise ValueError("too many levels")
    if isinstance(value, dict):
        return {clean(key, 0): clean(part, levels - 1) for key, part in value.items()}
    return [clean(part, levels - 1) for part in value] if isinstance(value, list) else value


def read_exactly(channel: socket, size: int, deadline: float) -> bytes:
    """Return the next `size` bytes. Raises TimeoutError at `deadline` (of time.monotonic()), EOFError and OSError."""
    content = bytearray()
    while len(content) < size:
        channel.settimeout(max(1e-3, deadline - time.monotonic()))
        part = channel.recv(min(size - len(content), 2**20))
        if not part:
            raise EOFError
        content += part
    return bytes(content)

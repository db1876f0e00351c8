"""Disturb the tracker of a run: its processes, or its server."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from common.files import read_text

PROGRAM = "runtime.tracker_process"


def children_of(process: int) -> list[int]:
    """Return the processes that this one has started, and those that they have started, and so on."""
    found = []
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, read_text(thread / "children", at_most=2**20).split()):
                found += [child, *children_of(child)]
    return found


def tracker_of(process: int) -> list[int]:
    """Return the process in which the tracker of a run runs, and those that it has started; nothing before it starts.

    A run also starts other processes for a moment, such as git.
    """
    for child in children_of(process):
        with suppress(OSError):
            if PROGRAM in read_text(f"/proc/{child}/cmdline", at_most=2**20).split("\0"):
                return [child, *children_of(child)]
    return []


def signal_tracker(process: int, number: signal.Signals, seconds: float, longest: float) -> bool:
    """Wait until the tracker of a run starts, then `seconds`, and send its processes a signal.

    Return whether there were any: False if the run ends first, or has no tracker after `longest` seconds.
    """
    end = time.monotonic() + longest
    while not tracker_of(process):
        if has_ended(process) or time.monotonic() > end:
            return False
        time.sleep(0.02)
    time.sleep(seconds)
    return send(open_all(tracker_of(process)), number)


def open_all(processes: list[int]) -> list[int]:
    """Return a descriptor of each process (man pidfd_open): a signal never reaches a later one of its number."""
    descriptors = []
    for process in processes:
        with suppress(ProcessLookupError):
            descriptors.append(os.pidfd_open(process))
    return descriptors


def send(descriptors: list[int], number: signal.Signals) -> bool:
    """Send a signal to each, and close the descriptors. Return whether there were any."""
    for descriptor in descriptors:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)
        os.close(descriptor)
    return bool(descriptors)


def has_ended(process: int) -> bool:
    try:
        return read_text(f"/proc/{process}/stat", at_most=2**20).rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


class MuteServer(BaseHTTPRequestHandler):
    """W&B's server, which answers what the start of a run asks. After that it reads requests, and answers none."""

    is_mute = False

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if MuteServer.is_mute:
            time.sleep(1e6)
        project = {"id": "1", "name": "hotswap", "entity": {"id": "1", "name": "me"}}
        bucket = {"id": "1", "name": request.get("variables", {}).get("name"), "displayName": "", "config": "{}"}
        MuteServer.is_mute = "upsertBucket" in request.get("query", "")
        bucket |= {"historyLineCount": 0, "project": project}
        data = {"upsertBucket": {"bucket": bucket, "inserted": True}} if MuteServer.is_mute else {"model": None}
        body = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        """Print nothing."""


@contextmanager
def mute_server() -> Iterator[dict[str, str]]:
    """Run a MuteServer in a process of its own. Yields the environment in which W&B takes it for its server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), MuteServer)
    server.handle_error = lambda *_: None  # connections that break at the end
    process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    process.start()
    server.server_close()  # here; the process goes on listening
    try:
        yield {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": "0" * 40}
    finally:
        process.kill()
        process.join()

"""Saving the checkpoints of a run (runtime/checkpoint.py says what they are) while it goes on."""

import contextlib
import math
import shutil
import statistics
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from runtime.checkpoint import SHARDS, TRAINING, WEIGHTS, State, flat, manifest, number, seal, steps, sync
from runtime.config import UserError
from runtime.ranks import Ranks

GROUPS = ("model", "exp_avg", "exp_avg_sq")  # of an optimizer's state()
GATHERED_BYTES = 2**30  # of whole tensors on rank 0's GPU, on their way to the host


class Checkpoints:
    """The checkpoints of one run: saves them, keeps the last `keep` and the best. On all ranks; rank 0 writes."""

    def __init__(self, folder: Path, keep: int, sharded: bool, ranks: Ranks, device: torch.device, made: int = 0):
        """The run goes on after `made` steps: later checkpoints, which were passed over as damaged, are deleted."""
        self.folder, self.keep, self.sharded, self.ranks = folder, keep, sharded and not ranks.alone, ranks
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future | None = None
        self.pauses: list[float] = []
        self.host: dict[str, Tensor] = {}  # copies, pinned for a GPU; pinning is slow, so they are used again
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # a group of its own: the thread's collectives would mix with those of the training loop
        self.group = dist.new_group(backend="gloo") if self.sharded else None
        if ranks.leads:
            for leftover in folder.glob(".step-*"):  # of a run that was killed in the middle of a save
                shutil.rmtree(leftover)
            for path in steps(folder):
                if number(path) > made:
                    discard(path)
        ranks.gather(None)
        self.best = self._lowest()  # validation loss so far

    def prepare(self, shapes: dict[str, torch.Size]) -> None:
        """Make room on the host for a state of three fp32 tensors a name, by the thread, while the first steps run.

        To pin the 1.5 GB of 124M takes 1.3 s on an H200's host, in which the first save would hold the loop up.
        """
        if self.ranks.leads and not self.sharded:
            self.pending = self.thread.submit(
                self._pin, {f"{group}.{name}": shapes[name] for group in GROUPS for name in shapes}
            )

    def _pin(self, shapes: dict[str, torch.Size]) -> None:
        with contextlib.suppress(RuntimeError):  # out of memory: the save itself will say so
            for key, shape in shapes.items():
                self.host[key] = torch.empty(shape, dtype=torch.float32, pin_memory=self.stream is not None)

    def save(self, step: int, state: State, rest: dict, facts: dict) -> tuple[float, torch.cuda.Event | None]:
        """Start saving: (seconds that this took, an event before which no tensor of `state` may change).

        `rest` goes into training.pt, `facts` (with val_loss) into the manifest. The rest is done by a thread.
        """
        start = time.perf_counter()
        self.finish()
        temporary = self.folder / f".step-{step:06d}"
        written, copied = None, None
        if self.sharded:
            if problem := self.ranks.tell(made_folder(temporary) if self.ranks.leads else None):
                print(f"warning: {temporary} cannot be made: {problem}", file=sys.stderr)
                return time.perf_counter() - start, None
            written = dcp.async_save(flat(state), checkpoint_id=temporary / SHARDS, process_group=self.group)
            state = {}
        else:
            state, copied = self._to_host(state)
        facts = {"step": step, **facts}
        is_best = facts["val_loss"] is not None and facts["val_loss"] < self.best
        self.best = facts["val_loss"] if is_best else self.best
        if self.ranks.leads:
            self.pending = self.thread.submit(self._write, temporary, state, rest, facts, written or copied, is_best)
        else:
            self.pending = written
        self.pauses.append(time.perf_counter() - start)
        return self.pauses[-1], copied

    def finish(self) -> None:
        """Wait until the last save is on the disk; one that failed is a warning, and the ones before it stay."""
        try:
            self._wait()
        except UserError as error:
            print(f"warning: {error}", file=sys.stderr)

    def close(self) -> dict[str, float]:
        """Wait for the last save; what saving cost, for the row. UserError: the last one failed."""
        self._wait()
        return {"checkpoint/pause_ms": 1e3 * statistics.median(self.pauses)} if self.pauses else {}

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self.finish()
        self.thread.shutdown()

    def _lowest(self) -> float:
        """The validation loss of `best`; a damaged one is none."""
        best = self.folder / "best"
        try:
            return manifest(best)["val_loss"] if best.exists() else math.inf
        except UserError as error:
            print(f"warning: {error}", file=sys.stderr)
            return math.inf

    def _wait(self) -> None:
        pending, self.pending = self.pending, None
        if pending and (error := pending.exception()) and self.ranks.leads:  # it speaks for all
            raise error

    def _to_host(self, state: State) -> tuple[State, torch.cuda.Event | None]:
        """Copies in host memory, on rank 0; on a GPU they are under way until the event, beside the computation."""
        copies: State = {group: {} for group in state}
        gathered = 0
        for group, tensors in state.items():
            for name, tensor in tensors.items():
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if not self.ranks.leads:
                    continue
                if (key := f"{group}.{name}") not in self.host:
                    self.host[key] = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=whole.is_cuda)
                copies[group][name] = self.host[key]
                gathered += whole.nbytes if isinstance(tensor, DTensor) else 0
                if self.stream and gathered > GATHERED_BYTES:
                    self.stream.synchronize()
                    gathered = 0
                if self.stream:
                    self.stream.wait_stream(torch.cuda.current_stream())
                    whole.record_stream(self.stream)
                with torch.cuda.stream(self.stream):  # of None: does nothing
                    copies[group][name].copy_(whole, non_blocking=True)
        return copies, self.stream.record_event() if self.stream else None

    def _write(self, temporary: Path, state: State, rest: dict, facts: dict, ready: Any, is_best: bool) -> None:
        final = temporary.with_name(temporary.name[1:])
        try:
            if isinstance(ready, Future):
                ready.result()  # rank 0's is done when every rank's shards are written
            elif ready:
                ready.synchronize()
            temporary.mkdir(parents=True, exist_ok=True)
            if state:
                save_file(state.pop("model"), temporary / WEIGHTS)
            torch.save({**state, **rest}, temporary / TRAINING)
            seal(temporary, facts)
            discard(final)  # a damaged one, before which the run began again
            temporary.rename(final)
            sync(self.folder)
        except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:  # a full disk has many names
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, CheckpointException):  # of a rank; it came with its traceback
                error = next(iter(error.failures.values()))[0]
            why = getattr(error, "strerror", None) or str(error).splitlines()[0]
            free = shutil.disk_usage(next(parent for parent in self.folder.parents if parent.is_dir())).free
            raise UserError(
                f"{final} could not be written: {why}; those before it stay, and {free / 2**30:.1f} GiB are free"
            ) from error
        try:
            self._prune(final, is_best)
        except OSError as error:
            raise UserError(f"{self.folder} cannot be tidied up: {error.strerror}") from error

    def _prune(self, newest: Path, is_best: bool) -> None:
        """Point `best` at the newest if it is, and delete what is neither best nor among the last `keep`."""
        best = self.folder / "best"
        if is_best:
            if best.is_dir() and not best.is_symlink():  # a copy of the folder followed the link
                shutil.rmtree(best)
            link = self.folder / ".best"
            link.unlink(missing_ok=True)
            link.symlink_to(newest.name)
            link.replace(best)
        for path in steps(self.folder)[self.keep :]:
            if path.resolve() != best.resolve():
                discard(path)


def discard(path: Path) -> None:
    """Delete a checkpoint, under a hidden name: killed half-way, it must not look like a damaged one."""
    if path.exists():
        hidden = path.with_name(f".{path.name}-old")
        path.rename(hidden)
        shutil.rmtree(hidden)


def made_folder(path: Path) -> str | None:
    """Make it; why that failed, if it did."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror
    return None

"""The private functions of PyTorch that this room uses, and why. tests/runtime/test_compat.py checks them."""

import pickle

import torch
from torch import Tensor


def copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into the target at the same place of the list, with one kernel launch for many tensors.

    A loop over copy_() has 148 launches for GPT-2 124M. The foreach functions have no public names before PyTorch 2.15.
    """
    torch._foreach_copy_(targets, sources)


def sleep_on_gpu(seconds: float) -> None:
    """Keep the current stream of the current GPU busy for about `seconds`. The host does not wait.

    The private function takes a number of clocks: an H200 has 1.98e9 a second, and a slower GPU sleeps longer.
    """
    torch.cuda._sleep(int(2e9 * seconds))


def flight_records() -> dict[str, bytes]:
    """Return PyTorch's records of the last 2,000 collectives of this rank, pickled: backend -> its record.

    The flight recorder is on by default, but the public ways to read it are NCCL's time-out and a server.
    """
    from torch._C import _distributed_c10d as c10d

    readers = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}  # a PyTorch without CUDA has no NCCL
    return {backend: getattr(c10d, reader)() for backend, reader in readers.items() if hasattr(c10d, reader)}


def name_groups(record: bytes, world_size: int) -> bytes:
    """Return a flight record in which torchfrtrace finds the group of each collective by its name.

    gloo records all groups under the name "", where torchfrtrace ends with a KeyError, and a second group without its
    ranks. Every group of a job has all ranks.
    """
    content = pickle.loads(record)
    if "" not in content["pg_config"]:
        return record
    groups = {entry["process_group"] for entry in content["entries"]}
    ranks = str(list(range(world_size)))
    content["pg_config"] = {name: {"name": name, "desc": description, "ranks": ranks} for name, description in groups}
    return pickle.dumps(content)


def pending_collective() -> str | None:
    """Return the first collective that this rank has begun and not ended, such as "gloo:all_reduce number 4"."""
    for record in flight_records().values():
        for entry in pickle.loads(record)["entries"]:
            if not entry["retired"] and entry["state"] != "completed":
                return f"{entry['profiling_name']} number {entry['collective_seq_id']}"
    return None

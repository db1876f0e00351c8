"""The watchdog of one process, and of ranks that share a store. tests/test_parallel.py stops a rank of a real job."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from runtime import watchdog
from runtime.ranks import Ranks
from runtime.saver import Checkpoints
from runtime.watchdog import Watchdog


@pytest.fixture
def ranks(monkeypatch):
    """Three watchdogs that share a store. None runs: the test counts their beats."""
    store = dist.HashStore()
    monkeypatch.setattr(Watchdog, "_watch", lambda self: None)
    monkeypatch.setattr(watchdog, "pending_collective", lambda: "gloo:all_reduce number 38")
    ranks = [Watchdog(rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.start(store, 30)
    return ranks


def explain(monkeypatch, ranks, beating):
    """What rank 0 says of a hang, while the ranks in `beating` beat."""
    monkeypatch.setattr(time, "sleep", lambda _: [ranks[rank]._beat() for rank in beating])
    return ranks[0]._explain_hang()


def test_the_reason_of_the_first_failed_rank_is_in_the_store(ranks):
    assert ranks[2].failure_reason(seconds=0) is None
    assert [ranks[rank].report(f"rank {rank} failed") for rank in (1, 0)] == ["rank 1 failed"] * 2
    assert ranks[2].failure_reason() == "rank 1 failed"


def test_ranks_without_a_beat_are_stopped(monkeypatch, ranks):
    found = explain(monkeypatch, ranks, beating=[])
    assert "rank 1, 2 on " in found
    assert "is stopped, or its machine is down; rank 0 on " in found
    assert "waits for gloo:all_reduce number 38 at " in found


def test_a_rank_that_was_stopped_before_its_first_beat(monkeypatch, ranks):
    """A store's get() would wait for it."""
    ranks[0].store.delete_key("state2")
    ranks[0].store.delete_key("beats2")
    found = explain(monkeypatch, ranks, beating=[1])
    assert "rank 2 on an unknown machine is stopped, or its machine is down; " in found


def test_a_rank_that_has_begun_fewer_collectives_is_late(monkeypatch, ranks):
    for rank in ranks:
        rank.collectives = 7 if rank.rank == 2 else 8
    monkeypatch.setattr(watchdog, "main_thread_place", lambda collective: f"waits for {collective or 'data'}")
    found = explain(monkeypatch, ranks, beating=[1, 2])
    assert "30 minutes: rank 2 on " in found
    assert "is late, and waits for data; rank 0 on " in found
    assert "stopped" not in found


def test_the_process_ends_even_if_nothing_can_be_written(monkeypatch, ranks, tmp_path, capsys):
    def fail(*_):
        raise KeyError("pg_config")

    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(watchdog, "write_records", fail)
    ranks[0].folder, ranks[0].on_stuck = tmp_path, fail
    ranks[0]._end("rank 1 failed")
    assert codes == [1]
    assert capsys.readouterr().err.splitlines() == [
        "warning: the last collectives cannot be recorded: KeyError: 'pg_config'",
        "warning: the run cannot be closed: KeyError: 'pg_config'",
    ]


def test_a_rank_in_a_collective_of_a_checkpoint_waits_for_the_collective(monkeypatch, tmp_path):
    """Elsewhere in runtime/saver.py it waits for the disk."""
    places = []
    names = {"places": places, "thread": ThreadPoolExecutor(1), "place": watchdog.main_thread_place}
    source = "def gather(*_): places.append(thread.submit(place, 'gloo:all_gather number 3').result())"
    exec(compile(source, "torch/distributed.py", "exec"), names)  # code outside of this repo
    monkeypatch.setattr(dist, "all_gather_object", names["gather"])
    Checkpoints(tmp_path / "checkpoints", 2, False, Ranks(0, 2), torch.device("cpu"), 0)
    assert re.fullmatch(r"waits for gloo:all_gather number 3 at runtime/saver.py:\d+ \(__init__\)", places[0])

"""The shared store of the ranks, in a job of one process. tests/test_parallel.py runs several processes."""

import pytest
import torch.distributed as dist

from runtime.ranks import failure_reason, shared_store


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_reason_of_the_first_failed_rank_is_in_the_shared_store(process_group):
    assert failure_reason(seconds=0) is None
    for rank in (1, 0):
        shared_store().compare_set("failed", "", f"rank {rank} failed: a bug")
    assert failure_reason() == "rank 1 failed: a bug"

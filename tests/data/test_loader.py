import os
import shutil
import threading
import time

import numpy as np
import pytest
import torch

from data.errors import DataError
from data.loader import Loader, Windows, evaluation, prefetch
from data.shards import open_shards
from tests.data.test_shards import damage, write_split

T = 8


@pytest.fixture
def windows(tmp_path):
    """Two and a half shards of consecutive ids: 50, 50 and 29 tokens are 6 + 6 + 3 samples of 8."""
    write_split(tmp_path, "train", [np.arange(1, 129, dtype=np.uint16)], eot=0, shard_tokens=50)
    return Windows(open_shards(tmp_path, "train", 129), T, "training")


def starts(batches):
    return [int(row[0]) for x, _ in batches for row in x]


def test_samples_are_windows_and_targets_are_one_on(windows):
    assert len(windows) == 15
    x, y = windows.batch(np.array([0, 5, 6, 14]))
    assert x[:, 0].tolist() == [0, 40, 50, 116]
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(y, x + 1)
    assert (x.dtype, x.shape) == (torch.int64, (4, T))


def test_starts_are_where_documents_begin(windows):
    """An end of text is the first token of what follows it; a sample's first document is cut off by the sample."""
    masked = Windows(windows.shards, T, "training", eot=43)
    plain, (x, y, first) = windows.batch(np.array([4, 5, 14])), masked.batch(np.array([4, 5, 14]))
    assert torch.equal(x, plain[0])
    assert torch.equal(y, plain[1])
    assert x[1, 3] == 43
    assert first.tolist() == [[0] * T, [0, 0, 0, 3, 3, 3, 3, 3], [0] * T]
    assert (first.dtype, first.shape) == (torch.int32, x.shape)


def test_an_epoch_has_every_sample_once(windows):
    """15 samples, 5 a step: three steps are an epoch, and the next one has another order."""
    loader = Loader(windows, batch_size=5, tokens_per_step=5 * T, seed=1)
    epochs = [[s for step in range(3 * e + 1, 3 * e + 4) for s in starts(loader(step))] for e in range(3)]
    everything = sorted(starts([windows.batch(np.arange(15))]))
    assert [sorted(epoch) for epoch in epochs] == [everything] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_step_may_lie_across_epochs_or_hold_several(windows):
    loader = Loader(windows, batch_size=4, tokens_per_step=40 * T, seed=1)
    seen = sorted(starts(loader(1)) + starts(loader(2)) + starts(loader(3)))
    assert seen == sorted(8 * starts([windows.batch(np.arange(15))]))  # 120 samples are 8 epochs


def test_a_pure_function_of_seed_and_step(windows):
    loader = Loader(windows, 2, 4 * T, seed=1)
    later = starts(loader(7))
    again = Loader(windows, 2, 4 * T, seed=1)
    assert starts(again(7)) == later
    assert starts(loader(7)) == later
    orders = {tuple(starts(Loader(windows, 5, 15 * T, seed)(1))) for seed in range(5)}
    assert len(orders) == 5


@pytest.mark.parametrize(("batch_size", "world_size"), [(12, 1), (1, 1), (3, 2), (2, 3), (1, 4)])
def test_a_step_is_the_same_samples_however_divided(windows, batch_size, world_size):
    whole = starts(Loader(windows, 12, 12 * T, seed=1)(2))
    ranks = [Loader(windows, batch_size, 12 * T, 1, rank, world_size)(2) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {12 // batch_size // world_size}
    assert sorted(s for batches in ranks for s in starts(batches)) == sorted(whole)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda file: damage(file, 1100, b"\7"), "rewritten"),
        (lambda file: damage(file, 0, b"", cut=20), "1104 bytes, 1124 before"),
        (lambda file: os.truncate(file, 0), "0 bytes, 1124 before"),  # reading it would be a SIGBUS
        (
            lambda file: (file.rename(file.with_suffix(".old")), shutil.copy2(file.with_suffix(".old"), file)),
            "rewritten",
        ),
        (lambda file: file.unlink(), "No such file or directory"),
    ],
)
def test_a_shard_that_changes_under_a_run_is_found(windows, harm, message):
    """Only the batches that lie in it are stopped: sample 5 ends the first shard, 6 begins the second."""
    windows.batch(np.array([5, 6]))
    harm(windows.shards[1].path)
    windows.batch(np.array([0, 5, 12]))
    with pytest.raises(DataError, match=rf"000001.bin changed while it was being read \({message}\)"):
        windows.batch(np.array([5, 6]))


def test_prefetch_is_the_loader_and_tells_the_wait(windows):
    """The third step is held back until it has been waited for."""
    asked, loader = threading.Event(), Loader(windows, 2, 4 * T, seed=1)

    def held_back(step):
        if step == 3:
            asked.wait()
            time.sleep(0.1)
        return loader(step)

    stream = prefetch(held_back, 2, torch.device("cpu"))
    got = [next(stream)]
    asked.set()
    got += [next(stream), next(stream)]
    assert [starts(batches) for batches, _ in got] == [starts(loader(step)) for step in (2, 3, 4)]
    assert got[1][1] > 0.05


def test_prefetch_hands_errors_on(windows):
    def broken(step):
        raise DataError("the shard is gone")

    with pytest.raises(DataError, match="the shard is gone"):
        next(prefetch(broken, 1, torch.device("cpu")))


def test_evaluation_is_fixed_and_spread_over_the_split(windows):
    assert starts(evaluation(windows, 2, 4)) == starts([windows.batch(np.array([0, 3, 7, 11]))])
    assert [len(x) for x, _ in evaluation(windows, 4, 100)] == [4, 4, 4]
    assert [len(x) for x, _ in evaluation(windows, 64, 100)] == [15]


def test_too_little_text(tmp_path):
    write_split(tmp_path, "val", [np.arange(T, dtype=np.uint16)[1:]], eot=0)
    with pytest.raises(DataError, match=r"the validation text has 8 tokens, and one sample takes 9"):
        Windows(open_shards(tmp_path, "val", 128), T, "validation")

import os
import shutil
import threading
import time

import numpy as np
import pytest
import torch

from data.errors import DataError
from data.loader import IGNORED, Loader, Windows, evaluation_batches, prefetch
from data.shards import open_shards
from tests.data.test_shards import damage, write_split

T = 8  # block_size


@pytest.fixture
def windows(tmp_path):
    """Three shards of consecutive ids, with 50, 50 and 29 tokens. They hold 6 + 6 + 3 samples with 8 inputs each."""
    write_split(tmp_path, "train", [np.arange(1, 129, dtype=np.uint16)], eot=0, shard_tokens=50)
    return Windows(open_shards(tmp_path, "train", 129), T, "training")


def first_ids(batches):
    """Return the first token id of each sample. No id occurs twice in `windows`, so it identifies the sample."""
    return [int(row[0]) for x, _ in batches for row in x]


def test_samples_are_windows_and_targets_are_shifted_by_one(windows):
    assert len(windows) == 15
    x, y = windows.batch(np.array([0, 5, 6, 14]))
    assert x[:, 0].tolist() == [0, 40, 50, 116]
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(y, x + 1)
    assert (x.dtype, x.shape) == (torch.int64, (4, T))


def test_starts_are_where_documents_begin(windows):
    """The eot is the first token of its document. A document that begins before the sample gets the start 0."""
    windows_with_eot = Windows(windows.shards, T, "training", eot=43)
    samples = np.array([4, 5, 14])
    x, y, starts = windows_with_eot.batch(samples)
    x_without_eot, y_without_eot = windows.batch(samples)
    assert torch.equal(x, x_without_eot)
    assert torch.equal(y, y_without_eot)
    assert x[1, 3] == 43
    assert starts.tolist() == [[0] * T, [0, 0, 0, 3, 3, 3, 3, 3], [0] * T]
    assert (starts.dtype, starts.shape) == (torch.int32, x.shape)


def test_an_epoch_has_every_sample_once(windows):
    """15 samples at 5 per step are an epoch of three steps. The next epoch has another order."""
    loader = Loader(windows, batch_size=5, tokens_per_step=5 * T, seed=1)
    steps = [first_ids(loader(step)) for step in range(1, 10)]
    epochs = [[*steps[i], *steps[i + 1], *steps[i + 2]] for i in (0, 3, 6)]
    all_samples = sorted(first_ids([windows.batch(np.arange(15))]))
    assert [sorted(epoch) for epoch in epochs] == [all_samples] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_step_may_span_several_epochs(windows):
    loader = Loader(windows, batch_size=4, tokens_per_step=40 * T, seed=1)
    samples = sorted(first_ids(loader(1)) + first_ids(loader(2)) + first_ids(loader(3)))
    assert samples == sorted(8 * first_ids([windows.batch(np.arange(15))]))  # 120 samples are 8 epochs


def test_batches_are_a_pure_function_of_seed_and_step(windows):
    loader = Loader(windows, 2, 4 * T, seed=1)
    step_7 = first_ids(loader(7))
    new_loader = Loader(windows, 2, 4 * T, seed=1)
    assert first_ids(new_loader(7)) == step_7
    assert first_ids(loader(7)) == step_7
    orders = {tuple(first_ids(Loader(windows, 5, 15 * T, seed)(1))) for seed in range(5)}
    assert len(orders) == 5


def test_a_shift_moves_the_batches_of_later_steps(windows):
    """Each shift counts from its first step on, on top of those before it, and an epoch still has every sample once."""
    usual, loader = (Loader(windows, 5, 5 * T, seed=1) for _ in range(2))
    loader.shift(2, 5)
    loader.shift(4, 2**31)
    assert len(windows) == 15
    assert first_ids(loader(1)) == first_ids(usual(1))
    assert [first_ids(loader(step)) for step in (2, 3)] == [first_ids(usual(step)) for step in (3, 1)]
    moved = Loader(windows, 5, 5 * T, seed=1)
    moved.shift(1, (5 + 2**31) % 15)
    assert [first_ids(loader(step)) for step in (4, 5, 6)] == [first_ids(moved(step)) for step in (4, 5, 6)]
    epoch = [sample for step in (4, 5, 6) for sample in first_ids(moved(step))]
    assert sorted(epoch) == sorted(first_ids([windows.batch(np.arange(15))]))


def test_prefetch_reads_the_steps_after_a_shift_again(windows):
    """The judge shifts the batches after a step, when the thread may have read more steps."""
    loader, usual = Loader(windows, 2, 4 * T, seed=1), Loader(windows, 2, 4 * T, seed=1)
    stream = prefetch(loader, 1, torch.device("cpu"))
    steps = [next(stream) for _ in range(2)]
    time.sleep(0.1)
    loader.shift(3, 3)
    steps += [next(stream) for _ in range(6)]
    usual.shift(3, 3)
    assert [first_ids(batches) for batches, _ in steps] == [first_ids(usual(step)) for step in range(1, 9)]


def test_overfit_gives_every_step_the_batches_of_step_1(windows):
    loader, usual = Loader(windows, 2, 4 * T, seed=1, overfit=True), Loader(windows, 2, 4 * T, seed=1)
    assert first_ids(loader(1)) == first_ids(loader(7)) == first_ids(usual(1)) != first_ids(usual(7))


@pytest.mark.parametrize(("batch_size", "world_size"), [(12, 1), (1, 1), (3, 2), (2, 3), (1, 4)])
def test_a_step_has_the_same_samples_however_it_is_divided(windows, batch_size, world_size):
    undivided = first_ids(Loader(windows, 12, 12 * T, seed=1)(2))
    micro_batches = []
    for rank in range(world_size):
        rank_batches = Loader(windows, batch_size, 12 * T, 1, rank, world_size)(2)
        assert len(rank_batches) == 12 // batch_size // world_size
        micro_batches += rank_batches
    assert sorted(first_ids(micro_batches)) == sorted(undivided)


def replace_by_copy(file):
    original = file.rename(file.with_suffix(".old"))
    shutil.copy2(original, file)


@pytest.mark.parametrize(
    ("damage_file", "message"),
    [
        (lambda file: damage(file, 1100, b"\7"), "rewritten"),
        (lambda file: damage(file, 0, b"", cut=20), "rewritten"),
        (lambda file: os.truncate(file, 0), "rewritten"),  # reading the file would raise SIGBUS
        (replace_by_copy, "rewritten"),
        (lambda file: file.unlink(), "No such file or directory"),
    ],
)
def test_a_shard_that_changes_during_a_run_is_an_error(windows, damage_file, message):
    """Only batches with samples of shard 1 fail. Sample 5 is the last of shard 0; sample 6 is the first of shard 1."""
    windows.batch(np.array([5, 6]))
    damage_file(windows.shards[1].path)
    windows.batch(np.array([0, 5, 12]))
    with pytest.raises(DataError, match=rf"000001.bin changed while it was being read \({message}\)"):
        windows.batch(np.array([5, 6]))


def test_prefetch_yields_the_batches_of_the_loader_and_the_wait_time(windows):
    """The loader needs 0.1 s for step 3, and starts step 3 only when the caller has step 2."""
    step_2_is_done = threading.Event()
    loader = Loader(windows, 2, 4 * T, seed=1)

    def slow_loader(step):
        if step == 3:
            step_2_is_done.wait()
            time.sleep(0.1)
        return loader(step)

    slow_loader.shifts = []
    stream = prefetch(slow_loader, 2, torch.device("cpu"))
    steps = [next(stream)]
    step_2_is_done.set()
    steps += [next(stream), next(stream)]
    assert [first_ids(batches) for batches, _ in steps] == [first_ids(loader(step)) for step in (2, 3, 4)]
    _, wait_seconds = steps[1]
    assert wait_seconds > 0.05


def test_prefetch_raises_the_error_of_the_loader(windows):
    def broken_loader(step):
        raise DataError("the shard is missing")

    broken_loader.shifts = []
    with pytest.raises(DataError, match="the shard is missing"):
        next(prefetch(broken_loader, 1, torch.device("cpu")))


def test_evaluation_is_fixed_and_spread_over_the_split(windows):
    assert first_ids(evaluation_batches(windows, 2, 4)) == first_ids([windows.batch(np.array([0, 3, 7, 11]))])


@pytest.mark.parametrize("batch_size", [1, 2, 4, 11, 15, 64])
@pytest.mark.parametrize("samples", [1, 11, 15, 100])
def test_evaluation_has_the_same_samples_at_any_batch_size(windows, batch_size, samples):
    """The last batch is filled up with rows whose targets are ignored, so that all batches have one shape."""
    windows = Windows(windows.shards, T, "validation", eot=43)
    count = min(samples, len(windows))
    rows = []
    for x, y, starts in evaluation_batches(windows, batch_size, samples):
        assert x.shape == y.shape == starts.shape == (batch_size, T)
        ignored = (y == IGNORED).all(1)
        assert torch.equal(y[~ignored], x[~ignored] + 1)
        assert not ignored[0]
        rows += x[~ignored, 0].tolist()
    samples = np.array([i * len(windows) // count for i in range(count)])
    assert rows == first_ids([windows.batch(samples)[:2]])


def test_too_little_text_for_a_sample_is_an_error(tmp_path):
    write_split(tmp_path, "val", [np.arange(T, dtype=np.uint16)[1:]], eot=0)
    with pytest.raises(DataError, match=r"the validation text has 8 tokens, and one sample takes 9"):
        Windows(open_shards(tmp_path, "val", 128), T, "validation")

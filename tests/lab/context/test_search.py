"""The search for the longest context, with a fake machine in place of child processes."""

import random
from itertools import pairwise

import pytest
import torch

from lab.context import attempt
from lab.context.prober import OUT_OF_MEMORY, ProbeResult
from lab.context.search import INDICES, OCTAVE, Search, fit_step_seconds, index_of, last_that_fits, length_of
from runtime import host_memory
from tests.lab.context.machine import Machine
from tests.lab.proof.test_memory import config


def longest(machine, *overrides, mode="train", earlier=()):
    return Search(machine, config(*overrides).recipe, mode, machine.first, machine, earlier).longest()


def test_neighbouring_lengths_differ_by_less_than_one_percent():
    lengths = [length_of(index) for index in range(INDICES)]
    assert (lengths[0], lengths[OCTAVE], lengths[-1]) == (128, 256, 255 * 2**22)
    assert all(1 / 256 <= (b - a) / a <= 1 / 128 for a, b in pairwise(lengths))
    assert [index_of(length) for length in lengths] == list(range(INDICES))
    assert length_of(index_of(2 * 1048576 - 1)) == 2 * 1048576 - 8192


@pytest.mark.parametrize("limit", [0, 1, 127, 128, 777, 1500, INDICES - 2])
@pytest.mark.parametrize("start", [0, 130, 776, 777, 781, 1500, INDICES - 1])
@pytest.mark.parametrize("step", [1, 4, OCTAVE])
def test_last_that_fits_is_found_from_any_start(limit, start, step):
    """A good start takes few attempts, and no index is tried twice."""
    tried = []
    assert last_that_fits(lambda index: tried.append(index) or index <= limit, start, step) == limit
    assert len(tried) == len(set(tried)) <= abs(limit - start) / OCTAVE + 16
    if step == 4 and abs(limit - start) <= 4:
        assert len(tried) <= 5


def test_last_that_fits_if_nothing_or_everything_fits():
    assert last_that_fits(lambda index: False, 1000, 4) is None
    assert last_that_fits(lambda index: True, 1000, 4) == INDICES - 1


@pytest.mark.parametrize("seed", range(20))
def test_last_that_fits_with_random_failures(seed):
    """If some indices fit at random, the search still returns an index that fitted, while the next one did not."""
    chance, results = random.Random(seed), {}

    def fits(index):
        results[index] = index < 760 or (index < 790 and chance.random() < 0.5)
        return results[index]

    last = last_that_fits(fits, chance.choice([300, 775, 1200]), 4)
    assert (results[last], results[last + 1]) == (True, False)
    assert len(results) < 30


def test_seconds_are_linear_and_quadratic():
    rows = [{"T": T, "status": "ok", "seconds": 1e-6 * T + 1e-11 * T * T} for T in (2**17, 2**18)]
    assert fit_step_seconds(rows)(2**21) == pytest.approx(1e-6 * 2**21 + 1e-11 * 2**42)
    assert fit_step_seconds([rows[0], {"T": 2**18, "status": "oom"}])(2**21) == 0


@pytest.mark.parametrize(("predicted", "most"), [(2**16, 4), (60000, 10), (2**13, 20), (2**20, 22), (None, 30)])
def test_longest_is_found_whatever_was_predicted(predicted, most):
    """The row has every attempt, and the prediction beside the measurement."""
    machine = Machine(predicted)
    row = longest(machine)
    assert (row["context/max_train"], row["context/train/limit"]) == (machine.LIMIT, "oom")
    assert (row["context/train/seconds"], row["context/train/window"]) == (pytest.approx(1.31, rel=1e-2), None)
    assert row["context/train/headroom_gib"] == 0
    assert [attempt["T"] for attempt in row["context/train/tries"]] == machine.attempted
    assert [{"mode": "train", **attempt} for attempt in row["context/train/tries"]] == machine.logged
    assert len(machine.attempted) <= most
    assert row.get("context/train/prediction_error") == (predicted and pytest.approx(predicted / 2**16 - 1))


@pytest.mark.parametrize(
    ("opaque", "compiled", "attempts"), [([], False, 2 + 16), (["an op"], False, 2 + 2), ([], True, 2 + 2)]
)
def test_two_short_attempts_correct_an_uncertain_prediction(opaque, compiled, attempts):
    """The prediction is twice the memory, because an op's own memory was not seen, or ignores torch.compile.

    The row of a compiled model has no prediction.
    """
    machine = Machine(predicted=2**17)
    machine.first.row["opaque"] = opaque
    row = longest(machine, f"kernels.compile={str(compiled).lower()}")
    assert row["context/max_train"] == machine.LIMIT
    assert row["context/train/predicted"] == (None if compiled else machine.LIMIT // 2)
    assert ("context/train/prediction" in row) != compiled
    assert len(machine.attempted) == attempts


@pytest.mark.parametrize(("opaque", "host_tokens"), [([], None), (["an op"], None), ([], 999_999)])
def test_ranks_start_lower_because_nccl_takes_memory(opaque, host_tokens, monkeypatch):
    """The prediction is for 84 GiB, all that is free, and the attempts find that NCCL leaves 76 of the 80 that exist.

    If the host's memory ends the search, the room of the GPU does not matter.
    """
    machine = Machine()
    machine.LIMIT = 76 * 2**14
    machine.first.usable_gib, machine.first.row = 84.0, machine.prediction(84 * 2**14) | {"opaque": opaque}
    machine.first.host_tokens = host_tokens
    attempt_of_one = machine.attempt

    def attempt_of_two(*arguments):
        result = attempt_of_one(*arguments)
        result.row["room_gib"] = 76.0
        return result

    monkeypatch.setattr(machine, "attempt", attempt_of_two)
    longest_of_all = min(machine.LIMIT, host_tokens or machine.LIMIT)
    assert longest(machine)["context/max_train"] == length_of(index_of(longest_of_all))
    assert len(machine.attempted) == 2 + (1 if host_tokens else 2)


def test_the_row_of_a_full_memory_says_why():
    machine = Machine()
    machine.attempt = lambda *_: ProbeResult(failure="oom", why="T=128: the memory is full")
    assert longest(machine)["context/train/tries"][0]["why"] == "T=128: the memory is full"


def test_host_memory_ends_the_search_before_the_system_kills_an_attempt(capsys):
    """Block inputs wait on the host. It has room for fewer tokens than the GPU, and no longer length is tried."""
    machine = Machine()
    machine.first.host_tokens = 999_999
    row = longest(machine, "model.checkpointing=host")
    assert (row["context/max_train"], row["context/train/limit"]) == (length_of(index_of(999_999)), "host memory")
    assert machine.attempted == [62_499, 124_999, length_of(index_of(999_999))]
    assert "not run: the host's free memory holds the inputs of 999,999 tokens" in capsys.readouterr().out


def test_tokens_whose_block_inputs_fit_on_the_host(tmp_path, monkeypatch):
    """GPT-2 124M in bf16 keeps 12 inputs of 1536 bytes a token, and in chunks a gradient of one input more.

    Without chunks an input is one pinned allocation, which PyTorch rounds up to a power of two: here 64 MiB of 77. On
    two ranks it is two, of 32 MiB.
    """
    (tmp_path / "meminfo").write_text("MemTotal: 9999999 kB\nMemFree: 1 kB\nMemAvailable:    1000000 kB\n")
    monkeypatch.setattr(host_memory, "PROC", tmp_path)
    tokens = {}
    for checkpointing in ("block", "host", "chunks"):
        words = "model=gpt2_124m", "model.n_layer=12", "precision=bf16", f"model.checkpointing={checkpointing}"
        tokens[checkpointing] = attempt.host_tokens(config(*words).recipe, torch.device("cuda"))
    assert tokens == {"block": None, "host": 2**26 // 1536, "chunks": 972_800_000 // (13 * 1536)}
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert attempt.host_tokens(config(*words[:-1], "model.checkpointing=host").recipe, torch.device("cuda")) == 43690


def test_prediction_that_short_attempts_confirm_is_kept():
    """Memory that does not grow with T bends the line through two short lengths. Here the line is 2.3% off."""
    machine = Machine(bend=0.1)
    machine.first.row["opaque"] = ["an op"]
    assert longest(machine)["context/max_train"] == machine.LIMIT
    assert machine.attempted == [65536, 131072, machine.LIMIT, machine.LIMIT + 8192]


def test_slow_generation_computes_the_last_chunks_of_its_prompt(capsys):
    machine = Machine(quadratic=60 / Machine.LIMIT**2, minutes=1)
    row = longest(machine, "kernels.compile=true", mode="generate")
    assert (row["context/max_generate"], row["context/generate/computed"]) == (machine.LIMIT, 2**15)
    assert row["context/generate/seconds_of_full_attention"] == pytest.approx(machine.seconds(machine.LIMIT))
    assert len(machine.attempted) == 4  # torch.compile does not make its prediction uncertain
    assert f"T {machine.LIMIT:>11,} | ok | 1.311 s | peak 80.00 GiB (80.00 reserved) | the last 32,768 computed" in (
        capsys.readouterr().out
    )


def test_slow_step_runs_with_a_window():
    """A step takes a minute, the time limit of an attempt. The row has the seconds with a window and those without."""
    machine = Machine(quadratic=60 / Machine.LIMIT**2, minutes=1)
    row = longest(machine)
    assert (row["context/max_train"], row["context/train/window"]) == (machine.LIMIT, 4096)
    assert row["context/train/seconds"] == pytest.approx(1.31, rel=1e-2)
    assert row["context/train/seconds_of_full_attention"] == pytest.approx(machine.seconds(machine.LIMIT))
    assert [attempt["shortened"] for attempt in row["context/train/tries"]][:3] == [False, False, True]


def test_time_is_the_limit_if_no_attempt_can_be_shortened():
    machine = Machine(quadratic=60 / Machine.LIMIT**2, can_shorten=False, minutes=1)
    row = longest(machine)
    length = row["context/max_train"]
    assert 2 * machine.seconds(length) <= 0.8 * 60 < 2 * machine.seconds(length * 129 / 128)
    assert (row["context/train/limit"], row["context/train/window"]) == ("timeout", None)
    assert max(machine.attempted) == length  # longer ones were not run
    assert row["context/train/tries"][-1]["why"].startswith("not run: two steps would take 48 s")
    assert len(row["context/train/tries"]) == 4  # two short ones, the longest in time, and the next length


def test_only_one_attempt_takes_too_long(capsys):
    """Long steps take 1.5 times as long as the short steps suggest."""
    machine = Machine(quadratic=60 / Machine.LIMIT**2, can_shorten=False, late=1.5, minutes=1)
    row = longest(machine)
    late = [length for length in machine.attempted if 2 * machine.seconds(length) > 60]
    assert len(late) == 1
    assert row["context/max_train"] == pytest.approx(late[0] / 2**0.5, rel=1e-2)  # half the time, if it is quadratic
    assert row["context/train/limit"] == "timeout"
    assert f"T {late[0]:>11,} | timeout\n" in (out := capsys.readouterr().out)
    assert out.count("| not run: two steps would take ") == len(row["context/train/tries"]) - len(machine.attempted)


@pytest.mark.parametrize(("predicted", "quadratic"), [(2**16, 20), (2**17, 84), (1.2 * 2**16, 29)])
def test_attempt_that_takes_too_long_is_shortened(predicted, quadratic):
    """Long steps take 1.5 times as long as the short steps suggest. Memory still ends the search, not time."""
    machine = Machine(int(predicted), quadratic / Machine.LIMIT**2, late=1.5, minutes=1)
    row = longest(machine)
    assert (row["context/max_train"], row["context/train/window"]) == (machine.LIMIT, 4096)
    assert row["context/train/limit"] == "oom"
    assert row["context/train/seconds_of_full_attention"] >= 0.66 * machine.seconds(machine.LIMIT)
    full = [attempt["T"] for attempt in row["context/train/tries"] if not attempt["shortened"]]
    assert sum(2 * machine.seconds(length) > 60 for length in full) <= 1


def test_a_search_that_the_host_has_stopped_goes_on_when_it_has_more_memory():
    machine = Machine()
    machine.first.host_tokens = 999_999
    longest(machine, "model.checkpointing=host")
    again, next_length = Machine(), length_of(index_of(999_999) + 1)
    again.first.host_tokens = next_length
    row = longest(again, "model.checkpointing=host", earlier=machine.logged)
    assert (row["context/max_train"], row["context/train/limit"]) == (next_length, "host memory")


def test_an_earlier_attempt_counts_only_in_its_mode_and_kind():
    row, machine = {"T": 128, "shortened": False}, Machine(2**16)
    earlier = [{"step": 1, "mode": "train", **row, "status": "ok"}]
    for mode, wanted, found in (
        ("train", row, {**row, "status": "ok"}),
        ("generate", row, None),
        ("train", row | {"shortened": True}, None),
    ):
        search = Search(machine, config().recipe, mode, machine.first, machine, earlier)
        assert search.find_earlier(wanted) == found


def test_timeouts_and_crashes_limit_the_length():
    """Without a prediction, no short attempts show that a step will be slow."""
    machine = Machine(predicted=None, quadratic=60 / Machine.LIMIT**2, can_shorten=False, minutes=1)
    row = longest(machine)
    assert row["context/train/limit"] == "timeout"
    assert 2 * machine.seconds(row["context/max_train"]) <= 60
    row = longest(Machine(crash=2**20), mode="generate")
    assert (row["context/max_generate"], row["context/generate/limit"]) == (2**20, "failed: an illegal memory access")
    row = longest(Machine(crash=1))
    assert (row["context/max_train"], row["context/train/limit"]) == (None, "failed: an illegal memory access")
    assert "context/train/seconds" not in row


def test_the_limit_is_why_the_next_length_failed():
    """The first attempts are far too long and crash. The next length after the longest runs out of memory."""
    machine = Machine(predicted=2**13, crash=2 * Machine.LIMIT)
    assert longest(machine)["context/train/limit"] == "oom"
    assert max(machine.attempted) > machine.crash


@pytest.mark.parametrize(("reserved", "headroom"), [(75.0, 5.0), (None, 20.0)])
def test_headroom_is_what_is_not_even_reserved(reserved, headroom):
    """The allocator of a GPU reserves more than the tensors take. A CPU has no such figure."""
    machine = Machine()
    search = Search(machine, config().recipe, "train", machine.first, machine)
    search.rows = [{"T": 128, "status": "ok", "shortened": False, "peak_gib": 60.0, "reserved_gib": reserved}]
    assert search.figures_at(128)["headroom_gib"] == headroom


def test_full_memory_is_recognised_in_the_messages_of_libraries():
    """The messages come from CUDA's driver, Triton, cuBLAS, cuDNN, C++ and oneDNN."""
    messages = "CUDA_ERROR_OUT_OF_MEMORY", "Triton Error [CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
    messages += "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "std::bad_alloc", "could not create a primitive"
    messages += ("out of GPU memory with T=128",)  # of runtime.device.explain_out_of_memory()
    assert all(OUT_OF_MEMORY.search(f"RuntimeError: {message} when calling it") for message in messages)
    assert not OUT_OF_MEMORY.search("CUDA error: an illegal memory access was encountered")

"""decode=persistent: its kernel on a CPU, emulated thread by thread, and what nvcc makes of it for Hopper.

test_decode.py tests the backend as it tests every other one. Here are bf16, schedules of the threads, other numbers of
blocks, the tokens that the kernel draws itself, and what happens if a block does not answer.
"""

import faulthandler
import os
import re
import shutil
import subprocess
import zlib
from functools import partial
from math import ceil

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import decode as contract
from kernels.cache import FP8
from kernels.check import broken_rule
from kernels.decode import Model, int8, persistent, persistent_int8
from kernels.decode._cases import LLAMA
from kernels.decode._persistent import emulator, plan
from kernels.registry import KernelError, Unavailable, cpp_compiler
from kernels.sampling import NO_TOKEN, Sampling, sample_tokens, seeds_of
from tests.kernels.test_decode import dequantize

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
ONE_TOKEN = [name for name, case in contract.CASES.items() if case.get("tokens", 1) == 1 and case["batch"] <= 8]
CASES = {name: contract.CASES[name] for name in ONE_TOKEN if name != "odd_width"}
CASES |= {
    "padded_tiles": {"batch": 2, "lengths": [4, 9], "width": 40, "heads": 1, "vocab": 53},
    "idle_lanes": {"batch": 1, "lengths": [4], "width": 48, "heads": 2, "vocab": 53},  # 3 of 4 lanes have channels
    "full_words": {"batch": 1, "lengths": [4], "width": 72, "heads": 1, "vocab": 53},  # 96 hidden units a block
    "full_words_of_two": {"batch": 2, "lengths": [4, 9], "width": 72, "heads": 1, "vocab": 53},
    "eight_sequences": {"batch": 8, "lengths": [0, 9, 3, 30, 1, 2, 12, 5], "n_layer": 1},
}
SAMPLINGS = {
    "greedy": Sampling(97, temperature=0),
    "all": Sampling(97, temperature=0.7),
    "top_k": Sampling(97, top_k=20),
    "top_k of padding": Sampling(60, top_k=80),
    "top_p": Sampling(97, temperature=0.8, top_p=0.8),
    "top_p 0": Sampling(97, top_p=0.0),
    "both": Sampling(97, temperature=1.5, top_k=12, top_p=0.7),
    "cold": Sampling(97, temperature=1e-4, top_k=5, top_p=0.9),
}
BARRIER = "  synchronize_compute_warps();\n"
MISSING_BARRIER = """#include <cstdlib>
static int missing_barrier() {
  const char *number = std::getenv("MISSING_BARRIER");
  return number ? std::atoi(number) : -1;
}
"""
pytestmark = pytest.mark.skipif(not GPU and not cpp_compiler(), reason="the emulator needs a C++ compiler")


@pytest.fixture(autouse=True)
def launch(monkeypatch):
    """Let a CPU emulate 3 multiprocessors. launch(blocks=, seed=, absent=, slow=) changes the next launches."""

    def change(blocks=3, **schedule):
        if not GPU:
            monkeypatch.setattr(persistent, "multiprocessors", lambda device: blocks)
            monkeypatch.setattr(emulator, "schedule", {"seed": 0, "absent": -1, "slow": -1} | schedule)

    change()
    return change


def case_inputs(case, dtype=torch.float32, **changes):
    """Return weights, tokens and cache of a case, by its name or as a dict. The seed depends on the name."""
    sizes = CASES[case] if isinstance(case, str) else case
    seed = zlib.crc32(str(case).encode())
    return contract.inputs(**sizes | changes, dtype=dtype, device=DEVICE, seed=seed)


def copy_cache(cache):
    kv = [tuple(tensor.clone() for tensor in pair) for pair in cache.kv]
    return cache._replace(kv=kv, positions=cache.positions.clone())


def pack(weights, cache):
    return persistent.pack(Model(forward=None, weights=lambda: weights), cache)


def rows_of(cache):
    """Return the bytes of a cache."""
    return torch.cat([tensor.view(torch.uint8).flatten() for pair in cache.kv for tensor in pair])


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.bfloat16) for case in CASES] + [(case, torch.float32) for case in CASES if case not in ONE_TOKEN],
)
def test_against_float64(case, dtype):
    """Logits and new rows of the cache follow the rule of kernels/check.py. Other rows keep their bits.

    test_decode.py has the contract's cases in fp32.
    """
    arguments = case_inputs(case, dtype)
    weights, tokens, cache = arguments.values()
    exact, eager, own = contract.to_float64(arguments), copy_cache(cache), copy_cache(cache)
    truth = {"logits": contract.reference(**exact)}
    expected = {"logits": contract.reference(weights, tokens, eager)}
    got = {"logits": persistent.decode(pack(weights, own), tokens, own)}
    sequences, row = torch.arange(len(tokens)), cache.positions % cache.rows
    for layer, pair in enumerate(own.kv):
        for i, stored in enumerate(pair):
            restored = stored.view(torch.uint8).clone()
            restored[sequences, row] = cache.kv[layer][i].view(torch.uint8)[sequences, row]
            assert torch.equal(restored, cache.kv[layer][i].view(torch.uint8))
            new, eager_new, exact_new = (
                side[layer][i].float()[sequences, row] for side in (own.kv, eager.kv, exact["cache"].kv)
            )
            if stored.dtype == FP8:  # a value between two numbers of fp8 may become either
                torch.testing.assert_close(new, eager_new, rtol=1 / 8, atol=2**-9 if dtype == torch.float32 else 2**-6)
                continue
            for side, value in ((got, new), (expected, eager_new), (truth, exact_new.double())):
                side[f"{layer} {i}"] = value
    reason = broken_rule(got, expected, truth, {"w": weights.wte}, dtype)
    assert reason is None, reason


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.bfloat16) for case in ("one", "ragged", "gqa", "padded_tiles", "eight_sequences", "llama", "qwen3")]
    + [(case, torch.float32) for case in ("ragged", "padded_tiles")],
)
def test_int8_is_the_model_with_rounded_weights(case, dtype):
    """The logits follow the rule if the truth has the weights integer * scale, and eager these weights in `dtype`."""
    arguments = case_inputs(case, dtype)
    weights, tokens, cache = arguments.values()
    quantized = weights.map_matrices(int8.quantize)
    exact, rounded = (quantized.map_matrices(partial(dequantize, dtype=kind)) for kind in (torch.float32, dtype))
    truth = contract.reference(**contract.to_float64(arguments | {"weights": exact}))
    eager = contract.reference(rounded, tokens, copy_cache(cache))
    packed = persistent_int8.pack(Model(forward=None, weights=lambda: weights), cache)
    assert persistent_int8.weight_bytes(packed) == int8.weight_bytes(quantized)
    own = persistent_int8.decode(packed, tokens, copy_cache(cache))
    reason = broken_rule({"y": own}, {"y": eager}, {"y": truth}, {"w": weights.wte}, dtype)
    assert reason is None, reason


@pytest.mark.skipif(GPU, reason="the sizes are for three emulated multiprocessors")
def test_a_pass_larger_than_the_ring(monkeypatch):
    """A pass of fc has 2.5 pieces, and the ring at most 2.2. A pass of fc_proj is as large, in 10 pieces.

    So a block must release pieces before the pass is complete. It takes four pieces of fc_proj at once, and two at the
    end.
    """
    monkeypatch.setattr(plan, "PIECE_BYTES", 1)  # as few tiles as there are warps
    monkeypatch.setattr(plan, "MOST_FC_ROWS", 214)  # in one pass
    arguments = case_inputs({"batch": 1, "lengths": [5], "width": 160, "heads": 2, "vocab": 53})
    plans = plan.make_plans(arguments["weights"], 3, 4)
    assert (plans["FC"], plans["FC_PROJ"]) == (plan.Plan(214, 1, 4), plan.Plan(54, 1, 4))  # of 10 and 40 tiles
    piece, scratch = 214 * 4 * 64, 23_000
    monkeypatch.setattr(persistent, "SHARED_BYTES", scratch + 2 * piece)
    packed = pack(arguments["weights"], arguments["cache"])
    expected = contract.reference(**contract.to_float64(arguments))
    logits = persistent.decode(packed, arguments["tokens"], arguments["cache"])
    torch.testing.assert_close(logits, expected.float(), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(persistent, "SHARED_BYTES", scratch + 2 * piece - 10_000)
    with pytest.raises(Unavailable, match="shared memory"):  # so the ring had at most 10 KB more than two pieces
        pack(arguments["weights"], arguments["cache"])


@pytest.mark.skipif(not GPU, reason="an emulator is too slow for this width")
def test_wide_model_on_a_gpu():
    """At the width of 1558M a pass of fc_proj takes most of the ring."""
    arguments = case_inputs({"batch": 1, "lengths": [9], "width": 1600, "heads": 25}, torch.bfloat16)
    expected = contract.reference(**contract.to_float64(arguments)).float()
    packed = pack(arguments["weights"], arguments["cache"])
    logits = persistent.decode(packed, arguments["tokens"], arguments["cache"])
    eager = contract.reference(**arguments).float()  # it appends the same keys once more
    error, own = (eager - expected).norm(), (logits.float() - expected).norm()
    assert own <= 2 * error


def draw_one_by_one(packed, tokens, cache, seeds, sampling, steps, stops=()):
    """Return what generate_tokens() should: by `steps` calls of decode(), with a draw in PyTorch after each."""
    drawn, stopped = [], torch.zeros(len(tokens), dtype=torch.bool, device=DEVICE)
    for _ in range(steps):
        before = copy_cache(cache)
        logits = persistent.decode(packed, tokens, cache)[:, 0]
        for pair, old in zip(cache.kv, before.kv, strict=True):
            for tensor, value in zip(pair, old, strict=True):
                tensor.view(torch.uint8)[stopped] = value.view(torch.uint8)[stopped]
        new = sample_tokens(logits, seeds, cache.positions + 1, sampling)
        new = torch.where(stopped, drawn[-1] if drawn else new, new)
        drawn.append(new)
        stopped |= torch.isin(new, torch.tensor(stops, dtype=torch.int64, device=DEVICE))
        tokens = torch.where(stopped[:, None], tokens, new[:, None])
        cache = cache._replace(positions=torch.where(stopped, cache.positions, cache.positions + 1))
    return torch.stack(drawn, dim=1)


@pytest.mark.parametrize(
    ("case", "sampling"),
    [("ragged", sampling) for sampling in SAMPLINGS]
    + [(case, sampling) for case in ("one", "fp8_ring") for sampling in ("greedy", "all", "both")]
    + [("llama", "greedy"), ("qwen3_ring", "both")],
)
def test_one_launch_draws_the_tokens_of_single_steps(case, sampling, launch):
    """Token for token, and it leaves the same cache. It changes neither its tokens nor its positions."""
    weights, tokens, cache = case_inputs(case).values()
    packed = pack(weights, cache)
    for seed in (0, 5) if case == "ragged" else (5,):
        launch(seed=seed)
        own, other, seeds = copy_cache(cache), copy_cache(cache), seeds_of(seed, len(tokens), DEVICE)
        inputs = tokens.clone(), own.positions.clone()
        drawn = persistent.generate_tokens(packed, tokens, own, seeds, SAMPLINGS[sampling], 4, ())
        expected = draw_one_by_one(packed, tokens, other, seeds, SAMPLINGS[sampling], 4)
        assert drawn.tolist() == expected.tolist()
        assert torch.equal(rows_of(own), rows_of(other))
        assert torch.equal(inputs[0], tokens)
        assert torch.equal(inputs[1], own.positions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_vocabulary_is_drawn_in_larger_groups(dtype, monkeypatch):
    """Groups of 32 logits give the tokens of groups of 16."""
    weights, tokens, cache = case_inputs("ragged", dtype).values()
    small = pack(weights, cache)
    monkeypatch.setattr(plan, "LARGE_VOCAB", 96)
    large = pack(weights, cache)
    assert plan.group_size(weights) == 32
    for name in ("greedy", "all", "both"):
        draw = tokens, cache, seeds_of(7, 3, DEVICE), SAMPLINGS[name], 2, ()
        assert torch.equal(*(persistent.generate_tokens(packed, *draw) for packed in (small, large)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_top_k_of_equal_logits(dtype, launch):
    """All are 0. None is larger than another one, so the kernel draws among all. Every thread has groups of logits."""
    vocab = 9000 if GPU else 2100
    sizes = {"batch": 2, "lengths": [5, 9], "width": 32, "vocab": vocab}
    weights, tokens, cache = contract.inputs(**sizes, dtype=dtype, device=DEVICE).values()
    packed, seeds = pack(weights._replace(head=torch.zeros_like(weights.head)), cache), seeds_of(0, 2, DEVICE)
    expected = draw_one_by_one(packed, tokens, copy_cache(cache), seeds, Sampling(vocab), 3)
    for sampling in (Sampling(vocab, top_k=5), Sampling(vocab, top_k=5, top_p=0.5)):
        drawn = persistent.generate_tokens(packed, tokens, copy_cache(cache), seeds, sampling, 3, ())
        assert drawn.tolist() == expected.tolist()


@pytest.mark.parametrize("stopping", [1, 3])
def test_a_sequence_that_stops_repeats_its_token(stopping, launch):
    """It appends nothing more to the cache. The launch ends early if all sequences have stopped."""
    weights, tokens, cache = case_inputs("ragged").values()
    packed, seeds, sampling = pack(weights, cache), seeds_of(2, 3, DEVICE), SAMPLINGS["all"]
    free = persistent.generate_tokens(packed, tokens, copy_cache(cache), seeds, sampling, 8, ()).tolist()
    stops = tuple({row[2] for row in free[:stopping]})
    other = copy_cache(cache)
    expected = draw_one_by_one(packed, tokens, other, seeds, sampling, 8, stops).tolist()
    for seed in (0, 1, 2):
        launch(seed=seed)
        own = copy_cache(cache)
        drawn = persistent.generate_tokens(packed, tokens, own, seeds, sampling, 8, stops)
        assert drawn.tolist() == expected
        assert torch.equal(rows_of(own), rows_of(other))
    assert any(row[-1] == row[-2] for row in drawn.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sequence_whose_logits_are_nan_stops(dtype):
    """The second sequence reads NaN at position 19, in the third step: it draws NO_TOKEN, and appends nothing more.

    The other sequences draw the tokens that they draw without it.
    """
    weights, tokens, cache = case_inputs("ragged", dtype).values()
    assert cache.positions.tolist() == [0, 17, 30]
    packed, seeds = pack(weights, cache), seeds_of(2, 3, DEVICE)

    def draw(sampling):
        own = copy_cache(cache)
        return persistent.generate_tokens(packed, tokens, own, seeds, sampling, 5, ()).tolist(), own

    clean = {name: draw(sampling)[0] for name, sampling in SAMPLINGS.items()}
    packed.tensors["wpe"][19] = torch.nan
    for name, (first, second, third) in clean.items():
        drawn, own = draw(SAMPLINGS[name])
        assert drawn == [first, [*second[:2], NO_TOKEN, NO_TOKEN, NO_TOKEN], third], name
        for pair, before in zip(own.kv, cache.kv, strict=True):
            assert all(map(torch.equal, (rows[1, 20:] for rows in pair), (rows[1, 20:] for rows in before)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sampling", ["greedy", "all", "top_k", "both"])
def test_a_logit_of_inf_draws_no_token(sampling, dtype):
    """A logit of -inf has probability 0, and the others are drawn."""
    weights, tokens, cache = case_inputs("one", dtype).values()
    width = weights.head.shape[1]
    head = torch.cat((3e38 * torch.eye(width, device=DEVICE), torch.ones(97 - width, width, device=DEVICE))).to(dtype)
    logits = persistent.decode(pack(weights._replace(head=head), cache), tokens, copy_cache(cache))[0, 0]
    for value, is_error in ((torch.inf, True), (-torch.inf, False)):
        with_value = torch.where((logits == value)[:, None], head, head[-1])
        packed = pack(weights._replace(head=with_value), cache)
        assert (persistent.decode(packed, tokens, copy_cache(cache)) == value).any()
        generate = packed, tokens, copy_cache(cache), seeds_of(0, 1, DEVICE), SAMPLINGS[sampling], 1, ()
        assert (persistent.generate_tokens(*generate).item() == NO_TOKEN) == is_error


@pytest.mark.skipif(GPU, reason="the emulator has schedules")
@pytest.mark.parametrize("sampling", [Sampling(61, top_p=0.9), Sampling(61, temperature=0)], ids=["top_p", "greedy"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)], ids=str)
def test_any_schedule_of_the_threads_gives_the_same_bits(dtype, sampling, launch):
    """Also with more blocks, some of which have no rows of the projections, and if one of these is late."""
    arguments = case_inputs({"batch": 2, "lengths": [4, 11], "width": 16, "heads": 2, "vocab": 61}, dtype)
    weights, tokens, cache = arguments.values()
    results = []
    for blocks, schedules in {3: [{"seed": 1}, {"seed": 2}, {"slow": 0}], 5: [{}, {"seed": 3}, {"slow": 4}]}.items():
        launch(blocks)
        packed = pack(weights, cache)
        assert packed.blocks == blocks
        for schedule in schedules:
            launch(blocks, **schedule)
            own = copy_cache(cache)
            drawn = persistent.generate_tokens(packed, tokens, own, seeds_of(1, 2), sampling, 4, ())
            results.append((drawn.tolist(), rows_of(own)))
    assert ceil(16 / ceil(16 / 5)) == 4  # so the fifth block has no rows of the projections
    for i, (drawn, rows) in enumerate(results):
        assert drawn == results[0][0]
        assert torch.equal(rows, results[i // 3 * 3][1])  # the number of blocks changes the order of sums


def test_a_sequence_does_not_depend_on_the_others(launch):
    """Other tokens and lengths of the other sequences change no bits of it. With 9 blocks it has two splits."""
    launch(9)
    sizes = {"batch": 2, "lengths": [300, 280], "rows": 320, "n_layer": 1}
    weights, tokens, cache = case_inputs(sizes).values()
    packed, other = pack(weights, cache), copy_cache(cache)
    logits = persistent.decode(packed, tokens, copy_cache(cache))
    other.positions[1] = 3
    changed = persistent.decode(packed, torch.stack((tokens[0], tokens[1] + 1)) % 97, other)
    assert torch.equal(logits[0], changed[0])
    assert not torch.equal(logits[1], changed[1])


@pytest.mark.parametrize("case", ["many_keys", {"batch": 2, "lengths": [300, 20], "rows": 320, "heads": 1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_splits_of_the_keys(case, dtype, launch):
    """With 9 blocks, 300 keys of 2 heads, or of 2 sequences, have 4 splits, and 20 keys have one."""
    launch(9)
    arguments = case_inputs(case, dtype)
    weights, tokens, cache = arguments.values()
    truth = {"y": contract.reference(**contract.to_float64(arguments))}
    eager = {"y": contract.reference(weights, tokens, copy_cache(cache))}
    own = {"y": persistent.decode(pack(weights, cache), tokens, copy_cache(cache))}
    assert broken_rule(own, eager, truth, {"w": weights.wte}, dtype) is None


@pytest.mark.parametrize(("case", "fc_rows", "fc_passes"), [("ragged", 11, 8), ("llama", 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_pieces_and_passes_change_no_bits(case, fc_rows, fc_passes, dtype, monkeypatch):
    """A product in several pieces, and fc and a head in several passes, add the same numbers in the same order."""
    weights, tokens, cache = case_inputs(case, dtype, n_layer=1).values()
    expected = persistent.decode(pack(weights, cache), tokens, copy_cache(cache))
    monkeypatch.setattr(plan, "PIECE_BYTES", 1)
    monkeypatch.setattr(plan, "MOST_HEAD_ROWS", 7)
    monkeypatch.setattr(plan, "MOST_FC_ROWS", 12)
    plans = plan.make_plans(weights, blocks=3, warps=4)
    assert plans["HEAD"].passes == 5
    assert plans["FC"][:2] == (fc_rows, fc_passes)
    assert plans["FC_PROJ"].tiles == 4
    if not GPU:
        assert torch.equal(persistent.decode(pack(weights, cache), tokens, copy_cache(cache)), expected)


@pytest.mark.skipif(GPU, reason="on a GPU no block is absent")
def test_a_block_that_does_not_answer_is_an_error(launch, monkeypatch):
    """The other blocks give up after the timeout, and the next launch is right again."""
    monkeypatch.setattr(persistent, "TIMEOUT_NS", 3_000_000)
    weights, tokens, cache = case_inputs("ragged").values()
    packed = pack(weights, cache)
    generate = [packed, tokens, cache, seeds_of(0, 3), SAMPLINGS["greedy"], 3, ()]
    expected = persistent.generate_tokens(*generate)
    for absent in (0, 2):
        launch(absent=absent)
        assert (persistent.generate_tokens(*generate) == contract.FAILED_LAUNCH).all()
        with pytest.raises(KernelError, match=r"a block waited 0\.003 s for another one") as error:
            persistent.decode(*generate[:3])
        assert "\n" not in str(error.value)
        launch()
        assert torch.equal(persistent.generate_tokens(*generate), expected)


@pytest.mark.exhaustive
@pytest.mark.skipif(GPU, reason="the emulator has schedules")
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("persistent.cu", "ragged"),
        ("persistent.cu", "llama"),
        ("products.cuh", "ragged"),
        ("attention.cuh", "ragged"),
        ("sampling.cuh", "ragged"),
    ],
)
def test_the_emulator_notices_a_missing_barrier(name, case, launch, monkeypatch, tmp_path):
    """Without any one of the block's barriers a launch hangs, crashes, or leaves another result, in some schedule.

    In a copy of the sources, the barrier whose number is in MISSING_BARRIER is passed over. RMSNorm returns before
    the second barrier of normalise().
    """
    shutil.copytree(emulator.FOLDER.parent, tmp_path / "decode")
    numbers = {}  # file name -> the numbers of its barriers
    for path in sorted((tmp_path / "decode").rglob("*.cu*")):
        first, *others = path.read_text().split(BARRIER)
        numbers[path.name] = range(start := sum(map(len, numbers.values())), start + len(others))
        conditional = (
            f"if (missing_barrier() != {i}) {BARRIER}{part}" for i, part in zip(numbers[path.name], others, strict=True)
        )
        path.write_text("".join([MISSING_BARRIER if path.name == "persistent.cu" else "", first, *conditional]))
    weights, tokens, cache = case_inputs(case).values()
    samplings = [SAMPLINGS["both"]]  # its top_k is more than there are groups of logits
    if name == "sampling.cuh":
        samplings.append(Sampling(97, top_k=6))  # fewer
    monkeypatch.setattr(persistent, "TIMEOUT_NS", 4_000_000)

    def outcome(sampling, seed, stops):
        launch(seed=seed)
        own = copy_cache(cache)
        try:
            packed = pack(weights, own)
            drawn = persistent.generate_tokens(packed, tokens, own, seeds_of(2, 3), sampling, 3, stops)
        except (KernelError, AssertionError) as error:
            return str(error)
        return drawn.tolist(), rows_of(own).tolist()

    def differs(run, expected, missing=-1):
        """In a process of its own, because without a barrier it may also crash."""
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            os.environ["MISSING_BARRIER"] = str(missing)
            try:
                os._exit(outcome(*run) != expected)
            finally:
                os._exit(1)
        return os.waitpid(child, 0)[1] != 0

    stops = tuple({row[2] for row in outcome(samplings[0], 0, ())[0]})  # with these the launch ends early
    settings = [(samplings[0], stops), *((sampling, ()) for sampling in samplings)]
    runs = {run: outcome(*run) for run in ((sampling, seed, ids) for sampling, ids in settings for seed in range(4))}
    monkeypatch.setattr(emulator, "FOLDER", tmp_path / "decode/_persistent")
    emulator.compile_for_cpu.cache_clear()
    pack(weights, copy_cache(cache))  # compile once, and not in each process
    assert not any(differs(*run) for run in [*runs.items()][:: len(runs) // len(settings)])  # one run of each setting
    not_reached = numbers[name][2] if case == "llama" else None
    for i in set(numbers[name]) - {not_reached}:
        assert any(differs(*run, missing=i) for run in runs.items()), f"{name}: barrier {i} is not needed"
    emulator.compile_for_cpu.cache_clear()


def test_what_the_kernel_cannot_do_is_refused_in_one_line(monkeypatch):
    def reason(**sizes):
        weights, _, cache = case_inputs(
            {"batch": 2, "lengths": [3]} | sizes, sizes.pop("dtype", torch.float32)
        ).values()
        with pytest.raises(Unavailable) as error:
            pack(weights, cache)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "up to 8 sequences, not 9" in reason(batch=9)
    assert "a multiple of 8 channels a head, and up to 256 channels, not 20" in reason(width=60, heads=3)
    weights, tokens, cache = case_inputs("one", torch.float16).values()
    with pytest.raises(Unavailable, match="supports float32 and bfloat16"):
        pack(weights, cache)
    weights, tokens, cache = case_inputs("one").values()
    with pytest.raises(Unavailable, match="one token at a time, not 2"):
        persistent.decode(pack(weights, cache), tokens.expand(1, 2), cache)
    with pytest.raises(Unavailable, match="contiguous"):
        pack(weights, cache._replace(kv=[(k.transpose(1, 2), v) for k, v in cache.kv]))
    monkeypatch.setattr(persistent, "SHARED_BYTES", 200)
    assert "200 bytes of shared memory are too few for 2 sequences" in reason()


def test_it_records_its_phases(monkeypatch):
    monkeypatch.setattr(persistent, "TIMING", True)
    weights, tokens, cache = case_inputs("one").values()
    packed, sampling = pack(weights, cache), SAMPLINGS["greedy"]
    persistent.generate_tokens(packed, tokens, cache, seeds_of(0, 1, DEVICE), sampling, 2, ())
    records = 2 * (len(persistent.INTERVALS) * len(weights.layers) + len(persistent.LAST_INTERVALS))
    timeline = packed.tensors["timeline"].view(torch.int64).tolist()
    assert timeline[:records] == sorted(timeline[:records])
    assert timeline[records - 1] > 0
    assert not any(timeline[records:])


def test_it_runs_on_a_cpu_for_tests_only(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert persistent.unavailable(cpu) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "compute capability 9.0" in persistent.unavailable(cpu)


LLAMA_1B = {"width": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192, "n_layer": 16, "vocab": 128256, **LLAMA}
SIZES = contract.SHAPES | {"llama-3.2-1b": {"lengths": [128], **LLAMA_1B}}


def defined_on_an_h200(shape, batch, kv_dtype=None, quantize=None):
    """Return the options -D of a shape in bf16 on 132 multiprocessors, and the plan of fc. No tensor has memory."""
    with FakeTensorMode():
        sizes = SIZES[shape] | {"batch": batch, "kv_dtype": kv_dtype, "rows": 256}
        weights, _, cache = contract.inputs(**sizes, dtype=torch.bfloat16).values()
        weights = weights.map_matrices(quantize) if quantize else weights
    weights = weights._replace(wte=torch.empty(weights.wte.shape, dtype=torch.bfloat16, device="meta"))  # not on a CPU
    blocks, warps = plan.count_blocks(weights, 132), plan.count_warps(weights, batch)
    plans = plan.make_plans(weights, blocks, warps)
    defined = plan.sizes(weights, cache, blocks, warps, plans)
    return defined | {name: getattr(persistent, name) for name in persistent.CONSTANTS}


def test_only_a_large_layer_has_two_copies_in_flight():
    """A block's bytes of a layer: 942 KB of Llama-3.2-1B, and 246 KB of Qwen3-0.6B."""
    flying = {shape: defined_on_an_h200(shape, batch=1)["FLYING"] for shape in SIZES}
    assert flying == {shape: 1 + (shape in ("1558m", "llama-3.2-1b")) for shape in SIZES}


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize(
    ("shape", "batch", "kv_dtype", "quantize"),
    [
        ("124m", 1, None, None),
        pytest.param("124m", 8, FP8, None, marks=pytest.mark.exhaustive),
        pytest.param("1558m", 1, None, int8.quantize, marks=pytest.mark.exhaustive),
        pytest.param("qwen3-0.6b", 1, None, None, marks=pytest.mark.exhaustive),
        pytest.param("llama-3.2-1b", 1, None, None, marks=pytest.mark.exhaustive),
    ],
)
def test_the_kernel_fits_into_a_multiprocessor(shape, batch, kv_dtype, quantize, tmp_path):
    """nvcc compiles it for sm_90 almost without spills. Without forget() 1558M has 68 to 184 bytes."""
    defined = defined_on_an_h200(shape, batch, kv_dtype, quantize)
    warps = defined["WARPS"]
    assert 8 <= warps <= 11
    options = [f"-D{name}={value}" for name, value in defined.items()]
    command = ["nvcc", "-std=c++17", "-arch=sm_90", "-cubin", "-Xptxas=-v", *options, "-o", tmp_path / "kernel.cubin"]
    done = subprocess.run([*command, persistent.SOURCE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spilled = int(done.stderr.split("frame, ")[1].split(" bytes spill stores")[0])
    assert spilled <= 16
    registers = int(done.stderr.split("Used ")[1].split(" registers")[0])
    assert registers <= 65_536 // (128 * ceil((warps + 1) / 4))  # warps get registers in fours
    assert persistent.SHARED_BYTES == 227 * 1024


def test_nvrtc_takes_every_lambda():
    """NVRTC, which compiles the kernel on a GPU, treats a lambda with `auto` parameters as host code, and refuses it.

    nvcc and the emulator's compiler accept such a lambda.
    """
    sources = [persistent.SOURCE, *emulator.FOLDER.glob("*.cuh")]
    parameters = [
        text for source in sources for text in re.findall(r"\]\s*(\([^()]*\)) *\{", source.read_text("utf-8"))
    ]
    assert len(parameters) > 20
    assert [text for text in parameters if re.search(r"\bauto\b", text)] == []


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("shape", ["smollm2-135m", "qwen3-0.6b", "llama-3.2-1b"])
def test_shapes_of_today_fit_into_an_h200(shape, batch):
    """Every block has rows of fc, gate and up in pairs, and the assertions of persistent.cu hold.

    One of them demands that the ring in shared memory has room for two pieces of weights.
    """
    defined, hidden = defined_on_an_h200(shape, batch), SIZES[shape]["hidden"]
    rows, passes, blocks = defined["FC_ROWS"], defined["FC_PASSES"], defined["BLOCKS"]
    assert rows % 2 == 0
    assert 120 <= blocks <= 132
    assert rows * passes * (blocks - 1) < 2 * hidden <= rows * passes * blocks
    options = [f"-D{name}={value}" for name, value in defined.items()]
    command = [cpp_compiler(), *emulator.FLAGS, "-fsyntax-only", *options, str(persistent.SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_row_of_a_matrix_has_a_block():
    """arrange_matrix() puts W[n, k] where the kernel looks for it: block, pass, tile, row, column."""
    weight = torch.arange(29 * 40, dtype=torch.float32).view(29, 40) + 1
    chosen = plan.make_plan(plan.Product("HEAD", weight, None, None), columns=16, blocks=2, warps=1, most_rows=7)
    assert (chosen.rows, chosen.passes, chosen.share) == (5, 3, 15)
    arranged = plan.arrange_matrix(chosen, weight, columns=16, order=range(8), blocks=2).view(2, 3, 3, 5, 16)
    for n, k in ((0, 0), (4, 39), (5, 16), (17, 31), (28, 7)):
        block, row = divmod(n, 15)
        assert arranged[block, row // 5, k // 16, row % 5, k % 16] == weight[n, k]
    assert (arranged != 0).sum() == weight.numel()
    weight, order = torch.arange(16).view(1, 16), [0, 4, 1, 5, 2, 6, 3, 7]
    arranged = plan.arrange_matrix(plan.Plan(1, 1, 1), weight, columns=16, order=order, blocks=1)
    assert arranged.tolist() == [[8 * group + i for group in range(2) for i in order]]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "batch", "length"),
    [
        *(("124m", 1, 128), ("124m", 1, 1000), ("124m", 8, 128), ("124m", 3, 500)),
        *(("smollm2-135m", 1, 128), ("smollm2-135m", 8, 500)),
        *(("qwen3-0.6b", 1, 128), ("qwen3-0.6b", 3, 500)),
    ],
)
def test_whole_models_on_a_gpu(shape, batch, length):
    """A model in bf16 follows the rule. A launch of 40 tokens draws each token as PyTorch does after the same tokens.

    Scores differ in their last bits, and with top_k PyTorch may leave out one of two equal logits.
    """
    sizes = contract.SHAPES[shape] | {"batch": batch, "lengths": [length], "rows": 1088}
    n_vocab = sizes["vocab"] - 47  # GPT-2 has 50,257 tokens, and 47 rows of padding
    arguments = case_inputs(sizes, torch.bfloat16)
    weights, tokens, cache = arguments.values()
    packed = pack(weights, cache)
    truth = {"y": contract.reference(**contract.to_float64(arguments))}
    eager = {"y": contract.reference(weights, tokens, copy_cache(cache))}
    own = {"y": persistent.decode(packed, tokens, copy_cache(cache))}
    reason = broken_rule(own, eager, truth, {"w": weights.wte}, torch.bfloat16)
    assert reason is None, reason
    for sampling in (Sampling(n_vocab, 0), Sampling(n_vocab, 0.8, 200), Sampling(n_vocab, 1.0, 0, 0.9)):
        seeds, one, other, equal = seeds_of(3, batch, DEVICE), copy_cache(cache), copy_cache(cache), 0
        drawn = persistent.generate_tokens(packed, tokens, one, seeds, sampling, 40, ())
        last = tokens
        for t in range(40):
            logits = persistent.decode(packed, last, other)[:, 0, : sampling.n_vocab]
            expected = sample_tokens(logits, seeds, other.positions + 1, sampling)
            last = drawn[:, t : t + 1]
            greedy = logits.gather(1, last)[:, 0] == logits.amax(1)
            equal += (greedy if sampling.temperature == 0 else expected == drawn[:, t]).sum().item()
            other.positions.add_(1)
        assert equal >= 0.98 * drawn.numel()
        assert torch.equal(rows_of(one), rows_of(other))

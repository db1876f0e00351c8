"""Our Triton kernels: they compile for GPUs that are not here, save few bytes, and take the right code path.

test_backends.py tests their results, on a CPU in Triton's interpreter.
"""

import functools
import importlib
import math
import random
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from triton.language import constexpr

from kernels.check import exact_results
from kernels.loss import cap_logits
from kernels.registry import AttnConfig, KernelsConfig, Unavailable, contract, load, missing_argument
from kernels.tuned import override_tables
from lab.report import compiled_table
from model.config import GPTConfig
from model.divergence import why_nan
from model.step import build
from tests.kernels import compiled
from tests.kernels.test_backends import assert_as_good_as_eager, load_or_skip, outputs_and_gradients

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
triton = pytest.importorskip("triton", reason="Triton is for Linux")
if torch.cuda.is_available():
    DTYPES, VOCABS = [torch.float32, torch.bfloat16], [131, 16384]
else:
    DTYPES, VOCABS = [torch.float32], [131]  # Triton's interpreter does not support bf16
ALWAYS = (90,)  # capabilities. All six take 5 minutes on one core


@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", compiled_table.GPUS)
def test_kernels_compile_and_do_not_spill(capability):
    """compile_triton.py compiles every kernel for this compute capability. results/compiled.json has what they need.

    While the file is of this code and this version, only the capabilities in ALWAYS are compiled again.
    """
    version, sources, usage = compiled_table.read_usage()
    if (version, sources) == (triton.__version__, compiled.digest_sources()) and capability not in ALWAYS:
        pytest.skip("results/compiled.json is up to date")
    code, text = compiled.compile_for(capability)
    assert code == 0, text
    used = compiled.read_lines(text)
    assert used.keys() == usage[capability].keys()
    if version == triton.__version__:
        assert used == usage[capability], "results/compiled.json is stale: run make compiled"


@pytest.mark.parametrize("impl", ["triton", "triton_recompute"])
@pytest.mark.parametrize("residual", [True, False])
def test_tensors_that_norm_saves(impl, residual):
    """Besides its inputs and y, triton saves the new stream, mean and rstd. triton_recompute saves only rstd.

    Without a residual the stream is x itself.
    """
    inputs = contract("norm").inputs((10, 24), residual=residual, dtype=torch.float32, device=DEVICE)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        y, stream = load("norm", impl, DEVICE)(**inputs)
    not_new = {tensor.data_ptr() for tensor in (y, *inputs.values()) if isinstance(tensor, torch.Tensor)}
    if residual:
        assert (stream.data_ptr() in saved) == (impl == "triton")
    numbers_per_row = sorted(tensor.numel() // 10 for pointer, tensor in saved.items() if pointer not in not_new)
    if impl == "triton_recompute":
        assert numbers_per_row == [1]
    else:
        assert numbers_per_row == ([1, 1, 24] if residual else [1, 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("weight", "ratio", "nan"), [(2**-10, 1.0, False), (-(2**-10), 1.01, True), (0.0, 1.0, True)])
def test_norm_recompute_refuses_imprecise_gradients(dtype, weight, ratio, nan):
    """`ratio` is the |bias / weight| of a column, divided by the largest that the dtype allows."""
    from kernels.norm import triton_recompute

    limit = 1024 if dtype == torch.float32 else 16
    inputs = contract("norm").inputs((9, 64), dtype=dtype, device=DEVICE)
    with torch.no_grad():
        inputs["weight"][5], inputs["bias"][5] = weight, weight * limit * ratio
    reason = triton_recompute.why_nan(inputs["weight"], inputs["bias"])
    results = outputs_and_gradients(load("norm", "triton_recompute", DEVICE), inputs)
    assert results["d_x"].isnan().all() if nan else results["d_x"].isfinite().all()
    assert results["d_weight"][5].isnan() == nan
    assert results["out0"].isfinite().all()
    assert results["d_bias"].isfinite().all()
    assert (reason is not None) == nan
    if nan:
        assert "and 1 of 64 are too small" in reason
    else:  # rounding y moves xhat by up to eps / 2 of |xhat| + |bias / weight|; |xhat| and |dy| are below 5
        # in all 9 rows. The last term is the rounding of dweight
        error = (
            results["d_weight"][5].double() - exact_results("norm", "triton_recompute", inputs)["d_weight"][5]
        ).abs()
        assert error <= torch.finfo(dtype).eps / 2 * (9 * 5 * (5 + limit) + 9 * 5 * 5)


def test_a_rope_that_recomputes_saves_no_input():
    """With weights, triton saves qkv, 9 heads of 8 channels a token; triton_recompute 6 rstd a token. See the rule."""
    inputs = contract("rope").inputs((2, 5, 9, 8), kv_heads=3, qk_norm=True, dtype=torch.float32, device=DEVICE)
    for impl, saves_input, numbers_per_token in (("triton", True, []), ("triton_recompute", False, [6])):
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.setdefault(t.data_ptr(), t), lambda t: t):
            out = load("rope", impl, DEVICE)(**inputs)
        not_new = {tensor.data_ptr() for tensor in (out, *inputs.values()) if isinstance(tensor, torch.Tensor)}
        assert (inputs["qkv"].data_ptr() in saved) == saves_input
        assert [tensor.numel() / 10 for pointer, tensor in saved.items() if pointer not in not_new] == numbers_per_token


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("weight", "ratio", "nan"), [(2**-10, 1.0, False), (-(2**-10), 1.01, True), (0.0, 1.0, True)])
def test_rope_recompute_refuses_imprecise_gradients(dtype, weight, ratio, nan):
    """`ratio` is that of the weights of two channels that turn together, divided by the largest that is allowed."""
    from kernels.rope import triton_recompute

    limit = 1024 if dtype == torch.float32 else 16
    inputs = contract("rope").inputs((1, 9, 5, 16), kv_heads=1, qk_norm=True, dtype=dtype, device=DEVICE)
    with torch.no_grad():
        inputs["q_weight"][3], inputs["q_weight"][11] = weight, weight * limit * ratio
    reason = triton_recompute.why_nan(inputs["q_weight"], inputs["k_weight"])
    results = outputs_and_gradients(load("rope", "triton_recompute", DEVICE), inputs)
    heads = results["d_qkv"].isnan().flatten(3).all(3).all(1).all(0).tolist()
    assert heads == [nan, nan, nan, False, False]  # queries; a key and a value
    assert results["d_q_weight"][3].isnan() == nan
    assert results["out0"].isfinite().all()
    assert results["d_k_weight"].isfinite().all()
    assert (reason is not None) == nan
    if nan:
        assert f"and {1 if weight else 2} of 32 are too small" in reason
    else:  # rounding moves both channels by eps / 2 of the larger one, so the smaller one's xhat by `limit` times that
        # in 9 rows of 3 heads; |xhat| is below 4 and |dy| below 5. The last term is the rounding of dweight
        exact = exact_results("rope", "triton_recompute", inputs)["d_q_weight"][3]
        error = (results["d_q_weight"][3].double() - exact).abs()
        assert error <= torch.finfo(dtype).eps / 2 * 27 * 5 * (2 * 4 * limit + 4)


@pytest.mark.parametrize(
    ("weight", "chosen", "norm"),
    [
        ("ln_2.weight", {"norm": "triton_recompute"}, "ln_2, norm"),
        ("ln_1.weight", {"rms_norm": "triton_recompute"}, "ln_1, rms_norm"),
        ("attn.k_norm.weight", {"rope": "triton_recompute"}, "attn, rope"),
    ],
)
def test_a_model_knows_which_norm_has_nan(weight, chosen, norm):
    config = GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=8, vocab_size=32, pos="rope", bias=True, dropout=0.0)
    config = replace(config, norm="rmsnorm" if "rms_norm" in chosen else "layernorm", qk_norm=True)
    model = build(config, KernelsConfig(**chosen), AttnConfig("eager"), "amp", DEVICE, seed=1)
    assert why_nan(model) is None
    with torch.no_grad():
        model.h[0].get_parameter(weight)[3] = 0
    assert re.match(
        rf"in h\.0\.{norm}=triton_recompute divides by the weights.*, and 1 of (16|32) are ", why_nan(model)
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_tensors_that_mlp_saves(compiled, bias):
    """Besides its inputs, triton saves h and triton_recompute nothing. Both give the same bits."""
    inputs = contract("mlp").inputs((10, 24), bias=bias, dtype=torch.float32, device=DEVICE)
    not_new = {tensor.data_ptr() for tensor in inputs.values() if tensor is not None}
    results = []
    for impl, numbers_per_row in (("triton", [96]), ("triton_recompute", [])):
        function, saved = load("mlp", impl, DEVICE), {}
        if compiled:
            torch.compiler.reset()
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        save = functools.partial(lambda saved, tensor: saved.setdefault(tensor.data_ptr(), tensor), saved)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            function(**inputs)
        new = [t for pointer, t in saved.items() if pointer not in not_new and t.numel()]
        assert [t.numel() // 10 for t in new] == numbers_per_row
        results.append(outputs_and_gradients(function, inputs))
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 12, 13])
def test_loss_in_chunks(chunk, dtype):
    """13 tokens in chunks follow the rule: chunks of one token, a shorter last chunk, and a single chunk."""
    inputs = contract("loss").inputs((13, 24), vocab=131, ignored=0.3, dtype=dtype, device=DEVICE)
    truth = outputs_and_gradients(contract("loss").reference, inputs, dtype=torch.float64)
    eager = outputs_and_gradients(load("loss", "eager", DEVICE), inputs)
    with override_tables({"linear_cross_entropy": {"chunk": chunk}}):
        got = outputs_and_gradients(load("loss", "triton", DEVICE), inputs)
    assert_as_good_as_eager(got, eager, truth, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("chunk", "group"), [(1, 16), (1, 32), (1, 45), (32, 32), (48, 48)])
def test_loss_in_fp8_in_chunks(chunk, group, dtype, fp8_on_a_cpu, monkeypatch):
    """45 tokens in chunks of 16 (rounded up from 1), of 32, and at once, with one product for each group of chunks."""
    monkeypatch.setattr("kernels.loss.triton.FP8_COLUMNS_BYTES", 131 * group)
    inputs = contract("loss").inputs((45, 24), vocab=131, ignored=0.3, fp8=True, dtype=dtype, device=DEVICE)
    truth = outputs_and_gradients(contract("loss").reference, inputs, dtype=torch.float64)
    eager = outputs_and_gradients(load("loss", "eager", DEVICE), inputs)
    with override_tables({"linear_cross_entropy_fp8": {"chunk": chunk}}):
        got = outputs_and_gradients(load("loss", "triton", DEVICE), inputs)
    assert_as_good_as_eager(got, eager, truth, inputs, dtype)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("target", [-7, 0, 1, 2**40], ids=["below", "first beyond", "second beyond", "far beyond"])
def test_a_target_outside_the_vocabulary_makes_the_loss_nan(target, vocab):
    """The gradients of the other rows stay right.

    The logit at index V of a row is the first logit of the next row, so a kernel could read and overwrite it.
    """
    dtype = torch.float32 if vocab == 131 else torch.bfloat16
    gradients = {}
    for index in (vocab + target if target >= 0 else target, 5):
        inputs = contract("loss").inputs((13, 24), vocab=vocab, dtype=dtype, device=DEVICE)
        inputs["targets"][[4, 12]] = index
        loss = load("loss", "triton", DEVICE)(**inputs)
        loss.backward()
        gradients[index] = inputs["x"].grad
        assert loss.isfinite().item() == (index == 5)
    others = torch.tensor([row not in (4, 12) for row in range(13)], device=DEVICE)
    assert torch.equal(*(gradient[others] for gradient in gradients.values()))


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["norm", "mlp", "loss", "attention"])
def test_another_batch_size_compiles_nothing(op, monkeypatch):
    """Triton would specialize a kernel for an integer argument that is 1 or a multiple of 16, such as B T."""
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **facts: compiled.append(facts["repr"]))
    module, device = contract(op), torch.device("cuda")
    shape = {"norm": (256, 768), "mlp": (256, 64), "loss": (256, 64), "attention": (2, 256, 2, 64)}[op]
    sizes = {"vocab": 512} if op == "loss" else {}

    def run(rows):
        axis = 1 if op == "attention" else 0
        inputs = module.inputs((*shape[:axis], rows, *shape[axis + 1 :]), **sizes, dtype=torch.bfloat16, device=device)
        out = load(op, "triton", device)(**inputs)
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    run(256)
    assert compiled
    compiled.clear()
    other_rows = (512, 255, 17) if op == "attention" else (512, 255, 17, 1)  # attention has other tiles for one query
    for rows in other_rows:
        run(rows)
    # the tile of add_partial_sums() is as high as the next power of two of the number of sums, up to 512
    assert [name for name in compiled if not name.startswith("_sum_rows_kernel")] == []


def attention_results(inputs, function):
    """Return the output and the gradients of q, k and v. The output's gradient alternates between 0.5 and 1."""
    out = function(**inputs)
    dout = torch.ones_like(out)
    dout[..., ::2] = 0.5
    return out, *torch.autograd.grad(out, [inputs[name] for name in "qkv"], dout)


def to_float64(inputs):
    """Return the inputs with q, k and v as float64 leaves."""
    exact = {name: inputs[name].detach().double().requires_grad_() for name in "qkv"}
    return {**inputs, **exact}


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a Hopper GPU test_backends.py takes this path")
@pytest.mark.parametrize("case", ["D=80", "T=129", "gqa", "chunk", "full", "packed", "documents_window"])
def test_attention_with_tma_descriptors(case, monkeypatch):
    """The interpreter runs the path in which Hopper loads tiles by TMA. Results agree with float64."""
    module = contract("attention")
    inputs = module.inputs(**module.CASES[case], dtype=torch.float32)
    for part in ("triton", "_triton_backward"):
        monkeypatch.setattr(importlib.import_module(f"kernels.attention.{part}"), "can_use_tma", lambda *tensors: True)
    got = attention_results(inputs, load("attention", "triton", torch.device("cpu")))
    for value, exact in zip(got, attention_results(to_float64(inputs), module.reference), strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)


def test_attention_splits_the_keys_of_a_decoding_step():
    """One sequence has keys only in the first part. With a window all visible keys are in the last parts."""
    device, module = torch.device("cuda" if torch.cuda.is_available() else "cpu"), contract("attention")
    triton = importlib.import_module("kernels.attention.triton")
    assert triton.count_splits(2, 1030, device) > 1
    for given in ({"lengths": (5, 1000)}, {"lengths": (1030, 700), "window": 300}):
        inputs = module.inputs((2, 1, 1, 64), keys=1030, **given, dtype=torch.float32, device=device)
        exact = module.reference(**to_float64(inputs))
        torch.testing.assert_close(triton.attention(**inputs).double(), exact, rtol=1e-5, atol=1e-5)


def test_gradients_of_attention_are_in_one_buffer():
    """dq, dk and dv are side by side, as in the packed tensor, so nothing copies them. Two calls give equal bits."""
    device, module = torch.device("cuda" if torch.cuda.is_available() else "cpu"), contract("attention")
    inputs = module.inputs((2, 100, 6, 64), kv_heads=2, packed=True, dtype=torch.float32, device=device)
    function = load("attention", "triton", device)
    (_, dq, dk, dv), second = attention_results(inputs, function), attention_results(inputs, function)[1:]
    assert all(torch.equal(first, second) for first, second in zip((dq, dk, dv), second, strict=True))
    assert [t.storage_offset() for t in (dq, dk, dv)] == [0, 6 * 64, 8 * 64]
    assert {t.untyped_storage().data_ptr() for t in (dq, dk, dv)} == {dq.data_ptr()}
    assert dq.stride() == dk.stride() == dv.stride() == (100 * 10 * 64, 10 * 64, 64, 1)


@pytest.mark.parametrize(
    ("refusal", "changed"),
    [
        (None, {}),
        (None, {"D": 128, "T": 1, "Tk": 1, "Hkv": 4}),
        (None, {"dtype": torch.float16, "Hkv": 3}),
        ("heads of 64 or 128 channels, not 96", {"D": 96}),
        ("bfloat16 or float16, not torch.float32", {"dtype": torch.float32}),
        ("whole sequences with a causal mask, and no others", {"Tk": 1100}),
        ("whole sequences with a causal mask, and no others", {"causal": False}),
    ],
    ids=str,
)
def test_inputs_that_attention_in_gluon_takes(refusal, changed):
    """Each case changes the shape of GPT-2 124M. What gluon.py lacks, it refuses in one line that says what can."""
    case = {"T": 1024, "Tk": 1024, "Hkv": 12, "D": 64, "dtype": torch.bfloat16, "causal": True, **changed}
    sizes = (case["T"], 12), (case["Tk"], case["Hkv"]), (case["Tk"], case["Hkv"])
    with FakeTensorMode():
        q, k, v = (torch.empty(32, T, heads, case["D"], dtype=case["dtype"], device="cuda") for T, heads in sizes)
        with refused(f"attention=gluon takes {refusal}: choose attn=triton") if refusal else nullcontext():
            out = load_without_gpu("attention", "gluon")(q, k, v, causal=case["causal"])
            assert out.shape == q.shape


@pytest.mark.parametrize("argument", ["lengths", "window", "starts"])
def test_attention_in_gluon_has_no_argument_that_its_kernels_lack(argument):
    """The registry refuses it, and says which backends take it."""
    message = missing_argument(load_without_gpu("attention", "gluon"), argument)
    assert message.startswith(
        f"kernels.attention.gluon takes no {argument} (kernels/attention/__init__.py): choose attn="
    )
    assert re.search(r"\btriton\b", message)


def load_without_gpu(op, impl):
    """Return the function of a backend that load() refuses here. With fake tensors it runs on every machine."""
    return getattr(importlib.import_module(f"kernels.{op}.{impl}"), op)


def refused(message):
    return pytest.raises(Unavailable, match=f"^{re.escape(message)}$")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "given",
    [
        {"shape": (2, 1, 4, 64)},
        {"shape": (2, 129, 4, 64)},
        {"shape": (2, 300, 8, 64), "kv_heads": 4, "packed": True},
        {"shape": (1, 1025, 4, 64), "scale": 0.3},
        {"shape": (2, 257, 4, 64), "magnitude": 6.0},
        {"shape": (3, 1000, 8, 128), "kv_heads": 2},
        {"shape": (1, 4500, 3, 128), "packed": True},
        {"shape": (16, 600, 12, 64)},
    ],
    ids=str,
)
@pytest.mark.parametrize("programs", [3, None, 1000])
def test_attentions_gluon_backward(given, programs, monkeypatch):
    """It follows the rule, and two calls give equal bits. By default there is a program for each multiprocessor.

    With 3 programs, heads share memory for dq. With 1000, most start only after others have ended.
    """
    if programs:
        kernel = importlib.import_module("kernels.attention._gluon_backward")
        monkeypatch.setattr(kernel, "multiprocessors", lambda device: programs)
    assert_right_and_repeatable("attention", "gluon", given)


def assert_right_and_repeatable(op, impl, given):
    module, device, dtype = contract(op), torch.device("cuda"), torch.bfloat16
    inputs = module.inputs(**given, dtype=dtype, device=device)
    function = load_or_skip(op, impl, device)
    truth = outputs_and_gradients(module.reference, inputs, dtype=torch.float64)
    eager = outputs_and_gradients(load(op, "eager", device), inputs)
    first, second = (outputs_and_gradients(function, inputs) for _ in range(2))
    assert_as_good_as_eager(first, eager, truth, inputs, dtype)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("T", "M", "heads", "at_once", "programs"),
    [
        (1024, 128, 384, 64, 132),
        (16384, 192, 24, 4, 132),
        (4096, 128, 64, 8, 132),
        (1000, 128, 5, 3, 7),
        (30, 128, 2, 1, 2),
    ],
)
def test_plan_of_attention(T, M, heads, at_once, programs):
    """Each block is computed once. Among the heads that are computed at once, long blocks come first.

    No program works 3% longer than the mean. Few blocks for each program cannot be divided evenly, so the last two
    shapes are not judged.
    """
    forward = importlib.import_module("kernels.attention._gluon_forward")
    counts, *rounds = forward.plan(T, M, heads, at_once, programs).tolist()
    blocks = -(-T // M)
    numbers = [[row[program] for row in rounds[:count]] for program, count in enumerate(counts)]
    assert sorted(number for column in numbers for number in column) == list(range(heads * blocks))
    assert len(rounds) > max(counts)  # the kernel reads one number more
    work = [sum(-(-min(T, (number % blocks + 1) * M) // 128) + 1 for number in column) for column in numbers]
    if heads * blocks > 10 * programs:
        assert max(work) <= 1.03 * sum(work) / programs
    for column in numbers:
        for first in range(0, heads, at_once):
            lengths = [number % blocks for number in column if first <= number // blocks < first + at_once]
            assert lengths == sorted(lengths, reverse=True)


def test_programs_that_take_turns_never_deadlock():
    """The backward of attention, with programs that wait for their turn at each tile of dq, ends for all sizes.

    A program takes blocks by tickets. A block waits for the blocks that add to the same tile before it, and for the
    earlier heads in the same memory. Programs advance in random order, and some start late.
    """
    module, choices = importlib.import_module("kernels.attention._gluon_turns"), random.Random(0)
    head_and_block, turns_before = module.head_and_block.fn, module.turns_before.fn
    for T, heads, programs, heads_in_sums in ((1024, 20, 7, 2), (300, 9, 2, 1), (128, 5, 3, 4), (2000, 3, 40, 3)):
        blocks = -(-T // 128)
        tickets = iter(range(heads * blocks))
        turns = dict.fromkeys(((memory, i) for memory in range(heads_in_sums) for i in range(2 * blocks)), 0)

        def steps(tickets=tickets, T=T, blocks=blocks, heads_in_sums=heads_in_sums):
            """Yield the turn that each step of a program waits for, as (memory, tile of dq, turn)."""
            for ticket in tickets:
                head, j = (number.value for number in head_and_block(constexpr(ticket), T))
                for i in range(2 * j, 2 * blocks):
                    yield head % heads_in_sums, i, turns_before(head, j, i, heads_in_sums)

        running, late = [steps() for _ in range(-(-programs // 2))], [steps() for _ in range(programs // 2)]
        waiting = [next(program, None) for program in running]
        while any(waiting):
            ready = [n for n, turn in enumerate(waiting) if turn and turns[turn[:2]] == turn[2]]
            assert ready, "every program waits"
            n = choices.choice(ready)
            turns[waiting[n][:2]] += 1
            waiting[n] = next(running[n], None)
            if late and choices.random() < 0.05:
                running.append(late.pop())
                waiting.append(next(running[-1], None))
        assert next(tickets, None) is None
        for (memory, i), turn in turns.items():
            assert turn == len(range(memory, heads, heads_in_sums)) * (i // 2 + 1)


def test_attentions_gluon_forward_makes_a_plan_tensorce():
    """A profile and a dispatch mode make no other one, and it stays: a captured CUDA graph may read it."""
    plan_tensor, cpu = importlib.import_module("kernels.attention._gluon_forward").plan_tensor, torch.device("cpu")
    plans = []
    for context in (nullcontext(), torch.profiler.profile(), FlopCounterMode(display=False)):
        with context:
            plans.append(plan_tensor(cpu, 200, 128, 4, 1, 4))
    for T in range(17, 187):
        plan_tensor(cpu, T, 128, 4, 1, 4)
    assert all(plan is plans[0] for plan in (*plans, plan_tensor(cpu, 200, 128, 4, 1, 4)))
    with FakeTensorMode():
        assert isinstance(plan_tensor(cpu, 200, 128, 4, 1, 4), FakeTensor)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "given",
    [
        {"shape": (2, 17, 4, 64)},
        {"shape": (2, 300, 8, 64), "kv_heads": 4, "packed": True},
        {"shape": (1, 1025, 4, 128), "scale": 0.3},
        {"shape": (3, 1000, 8, 128), "kv_heads": 2},
        {"shape": (2, 257, 4, 64), "magnitude": 6.0},
        {"shape": (1, 4096, 2, 64)},
        {"shape": (1, 4500, 3, 64), "packed": True},
    ],
    ids=str,
)
def test_attentions_gluon_forward(given):
    """It follows the rule, with two consumers and with three, and two calls give equal bits."""
    assert_right_and_repeatable("attention", "gluon", given)


@pytest.mark.parametrize("impl", ["gluon", "gluon_whole"])
@pytest.mark.parametrize(
    ("refusal", "changed"),
    [
        (None, {}),
        (None, {"V": 1024, "C": 8}),
        ("C and V that are multiples of 8, not 768 and 50257", {"V": 50257}),  # rows are not aligned to 16 bytes
        ("C and V that are multiples of 8, not 60 and 50304", {"C": 60}),
        ("bfloat16, not torch.float32", {"weight": torch.float32}),
        ("bfloat16, not torch.float16", {"dtype": torch.float16}),  # exponentials would overflow
        ("bfloat16, not torch.float32", {"dtype": torch.float32}),
    ],
    ids=str,
)
def test_inputs_that_the_loss_in_gluon_takes(refusal, changed, impl):
    """Each case changes GPT-2 124M."""
    case = {"C": 768, "V": 50304, "dtype": torch.bfloat16, **changed}
    with FakeTensorMode():
        x = torch.empty(4, case["C"], dtype=case["dtype"], device="cuda")
        weight = torch.empty(case["V"], case["C"], dtype=case.get("weight", case["dtype"]), device="cuda")
        targets = torch.empty(4, dtype=torch.int64, device="cuda")
        remedy = f"choose kernels.loss={impl.replace('gluon', 'triton')}"
        with refused(f"loss={impl} takes {refusal}: {remedy}") if refusal else nullcontext():
            assert load_without_gpu("loss", impl)(x, weight, targets).shape == ()


@pytest.mark.parametrize(
    ("refusal", "changed"),
    [
        (None, {}),
        (None, {"dtype": torch.float16, "C": 8}),
        (None, {"fp8": True}),
        ("widths that are multiples of 8, not 60 and 3072", {"C": 60}),
        ("widths that are multiples of 16, not 24 and 3072", {"C": 24, "fp8": True}),
        ("bfloat16 or float16, not torch.float32", {"dtype": torch.float32}),
    ],
    ids=str,
)
def test_inputs_that_the_mlp_in_gluon_takes(refusal, changed):
    case = {"C": 768, "dtype": torch.bfloat16, "fp8": False, **changed}
    sizes = (4, case["C"]), (3072, case["C"]), (3072,), (case["C"], 3072), (case["C"],)
    with FakeTensorMode():
        x, *weights = (torch.empty(size, dtype=case["dtype"], device="cuda") for size in sizes)
        with refused(f"mlp=gluon takes {refusal}: choose kernels.mlp=triton") if refusal else nullcontext():
            assert load_without_gpu("mlp", "gluon")(x, *weights, fp8=case["fp8"]).shape == x.shape


@pytest.mark.parametrize(
    ("refusal", "changed"),
    [
        (None, {}),
        (None, {"dtype": torch.float16, "C": 8, "F": 8}),
        ("widths that are multiples of 8, not 60 and 1536", {"C": 60}),
        ("widths that are multiples of 8, not 576 and 1540", {"F": 1540}),
        ("bfloat16 or float16, not torch.float32", {"dtype": torch.float32}),
        ("x and w_fc in one dtype, not in torch.bfloat16 and torch.float32", {"weights": torch.float32}),
    ],
    ids=str,
)
def test_inputs_that_the_gated_mlp_in_gluon_takes(refusal, changed):
    """Each case changes SmolLM2-135M."""
    case = {"C": 576, "F": 1536, "dtype": torch.bfloat16, **changed}
    C, F = case["C"], case["F"]
    dtypes = case["dtype"], *[case.get("weights", case["dtype"])] * 4
    with FakeTensorMode():
        sizes = (4, C), (2 * F, C), (2 * F,), (C, F), (C,)
        x, *weights = (torch.empty(size, dtype=dtype, device="cuda") for size, dtype in zip(sizes, dtypes, strict=True))
        with refused(f"glu=gluon takes {refusal}: choose kernels.glu=triton") if refusal else nullcontext():
            assert load_without_gpu("glu", "gluon")(x, *weights).shape == x.shape


@pytest.mark.parametrize(
    ("scale", "bits", "softcap"),
    [(1.0, None, None), (40.0, None, None), (60.0, 145, None), (1.0, None, 1.0), (40.0, None, 15.0), (90.0, 145, 90.0)],
)
def test_loss_from_unnormalised_exponentials(scale, bits, softcap):
    """The kernels of loss/_unnormalised.py, before and after the matmul, with the matmul and its epilogue in PyTorch.

    With large logits some totals are too large, and the last kernel computes these rows again. If `bits` is given, the
    losses are about as large, so that p does not overflow. One target is ignored, and one is outside the vocabulary,
    which makes only its own loss NaN.
    """
    kernel, device = importlib.import_module("kernels.loss._unnormalised"), torch.device(DEVICE)
    N, V, C = 37, 136, 72
    inputs = contract("loss").inputs((N, C), vocab=V, scale=scale, dtype=torch.float32, device=device)
    x, weight, targets = inputs["x"].detach(), inputs["weight"].detach(), inputs["targets"]
    uncapped = x.double() @ weight.double().T
    logits = cap_logits(uncapped, softcap)
    slope = 1 - (logits / softcap).square() if softcap else torch.ones_like(logits)
    if bits:
        targets = (logits.logsumexp(1, keepdim=True) - logits - bits * math.log(2)).abs().argmin(1)
    targets[3], targets[5] = -1, V + 7
    target_logits = kernel.target_logits(x, weight, targets, ignore_index=-1, softcap=softcap)
    right = torch.arange(N, device=device) != 5
    picked = logits.gather(1, targets.clamp(0, V - 1)[:, None]).squeeze(1) * math.log2(math.e)
    torch.testing.assert_close(target_logits[right], picked.where(targets != -1, math.inf)[right].float())
    p = torch.exp2(logits.float() * math.log2(math.e) - (target_logits[:, None] + kernel.HEADROOM_BITS.value))
    # with a cap of 15, no loss is above 30 + ln(136) = 35 nats
    assert bool((p.sum(1) > kernel.LARGEST.value).any()) == (scale > 1 and softcap != 15)
    sums = torch.stack([part.sum(1) for part in p.split(128, 1)])
    p = p * slope.float()
    losses = torch.empty(N, device=device)
    scaled_x, scales = kernel.unnormalised_gradient(
        x, weight, targets, losses, ignore_index=-1, out=p, exponentials=lambda *_, **cap: sums, softcap=softcap
    )
    exact = torch.nn.functional.cross_entropy(logits[right], targets[right], ignore_index=-1, reduction="none")
    rounding = 2**-20 * max(kernel.HEADROOM_BITS.value, uncapped.abs().max().item())  # of sums of 72 products in fp32
    torch.testing.assert_close(losses[right].double(), exact, rtol=0, atol=rounding)
    assert losses[5].isnan()
    onehot = torch.nn.functional.one_hot(targets.clamp(0, V - 1), V)
    softmax = logits.softmax(1) * (targets != -1)[:, None]
    dlogits = (softmax - onehot * (targets != -1)[:, None]) * slope  # far smaller than softmax at some targets
    got = scales.double() * p.double()
    assert ((got - dlogits).abs() <= 4 * rounding * softmax + 1e-6)[right].all()
    torch.testing.assert_close(scaled_x, scales * x)


@pytest.mark.parametrize(("chunk", "softcap"), [(5, None), (5, 1.0), (13, None)])
def test_loss_without_logits_in_chunks(chunk, softcap, monkeypatch):
    """The loss that loss/gluon.py computes follows the rule, with the matmul and its epilogue in PyTorch."""
    kernel = importlib.import_module("kernels.loss.gluon")

    def multiply(x, w, p, target_logits_ptr, sums_ptr, SOFTCAP, **_):
        logits = cap_logits(x @ w.T, SOFTCAP)
        p.copy_(torch.exp2(logits * math.log2(math.e) - (target_logits_ptr[:, None] + kernel.HEADROOM_BITS.value)))
        sums_ptr.copy_(torch.stack([part.sum(1) for part in p.split(kernel.BLOCK_V.value, 1)]))
        if SOFTCAP:
            p.mul_(1 - (logits / SOFTCAP).square())

    monkeypatch.setattr(kernel, "refusal", lambda *_: None)
    monkeypatch.setattr(kernel, "make_context_current", lambda: None)
    monkeypatch.setattr(kernel, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(kernel, "tma_descriptor", lambda tensor, *block: tensor)
    monkeypatch.setattr(kernel, "_cross_entropy_gluon_kernel", {(1,): multiply, (2,): multiply})
    options = {"ignored": 0.3, "softcap": softcap, "dtype": torch.float32, "device": DEVICE}
    inputs = contract("loss").inputs((13, 24), vocab=136, **options)
    truth = outputs_and_gradients(contract("loss").reference, inputs, dtype=torch.float64)
    eager = outputs_and_gradients(load("loss", "eager", DEVICE), inputs)
    with override_tables({"linear_cross_entropy": {"chunk": chunk}}):
        got = outputs_and_gradients(kernel.loss, inputs)
    assert_as_good_as_eager(got, eager, truth, inputs, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "given",
    [
        {"shape": (5000, 64), "vocab": 50304, "ignored": 0.1},  # more than one chunk
        {"shape": (130, 64), "vocab": 16384, "scale": 30.0},  # p overflows
        {"shape": (5, 128), "vocab": 53248, "ignored": 1.0},
        {"shape": (5000, 64), "vocab": 2048, "scale": 30.0},  # large totals
        {"shape": (300, 40), "vocab": 1000},  # partial tiles in each dimension
        {"shape": (1, 8), "vocab": 1000},
        {"shape": (5000, 64), "vocab": 50304, "ignored": 0.1, "scale": 10.0, "softcap": 30.0},
        {"shape": (130, 64), "vocab": 16384, "scale": 90.0, "softcap": 90.0},  # p overflows
        {"shape": (5000, 64), "vocab": 2048, "scale": 30.0, "softcap": 40.0},  # large totals
        {"shape": (300, 40), "vocab": 1000, "scale": 5.0, "softcap": 5.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("impl", ["gluon", "gluon_whole"])
def test_loss_in_gluon(impl, given):
    """It follows the rule, and two calls give equal bits."""
    assert_right_and_repeatable("loss", impl, given)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("save_h", [False, True])
def test_glu_around_the_kernels_in_gluon(save_h, bias, monkeypatch):
    """The launchers of glu/gluon.py follow the rule, with the two kernels in PyTorch.

    Without save_h, dh is the buffer of h.
    """
    kernel, module = (importlib.import_module(f"kernels.glu.{name}") for name in ("_gluon_kernel", "gluon"))

    def forward(x, w, gate, up, a, b_ptr, N, F, C, **_):
        biases = (0, 0) if b_ptr is None else b_ptr.view(2, F)
        for out, weight, bias in zip((gate, up), w.base, biases, strict=True):
            out.base.copy_(x.base @ weight.T + bias)
        a.base.copy_(gate.base * gate.base.sigmoid() * up.base)

    def backward(dy, w, gate, up, a, dgate, dup, partial_ptr, N, F, C, **_):
        s, da = gate.base.sigmoid(), dy.base @ w.base
        silu, derivative = gate.base * s, s + gate.base * s * (1 - s)
        a.base.copy_(silu * up.base)
        gradients = da * up.base * derivative, da * silu
        for out, gradient in zip((dgate, dup), gradients, strict=True):
            out.base.copy_(gradient)
        if partial_ptr is not None:  # a warp of four has 16 of every 64 rows of a tile
            rows = torch.nn.functional.pad(torch.cat(gradients, 1), (0, 0, 0, -N % 128))
            partial_ptr.copy_(rows.view(-1, 2, 4, 16, 2 * F).sum((1, 3)).flatten(0, 1))

    monkeypatch.setattr(kernel, "make_context_current", lambda: None)
    monkeypatch.setattr(kernel, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(kernel, "_glu_fwd_gluon_kernel", {(2,): forward})
    monkeypatch.setattr(kernel, "_glu_bwd_gluon_kernel", {(2,): backward})
    inputs = contract("glu").inputs((130, 24), hidden=72, bias=bias, dtype=torch.float32, device=DEVICE)
    truth = outputs_and_gradients(contract("glu").reference, inputs, dtype=torch.float64)
    eager = outputs_and_gradients(load("glu", "eager", DEVICE), inputs)
    got = outputs_and_gradients(functools.partial(module.unquantized_glu, save_h=save_h), inputs)
    assert_as_good_as_eager(got, eager, truth, inputs, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "given",
    [
        {"shape": (5000, 64), "hidden": 1064},  # several tiles for each program, with a partial one in each dimension
        {"shape": (300, 72), "hidden": 200, "bias": True},
        {"shape": (129, 200), "hidden": 40, "bias": True},  # the second slice of the gate reaches into up
        {"shape": (1, 8), "hidden": 8},
    ],
    ids=str,
)
def test_glu_in_gluon(given):
    """It follows the rule, and two calls give equal bits."""
    assert_right_and_repeatable("glu", "gluon", given)


def test_unsupported_inputs_of_attention_raise_unavailable():
    inputs = contract("attention").inputs((1, 3, 1, 257), causal=False, dtype=torch.float32)
    with pytest.raises(Unavailable, match=r"heads of up to 256 channels, not 257: choose attn="):
        importlib.import_module("kernels.attention.triton").attention(**inputs)
    inputs = contract("attention").inputs((1, 3, 1, 64), causal=False, window=2, dtype=torch.float32)
    with pytest.raises(Unavailable, match=r"windows and documents only in causal attention: choose attn=eager"):
        importlib.import_module("kernels.attention.triton").attention(**inputs)


@pytest.mark.parametrize("case", ["decode", "chunk", "lengths", "lengths_gqa", "window_chunk"])
def test_attention_reads_keys_and_values_in_fp8(case):
    """The result equals attention over the same numbers in q's dtype, which represents every value of fp8."""
    dtype = DTYPES[-1]
    module = contract("attention")
    given = module.inputs(**module.CASES[case], dtype=dtype, device=DEVICE)
    given = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    fp8 = {name: given[name].to(torch.float8_e4m3fn) for name in "kv"}
    attention = load("attention", "triton", DEVICE)
    got = attention(**given | fp8)
    expected = attention(**given | {name: tensor.to(dtype) for name, tensor in fp8.items()})
    tolerance = 4 * torch.finfo(dtype).eps  # a sum may be in another order, because fp8 is not loaded by TMA
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)

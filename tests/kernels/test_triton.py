"""Our Triton kernels compiled for GPUs that are not here. What they compute: test_backends.py, in the interpreter."""

import functools
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.registry import Unavailable, contract, load
from kernels.tuned import override
from tests.kernels.test_backends import assert_as_good_as_eager, evaluate

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
triton = pytest.importorskip("triton", reason="Triton is for Linux")


@pytest.mark.parametrize("capability", [80, 90])
def test_they_compile_and_do_not_spill(capability):
    command = [sys.executable, "-m", "tests.kernels.compile_triton", str(capability)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("registers") == {80: 34, 90: 39}[capability]


@pytest.mark.parametrize(("impl", "numbers"), [("triton", 24), ("triton_recompute", 0)])
@pytest.mark.parametrize("residual", [True, False])
def test_what_a_norm_keeps(impl, numbers, residual):
    """Besides its arguments and its output y: the stream (x itself, where it is the stream), mean and rstd; or rstd."""
    inputs = contract("norm").inputs((10, 24), residual=residual, dtype=torch.float32, device=DEVICE)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        y, stream = load("norm", impl, DEVICE)(**inputs)
    own = {tensor.data_ptr() for tensor in (y, *inputs.values()) if isinstance(tensor, torch.Tensor)}
    if residual:
        assert (stream.data_ptr() in kept) == (impl == "triton")
    sizes = sorted(tensor.numel() // 10 for pointer, tensor in kept.items() if pointer not in own)
    assert sizes == ([1] if impl == "triton_recompute" else [1, 1, numbers] if residual else [1, 1])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_an_mlp_keeps(compiled, bias):
    """Besides its arguments h, or with triton_recompute nothing; and its gradients are the same bits."""
    inputs = contract("mlp").inputs((10, 24), bias=bias, dtype=torch.float32, device=DEVICE)
    own = {tensor.data_ptr() for tensor in inputs.values() if tensor is not None}
    results = []
    for impl, numbers in (("triton", [96]), ("triton_recompute", [])):
        function, kept = load("mlp", impl, DEVICE), {}
        if compiled:
            torch.compiler.reset()
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        keep = functools.partial(lambda kept, tensor: kept.setdefault(tensor.data_ptr(), tensor), kept)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            function(**inputs)
        assert [tensor.numel() // 10 for pointer, tensor in kept.items() if pointer not in own] == numbers
        results.append(evaluate(function, inputs))
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


@pytest.mark.parametrize("dtype", [torch.float32] + [torch.bfloat16] * (DEVICE.type == "cuda"), ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 12, 13])
def test_a_loss_in_chunks(chunk, dtype):
    """13 tokens: chunks of one, chunks with a rest, and all in one."""
    inputs = contract("loss").inputs((13, 24), vocab=131, ignored=0.3, dtype=dtype, device=DEVICE)
    truth = evaluate(contract("loss").reference, inputs, dtype=torch.float64)
    eager = evaluate(load("loss", "eager", DEVICE), inputs)
    with override({"linear_cross_entropy": {"chunk": chunk}}):
        got = evaluate(load("loss", "triton", DEVICE), inputs)
    assert_as_good_as_eager(got, eager, truth, inputs, dtype)


@pytest.mark.parametrize("vocab", [131] + [16384] * (DEVICE.type == "cuda"))  # which Hopper does in Gluon
@pytest.mark.parametrize("target", [-7, 0, 1, 2**40], ids=["below", "first beyond", "second beyond", "far beyond"])
def test_a_target_that_does_not_exist_is_a_loss_that_is_not_a_number(target, vocab):
    """And no other row's: the first one beyond is the next row's first logit, which may be read and written to."""
    dtype = torch.float32 if vocab == 131 else torch.bfloat16
    found = {}
    for wrong in (vocab + target if target >= 0 else target, 5):
        inputs = contract("loss").inputs((13, 24), vocab=vocab, dtype=dtype, device=DEVICE)
        inputs["targets"][[4, 12]] = wrong
        loss = load("loss", "triton", DEVICE)(**inputs)
        loss.backward()
        found[wrong] = inputs["x"].grad
        assert loss.isfinite().item() == (wrong == 5)
    others = torch.tensor([row not in (4, 12) for row in range(13)], device=DEVICE)
    assert torch.equal(*(gradient[others] for gradient in found.values()))


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["norm", "mlp", "loss", "attention"])
def test_another_batch_compiles_nothing(op, monkeypatch):
    """Triton compiles anew for an integer that is 1, or no more a multiple of 16; B T is both, in its time."""
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **told: compiled.append(told["repr"]))
    module, device = contract(op), torch.device("cuda")
    shape = {"norm": (256, 768), "mlp": (256, 64), "loss": (256, 64), "attention": (2, 256, 2, 64)}[op]
    sizes = {"vocab": 512} if op == "loss" else {}

    def run(rows):
        at = 1 if op == "attention" else 0
        inputs = module.inputs((*shape[:at], rows, *shape[at + 1 :]), **sizes, dtype=torch.bfloat16, device=device)
        out = load(op, "triton", device)(**inputs)
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    run(256)
    assert compiled
    compiled.clear()
    for rows in (512, 255, 17) + (1,) * (op != "attention"):  # whose decoding has tiles of its own
        run(rows)
    assert not compiled


def attend(inputs, function):
    """Output and gradients, for a gradient of ones and a half (of two values, so that no sum is trivial)."""
    out = function(**inputs)
    dout = torch.ones_like(out)
    dout[..., ::2] = 0.5
    return out, *torch.autograd.grad(out, [inputs[name] for name in "qkv"], dout)


def float64(inputs):
    """The same numbers as float64 leaves."""
    exact = {name: inputs[name].detach().double().requires_grad_() for name in "qkv"}
    return {**inputs, **exact}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there test_backends.py goes this way")
@pytest.mark.parametrize("case", ["D=80", "T=129", "gqa", "chunk", "full", "packed", "documents_window"])
def test_attention_by_descriptors(case, monkeypatch):
    """Hopper's way to fetch tiles, in the interpreter."""
    module = contract("attention")
    inputs = module.inputs(**module.CASES[case], dtype=torch.float32)
    for part in ("triton", "_triton_backward"):
        monkeypatch.setattr(importlib.import_module(f"kernels.attention.{part}"), "by_tma", lambda *tensors: True)
    got = attend(inputs, load("attention", "triton", torch.device("cpu")))
    for value, exact in zip(got, attend(float64(inputs), module.reference), strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)


def test_attention_splits_the_keys_of_a_decoding_step():
    """Of two rows one has keys in the first part alone; a window's are in the last."""
    device, module = torch.device("cuda" if torch.cuda.is_available() else "cpu"), contract("attention")
    triton = importlib.import_module("kernels.attention.triton")
    assert triton.splits(2, 1030, device) > 1
    for given in ({"lengths": (5, 1000)}, {"lengths": (1030, 700), "window": 300}):
        inputs = module.inputs((2, 1, 1, 64), keys=1030, **given, dtype=torch.float32, device=device)
        exact = module.reference(**float64(inputs))
        torch.testing.assert_close(triton.attention(**inputs).double(), exact, rtol=1e-5, atol=1e-5)


def test_attentions_gradients():
    """The same bits each time; and one buffer in the order of the packed tensor, which spares a concatenation."""
    device, module = torch.device("cuda" if torch.cuda.is_available() else "cpu"), contract("attention")
    inputs = module.inputs((2, 100, 6, 64), kv_heads=2, packed=True, dtype=torch.float32, device=device)
    function = load("attention", "triton", device)
    (_, dq, dk, dv), again = attend(inputs, function), attend(inputs, function)[1:]
    assert all(torch.equal(first, second) for first, second in zip((dq, dk, dv), again, strict=True))
    assert [t.storage_offset() for t in (dq, dk, dv)] == [0, 6 * 64, 8 * 64]
    assert {t.untyped_storage().data_ptr() for t in (dq, dk, dv)} == {dq.data_ptr()}
    assert dq.stride() == dk.stride() == dv.stride() == (100 * 10 * 64, 10 * 64, 64, 1)


@pytest.mark.parametrize(
    ("taken", "changed"),
    [
        (True, {}),
        (True, {"B": 50, "T": 1}),
        (True, {"T": 256, "Hkv": 3, "B": 44, "dtype": torch.float16}),
        (False, {"T": 1025, "B": 22}),
        (False, {"T": 512, "Hkv": 3, "B": 44}),  # sums of four heads at once
        (False, {"B": 12}),  # two rounds for 144 heads
        (False, {"B": 1}),
        (False, {"D": 128}),
        (False, {"dtype": torch.float32}),
        (False, {"Tk": 1100}),
        (False, {"causal": False}),
        (False, {"window": 100}),
        (False, {"starts": torch.zeros(1)}),
        (False, {"capability": (10, 0)}),
        (False, {"device": "cpu"}),
    ],
    ids=str,
)
def test_which_attention_has_its_backward_in_gluon(taken, changed, monkeypatch):
    case = {"B": 32, "T": 1024, "H": 12, "Hkv": 12, "D": 64, "device": "cuda", "dtype": torch.bfloat16, **changed}
    kernel = importlib.import_module("kernels.attention._gluon_backward")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: case.get("capability", (9, 0)))
    monkeypatch.setattr(kernel, "processors", lambda device: 132)
    with FakeTensorMode():
        q, k = (
            torch.empty(case["B"], T, heads, case["D"], device=case["device"], dtype=case["dtype"])
            for T, heads in ((case["T"], case["H"]), (case.get("Tk", case["T"]), case["Hkv"]))
        )
    assert kernel.takes(q, k, case.get("causal", True), case.get("starts"), case.get("window")) is taken


@pytest.mark.gpu
@pytest.mark.parametrize(
    "given",
    [
        {"shape": (2, 1, 4, 64)},
        {"shape": (2, 129, 4, 64)},
        {"shape": (2, 300, 8, 64), "kv_heads": 4, "packed": True},
        {"shape": (1, 1025, 4, 64), "scale": 0.3},
        {"shape": (2, 257, 4, 64), "magnitude": 6.0},
    ],
    ids=str,
)
def test_attentions_backward_in_gluon(given, monkeypatch):
    """On a Hopper with four multiprocessors, so that few heads are enough for it."""
    kernel = importlib.import_module("kernels.attention._gluon_backward")
    monkeypatch.setattr(kernel, "processors", lambda device: 4)
    module, device, dtype = contract("attention"), torch.device("cuda"), torch.bfloat16
    inputs = module.inputs(**given, dtype=dtype, device=device)
    if "Gluon" not in importlib.import_module("kernels.attention.triton").detail(**inputs):
        pytest.skip("for Hopper")
    function = load("attention", "triton", device)
    truth = evaluate(module.reference, inputs, dtype=torch.float64)
    eager = evaluate(load("attention", "eager", device), inputs)
    first, second = (evaluate(function, inputs) for _ in range(2))
    assert_as_good_as_eager(first, eager, truth, inputs, dtype)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("taken", "V", "dtype", "device", "capability"),
    [
        (True, 50304, torch.bfloat16, "cuda", (9, 0)),
        (True, 16384, torch.float16, "cuda", (9, 0)),
        (False, 50257, torch.bfloat16, "cuda", (9, 0)),  # rows that begin anywhere
        (True, 53248, torch.bfloat16, "cuda", (9, 0)),
        (False, 53256, torch.bfloat16, "cuda", (9, 0)),  # two do not fit
        (False, 8192, torch.bfloat16, "cuda", (9, 0)),
        (False, 50304, torch.float32, "cuda", (9, 0)),
        (False, 50304, torch.bfloat16, "cuda", (10, 0)),
        (False, 50304, torch.bfloat16, "cpu", (9, 0)),
    ],
)
def test_which_losss_softmax_is_in_gluon(taken, V, dtype, device, capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    kernel = importlib.import_module("kernels.loss._gluon")
    assert kernel.takes(V, dtype, torch.device(device)) is taken


@pytest.mark.gpu
@pytest.mark.parametrize(
    "given",
    [
        {"shape": (2700, 64), "vocab": 50304, "ignored": 0.1},  # more than a chunk
        {"shape": (130, 64), "vocab": 16384, "scale": 30.0},
        {"shape": (5, 128), "vocab": 53248, "ignored": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("impl", ["triton", "triton_whole"])
def test_losss_softmax_in_gluon(impl, given):
    module, device, dtype = contract("loss"), torch.device("cuda"), torch.bfloat16
    inputs = module.inputs(**given, dtype=dtype, device=device)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper")
    assert "Gluon" in importlib.import_module(f"kernels.loss.{impl}").detail(**inputs)
    function = load("loss", impl, device)
    truth = evaluate(module.reference, inputs, dtype=torch.float64)
    eager = evaluate(load("loss", "eager", device), inputs)
    first, second = (evaluate(function, inputs) for _ in range(2))
    assert_as_good_as_eager(first, eager, truth, inputs, dtype)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_attention_refuses():
    inputs = contract("attention").inputs((1, 3, 1, 257), causal=False, dtype=torch.float32)
    for impl in ("triton", "triton_naive"):
        with pytest.raises(Unavailable, match=r"heads of up to 256 channels, not 257: choose attn="):
            importlib.import_module(f"kernels.attention.{impl}").attention(**inputs)
    inputs = contract("attention").inputs((1, 3, 1, 64), causal=False, window=2, dtype=torch.float32)
    with pytest.raises(Unavailable, match=r"windows and documents in causal attention alone: choose attn=eager"):
        importlib.import_module("kernels.attention.triton").attention(**inputs)


def test_the_lessons_run(tmp_path, monkeypatch):
    """The examples of kernels/README.md, as they stand there; Triton reads the source, so they need a file."""
    text = (ROOT / "kernels" / "README.md").read_text()
    (tmp_path / "lessons.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    monkeypatch.syspath_prepend(tmp_path)
    lessons = importlib.import_module("lessons")
    x, y = (torch.randn(3, 1500, generator=torch.Generator().manual_seed(0)).to(DEVICE) for _ in range(2))
    assert torch.equal(lessons.add(x, y), x + y)
    torch.testing.assert_close(lessons.softmax(100 * x).double(), (100 * x).double().softmax(-1), rtol=1e-5, atol=1e-7)

"""Every rung of the course is right, explains itself in one short file, and has an exercise with a right solution."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch

from kernels.check import broken_rule, exact_results, outputs_and_gradients
from kernels.compat import inductor_options
from kernels.lookup import import_file
from kernels.registry import backend, contract, load
from lab.bench.rung import load_solution, run, rungs, why_unavailable
from tests.kernels.test_backends import LARGE

SOLUTIONS = Path(__file__).parent / "solutions"
RUNGS = [pytest.param(path, id=path.stem) for path in rungs()]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter computes bf16 wrongly
IMPORTS = {"torch", "triton", "math", "functools", "importlib", "os", "re", "climb", "jax"}


def op_of(path):
    op = re.search(r'^OP = "(\w+)"', path.read_text(), re.MULTILINE)
    return op and op[1]


def load_rung(path):
    op = op_of(path)
    rung = backend(op, str(path)) if op else import_file(path, f"rung_{path.stem}")
    if why := why_unavailable(rung, DEVICE):
        pytest.skip(why)
    return rung


@pytest.mark.parametrize("path", RUNGS)
def test_a_rung_is_right(path):
    rows = run(load_rung(path), DEVICE)
    assert {row["kernel"] for row in rows if not row["own"]} >= {"PyTorch"}
    assert [row["wrong"] for row in rows] == [None] * len(rows)


@pytest.mark.parametrize("path", RUNGS)
def test_a_solution_is_right_and_the_rung_itself_is_none(path):
    rung = load_rung(path)
    solution = load_solution(SOLUTIONS / path.name)
    assert {row["wrong"] for row in run(rung, DEVICE, solution)} == {None}
    try:
        own, *_ = run(rung, DEVICE, list(rung.KERNELS.values())[-1])
    except (RuntimeError, TypeError, ValueError):
        return
    assert own["wrong"]


@pytest.mark.parametrize("path", RUNGS)
def test_a_rung_explains_itself(path):
    text = path.read_text()
    doc = ast.get_docstring(ast.parse(text))
    assert doc.startswith(f"Rung {int(path.stem[:2])}: ")
    assert "\nExercise: " in doc
    assert f"python course/{path.name} mine.py" in doc
    assert len(text.splitlines()) <= 140
    assert (SOLUTIONS / path.name).is_file()


@pytest.mark.parametrize("path", RUNGS)
def test_a_rung_stands_alone(path):
    tree = ast.parse(path.read_text())
    modules = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in modules} <= IMPORTS


def op_cases():
    """Yield the cases of the contract for every rung that computes an op, without the arguments that no rung has."""
    for path in rungs():
        op = op_of(path)
        for name, case in contract(op).CASES.items() if op else ():
            if not {*getattr(contract(op), "OPTIONAL", ()), "documents"} & case.keys():
                marks = [pytest.mark.exhaustive] if max(case["shape"]) > LARGE else []
                yield pytest.param(op, path, case, id=f"{path.stem}-{name}", marks=marks)


@pytest.mark.parametrize(("op", "path", "case"), op_cases())
def test_a_rung_that_computes_an_op_keeps_its_contract(op, path, case):
    function, module = load(op, str(path), DEVICE), contract(op)
    inputs = module.inputs(**case, dtype=DTYPE, device=DEVICE)
    if getattr(load_rung(path), "FORWARD_ONLY", False):
        inputs = {name: value.detach() if torch.is_tensor(value) else value for name, value in inputs.items()}
    results, eager = (outputs_and_gradients(f, inputs) for f in (function, load(op, "eager", DEVICE)))
    assert broken_rule(results, eager, exact_results(op, "eager", inputs), inputs, DTYPE) is None


@pytest.mark.gpu
@pytest.mark.parametrize("path", [rung for rung in RUNGS if op_of(*rung.values) and "11_" not in rung.id])
def test_a_rung_under_torch_compile(path):
    """As in a model with kernels.compile=true. rung 11 has no backward."""
    op, rung = op_of(path), load_rung(path)
    inputs = contract(op).inputs(**rung.SHAPES["cpu"], dtype=DTYPE, device=DEVICE)
    torch.compiler.reset()
    function = torch.compile([*rung.KERNELS.values()][-1], fullgraph=True, options=inductor_options())
    results = outputs_and_gradients(function, inputs)
    eager = outputs_and_gradients(load(op, "eager", DEVICE), inputs)
    assert broken_rule(results, eager, exact_results(op, "eager", inputs), inputs, DTYPE) is None


def test_the_loss_in_several_chunks(monkeypatch):
    """60 rows in chunks of 16: three whole chunks and a shorter one."""
    [path] = [path for path in rungs() if path.stem == "13_loss"]
    rung = load_rung(path)
    monkeypatch.setattr(rung, "LOGITS_BYTES", 16 * 500 * DTYPE.itemsize)
    inputs = contract("loss").inputs((60, 32), vocab=500, ignored=0.2, dtype=DTYPE, device=DEVICE)
    results, eager = (outputs_and_gradients(f, inputs) for f in (rung.loss, load("loss", "eager", DEVICE)))
    assert broken_rule(results, eager, exact_results("loss", "eager", inputs), inputs, DTYPE) is None


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the model is in fp32 on a CPU")
def test_the_rungs_train_a_model(hotswap, tmp_path):
    """All rungs that compute an op, in one model: the losses of eager PyTorch, but for rounding."""
    sizes = ["n_layer=1", "n_embd=32", "n_head=2", "block_size=16"]
    words = ["+experiment=smoke", *(f"model.{size}" for size in sizes), "train.block_size=16", "train.batch_size=2"]
    words += ["train.tokens_per_step=32", "train.max_steps=3", "train.eval_every=0", "train.log_every=1"]
    chosen = {op_of(path): str(path) for path in rungs() if "11_" not in path.stem}  # which has no backward
    own = [f"{'attn.impl' if op == 'attention' else f'kernels.{op}'}={path}" for op, path in chosen.items() if op]
    losses = []
    for name, kernels in {"rungs": own, "eager": ["kernels=eager", "attn=eager"]}.items():
        assert hotswap(*words, *kernels, f"out_dir={name}")[0] == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["train/loss"] for line in lines])
    assert len(own) == 4
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)

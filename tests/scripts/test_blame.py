"""`python -m scripts.blame`: kernels that overflow on purpose, and steps that eager PyTorch cannot repair."""

import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.linear.triton import linear
from kernels.norm.triton import norm_in_fp8
from lab.proof import blame as proof
from lab.proof.blame import BadStep, Replay, replay, verdict, watch_function
from model.step_file import write_step
from runtime.device import OutOfMemory
from runtime.row import read_row, write_row
from scripts import blame
from tests.test_train import QUICK

HEAD = """
import torch
from kernels.mlp import reference
calls = 0


"""
# The second of two layers overflows: its calls are even
FORWARD = """def mlp(x, w_fc, b_fc, w_proj, b_proj):
    global calls
    calls += 1
    y = reference(x, w_fc, b_fc, w_proj, b_proj)
    return y * 1e30 * 1e30 if calls % 2 == 0 else y
"""
BACKWARD = """class Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx * 1e30 * 1e30


def mlp(x, w_fc, b_fc, w_proj, b_proj):
    return reference(Overflow.apply(x), w_fc, b_fc, w_proj, b_proj)
"""
RUN = *QUICK, "model.n_layer=2", "train.max_steps=3", "kernels.mlp=mine.py", "kernels.check=false"


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: called("blame.py", blame.main, *arguments, "--device", "cpu", "--trust")


@pytest.mark.parametrize(
    ("body", "first"), [(FORWARD, "mlp in h.1.mlp, its output"), (BACKWARD, "mlp in h.1.mlp, its gradient")]
)
def test_the_kernel_that_overflows_is_named_with_its_layer(command, hotswap, body, first):
    """The backward comes to the last layer first."""
    Path("mine.py").write_text(HEAD + body)
    assert hotswap(*RUN)[0] == 1
    assert torch.load("run/nonfinite-step-000001.pt", weights_only=True).keys() == {"step", "batches", "weights"}
    code, out, err = command("run")
    assert (code, err) == (0, "")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if "|" in line]
    assert [line[0] for line in lines[2:]] == ["as in the run", "attn.impl=eager", "kernels.mlp=eager", "all ops eager"]
    assert [line[2] for line in lines[2:]] == [first, first, "every call is finite", "every call is finite"]
    assert f"The first is {first}. The step is finite with kernels.mlp=eager or with all ops eager.\n" in out
    assert out.endswith("The weights are those after step 0, the batches are of step 1.\n")


def test_weights_that_are_not_finite_are_not_a_kernels_fault(command, hotswap):
    Path("mine.py").write_text(HEAD + FORWARD)
    assert hotswap(*RUN)[0] == 1
    kept = torch.load("run/nonfinite-step-000001.pt", weights_only=True)
    kept["weights"]["h.0.attn.c_attn.bias"][0] = torch.inf
    write_step(Path("run/nonfinite-step-000001.pt"), kept)
    code, out, _ = command("run")
    assert code == 0
    assert "The first is the inputs of linear in h.0.attn.c_attn. Eager PyTorch goes wrong, too" in out


def test_a_step_that_is_finite_again_is_exit_code_1(command, hotswap):
    """Without weights in the file, a checkpoint of an earlier step takes their place."""
    Path("mine.py").write_text(HEAD + FORWARD.replace(" * 1e30 * 1e30", ""))
    assert hotswap(*RUN, "train.checkpoint_every=2")[0] == 0
    batch = torch.zeros(1, 8, dtype=torch.int64)
    write_step(Path("run/nonfinite-step-000003.pt"), {"step": 3, "batches": [(batch, batch)]})
    code, out, err = command("run")
    assert (code, err) == (1, "")
    assert "The step does not go wrong in this replay" in out
    assert "The weights are those after step 2, the batches are of step 3." in out
    assert command("run", "--step", "5") == (1, "", "error: --step 5: run has the steps 3\n")
    weights = Path("run/checkpoints/step-000002/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    code, _, err = command("run")
    damaged, error = err.splitlines()
    assert damaged.startswith("warning: run/checkpoints/step-000002 is damaged: model.safetensors has another SHA-256")
    assert error.endswith("has no weights, and run has no valid checkpoint before step 3")


def test_a_config_or_a_batch_that_does_not_fit_is_one_line(command, hotswap):
    """config.yaml is for people. The config comes from the row, whose CRC-32 is checked."""
    Path("mine.py").write_text(HEAD + FORWARD)
    assert hotswap(*RUN)[0] == 1
    page = command("run")
    Path("run/config.yaml").write_text("nothing: [")
    assert command("run") == page
    row = read_row(Path("run"))
    write_row(Path("run"), row | {"config": row["config"] | {"model": row["config"]["model"] | {"n_layer": 3}}})
    code, _, err = command("run")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("error: the weights of step 0 do not fit the run's config: Error(s) in loading state_dict")
    write_row(Path("run"), row)
    kept = torch.load("run/nonfinite-step-000001.pt", weights_only=True)
    for place, value in ((0, row["config"]["model"]["vocab_size"]), (0, -1), (1, -2)):
        damaged = [tuple(tensor.clone() for tensor in batch) for batch in kept["batches"]]
        damaged[0][place][0, 0] = value
        write_step(Path("run/nonfinite-step-000001.pt"), kept | {"batches": damaged})
        code, _, err = command("run")
        assert (code, err.count("\n")) == (1, 1)
        assert err.startswith("error: the batches of step 1 do not fit the run's model, which has model.vocab_size=")
    os.rename("run/nonfinite-step-000001.pt", "run/nonfinite-step-000002.pt")
    assert command("run")[2] == "error: run/nonfinite-step-000002.pt is of step 1: it was renamed\n"
    result = Path("run/result.json")
    result.write_bytes(result.read_bytes().replace(b'"n_layer": 2', b'"n_layer": 3'))
    assert command("run")[2].startswith("error: run has no row with a config: its result.json is missing or damaged")


@pytest.mark.parametrize(
    "changes",
    [
        {"kernels": {"norm": "run/notes.py"}},
        {"kernels": {"norm": "evil.notes"}},
        {"kernels": {"norm": "${out_dir}"}, "out_dir": "run/notes.py"},
        {"kernels": {"norm": "~/notes.py"}},
        {"kernels": "${data}"},
        {"attn": {"impl": "run/notes.py", "version": "x"}},
        {"attn": ["run/notes.py"]},
    ],
)
def test_code_that_the_folder_names_is_refused_and_not_imported(called, monkeypatch, tmp_path, changes):
    """Also the package around a module stays closed, and attn.version, for which a config imports its backend."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("run/notes.py", "notes.py", "evil/__init__.py", "evil/notes.py"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("open('imported', 'w').close()\n")
    write_row(Path("run"), {"status": "error", "config": {"kernels": {}, "attn": {}} | changes})
    code, out, err = called("blame.py", blame.main, "run", "--device", "cpu")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: the config of run names code outside of kernels/: ")
    assert err.endswith("; read it, and add --trust to run it\n")
    assert not Path("imported").exists()


@pytest.mark.parametrize("fails", ["run", "swap"])
def test_an_error_of_a_backend_is_one_line(command, hotswap, monkeypatch, fails):
    """In the run's replay it ends the command. In a swap it is a line of the table."""
    Path("mine.py").write_text(HEAD + FORWARD)
    assert hotswap(*RUN)[0] == 1
    original = proof.run_batches

    def run_batches(swap, *arguments):
        if (swap == "attn.impl=eager") if fails == "swap" else True:
            raise ZeroDivisionError("by\nzero")
        return original(swap, *arguments)

    monkeypatch.setattr(proof, "run_batches", run_batches)
    code, out, err = command("run")
    if fails == "run":
        assert (code, err) == (1, "error: replayed twice: a backend fails with ZeroDivisionError: by zero\n")
    else:
        assert (code, err) == (0, "")
        assert "not run: attn.impl=eager: a backend fails with ZeroDivisionError: by zero |" in out


def test_flips_in_a_kept_step_are_one_line(command, hotswap):
    """Flips in the pickle, in the tensors and in the zip's directory."""
    Path("mine.py").write_text(HEAD + FORWARD)
    assert hotswap(*RUN)[0] == 1
    path, draw = Path("run/nonfinite-step-000001.pt"), random.Random(1)
    whole = path.read_bytes()
    regions = [(0, 4096), (0, len(whole)), (len(whole) - 4096, len(whole))]
    for place in [draw.randrange(*region) for region in regions for _ in range(8)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :])
        code, out, err = command("run")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith("error: ")


@pytest.mark.parametrize("swap", ["attn.impl=eager", "all ops eager"])
def test_a_swap_that_cannot_run_is_a_line_of_the_page(command, hotswap, monkeypatch, swap):
    Path("mine.py").write_text(HEAD + FORWARD)
    assert hotswap(*RUN)[0] == 1

    def replay(name, *arguments):
        if name == swap:
            raise OutOfMemory("the memory is full")
        return original(name, *arguments)

    original = blame.replay
    monkeypatch.setattr(blame, "replay", replay)
    code, out, err = command("run")
    assert (code, err) == (0, "")
    [line] = [line for line in out.splitlines() if line.startswith(f"| {swap} ")]
    assert [cell.strip() for cell in line.split("|")[2:4]] == ["", "not run: the memory is full"]
    others = {"kernels.mlp=eager", "all ops eager"} - {swap}
    assert all(other in out.partition("The step is finite with ")[2] for other in others)


def test_a_swap_that_did_not_run_does_not_clear_eager():
    kept = BadStep(2, [], {}, 1)
    page = verdict([Replay("as in the run", torch.nan, "loss"), Replay("all ops eager", None, None, "full")], kept)
    assert "The first is loss. No swap that could run here repairs the step.\n" in page


class Root(torch.autograd.Function):
    """The identity, whose gradient is 1e30 everywhere: each is finite, and the norm of two is not."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return torch.full_like(dx, 1e30)


def test_a_gradient_norm_that_overflows_is_named(monkeypatch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            return Root.apply(self.weight).sum()

    model = Model()
    recipe = SimpleNamespace(build=lambda device: model)
    kept = BadStep(1, [(torch.zeros(1),)], model.state_dict(), 0)
    first = replay("as in the run", recipe, kept, torch.device("cpu")).first
    assert first == "the gradient norm: it overflows, and every gradient is finite"


def test_an_output_in_fp8_is_watched_like_any_other(fp8_on_a_cpu):
    """A norm that makes NaN in fp8 is named, and not the layer after it; so is a NaN in the layer's gradient."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weight = torch.ones(64, device=device)

    def broken(x, residual):
        in_fp8, stream = norm_in_fp8(x, residual, weight, None)
        in_fp8.rows[0, 0] = torch.nan
        return in_fp8, stream

    found = []
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    watch_function(broken, "norm", found, [])(x, None)
    assert found == ["norm, its output"]
    found.clear()
    in_fp8, _ = norm_in_fp8(x, None, weight, None)
    w = torch.full((96, 64), 1e-3, device=device)
    y = watch_function(lambda x: linear(x, w, None, fp8=True), "linear", found, [])(in_fp8)
    y.backward(torch.full_like(y, torch.nan))
    assert found == ["the gradient that reaches linear", "linear, its gradient"]


def test_a_folder_without_a_kept_step_is_an_error(command, hotswap):
    assert command("run")[2].startswith("error: run has no row with a config: its result.json is missing or damaged")
    assert hotswap(*QUICK, "train.max_steps=1")[0] == 0
    assert command("run")[2].startswith("error: run has no nonfinite-step-*.pt: ")


NOISE = """import torch
from kernels.mlp import reference


def mlp(x, *weights):
    scale = torch.ones(x.shape[-1])
    scale[0] = 1e30
    return reference(x, *weights) * (1 + 1e-3 * torch.rand((), generator=noise)) * scale * scale


noise = torch.Generator()  # torch.manual_seed() does not reset it
"""


def test_a_backend_that_does_not_repeat_its_bits_is_not_the_machine(command, hotswap):
    Path("mine.py").write_text(NOISE)
    assert hotswap(*RUN)[0] == 1
    code, out, err = command("run")
    assert (code, err) == (0, "")
    assert out.startswith("Two replays differ in their bits, and with all ops eager they do not: a backend is not det")
    assert "The first is mlp in h.0.mlp, its output. The step is finite with kernels.mlp=eager" in out


def test_a_machine_that_does_not_repeat_its_bits_is_named(command, hotswap, monkeypatch):
    """One bit of one weight is flipped before the second of two replays with eager PyTorch."""
    Path("mine.py").write_text(NOISE)
    assert hotswap(*RUN)[0] == 1
    build, calls = proof.Recipe.build, []

    def miscompute(recipe, device):
        model = build(recipe, device)
        calls.append(recipe.kernels.mlp)
        if calls.count("eager") == 2:
            model.register_load_state_dict_post_hook(flip)
        return model

    def flip(model, keys):
        model.wte.weight.detach().view(torch.int32)[1, 1] ^= 1 << 20

    monkeypatch.setattr(proof.Recipe, "build", miscompute)
    code, out, err = command("run")
    assert (code, out) == (1, "")
    assert err == (
        "error: the machine is to blame: two replays of step 1 with eager PyTorch give different bits; test it with "
        "python -m scripts.doctor soak=10\n"
    )
    assert calls == ["mine.py", "mine.py", "eager", "eager"]

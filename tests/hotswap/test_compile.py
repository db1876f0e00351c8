"""torch.compile makes few graphs for many shapes, with every preset of kernels and attention."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import hotswap
from kernels.names import config_groups

PRESETS = config_groups()
CHOICES = [{group: name} for group in ("kernels", "attn") for name in PRESETS[group] if name != "*"]
# These give the same graph as kernels=compile, too, and tracing it takes 12 s. Without fp8, torchao calls F.linear, and
# pallas has no kernel of this model
SAME = {"kernels": "eager"}, {"kernels": "torchao"}, {"kernels": "pallas"}, {"attn": "sdpa"}
CHOICES = [choice for choice in CHOICES if choice not in SAME]
IN_FP8 = ["compile", "torchao"]
if torch.cuda.is_available():  # Triton's interpreter has no bf16
    IN_FP8.append("triton")
CHOICES += [{"kernels": name, "precision": "fp8"} for name in IN_FP8]
SHAPE = {"n_layer": 1, "n_embd": 32, "n_head": 2, "block_size": 32, "vocab_size": 64}
PRECISION = "bf16" if torch.cuda.is_available() else "fp32"
QUICK = {"kernels": "compile"}, {"attn": "triton"}


@pytest.fixture
def graphs(monkeypatch):
    """Count the graphs of model.compile(), which hotswap.build() calls. Inductor would take a minute."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def compile_model(model, fullgraph, options):  # options are for Inductor
        torch.nn.Module.compile(model, fullgraph=fullgraph, backend=counter)

    monkeypatch.setattr(hotswap.GPT, "compile", compile_model)
    return counter


def compiled(kernels="eager", attn="sdpa", precision=PRECISION, **fields):
    """Return a compiled model. Skip the test if a kernel cannot run here."""
    options = {"device": "cuda" if torch.cuda.is_available() else "cpu", "precision": precision}
    kernels = {**PRESETS["kernels"][kernels], "compile": True}
    try:
        return hotswap.build("tiny", kernels=kernels, attn=attn, **SHAPE | fields, **options)
    except hotswap.registry.Unavailable as why:
        pytest.skip(str(why))


def train(model, *shapes):
    for shape in shapes:
        idx = torch.randint(64, shape, device=model.wte.weight.device)
        model(idx, idx).backward()


@pytest.mark.parametrize("choice", QUICK, ids=str)
def test_many_lengths_take_two_graphs(choice, graphs):
    """The first is for one length, and the second for all. Other numbers of sequences take one more graph."""
    model = compiled(**choice)
    train(model, (2, 8))
    assert graphs.frame_count == 1
    train(model, (2, 9), (2, 16), (2, 31), (2, 32))
    assert graphs.frame_count == 2
    train(model, (3, 16), (5, 31))
    assert graphs.frame_count == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice not in QUICK], ids=str)
def test_many_shapes_take_two_graphs(choice, graphs):
    """The first is for one shape. The second is for all if both sides change at once. A graph takes 5 s."""
    model = compiled(**choice)
    train(model, (2, 8))
    assert graphs.frame_count == 1
    train(model, (3, 9), (2, 16), (5, 32))
    assert graphs.frame_count == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("fields", [{"pos": "rope"}, {"window": 8}, {"checkpointing": "block"}], ids=str)
def test_many_lengths_take_two_graphs_with_every_shape_of_model(fields, graphs):
    train(compiled(**fields), (2, 8), (2, 9), (2, 31))
    assert graphs.frame_count == 2


def test_many_lengths_take_two_graphs_if_the_user_compiles(graphs):
    model = hotswap.build("tiny", **SHAPE, device="cpu", precision="fp32")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for length in (8, 9, 16, 31):
        idx = torch.randint(64, (2, length))
        compiled(idx, idx).backward()
    assert graphs.frame_count == 2


def test_a_compiled_model_refuses_what_the_model_refuses(graphs):
    """In the same line, and the next call is right."""
    model = compiled()
    train(model, (2, 16))
    for idx in (torch.zeros(2, 33, dtype=torch.int64), torch.zeros(16, dtype=torch.int64), torch.zeros(2, 16)):
        with pytest.raises(ValueError, match=r"^(a sequence of 33 is beyond|idx must be token ids)[^\n]*$"):
            model(idx)
    train(model, (2, 16))
    assert graphs.frame_count == 1

"""Backends of ops that a model does not call: they have no name, no check and no effect, and may not run here."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.registry import OPS, TRAINING_OPS, AttnConfig, KernelsConfig, contract
from lab.recipe import Recipe
from model.executed import called_kernels, called_ops
from model.optim import OptimConfig
from tests.model.test_gpt import SMALL
from tests.model.test_optim import ADAMW

CPU = torch.device("cpu")
OPTIM = OptimConfig(**ADAMW)
WITH_MODEL = [op for op in OPS if hasattr(contract(op), "MODEL")]  # the ops that GPT-2 does not call
BROKEN = "def {op}(*arguments, **more):\n    raise RuntimeError\n\n\ndef unavailable(device):\n    return 'no'\n"


@pytest.mark.parametrize("op", WITH_MODEL)
def test_an_op_with_model_is_called_by_such_a_model_only(op):
    llama = replace(SMALL, **contract(op).MODEL)
    assert op in called_ops(llama)
    assert op not in called_ops(SMALL)
    assert {*called_ops(SMALL, TRAINING_OPS)} == {*called_ops(SMALL), "adamw", "muon"}
    assert getattr(called_kernels(SMALL, KernelsConfig(**{op: "auto"})), op) == "eager"
    assert getattr(called_kernels(llama, KernelsConfig(**{op: "auto"})), op) == "auto"


@pytest.mark.parametrize("op", WITH_MODEL)
def test_a_backend_of_an_uncalled_op_is_neither_checked_nor_refused(op, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(BROKEN.format(op=op))
    monkeypatch.setattr("lab.bench.new_backends.run_probes", lambda groups, *_: [["wrong: broken"] for _ in groups])
    recipe = Recipe(SMALL, KernelsConfig(**{op: "mine.py"}), AttnConfig("sdpa"), OPTIM, "fp32", seed=1)
    assert recipe.check_kernels(CPU) == {}
    assert op not in recipe.chosen_kernels


def test_a_run_names_only_ops_that_its_model_calls_and_warns_of_others(hotswap):
    smoke = "+experiment=smoke", "device=cpu", "train.max_steps=1", "train.eval_every=0", "train.sample_tokens=0"
    words = "model.n_layer=1", "model.norm=rmsnorm", "kernels.norm=./mine.py", "kernels.linear=addmm.py"
    Path("mine.py").write_text(BROKEN.format(op="norm"))
    linear = "import torch\n\n\ndef linear(x, weight, bias):\n    return torch.nn.functional.linear(x, weight, bias)\n"
    Path("addmm.py").write_text(linear)
    code, _, err = hotswap(*smoke, *words, "proof=false", "kernels.check=false", "kernels.mlp=eager")
    assert (code, err) == (
        0,
        "warning: kernels.norm=./mine.py has no effect, because this run does not call norm; it calls rms_norm, "
        "linear, attention, mlp, loss, adamw\n",
    )
    [run] = Path("out").iterdir()
    assert run.name.endswith("rms_norm.eager+linear.addmm.py+mlp.eager+loss.eager-sdpa-fp32")
    assert "norm" not in json.loads((run / "result.json").read_text())["kernels"]

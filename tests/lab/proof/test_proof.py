"""proof=true end to end: the row of a right run has a proof, and the row of a wrong run shows no speed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from common.files import write_json
from kernels.attention import sdpa
from kernels.norm import eager
from lab.proof import memory, references
from lab.proof.parity import ROUNDING, distance
from lab.proof.receipt import MOST_KERNELS
from lab.recipe import Recipe
from lab.sweep.table import speed
from runtime.meter import MAX_SAMPLES
from tests.test_train import CPU, QUICK, config, row

PROOF = (*QUICK, "train.max_steps=21", "proof=true", "attn=sdpa", "train.log_every=3")
# As in +experiment=throughput: with such a small learning rate, the losses do not show a wrong gradient
PROOF += ("optim.learning_rate=6e-4", "optim.min_lr=6e-5", "optim.warmup_steps=100")


def recipe(cfg):
    return Recipe(cfg.model, cfg.kernels, cfg.attn, cfg.optim, cfg.precision, cfg.seed)


@pytest.mark.usefixtures("quick_python")
def test_the_row_of_a_right_run_has_a_proof_and_wrong_runs_have_no_speed(hotswap, monkeypatch):
    """One test, because these runs share their references.

    Processes of their own make the references, so a patched backend does not change them.
    """
    code, out, _ = hotswap(*PROOF, "precision=bf16")
    assert code == 0
    right = row()
    parity, receipt, memory = right["parity"], right["receipt"], right["memory"]
    assert parity["ok"] is True
    assert (parity["steps"], len(parity["losses"]), len(parity["reference"])) == (20, 20, 20)
    assert 0 < parity["loss_error"] < parity["loss_bound"] < 0.05
    assert 0 < parity["gradient_error"] < parity["gradient_bound"] < 0.1  # bf16's unit is 0.4%
    assert receipt["wrong"] is None
    assert receipt["families"].keys() >= {"gemm", "attention", "norm", "mlp", "loss", "optimizer"}
    assert len(receipt["kernels"]) == MOST_KERNELS
    assert receipt["optimizer_ms"] > 0
    called = "norm", "linear", "attention", "mlp", "loss", "adamw"
    assert receipt["lines"] == dict.fromkeys(called, 0)  # PyTorch's kernels
    parts = memory["predicted"]
    assert parts["peak"] == pytest.approx(sum(gib for name, gib in parts.items() if name != "peak"), rel=0.02)
    assert parts["weights"] * 2 == parts["gradients"]  # bf16 weights, and gradients that add up in fp32
    assert memory["measured"] is None  # measured on a GPU only
    assert (right["perf/graph_breaks"], right["perf/cache"]) == (0, None)
    assert len(right["perf/laps_s"]) == right["perf/samples"] == 6 <= MAX_SAMPLES
    assert [line.split()[0] for line in out.splitlines()[-4:]] == ["parity", "receipt", "memory", "done"]

    check_a_missing_kernel_is_wrong(hotswap, monkeypatch)
    check_wrong_numbers_are_wrong(hotswap, monkeypatch)


def check_a_missing_kernel_is_wrong(hotswap, monkeypatch):
    """The references of the first run are read again, without their locks."""
    cached = sorted(references.CACHE.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(sdpa, "RUNS", {"flash_for_cpu": ("flash_attention", "no_such_kernel")})
        patch.setattr(references, "FileLock", None)
        code, _, err = hotswap(*PROOF, "precision=bf16", "out_dir=other")
    assert code == 1
    assert "wrong: the row says attention=sdpa (flash_for_cpu" in row("other")["status"]
    assert "but no kernel of the profiled step matches no_such_kernel" in err
    assert speed(row("other")) is None
    assert sorted(references.CACHE.iterdir()) == cached


def check_wrong_numbers_are_wrong(hotswap, monkeypatch):
    """Another eps in norm, a bias of norm without a gradient, and q and k without gradients."""
    norm, attention = eager.norm, sdpa.attention
    wrong_backends = [
        (eager, "norm", lambda *arguments, **rest: norm(*arguments, **{**rest, "eps": 0.3})),
        (eager, "norm", lambda x, r, w, bias, **rest: norm(x, r, w, bias.detach() + 0 * bias, **rest)),
        (sdpa, "attention", lambda q, k, v, **rest: attention(q.detach(), k.detach(), v, **rest)),
    ]
    for number, (module, name, wrong_function) in enumerate(wrong_backends):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, wrong_function)
            code, _, err = hotswap(*PROOF, "precision=bf16", f"out_dir=wrong{number}")
        wrong = row(f"wrong{number}")
        assert (code, err.count("\n")) == (1, 1)
        assert wrong["status"].startswith("wrong: against eager PyTorch in fp32 the first 20 losses are off by")
        assert wrong["parity"]["ok"] is False
        assert speed(wrong) is None


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["model.dropout=0.1"], "with dropout, every backend draws random numbers of its own"),
        (["train.max_minutes=9"], "with train.max_minutes, the schedule depends on the speed"),
    ],
)
def test_a_row_without_parity_says_why(overrides, why, hotswap):
    code, out, err = hotswap(*PROOF, *overrides)
    assert (code, err) == (0, "")
    assert f"parity   not compared: {why}" in out
    assert row()["parity"] == {"ok": None, "why": why}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_a_run_without_references_trains_and_says_why(hotswap, tmp_path, monkeypatch):
    """The folder of the references is a file in the first run. In the second run their process fails."""
    (tmp_path / ".cache").mkdir()
    (tmp_path / references.CACHE).write_text("")
    code, out, err = hotswap(*PROOF, "out_dir=a")
    assert (code, err) == (0, "")
    assert "parity   not compared: [Errno" in out
    (tmp_path / references.CACHE).unlink()
    monkeypatch.setattr(references, "write_reference", torch.load)  # torch.load takes no config
    code, out, err = hotswap(*PROOF, "out_dir=b")
    assert (code, err) == (0, "")
    assert "parity   not compared: eager PyTorch in fp32 did not run: TypeError: load() " in out


def test_the_reference_in_fp8_has_the_ops_of_the_run_in_fp8(hotswap, monkeypatch):
    in_fp8 = []

    def fail(work, arguments, description):
        in_fp8.append((arguments[0].precision, arguments[0].kernels.fp8))
        if arguments[0].precision == "fp8":
            raise RuntimeError("enough")
        write_json(arguments[-1], {"losses": [10.0]})

    monkeypatch.setattr(references, "run_in_process", fail)
    code, out, err = hotswap(*PROOF, "precision=fp8", "kernels.fp8=mlp")
    assert (code, err) == (0, "")
    assert "parity   not compared: enough" in out
    assert in_fp8 == [("fp32", None), ("fp8", ["mlp"])]
    # these runs may take minutes, and come before the header
    line = "parity   first eager PyTorch in {}, as the reference of this config\n"
    assert out.startswith(line.format("fp32") + line.format("fp8"))


def test_references_do_not_depend_on_the_size_of_micro_batches(tmp_path):
    """They are equal to fp32 rounding, by the bound for fp32."""
    references_by_size = {}
    for size in (1, 4):
        cfg = config(*QUICK, f"train.batch_size={size}", "train.max_steps=4", "attn=sdpa")
        path = tmp_path / f"{size}.json"
        references.write_reference(recipe(cfg), cfg.data, cfg.train, None, torch.float32, CPU, path)
        references_by_size[size] = references.read_steps(path)
    losses, gradient = distance(references_by_size[1], references_by_size[4])
    assert losses < ROUNDING
    assert 0 < gradient < ROUNDING / 10


def test_the_reference_in_fp32_rounds_its_weights_as_the_run_does(tmp_path):
    """Otherwise the rounding of the weights would count as an error of the run's kernels."""
    cfg, losses = config(*QUICK, "train.max_steps=4", "attn=sdpa"), {}
    for dtype in (torch.float32, torch.bfloat16):
        path = tmp_path / f"{dtype}.json"
        references.write_reference(recipe(cfg), cfg.data, cfg.train, None, dtype, CPU, path)
        losses[dtype] = references.read_steps(path)["losses"]
    differences = (losses[torch.bfloat16] / losses[torch.float32] - 1).abs()
    assert ROUNDING / 100 < differences.max() < 2**-8  # bf16's unit


def test_everything_that_decides_a_reference_makes_a_new_one(tmp_path, monkeypatch):
    """If one of these settings changes, both references are made again. Other kernels have the same references."""
    paths = []

    def make(work, arguments, description):
        paths.append(arguments[-1])
        write_json(arguments[-1], {"losses": [10.0]})

    def made(*overrides, fingerprint="a", init_from=None, documents=False):
        cfg = config(*QUICK, *overrides)
        paths.clear()
        facts = replace(recipe(cfg), documents=documents), cfg.data, cfg.train, init_from
        references.read_or_make_references(*facts, SimpleNamespace(fingerprint=fingerprint), CPU)
        return len(paths)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(references, "run_in_process", make)
    assert made("precision=bf16") == 2
    assert made("precision=bf16", "kernels.norm=triton", "attn=eager", "train.log_every=9") == 0
    for change in ("seed=7", "model.n_layer=2", "model.window=8", "optim.learning_rate=1", "optim.warmup_steps=3"):
        assert made("precision=bf16", change) == 2, change
    for change in ("train.max_steps=5", "train.tokens_per_step=1024", "train.block_size=64", "train.overfit=true"):
        assert made("precision=bf16", change) == 2, change
    (tmp_path / "weights.pt").write_bytes(b"weights")
    for fact in ({"fingerprint": "b"}, {"init_from": "weights.pt"}, {"documents": True}):
        assert made("precision=bf16", **fact) == 2, fact
    assert made("precision=fp32") == 1  # without rounded weights; both references are one
    (tmp_path / "weights.pt").write_bytes(b"other weights")
    assert made("precision=bf16", init_from="weights.pt") == 2
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert made("precision=bf16") == 2


def test_largest_batch_size_is_the_largest_divisor_that_is_predicted_to_fit():
    """None if not even one sequence fits."""
    cfg = config(*QUICK, "train.batch_size=24", "train.tokens_per_step=3072")
    peaks = {}
    for size in (12, 8, 1):
        other = config(*QUICK, f"train.batch_size={size}", "train.tokens_per_step=3072")
        peaks[size] = memory.predict_step(recipe(other), size, other.train.block_size, 2, CPU)["peak"]

    def fits(gib):
        return memory.largest_batch_size(recipe(cfg), cfg.train, CPU, gib)

    assert fits(peaks[12]) == 12
    assert fits(peaks[12] - 1e-6) == fits(peaks[8]) == 8
    assert fits(peaks[1] - 1e-6) is None

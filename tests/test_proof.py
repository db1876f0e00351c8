"""proof=true end to end: what the row of an honest run has, and that a dishonest one shows no speed."""

import pytest
import torch

import train
from kernels.attention import sdpa
from kernels.norm import eager
from model import proof
from runtime.console import speed
from runtime.meter import LAPS
from runtime.parity import ROUNDING, distance
from tests.test_train import CPU, QUICK, config, row

PROOF = (*QUICK, "train.max_steps=21", "proof=true", "attn=sdpa", "train.log_every=3")
# As in +experiment=throughput: so slow that a wrong gradient is not to be seen in the losses
PROOF += ("optim.learning_rate=6e-4", "optim.min_lr=6e-5", "optim.warmup_steps=100")


def test_an_honest_run_and_others(hotswap, monkeypatch):
    """Eager PyTorch's first steps are made once, by processes of their own: what is patched here is not in them."""
    code, out, _ = hotswap(*PROOF, "precision=bf16")
    assert code == 0
    found = row()
    parity, receipt, memory = found["parity"], found["receipt"], found["memory"]
    assert parity["ok"] is True
    assert (parity["steps"], len(parity["losses"]), len(parity["reference"])) == (20, 20, 20)
    assert 0 < parity["loss_error"] < parity["loss_bound"] < 0.05
    assert 0 < parity["gradient_error"] < parity["gradient_bound"] < 0.1  # bf16's unit is 0.4%
    assert receipt["wrong"] is None
    assert receipt["families"].keys() >= {"gemm", "attention", "norm", "mlp", "loss", "optimizer"}
    assert len(receipt["kernels"]) == proof.KERNELS
    parts = memory["predicted"]
    assert parts["peak"] == pytest.approx(sum(gib for name, gib in parts.items() if name != "peak"), rel=0.02)
    assert parts["weights"] * 2 == parts["gradients"]  # bf16, and fp32 where they add up
    assert memory["measured"] is None  # of a CPU's allocator nobody asks
    assert (found["perf/graph_breaks"], found["perf/cache"]) == (0, None)
    assert len(found["perf/laps_s"]) == found["perf/samples"] == 6 <= LAPS
    assert [line.split()[0] for line in out.splitlines()[-4:]] == ["parity", "receipt", "memory", "done"]

    kept = sorted(proof.CACHE.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(sdpa, "RUNS", {"flash_for_cpu": ("flash_attention", "no_such_kernel")})
        patch.setattr(proof, "fcntl", None)  # nobody waits for what is there
        code, _, err = hotswap(*PROOF, "precision=bf16", "out_dir=other")
    assert code == 1
    assert "wrong: attention is said to be sdpa (flash_for_cpu" in row("other")["status"]
    assert "and no kernel of the profiled step is called like no_such_kernel" in err
    assert speed(row("other")) is None
    assert sorted(proof.CACHE.iterdir()) == kept

    norm, attention = eager.norm, sdpa.attention
    for number, (module, name, wrong) in enumerate(
        [
            (eager, "norm", lambda *arguments, **rest: norm(*arguments, **{**rest, "eps": 0.3})),
            (eager, "norm", lambda x, r, w, bias, **rest: norm(x, r, w, bias.detach() + 0 * bias, **rest)),
            (sdpa, "attention", lambda q, k, v, **rest: attention(q.detach(), k.detach(), v, **rest)),
        ]
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, wrong)
            code, _, err = hotswap(*PROOF, "precision=bf16", folder := f"out_dir=wrong{number}")
        found = row(folder.partition("=")[2])
        assert (code, err.count("\n")) == (1, 1)
        assert found["status"].startswith("wrong: against eager PyTorch in fp32 the first 20 losses are off by")
        assert found["parity"]["ok"] is False
        assert speed(found) is None


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["model.dropout=0.1"], "dropout draws its own numbers in every kernel"),
        (["train.max_minutes=9"], "train.max_minutes makes the schedule a matter of speed"),
    ],
)
def test_what_is_not_compared_says_why(overrides, why, hotswap):
    code, out, err = hotswap(*PROOF, *overrides)
    assert (code, err) == (0, "")
    assert f"parity   not compared: {why}" in out
    assert row()["parity"] == {"ok": None, "why": why}


def test_a_reference_that_fails_is_a_reason(hotswap, tmp_path, monkeypatch):
    """And no more than that: here its cache is a file, and then its process fails."""
    (tmp_path / ".cache").mkdir()
    (tmp_path / proof.CACHE).write_text("")
    code, out, err = hotswap(*PROOF, "out_dir=a")
    assert (code, err) == (0, "")
    assert "parity   not compared: [Errno" in out
    (tmp_path / proof.CACHE).unlink()
    monkeypatch.setattr(proof, "reference", torch.load)  # which takes no config
    code, out, err = hotswap(*PROOF, "out_dir=b")
    assert (code, err) == (0, "")
    assert "parity   not compared: eager PyTorch in fp32 did not run: TypeError: load() " in out


def test_references_do_not_depend_on_micro_steps(tmp_path):
    """A step is the same step in one micro-batch or in many: to fp32 rounding, as the bound for fp32 says."""
    found = {}
    for size in (1, 4):
        cfg = config(*QUICK, f"train.batch_size={size}", "train.max_steps=4", "attn=sdpa")
        proof.reference(cfg, torch.float32, CPU, path := tmp_path / f"{size}.pt", train.build, train.train_step)
        found[size] = torch.load(path, weights_only=True)
    losses, gradient = distance(found[1], found[4])
    assert losses < ROUNDING
    assert 0 < gradient < ROUNDING / 10


def test_a_full_memory_says_which_micro_batch_fits():
    """The largest divisor whose own prediction is within the memory; none, if not even a sequence is."""
    cfg = config(*QUICK, "train.batch_size=24", "train.tokens_per_step=3072")
    peaks = {}
    for size in (12, 8, 1):
        other = config(*QUICK, f"train.batch_size={size}", "train.tokens_per_step=3072")
        peaks[size] = proof.split(other, CPU, train.build, train.train_step)["peak"]

    def fits(gib):
        return proof.would_fit(cfg, CPU, gib, train.build, train.train_step)

    assert fits(peaks[12]) == 12
    assert fits(peaks[12] - 1e-6) == fits(peaks[8]) == 8
    assert fits(peaks[1] - 1e-6) is None

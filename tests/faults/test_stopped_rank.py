"""A rank that is stopped ends the job with a line that names it, and the restarted job goes on bit for bit."""

import re
from pathlib import Path

import pytest
import torch

from tests.test_parallel import BASE, STOPPABLE, figures, torchrun
from tests.test_train import ROOT, row

STOPPED = """
step = capture.train_step
def stopping(model, optimizer, batches, lr):
    if optimizer.ranks.rank == 1 and optimizer.steps == 5 and not Path("stopped").exists():
        while not Path("run/checkpoints/step-000004").exists():
            time.sleep(0.1)
        Path("stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    return step(model, optimizer, batches, lr)
capture.train_step = stopping
train.main()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("parallel", ["fsdp", "context"])
@pytest.mark.usefixtures("quick_python")
def test_a_stopped_rank_is_named_and_the_job_goes_on_bit_equal(tmp_path, monkeypatch, parallel):
    """It is stopped in step 6, and the job resumes after step 4."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "stopped.py"
    script.write_text((STOPPABLE + STOPPED).format(root=str(ROOT)))
    settings = *BASE, f"parallel={parallel}", "model.dropout=0.1", "train.checkpoint_every=4", "train.sample_tokens=0"
    settings += ("train.sharded_checkpoints=true",) if parallel != "context" else ()
    assert torchrun(tmp_path, *settings, "out_dir=whole")[0] == 0
    again = "train.resume=auto", "runtime.hang_minutes=0.1"  # a busy machine may take 3 s for a step
    code, _, err = torchrun(tmp_path, *settings, *again, script=script, restarts=1)
    assert code == 0, err
    assert re.search(
        r"error: the job made no progress for 0.1 minutes: rank 1 on \S+ is stopped, or its machine is down; "
        r"rank 0 on \S+ waits for gloo:\w+ number \d+ at model/\w+.py:\d+ \(\w+\); resume it with ",
        err,
    )
    assert row()["resumed_from"] == "run/checkpoints/step-000004"
    assert torch.equal(figures(Path("run")), figures("whole"))

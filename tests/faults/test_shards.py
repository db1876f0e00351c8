"""Flips and cuts of a checkpoint whose ranks write their own parts."""

import random
from pathlib import Path

import pytest
import torch

from runtime.checkpoint import checkpoint_folders, verify
from runtime.config import UserError
from tests.test_parallel import BASE, figures, torchrun
from tests.test_train import row


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_every_flip_of_a_sharded_checkpoint_is_found_and_the_job_goes_on_before_it(tmp_path, monkeypatch):
    """Nine random flips in each file of it, and a cut. The job resumes from the checkpoint before it, bit for bit."""
    monkeypatch.chdir(tmp_path)
    settings = *BASE, "parallel=fsdp", "train.sharded_checkpoints=true", "train.checkpoint_every=3"
    settings += "train.sample_tokens=0", "model.dropout=0.1", "train.eval_every=0"
    assert torchrun(tmp_path, *settings, "out_dir=whole")[0] == 0
    assert torchrun(tmp_path, *settings, "train.stop_after=7")[0] == 0
    newest = checkpoint_folders(Path("run/checkpoints"))[0]
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    assert len(files) >= 4  # the manifest, the parts of two ranks, and what is not sharded
    rng = random.Random(1)
    for path in files:
        before = path.read_bytes()
        for number in range(10):
            place = rng.randrange(len(before))
            after = bytearray(before[:place] if number == 9 else before)
            if len(after) == len(before):
                after[place] ^= 1 << rng.randrange(8)
            path.write_bytes(after)
            with pytest.raises(UserError, match=rf"{newest.name}"):
                verify(newest)
        path.write_bytes(after if path == files[-1] else before)
    code, _, err = torchrun(tmp_path, *settings, "train.resume=auto")
    assert code == 0, err
    assert f"warning: {newest} is damaged" in err
    assert row()["resumed_from"] == "run/checkpoints/step-000006"
    assert torch.equal(figures(Path("run")), figures("whole"))

"""Checkpoint folders: what is written is what is read, and nothing short of whole counts."""

import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime import checkpoint
from runtime.checkpoint import find, load, manifest, newest, read_weights, steps, verified
from runtime.config import UserError
from runtime.ranks import Ranks
from runtime.saver import Checkpoints

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def state(seed=0, size=1000):
    generator = torch.Generator().manual_seed(seed)
    groups = ("model", "exp_avg", "exp_avg_sq")
    return {group: {name: torch.randn(size, 3, generator=generator) for name in ("a", "b.c")} for group in groups}


def checkpoints(folder, keep=2, made=10**6):
    return Checkpoints(folder, keep, sharded=False, ranks=Ranks(), device=CPU, made=made)


def facts(loss=None):
    return {"val_loss": loss, "config": {}, "data": {}}


def save(folder, *numbers, keep=2, losses=()):
    kept = checkpoints(folder, keep)
    for number, loss in zip(numbers, [*losses, *[None] * len(numbers)], strict=False):
        kept.save(number, state(number), {"updates": number}, facts(loss))
    kept.close()
    return kept


def test_a_prepared_save_takes_no_more_memory(tmp_path):
    """The copies are the ones that prepare() made, and hold the state."""
    kept, saved = checkpoints(tmp_path), state(7)
    kept.prepare({name: tensor.shape for name, tensor in saved["model"].items()})
    kept.finish()
    before = {key: tensor.data_ptr() for key, tensor in kept.host.items()}
    kept.save(7, saved, {}, facts())
    kept.close()
    assert {key: tensor.data_ptr() for key, tensor in kept.host.items()} == before
    assert set(before) == {f"{group}.{name}" for group in saved for name in saved[group]}
    assert torch.equal(kept.host["exp_avg.b.c"], saved["exp_avg"]["b.c"])


def test_what_is_loaded_is_what_was_saved(tmp_path):
    save(tmp_path, 7)
    folder = find(tmp_path)
    assert folder == tmp_path / "step-000007"
    assert verified(folder)["step"] == 7
    empty = {group: {name: torch.full_like(t, torch.nan) for name, t in ts.items()} for group, ts in state().items()}
    assert load(folder, empty) == {"updates": 7}
    for group, tensors in state(7).items():
        for name, tensor in tensors.items():
            assert torch.equal(empty[group][name], tensor)
    assert all(torch.equal(tensor, state(7)["model"][name]) for name, tensor in read_weights(folder).items())


def test_the_tensors_may_change_while_they_are_written(tmp_path):
    """save() returns when it has copies, and the next save waits for the one before."""
    kept, tensors = checkpoints(tmp_path), state(1, size=300_000)
    kept.save(1, tensors, {}, facts())
    for group in tensors.values():
        for tensor in group.values():
            tensor.fill_(torch.nan)
    kept.save(2, state(2, size=300_000), {}, facts())
    kept.close()
    for step in (1, 2):
        weights = read_weights(tmp_path / f"step-00000{step}")
        assert torch.equal(weights["a"], state(step, size=300_000)["model"]["a"])


def test_the_last_ones_stay_and_the_best(tmp_path):
    save(tmp_path, 10, 20, 30, 40, 50, losses=[3.0, 1.0, 2.0, None, 1.5])
    assert [path.name for path in steps(tmp_path)] == ["step-000050", "step-000040", "step-000020"]
    assert (tmp_path / "best").resolve() == tmp_path / "step-000020"
    assert checkpoints(tmp_path).best == 1.0  # as the next process sees it
    save(tmp_path, 60, losses=[0.5])
    assert (tmp_path / "best").resolve() == tmp_path / "step-000060"
    assert [path.name for path in steps(tmp_path)] == ["step-000060", "step-000050"]


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damage_is_found_and_passed_over(tmp_path, capsys, name, damage):
    save(tmp_path, 1, 2)
    path = tmp_path / "step-000002" / name
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "truncated":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    said = {
        "flipped": "has another SHA-256",
        "truncated": f"has {len(content) - 1} of {len(content)} bytes",
        "missing": "is missing",
    }[damage]
    with pytest.raises(UserError, match=f"step-000002 is damaged: {name} {said}"):
        verified(tmp_path / "step-000002")
    assert newest(tmp_path) == tmp_path / "step-000001"
    assert capsys.readouterr().err.startswith(f"warning: {tmp_path}/step-000002 is damaged: {name} ")


def test_a_manifest_must_be_one(tmp_path):
    save(tmp_path, 1)
    path = tmp_path / "step-000001" / "manifest.json"
    whole = json.loads(path.read_text())
    for text in ("", "[", "[]", "{}", '{"version": 1}', json.dumps(whole | {"version": 2}), "\0" * 100):
        path.write_text(text)
        with pytest.raises(UserError):
            manifest(path.parent)
    with pytest.raises(UserError, match="holds no good checkpoint"):
        find(tmp_path / "nowhere")


def test_a_damaged_one_is_written_over(tmp_path):
    save(tmp_path, 1, 2)
    (tmp_path / "step-000002" / "training.pt").write_bytes(b"")
    save(tmp_path, 2)
    assert newest(tmp_path) == tmp_path / "step-000002"


def test_going_on_before_a_damaged_one(tmp_path):
    """It is deleted, or it would count as the newest and the new ones would be pruned."""
    save(tmp_path, 2, 4, 6, keep=1, losses=[3.0, 2.0, 1.0])
    (tmp_path / "step-000006" / "training.pt").write_bytes(b"")
    kept = checkpoints(tmp_path, keep=1, made=4)
    assert (steps(tmp_path), kept.best) == ([], math.inf)  # 4 was pruned long ago, and the best was 6
    kept.save(5, state(), {}, facts(2.5))
    kept.close()
    assert newest(tmp_path) == tmp_path / "step-000005"
    assert kept.best == 2.5


def test_a_damaged_best_is_none(tmp_path, capsys):
    save(tmp_path, 1, 2, 3, keep=1, losses=[1.0, 2.0, 2.0])
    (tmp_path / "best" / "manifest.json").write_text("")
    assert checkpoints(tmp_path).best == math.inf
    assert capsys.readouterr().err.startswith(f"warning: {tmp_path}/best is no good checkpoint")


def test_what_else_lies_in_the_folder(tmp_path):
    """A backup by hand is no checkpoint of the run; a copy of the folder that followed `best` can save again."""
    save(tmp_path, 1, losses=[1.0])
    shutil.copytree(tmp_path / "step-000001", tmp_path / "step-000001.bak")
    assert [path.name for path in steps(tmp_path)] == ["step-000001"]
    shutil.copytree(tmp_path, tmp_path / "copy", symlinks=False)
    save(tmp_path / "copy", 2, losses=[0.5])
    assert (tmp_path / "copy" / "best").resolve() == tmp_path / "copy" / "step-000002"


def test_a_full_disk_leaves_the_one_before(tmp_path, capsys):
    """Every file of more than 1,000 bytes fails, as on a full disk; then there is room again."""
    save(tmp_path, 1)
    kept = checkpoints(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        kept.save(2, state(2), {}, facts())
        kept.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    line = capsys.readouterr().err
    assert line.startswith(f"warning: {tmp_path}/step-000002 could not be written: ")
    assert line.endswith(" GiB are free\n")
    assert line.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert verified(tmp_path / "step-000001")["step"] == 1
    kept.save(3, state(3), {}, facts())
    kept.close()
    assert verified(tmp_path / "step-000003")["step"] == 3


def test_the_last_save_must_succeed(tmp_path):
    kept = checkpoints(tmp_path / "file" / "checkpoints")
    (tmp_path / "file").write_text("in the way")
    kept.save(1, state(), {}, facts())
    with pytest.raises(UserError, match="step-000001 could not be written: Not a directory"):
        kept.close()


SAVER = """
import sys, torch
from pathlib import Path
from tests.runtime.test_checkpoint import checkpoints, facts, state
kept, tensors = checkpoints(Path(sys.argv[1])), state(0, 400_000)
for step in range(1, 1000):
    kept.save(step, tensors, {}, facts())
    print(step, flush=True)
"""


def test_sigkill_in_the_middle_of_a_save(tmp_path):
    """Killed at moments spread over a save (about 0.2 s each): what is there is whole, and leftovers go."""
    seen = set()
    for delay in (0.0, 0.03, 0.08, 0.15):
        folder = tmp_path / str(delay)
        process = subprocess.Popen([sys.executable, "-c", SAVER, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        while process.stdout.readline() != "3\n":
            assert process.poll() is None
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen |= {path.name for path in folder.glob(".step-*")}
        whole = steps(folder)
        assert len(whole) >= 2
        assert all(verified(path) for path in whole)
        checkpoints(folder)
        assert not [*folder.glob(".*")]
    assert seen  # at least one kill met a save half done


def test_random_states_come_back():
    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]

    held = checkpoint.random_state(CPU)
    expected = draw()
    assert draw() != expected
    checkpoint.restore_random_state(held, CPU)
    assert draw() == expected


def test_random_states_are_of_types_that_are_safe_to_load(tmp_path):
    torch.save(checkpoint.random_state(CPU), tmp_path / "x.pt")
    checkpoint.restore_random_state(torch.load(tmp_path / "x.pt", weights_only=True), CPU)


def test_nothing_is_loaded_that_could_run_code(tmp_path):
    """A training.pt that would run a command is refused by torch.load, whatever its manifest says."""

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    save(tmp_path, 1)
    folder = tmp_path / "step-000001"
    torch.save({"exp_avg": Evil()}, folder / "training.pt")
    checkpoint.seal(folder, {"step": 1, **facts()})
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        load(folder, state())
    assert not (tmp_path / "ran").exists()

"""Checkpoints that somebody has changed: no command runs what is in them, and each says in one line what is wrong.

Most have the right SHA-256, because whoever changes a file can write the manifest again.
"""

import copy
import json
import os
import pickle
import shutil
import socket
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.files import add_sha256, read_json, write_json
from data.errors import DataError
from lab.evaluation import data_config
from model.sources import open_source
from runtime import checkpoint
from runtime.config import UserError
from runtime.manifest import Unreadable, read_manifest
from runtime.resume import check_same_run, checkpoint_model_config, logged_figures, saved_row
from scripts import evaluate, export, generate
from tests.runtime.test_checkpoint import save
from tests.runtime.test_sharded import Attack, change, reseal, set_place, shard
from tests.test_resume import BASE, RESUME

STEP = Path("run/checkpoints/step-000001")
RAN = Path("ran")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder for the run of all tests, which the first of them trains."""
    return tmp_path_factory.mktemp("trained") / "run"


@pytest.fixture
def trained(hotswap, shared):
    """The folder `run` has the checkpoint STEP."""
    if not shared.exists():
        assert hotswap(*BASE, "train.max_steps=1")[0] == 0
        shutil.copytree("run", shared, symlinks=True)
    else:
        shutil.copytree(shared, "run", symlinks=True)
    shutil.copytree(STEP, "original")


@pytest.fixture
def commands(called, hotswap, trained):
    """Name -> a function that opens STEP with this command. It returns (exit code, stdout, stderr)."""
    small = "device=cpu", "out_dir=new"
    return {
        "resume=auto": lambda: hotswap(*BASE, "train.max_steps=2", RESUME),
        "resume=PATH": lambda: hotswap(*BASE, "train.max_steps=2", f"train.resume={STEP}"),
        "init_from": lambda: hotswap(*BASE, "train.max_steps=1", f"init_from={STEP}", "out_dir=new"),
        "generate": lambda: called(
            "generate.py", generate.main_with_exact_prompt, f"checkpoint={STEP}", "max_new_tokens=2", *small
        ),
        "evaluate": lambda: called("evaluate.py", evaluate.main, f"checkpoint={STEP}", "batches=1", *small),
        "export": lambda: called("export.py", export.main, f"checkpoint={STEP}", "path=new", "format=nanogpt"),
    }


def restore():
    """Bring the checkpoint back, and delete what a command has written."""
    shutil.rmtree(STEP)
    shutil.copytree("original", STEP)
    shutil.rmtree("new", ignore_errors=True)


def make_sharded():
    training = torch.load(STEP / "training.pt", weights_only=True)
    shard(STEP, {"model": load_file(STEP / "model.safetensors"), **{k: training[k] for k in ("exp_avg", "exp_avg_sq")}})


def add_shards():
    (STEP / "shards").mkdir()
    (STEP / "shards/.metadata").write_bytes(pickle.dumps(Attack(RAN)))


def add_shards_and_reseal():
    add_shards()
    reseal(STEP)


def change_metadata():
    make_sharded()
    (STEP / "shards/.metadata").write_bytes(pickle.dumps(Attack(RAN)))
    reseal(STEP)


def change_shard():
    make_sharded()
    path = STEP / "shards/__0_0.distcp"
    size = path.stat().st_size
    torch.save(Attack(RAN), path)
    length = path.stat().st_size
    path.write_bytes(path.read_bytes() + bytes(size))
    change(STEP, lambda metadata: set_place(metadata, offset=0, length=length))


def change_training():
    training = torch.load(STEP / "training.pt", weights_only=True)
    torch.save({**training, "exp_avg": Attack(RAN)}, STEP / "training.pt")
    reseal(STEP)


def test_no_command_runs_what_is_in_a_checkpoint(commands):
    for attack in (add_shards, add_shards_and_reseal, change_metadata, change_shard, change_training):
        for name, command in commands.items():
            attack()
            code, _, err = command()
            assert not RAN.exists(), (attack, name)
            reads_weights_alone = attack is change_training and name in ("init_from", "generate", "evaluate")
            assert code == (0 if reads_weights_alone else 1), (attack, name, err)
            kinds = [line.partition(":")[0] for line in err.splitlines()]
            skips = name == "resume=auto" and attack is add_shards_and_reseal  # its manifest is not ours
            assert kinds == ["warning"] * skips + ["error"] * code, err
            restore()


WRONG = (None, True, -1, 10**400, 1.5, float("nan"), "x", "", [], [[[]]], {}, {"x": {}}, "../../x\n")


def paths_of(facts, path=()):
    """Yield the path of every key, at any depth, but in the row only those at the top."""
    for key, value in facts.items():
        yield (*path, key)
        if isinstance(value, dict) and path[:1] != ("row",):
            yield from paths_of(value, (*path, key))


def mutations(facts):
    """Yield what is changed, and the facts with one key missing, renamed, or with a wrong value.

    A key inside a group gets a third of the changes. All changes would take 25 s on one core.
    """
    changes = "missing", "renamed", *WRONG
    for number, (*parents, key) in enumerate(paths_of(facts)):
        for value in changes[number % 3 :: 3] if parents else changes:
            changed = copy.deepcopy(facts)
            group = changed
            for parent in parents:
                group = group[parent]
            old = group.pop(key)
            if value == "renamed":
                group[f"../{key}"] = old
            elif value != "missing":
                group[key] = value
            yield (*parents, key, value), changed


def use_manifest(config, data):
    """Call what reads a manifest."""
    manifest = read_manifest(STEP)
    assert {type(manifest[key]) for key in ("step", "elapsed")} <= {int, float}
    check_same_run(manifest, config, data, STEP)
    logged_figures(manifest)
    if manifest.get("row"):
        saved_row(manifest, config)
    source = open_source(str(STEP))[0]
    data_config(source, {}, source.run_config, "bytes")
    checkpoint_model_config("run", "auto")


def error_of(function):
    """Return the message of the UserError that the function raises, or None."""
    try:
        function()
    except (UserError, DataError) as error:
        return str(error)
    return None


def test_a_changed_manifest_is_an_error_of_one_line(trained):
    """Every key is missing, renamed, and wrong in many ways. All functions that read a manifest here pass or refuse."""
    path = STEP / "manifest.json"
    original = read_json(path)
    config, data = original["config"], original["data"]
    refused = set()
    for what, facts in mutations(original):
        path.write_bytes(add_sha256(json.dumps(facts)))
        error = error_of(lambda: use_manifest(config, data))
        assert "\n" not in (error or ""), what
        if error:
            refused.add((what[0], str(what[-1])))
    required = {"version", "step", "elapsed", "config", "data", "files"}
    assert {(key, "missing") for key in required} <= refused
    assert all((key, str(value)) in refused for key in required for value in (None, [], [[[]]]))
    path.write_bytes(add_sha256(json.dumps({**original, "metrics_lines": 7, "new": [1]})))
    assert checkpoint.verify(STEP)["metrics_lines"] == 7


NAMES = (
    "/etc/passwd", "../x", "shards/../x", "./training.pt", "shards//x", "shards/.metadata", "shards/__0_0.distcp",
    "shards/x.distcp", "manifest.json", "training.pt\n", "x", "",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_lists_only_files_that_we_write(tmp_path, name):
    save(tmp_path, 1)
    path = tmp_path / "step-000001/manifest.json"
    facts = read_json(path)
    facts["files"][name] = facts["files"]["training.pt"]
    write_json(path, facts)
    with pytest.raises(UserError, match=r"is not a valid checkpoint: manifest.json: `files` is missing or wrong"):
        read_manifest(path.parent)


def put_fifo(path):
    os.mkfifo(path)


def put_folder(path):
    path.mkdir()


def put_link(path):
    path.symlink_to(Path("original", *path.relative_to(STEP).parts).absolute())


def put_link_to_itself(path):
    path.symlink_to(path.name)


def put_device(path):
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero


def put_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("put", [put_fifo, put_folder, put_link, put_link_to_itself, put_device, put_socket])
@pytest.mark.parametrize("sharded", [False, True])
def test_an_odd_file_in_the_place_of_any_file_is_an_error_of_one_line(trained, put, sharded):
    """So it is in the place of the folder shards, and beside the files. Nothing hangs."""
    if sharded:
        make_sharded()
        shutil.rmtree("original")
        shutil.copytree(STEP, "original")
    names = [
        *read_manifest(STEP)["files"],
        "manifest.json",
        *(["shards", "shards/x", ".shards"] if sharded else ["shards"]),
    ]
    for name in names:
        path = STEP / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        try:
            put(path)
        except PermissionError:
            pytest.skip("only root can make a device")
        is_extra = name in ("shards/x", ".shards") or (name == "shards" and (not sharded or put is put_link))
        for read in (checkpoint.verify, checkpoint.read_weights):
            with pytest.raises(UserError, match=r"is damaged|is not a valid checkpoint|does not list") as error:
                read(STEP)
            assert isinstance(error.value, Unreadable) == is_extra
            assert "\n" not in str(error.value)
        if not is_extra:  # resume=auto does not pass over a checkpoint with a file too many
            assert checkpoint.newest_valid(STEP.parent) is None
        restore()
    assert checkpoint.verify(STEP)["step"] == 1


def test_a_file_that_is_not_in_the_manifest_is_an_error(trained):
    for name in ("x", ".x", "best", "a\nb", "shards"):
        (STEP / name).mkdir() if name == "shards" else (STEP / name).touch()
        error = error_of(lambda: checkpoint.verify(STEP))
        assert error.startswith(f"{STEP} holds {name!r}, which its manifest.json does not list: move this out of the ")
        restore()
    make_sharded()
    (STEP / "shards/.metadata").unlink()
    with pytest.raises(UserError, match=r"is damaged: shards/.metadata is missing"):
        checkpoint.verify(STEP)

"""Sharded checkpoints: they hold what was saved, and nothing in them runs."""

import os
import pickle
import struct
import warnings

import pytest
import torch
from torch.distributed import checkpoint as dcp

from runtime import sharded
from runtime.checkpoint import flatten, load_state, read_weights, verify
from runtime.config import UserError
from runtime.manifest import read_manifest, write_manifest
from tests.runtime.test_checkpoint import random_tensors, save
from tests.test_files import DAMAGED, results_of_flips


def reseal(folder):
    """Write the manifest again for the files that are there now, as one who attacks can."""
    facts = {key: value for key, value in read_manifest(folder).items() if key not in ("version", "files")}
    (folder / "manifest.json").unlink()
    write_manifest(folder, facts)


def shard(folder, state):
    """Put the shards of `state` in the place of the weights and moments of a checkpoint."""
    with warnings.catch_warnings(action="ignore"):
        dcp.save(flatten(state), checkpoint_id=folder / "shards", no_dist=True)
    training = torch.load(folder / "training.pt", weights_only=True)
    torch.save({key: training[key] for key in ("updates", "random")}, folder / "training.pt")
    (folder / "model.safetensors").unlink()
    reseal(folder)


@pytest.fixture
def folder(tmp_path):
    """A sharded checkpoint of random_tensors(7)."""
    save(tmp_path, 7)
    shard(tmp_path / "step-000007", random_tensors(7))
    return tmp_path / "step-000007"


class Attack:
    """Pickled, it makes the folder `path` when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_sharded_checkpoint_holds_what_was_saved(folder):
    state, expected = random_tensors(0), random_tensors(7)
    assert load_state(folder, state) == {"updates": 7, "random": []}
    for group, tensors in expected.items():
        for name, tensor in tensors.items():
            assert torch.equal(state[group][name], tensor)
    weights = read_weights(folder)
    assert weights.keys() == expected["model"].keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected["model"].items())


def test_flips_in_a_sharded_checkpoint(folder):
    for name in ("shards/.metadata", "shards/__0_0.distcp", "training.pt"):
        assert results_of_flips(folder / name, lambda: verify(folder), flips=300) == [DAMAGED]


def test_flips_in_the_metadata_of_a_resealed_checkpoint(folder):
    """Without the digest a flip may pass, but it is never more than an error of one line."""
    path, names = folder / "shards/.metadata", {"__0_0.distcp"}
    sizes = sharded.ShardReader(folder / "shards", names).sizes
    results = results_of_flips(path, lambda: sharded.ShardReader(folder / "shards", names).sizes, flips=1000)
    assert DAMAGED in results
    assert sizes in results
    assert {type(result) for result in results} == {str, dict}


def text(word):
    """The opcode SHORT_BINUNICODE."""
    return b"\x8c" + bytes([len(word)]) + word.encode()


def pickles(path):
    """Pickles that would make the folder `path`, or change a class, if pickle.loads() read them."""
    name = str(path)
    place = text("posix") + text("mkdir")
    yield pickle.dumps(Attack(path), protocol=0)  # GLOBAL
    yield pickle.dumps(Attack(path))  # STACK_GLOBAL
    yield b"(" + f"S'{name}'\niposix\nmkdir\n.".encode()  # INST
    yield b"\x80\x04(" + place + b"\x93" + text(name) + b"o."  # OBJ
    yield b"\x80\x04" + place + b"\x93" + text(name) + b"\x85\x81."  # NEWOBJ
    yield b"\x80\x04" + text("torch") + text("os.mkdir") + b"\x93" + text(name) + b"\x85R."  # a name with a dot
    yield b"\x80\x04" + text("torch.serialization") + text("os.mkdir") + b"\x93" + text(name) + b"\x85R."
    yield (
        b"\x80\x04"
        + text("torch.distributed.checkpoint.metadata")
        + text("Metadata")
        + b"\x93}"
        + text("name")
        + text("changed")
        + b"s\x86N\x85b."
    )  # BUILD of a class
    yield pickle.dumps({"model.a": Attack(path)})
    yield b"\x80\x04Nr" + struct.pack("<I", 2**32 - 1) + b"."  # LONG_BINPUT, for which Python would allocate 64 GB
    yield b"\x80\x04" + b"\x96" + struct.pack("<Q", 2**62) + b"."  # BYTEARRAY8
    yield b"\x80\x04" + b"(" * 10 + b"\x82\x01."  # EXT1
    yield b"\x80\x04" + text(name) + b"Q."  # BINPERSID
    yield from (b"", b".", b"\x80\x04N.", pickle.dumps({}), pickle.dumps([]), b"\0" * 100)


def test_no_pickle_runs(folder, tmp_path):
    ran, names = tmp_path / "ran", {"__0_0.distcp"}
    for content in pickles(ran):
        (folder / "shards/.metadata").write_bytes(content)
        with pytest.raises(UserError, match=r"shards/.metadata cannot be read: ") as error:
            sharded.ShardReader(folder / "shards", names)
        assert "\n" not in str(error.value), content
    assert not ran.exists()
    assert (sharded.Inert.name, sharded.Inert.state) == ("", None)
    assert dcp.metadata.Metadata.__name__ == "Metadata"


def test_the_pickles_of_this_test_would_run(tmp_path):
    """Otherwise the test above would show nothing."""
    for content in [*pickles(tmp_path / "ran")][:4]:
        pickle.loads(content)
        (tmp_path / "ran").rmdir()


def change(folder, function):
    """Change DCP's metadata, and seal the checkpoint again."""
    path = folder / "shards/.metadata"
    metadata = pickle.loads(path.read_bytes())
    function(metadata)
    path.write_bytes(pickle.dumps(metadata))
    reseal(folder)


def set_place(metadata, **values):
    for place in metadata.storage_data.values():
        vars(place).update(values)


def set_entry(metadata, value):
    metadata.state_dict_metadata["model.a"] = value


CHANGES = {
    "bytes, which DCP would unpickle": lambda m: set_entry(m, dcp.metadata.BytesStorageMetadata()),
    "a text": lambda m: set_entry(m, "x"),
    "a file outside": lambda m: set_place(m, relative_path="../training.pt"),
    "an absolute file": lambda m: set_place(m, relative_path="/etc/passwd"),
    "a negative place": lambda m: set_place(m, offset=-1),
    "a place that is no number": lambda m: set_place(m, length="x"),
    "a huge place": lambda m: set_place(m, offset=2**70),
    "no places": lambda m: setattr(m, "storage_data", None),
    "a huge tensor": lambda m: setattr(m.state_dict_metadata["model.a"], "size", torch.Size([2**40, 2**20])),
    "a huge tensor of a huge part": lambda m: [
        setattr(m.state_dict_metadata["model.a"], "size", torch.Size([2**40])),
        setattr(m.state_dict_metadata["model.a"].chunks[0], "sizes", torch.Size([2**40])),
    ],
    "a tensor without its parts": lambda m: m.state_dict_metadata["model.a"].chunks.clear(),
    "sizes that are no torch.Size": lambda m: setattr(m.state_dict_metadata["model.a"], "size", (1000, 3)),
    "no place of a part": lambda m: m.storage_data.clear(),
    "another shape": lambda m: [
        setattr(m.state_dict_metadata["model.a"], "size", torch.Size([3000])),
        setattr(m.state_dict_metadata["model.a"].chunks[0], "sizes", torch.Size([3000])),
        setattr(m.state_dict_metadata["model.a"].chunks[0], "offsets", torch.Size([0])),
    ],
    "a tensor less": lambda m: m.state_dict_metadata.pop("model.a"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changed_metadata_is_an_error_of_one_line(folder, what, capfd):
    change(folder, CHANGES[what])
    verify(folder)
    with pytest.raises(UserError) as error:
        load_state(folder, random_tensors())
    assert str(error.value).startswith(f"{folder}/shards")
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""


def test_a_shard_that_would_run_code_is_an_error_of_one_line(folder, tmp_path):
    path = folder / "shards/__0_0.distcp"
    with path.open("wb") as file:
        torch.save(Attack(tmp_path / "ran"), file)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + bytes(200_000))  # as many bytes as the tensors need
    change(folder, lambda metadata: set_place(metadata, offset=0, length=size))
    for read in (lambda: load_state(folder, random_tensors()), lambda: read_weights(folder)):
        with pytest.raises(UserError, match=r"shards cannot be loaded: a shard is damaged, or holds more") as error:
            read()
        assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()

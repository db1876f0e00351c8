"""Files of a few KB that would take hours or gigabytes: each reader refuses them in one line, and reads real files."""

import hashlib
import io
import pickle
import time
import zipfile

import pytest
import torch
from torch.distributed import checkpoint as dcp

from model.sources import open_source
from model.step_file import MARK, read_step
from runtime import sharded
from runtime.checkpoint import load_state, random_state, read_weights
from runtime.config import UserError
from runtime.pickles import MOST_DEPTH, MOST_REPEATED, check_opcodes, check_saved
from tests.runtime.test_checkpoint import random_tensors, save
from tests.runtime.test_sharded import change, reseal, set_place, shard

SECONDS = 10  # a busy machine takes more than 1 s for lists 100,000 deep
TWICE = b"q\x00h\x00\x86"  # the value on the stack becomes (value, value)


def twice(depth, start=b")", last=TWICE):
    """A tuple (t, t), nested: 5 bytes a level, and a hash of 2^depth steps."""
    return start + TWICE * (depth - 1) + last


BOMBS = {
    "a key of nested tuples": b"}" + twice(45) + b"Ns.",
    "keys of nested tuples": b"}(" + twice(45) + b"Nu.",
    "a key of nested tuples, by a memo of 4 bytes": b"}" + twice(45).replace(b"q\0h\0", b"r\0\0\0\0j\0\0\0\0") + b"Ns.",
    "a set of nested tuples": b"c__builtin__\nset\n](" + twice(45) + b"e\x85R.",
    "a set by opcodes": b"\x8f(" + twice(45) + b"\x90.",
    "a frozenset": b"(" + twice(45) + b"\x91.",
    "an OrderedDict of pairs": b"ccollections\nOrderedDict\n](" + twice(45) + b"N\x86e\x85R.",
    "the state of an OrderedDict": b"ccollections\nOrderedDict\n)R](" + twice(45) + b"N\x86eb.",
    "a torch.Size": b"ctorch\nSize\n" + twice(45) + b"\x85R.",
    "a call of nested tuples, whose text is in the error": twice(45) + b")R.",
    "a new object of nested tuples": twice(45) + b")\x81.",
    "a storage of nested tuples": b"(X\7\0\0\0storagectorch\nFloatStorage\n" + twice(45) + b"X\3\0\0\0cpuK\1tQ.",
    "nested lists": b"]" + b"q\x00]h\x00ah\x00a" * 45 + b".",
    "a tuple that changes later": b"]q\x01h\x01\x85q\x02" + b"h\x02h\x01h\x02a0" * 45 + b".",
    "a list that is filled after it is in a tuple": b"}]q\x01\x85h\x01" + twice(20) + b"ah\x01\x860Ns.",
    "a list in itself": b"]q\x00h\x00a.",
    "tuples 10^5 deep": b"})" + b"\x85" * 10**5 + b"Ns.",
    "lists 10^5 deep": b"]" * 10**5 + b"a" * (10**5 - 1) + b".",
    "a long key many times": b"}(" + b"N" * 10**5 + b"tq\x00h\x00" + b"N(" + b"h\x00" * 10**5 + b"tsNNu.",
    "a long text many times": b"X\x40\x42\x0f\0" + b"x" * 10**6 + b"q\x00(" + b"h\x00" * 10**5 + b"t.",
    "bytearray(N)": b"cbuiltins\nbytearray\nJ\0\x8c\x86G\x85R.",
    "__builtin__.bytearray(N)": b"c__builtin__\nbytearray\nJ\0\x8c\x86G\x85R.",
    "a place in the memo": b"Nr\xff\xff\xff\xff.",
    "a value that is not there": b"\x86.",
    "a change of a text": b"X\1\0\0\0xNb.",
    "nothing": b"",
}  # fmt: skip


def zipped(pickled, compression=zipfile.ZIP_STORED, **others):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in ({"data.pkl": pickled, "version": b"3\n", "byteorder": b"little"} | others).items():
            archive.writestr(f"x/{name}", content)
    return file.getvalue()


def files():
    """Yield what is wrong -> the content of a file for torch.load."""
    for what, pickled in BOMBS.items():
        yield what, zipped(b"\x80\x02" + pickled)
    yield "compressed", zipped(b"\x80\x02}.", zipfile.ZIP_DEFLATED, **{"data/0": bytes(10**8)})
    yield "two pickles", zipped(b"\x80\x02}.", **{"DATA.PKL": b"\x80\x02]."})
    yield "a pickle before a zip", b"\x80\x02" + BOMBS["bytearray(N)"] + zipped(b"\x80\x02}.")


FILES = dict(files())


@pytest.fixture
def folder(tmp_path):
    save(tmp_path, 7)
    return tmp_path / "step-000007"


@pytest.fixture
def readers(folder, tmp_path):
    """Name -> a function that reads this content in the place of such a file."""
    save(tmp_path / "other", 7)
    pieces = tmp_path / "other/step-000007"
    shard(pieces, random_tensors(7))
    metadata = (pieces / "shards/.metadata").read_bytes()

    def write(name, content, read):
        path = tmp_path / name
        path.write_bytes(content)
        return read(path)

    def as_training(content):
        (folder / "training.pt").write_bytes(content)
        reseal(folder)
        load_state(folder, random_tensors())

    def as_shard(content):
        (pieces / "shards/.metadata").write_bytes(metadata)
        (pieces / "shards/__0_0.distcp").write_bytes(content + bytes(200_000))
        change(pieces, lambda changed: set_place(changed, offset=0, length=len(content)))
        read_weights(pieces)

    def seal(content):
        return content + MARK + hashlib.sha256(content).hexdigest().encode() + b"\n"

    return {
        "training.pt": as_training,
        "ckpt.pt": lambda content: write("ckpt.pt", content, lambda path: open_source(str(path))),
        "nonfinite-step": lambda content: write("nonfinite-step-000001.pt", seal(content), read_step),
        "shard": as_shard,
    }


def refuse(read):
    """Read, which must be an error of one line within SECONDS."""
    start = time.perf_counter()
    with pytest.raises(UserError, match=r"is damaged|cannot be read|cannot be loaded") as error:
        read()
    assert time.perf_counter() - start < SECONDS
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


def test_no_reader_of_torch_files_waits_or_allocates(readers, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *args, **options: pytest.fail("torch.load reads it"))
    for name, read in readers.items():
        for what, content in FILES.items():
            try:
                refuse(lambda read=read, content=content: read(content))
            except BaseException as error:
                raise AssertionError((name, what)) from error


@pytest.mark.parametrize("protocol", [b"\x80\x02", b"\x80\x04"])
@pytest.mark.parametrize("what", BOMBS)
def test_metadata_neither_waits_nor_allocates(tmp_path, what, protocol):
    (tmp_path / "x.distcp").touch()
    (tmp_path / ".metadata").write_bytes(protocol + BOMBS[what])
    refuse(lambda: sharded.ShardReader(tmp_path, {"x.distcp"}))


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_real_files_pass():
    """nanoGPT's ckpt.pt with AdamW's moments, whose groups share `betas`; our random states; shared tensors."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    groups = [{"params": [p for p in model.parameters() if p.dim() == dims]} for dims in (1, 2)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weight = model[0].weight.bfloat16()
    for value in (
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "best_val_loss": torch.tensor(1.5)},
        {"updates": 3, "random": [random_state(torch.device("cpu"))] * 2, "exp_avg": dict(model.named_parameters())},
        {"batches": [(weight, weight, weight[:1])], "device": torch.device("cpu"), "dtype": torch.float32},
    ):
        check_saved(saved(value))


def test_the_sums_of_the_check():
    """The tree of repeated values may have MOST_REPEATED values and one for each opcode, and be MOST_DEPTH deep."""
    flat = b"(" + b"N" * 1023 + b"tq\x00("  # 1024 values
    assert check_opcodes(flat + b"h\x00" * (MOST_REPEATED // 1024) + b"t.") == set()
    with pytest.raises(ValueError, match="repeats too many"):
        check_opcodes(flat + b"h\x00" * (MOST_REPEATED // 1024 + 4) + b"t.")
    check_opcodes(b")" + b"\x85" * (MOST_DEPTH - 1) + b".")
    with pytest.raises(ValueError, match="deep"):
        check_opcodes(b")" + b"\x85" * MOST_DEPTH + b".")
    assert check_opcodes(pickle.dumps([torch.Size, torch.Size([2])])) == {"torch Size"}


def set_chunks(metadata, *chunks):
    entry = metadata.state_dict_metadata["model.a"]
    entry.chunks[:] = [dcp.metadata.ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in chunks]


def chunk_cases(rows, columns):
    half = rows // 2
    top, bottom = ((0, 0), (half, columns)), ((half, 0), (rows - half, columns))
    yield "whole", [top, bottom], True
    yield "in another order, and with an empty one", [bottom, ((rows, 0), (0, columns)), top], True
    yield "twice the same", [top, ((0, 0), (rows - half, columns))], False
    yield "overlap", [top, ((half - 1, 0), (rows - half, columns))], False
    yield "outside", [top, ((half + 1, 0), (rows - half, columns))], False
    yield "columns", [top, ((half, 1), (rows - half, columns))], False
    yield "other dimensions", [top, ((half,), ((rows - half) * columns,))], False


@pytest.mark.parametrize("number", range(7))
def test_the_parts_of_a_tensor_are_its_rows(folder, number):
    """Two parts at the same place have the right number of values, and leave the rest of torch.empty as it is."""
    shard(folder, random_tensors(7))
    shape = random_tensors()["model"]["a"].shape
    _, chunks, is_right = [*chunk_cases(*shape)][number]
    change(folder, lambda metadata: set_chunks(metadata, *chunks))
    names = {"__0_0.distcp"}
    if is_right:
        sharded.ShardReader(folder / "shards", names)
    else:
        with pytest.raises(UserError, match=r"its parts do not make up the tensor model\.a"):
            sharded.ShardReader(folder / "shards", names)

"""Check a pickle before it is read: whoever reads it then needs about the time and the memory of the file.

torch.load(weights_only=True) runs no program. But it calls bytearray(10**12), and it hashes keys. A tuple (t, t) in
which t is such a tuple, 45 deep, takes 500 bytes, and its hash 2^45 steps that no signal interrupts.
"""

import pickletools
import re
import zipfile
from typing import IO

import torch

MOST_BYTES = 2**24  # of a torch.save file without its tensors. 1,000 layers with AdamW's moments need 7 MB
MOST_REPEATED = 2**20  # values from the memo, besides one for each opcode. .metadata repeats 17,000 in 10^6 opcodes
MOST_DEPTH = 64  # ckpt.pt with AdamW's moments has 8. The hash of a tuple 10^6 deep overflows the stack of C
# What our files and nanoGPT's ckpt.pt name besides storages and dtypes
NAMES = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"}
NAMES |= {"torch Size", "torch device"}
# The files in a zip of torch.save, which PyTorch finds in upper and lower case
PART = re.compile(r"[^/]+/(data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/\w+)")

VALUES = {"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINSTRING"}
TEXTS = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
# opcode -> how many values it replaces by one
GROUPS = {"EMPTY_TUPLE": 0, "EMPTY_LIST": 0, "EMPTY_DICT": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
GROUPS |= {"REDUCE": 2, "NEWOBJ": 2, "BINPERSID": 1}
CHANGES = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}  # opcode -> how many values it puts into the one below them
PUTS, GETS = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"BINGET", "LONG_BINGET"}
WITHOUT_EFFECT = {"PROTO", "FRAME", "STOP"}


class Group:
    """What the check knows of a container, or of an object that a call returns."""

    __slots__ = ("depth", "is_repeated", "size")

    def __init__(self, members: list):
        self.size, self.depth, self.is_repeated = 1, 1, False
        self.add(members)

    def add(self, members: list) -> None:
        if self.is_repeated:
            raise ValueError("it changes a value that it has repeated")
        for member in members:
            self.size += 1 + size_of(member)
            if type(member) is Group and member.depth >= self.depth:
                self.depth = member.depth + 1
        if self.depth > MOST_DEPTH:
            raise ValueError(f"it has values more than {MOST_DEPTH} deep")


def size_of(value: Group | str | None) -> int:
    """Return the steps that a walk over the value takes, without one for the value itself."""
    if type(value) is Group:
        return value.size
    return len(value) // 100 if value else 0


def check_opcodes(content: bytes) -> set[str]:
    """Return the names in a pickle, such as "torch Size". Raises ValueError, or another Exception, if it may explode.

    It follows the stack with the size of each value as a tree, so a value counts as often as it is used. Each opcode
    makes one value and uses it at most once, except an opcode that gets a value from the memo: the sum of the sizes of
    these values is bounded. So all trees together, and each hash, comparison and text of a value, take about the size
    of the pickle. A repeated value may not change, so its size stays right. Other opcodes than PyTorch's are refused.
    """
    stack, marked, memo, names = [], [], {}, set()
    repeated = 0
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        name = opcode.name
        if name in PUTS:
            key = len(memo) if argument is None else argument
            if key > number:  # Python would allocate 64 GB for 2^32 - 1
                raise ValueError(f"it has the opcode {name} with {key}")
            memo[key] = stack[-1]
        elif name in TEXTS:
            stack.append(argument)
        elif name in VALUES:
            stack.append(None)
        elif name in GETS:
            value = memo[argument]
            repeated += size_of(value)
            if repeated > MOST_REPEATED + number:
                raise ValueError("it repeats too many values")
            if type(value) is Group:
                value.is_repeated = True
            stack.append(value)
        elif name in GROUPS:
            stack.append(Group(pop(stack, GROUPS[name])))
        elif name in CHANGES:
            members = pop(stack, CHANGES[name])
            stack[-1].add(members)
        elif name == "MARK":
            marked.append(stack)
            stack = []
        elif name == "TUPLE":
            members, stack = stack, marked.pop()
            stack.append(Group(members))
        elif name in ("APPENDS", "SETITEMS"):
            members, stack = stack, marked.pop()
            stack[-1].add(members)
        elif name == "GLOBAL":
            names.add(argument)
            stack.append(None)
        elif name == "STACK_GLOBAL":
            names.add(" ".join(reversed(pop(stack, 2))))
            stack.append(None)
        elif name not in WITHOUT_EFFECT:
            raise ValueError(f"it has the opcode {name}")
    return names


def pop(stack: list, count: int) -> list:
    """Take the last values from the stack, the last one first. Raises IndexError if there are fewer."""
    return [stack.pop() for _ in range(count)]


def check_saved(file: IO[bytes]) -> None:
    """Raise ValueError, or another Exception, unless torch.load reads this file in about the memory of the file.

    It must be a zip of torch.save, as all since PyTorch 1.6. The files in it must not be compressed or lie on one
    another, because few bytes may become any number. The pickle must be small, and name nothing but tensors and dtypes.
    """
    if file.read(4) != b"PK\x03\x04":  # torch.load looks here, and reads another format without it. zipfile does not
        raise ValueError("it is no zip of torch.save")
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise ValueError("it is compressed")
        names = {part.filename.lower() for part in parts}
        if len(names) < len(parts) or not all(PART.fullmatch(part.filename) for part in parts):
            raise ValueError("it has other files than torch.save writes")
        [pickled] = [part for part in parts if part.filename.endswith("/data.pkl")]
        if pickled.file_size > MOST_BYTES or sum(part.file_size for part in parts) > file.seek(0, 2):
            raise ValueError("its parts are too large")
        for name in check_opcodes(archive.read(pickled)) - NAMES:
            room, _, kind = name.partition(" ")
            if room != "torch" or not (kind.endswith("Storage") or isinstance(getattr(torch, kind), torch.dtype)):
                raise ValueError(f"it names {name}")

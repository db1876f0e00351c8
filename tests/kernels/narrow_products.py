"""Find the products in a compiled kernel that may pass 2^31 before they are added to a pointer.

A pointer has 64 bits, but Triton computes in int32 what it is given in int32: program ids, tl.arange(), and integer
arguments below 2^31. So `row * stride` wraps around, unless a factor is int64. narrow_products() reads Triton's IR, in
which all functions are inlined and all types are known.
"""

import re
from functools import cached_property
from pathlib import Path

from kernels.names import ALL_OPS
from lab.bench.new_backends import tracked_backends

KERNELS = Path(__file__).parents[2] / "kernels"
LIMIT = 2**31
NAME = re.compile(r"%[\w-]+(?:#\d+)?")
DEFINITION = re.compile(r'(?:(%[\w-]+)(?::(\d+))? = )?"?(\w+\.[\w.]+)"?(.*)')
WIDENS = {"arith.extsi", "arith.extui"}
RESHAPES = WIDENS | {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "ttg.convert_layout"}
# the result is an operand, or a sum of operands
PASSES_ON = RESHAPES | {"arith.trunci", "arith.addi", "arith.subi", "arith.select", "arith.minsi", "arith.maxsi"}
PASSES_ON |= {"tt.reduce", "scf.for", "scf.if", "scf.while", "argument", "counter"}


class Value:
    """A value of a kernel: the operation that makes it, its operands, and the values that are made of it."""

    def __init__(self, operation: str, text: str, operands: list["Value"]):
        self.operation, self.text, self.operands, self.users = operation, text, [], []
        self.step: Value | None = None  # of a counter
        for operand in operands:
            self.take(operand)

    def take(self, operand: "Value") -> None:
        self.operands.append(operand)
        operand.users.append(self)

    @property
    def is_int32(self) -> bool:
        return bool(re.search(r"(\b|x)i32\b", self.text.rpartition(" : ")[2]))

    @cached_property
    def upper_bound(self) -> int:
        """An exclusive upper bound of this value if it is not negative: 2^31 if no other is known."""
        if self.operation == "arith.constant":
            number = re.search(r"(?:constant |dense<)(\d+)[ >]", self.text)
            return int(number[1]) + 1 if number else LIMIT
        if self.operation == "tt.make_range":
            return int(re.search(r"end = (\d+)", self.text)[1])
        if self.operation in ("tt.get_program_id", "tt.get_num_programs"):
            return LIMIT if " x " in self.text else 2**16  # CUDA's limits of a grid
        if self.operation in ("arith.remsi", "arith.minsi"):
            return min(operand.upper_bound for operand in self.operands)
        if self.operation == "arith.addi":
            return sum(operand.upper_bound for operand in self.operands) - 1
        if self.operation == "arith.muli":
            return (self.operands[0].upper_bound - 1) * (self.operands[1].upper_bound - 1) + 1
        return self.operands[0].upper_bound if self.operation in {*RESHAPES, "arith.divsi", "arith.subi"} else LIMIT

    @property
    def is_compared(self) -> bool:
        """Whether this value, or a sum with it, is compared in int32, as a row is with the number of rows.

        A `for` compares its counter.
        """
        return any(user.is_int32 for user in self.all_users("arith.cmpi", "counter"))

    def all_users(self, *operations: str) -> list["Value"]:
        """Return the results of these operations on this value, or on a sum with it."""
        users = (user for value in reachable_values([self], "users") for user in value.users)
        return [user for user in users if user.operation in operations]


def reachable_values(values: list[Value], direction: str) -> set[Value]:
    """Return the values, and all values that they reach through the operations of PASSES_ON.

    `direction` is users or operands.
    """
    found, waiting = set(), list(values)
    while waiting:
        if (value := waiting.pop()) in found:
            continue
        found.add(value)
        if direction == "users":
            waiting += [user for user in value.users if user.operation in PASSES_ON]
        elif value.operation in PASSES_ON:
            waiting += value.operands
    return found


class Reader:
    """Reads the values of a kernel line by line. An argument of a loop takes its first value, and what a round yields.

    A name in Triton's IR means the last value of that name.
    """

    def __init__(self):
        self.values: list[Value] = []
        self.named: dict[str, Value] = {}
        self.regions: list[dict[str, list[list[Value]]]] = []  # {operation: the values that take its operands}
        self.passed: list[Value] = []  # the last operands of a yield or a condition
        self.captured: list[Value] = []  # the arguments of all partitions of the warps

    def get(self, text: str) -> list[Value]:
        return [self.named.setdefault(name, Value("argument", name, [])) for name in NAME.findall(text)]

    def define(self, names: list[str], operation: str, text: str, operands: list[list[Value]]) -> list[Value]:
        made = [Value(operation, text, own) for own in operands]
        self.named |= zip(names, made, strict=True)
        self.values += made
        return made

    def read(self, text: str) -> None:
        region = self.regions.pop() if text.startswith("}") else {}
        if found := DEFINITION.match(text):
            name, count, operation, rest = found.groups()
            names = [f"{name}#{i}" for i in range(int(count))] if count else [name] if name else []
            if operation in ("scf.for", "scf.while", "scf.if"):
                region = self.read_region(names, operation, text, rest)
            else:
                operands = self.get(rest)
                self.define(names, operation, text, [operands] * len(names))
                if operation == "ttg.warp_specialize":
                    self.captured = operands
                if operation in ("scf.yield", "scf.condition"):
                    self.passed = operands[1:] if operation == "scf.condition" else operands
                for takers in self.regions[-1].get(operation, []) if self.regions else []:
                    for taker, value in zip(takers, self.passed, strict=True):
                        taker.take(value)
        elif text.startswith("partition"):
            self.define(NAME.findall(text), "argument", text, [[value] for value in self.captured])
        elif text.startswith("^bb0") and "scf.condition" in self.regions[-1]:  # the body of a `while`
            self.define(NAME.findall(text), "argument", text, [[value] for value in self.passed])
        if text.endswith("{"):
            self.regions.append(region)

    def read_region(self, names: list[str], operation: str, text: str, rest: str) -> dict[str, list[list[Value]]]:
        """Define the results and the arguments of a loop or a branch. Return what takes what its body yields."""
        arguments = [] if operation == "scf.if" else re.findall(r"(%[\w-]+) = (%[\w-]+(?:#\d+)?)", rest)
        if operation == "scf.for":
            (counter, first), *arguments = arguments
            [value] = self.define([counter], "counter", text, [self.get(first)])
            value.step = self.get(re.search(r" step (%\S+)", rest)[1])[0]
        starts = [self.get(first) for _, first in arguments]
        takers = self.define([own for own, _ in arguments], "argument", text, starts)
        results = self.define(names, operation, text, [[] for _ in names])
        if operation == "scf.while":
            return {"scf.yield": [takers], "scf.condition": [results]}
        return {"scf.yield": [takers, results] if operation == "scf.for" else [results]}


def narrow_products(ir: str) -> list[str]:
    """Return what may pass 2^31 in int32, as text: products that reach a pointer's offset, and counters of loops.

    A product of small enough numbers cannot pass 2^31. Nor can the number of a row or of an element that is compared
    with the number of all of them, because that one is int32, too. A counter of rows or elements can, after the last
    one, if the step of the loop is a product with the number of programs.
    """
    reader = Reader()
    for line in re.sub(r" loc\([^()]*(?:\([^()]*\)[^()]*)*\)", "", ir).splitlines():
        reader.read(line.strip())
    offsets = [value.operands[1] for value in reader.values if value.operation == "tt.addptr"]
    products = (value for value in reachable_values(offsets, "operands") if value.operation == "arith.muli")
    found = [value for value in products if value.is_int32 and value.upper_bound > LIMIT and not value.is_compared]
    for value in reader.values:
        if value.operation == "counter" and value.is_int32 and value.step.operation == "arith.muli":
            by_programs = any(factor.operation == "tt.get_num_programs" for factor in value.step.operands)
            if by_programs and value.all_users("tt.addptr", "arith.muli"):
                found.append(value)
    return sorted(value.text for value in found)


def kernel_names(gluon: bool = True) -> set[str]:
    """Return the names of our kernels, but not those of a user's own backend. With `gluon`, also those for Hopper."""
    names = set()
    for path in KERNELS.rglob("*.py"):
        if "gluon" in path.stem and not gluon:
            continue
        op = path.parent.name
        if path.stem.startswith("_") or op not in ALL_OPS or path.stem in tracked_backends(op):
            names |= set(re.findall(r"^@(?:triton|gluon)\.jit.*\ndef (\w+_kernel)\(", path.read_text(), re.MULTILINE))
    return names - {"launch_next_kernel"}  # a function that kernels call

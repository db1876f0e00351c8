"""How much memory a piece of the program would take, found by running it on fake tensors: nothing is allocated.

A fake tensor (torch._subclasses.fake_tensor) has a shape, a dtype and a device, and no memory. Operators, autograd, the
optimizer and torch.utils.checkpoint run on it as they are, and make the tensors that they would make. So there is no
formula a backend, and none to keep up to date: `model.checkpointing=block`, a sliding window or attention that writes
T x T scores count by themselves.

    with simulated(device) as held:
        model = build(cfg, device)
    print(held.now, held.peak)

Of a custom op with Triton kernels it sees all that the op allocates: its Python runs too, on the fakes, and only the
kernels are not launched. What it cannot see is what an operator of PyTorch's takes for itself and gives back, as cuBLAS
and cuDNN do, and what the allocator loses between the tensors. Its peak for a step in fp32 on a CPU is that of
PyTorch's allocator to the byte (tests/model/test_memory.py).
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.loader import Batch
from model.optim import Optimizer


class Held(TorchDispatchMode):
    """Bytes of the tensors on `device` that were made within it: `now`, and at `peak`, when they were most.

    A storage counts once, however many tensors are views of it, until the last one goes. `opaque` names the custom ops
    whose inside was not seen.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.now, self.peak = device.type, 0, 0
        self.storages: set[int] = set()
        self.opaque: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if custom := OPDEFS.get(func.name()):
            try:
                if has_triton(custom._init_fn):
                    with self:
                        return custom._init_fn(*args, **(kwargs or {}))
            except RuntimeError:  # it asks for values or addresses, and a fake has none
                pass
            self.opaque.add(func.name())
        if kwargs and "out" in kwargs:  # makes nothing, and PyTorch 2.11 has no fake of addmm with an out_dtype
            return kwargs["out"]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device:
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.storages:
            self.storages.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.remove, key, size)  # PyTorch keeps the object as long as the memory

    def remove(self, key: int, size: int) -> None:
        self.storages.discard(key)
        self.now -= size


def has_triton(function: Callable) -> bool:
    """Whether there are Triton kernels in the function's file: then what is not a launch is PyTorch."""
    from triton.runtime.jit import KernelInterface

    return any(isinstance(value, KernelInterface) for value in function.__globals__.values())


@contextmanager
def simulated(device: torch.device) -> Iterator[Held]:
    """Within it all tensors are fake ones, and Triton launches nothing. Yields what those on `device` would hold."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(warnings.catch_warnings())  # TMA descriptors look at addresses, and a fake's is 0
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        # Module.to() swaps fake parameters, which a weak reference of FakeTensorMode's own forbids
        stack.enter_context(patch("torch.utils.swap_tensors", lambda a, b: setattr(a, "data", b)))
        if find_spec("triton"):
            from triton.runtime.jit import KernelInterface

            launch = patch.object(KernelInterface, "__getitem__", lambda kernel, grid: lambda *_, **__: None)
            stack.enter_context(launch)
        yield stack.enter_context(Held(device))


def parts(held: Held, model: nn.Module, optimizer: Optimizer, batch: Batch, step: Callable) -> dict[str, int]:
    """Bytes that `step` takes, which works on all three: weights, gradients, optimizer, activations, and the peak."""
    optimizer.state()  # with the moments, as in any step but the first
    before = held.now
    found = {"weights": nbytes(model.parameters()), "gradients": nbytes(optimizer.masters)}
    found["optimizer"] = before - found["weights"] - nbytes(batch)
    model.register_forward_hook(lambda *_: found.update(activations=held.now - before))
    step()
    return found | {"peak": held.peak}


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)

"""The private functions of PyTorch that this room uses, and why. tests/runtime/test_compat.py checks them."""

import torch
from torch import Tensor


def copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into the target at the same place of the list, with one kernel launch for many tensors.

    A loop over copy_() launches a kernel for each tensor, 148 for GPT-2 124M. torch.optim uses the foreach functions,
    but they have no public names.
    """
    torch._foreach_copy_(targets, sources)


def sleep_on_gpu(seconds: float) -> None:
    """Keep the current stream of the current GPU busy for about `seconds`. The host does not wait.

    The only public way is a kernel that takes this long. The private function takes a number of clocks. An H200 has
    1.98e9 clocks a second, and a slower GPU sleeps longer.
    """
    torch.cuda._sleep(int(2e9 * seconds))

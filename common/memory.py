"""GPU memory that PyTorch does not count, because another library allocates it."""

from collections.abc import Callable

import torch

OTHER_PEAKS: dict[str, Callable[[torch.device], int]] = {}  # a library's name -> its peak in bytes on a device

"""Which program of _gluon_forward.py computes which blocks of a causal attention.

Behind a causal mask the last block of a head takes 8 times as long as the first, at T = 1024 and with blocks of 128. If
program i of P computed blocks i, i + P, i + 2 P and so on, the slowest program would take 5 to 27% longer than the
mean. So a plan gives each block to the program that has the least to do so far.
"""

import functools
import heapq

import numpy as np
import torch
import triton
from torch import Tensor

from kernels.compat import fake_mode

TILE = 128  # time is counted in tiles of 128 keys


@functools.lru_cache
def plan(T: int, M: int, heads: int, heads_at_once: int, programs: int) -> np.ndarray:
    """Return which blocks of M tokens each program computes, (1 + rounds, programs) int32.

    A column is for one program: how many blocks it computes, their numbers, then zeros. With `blocks` blocks in a head,
    block i of head h has the number h * blocks + i, and is the longer, the larger i is. Blocks of the first
    `heads_at_once` heads come first, and among them long blocks.

    With 12 heads, a plan takes 30 ms for 64 x 1024 tokens, and 2.5 s for one sequence of 8 million tokens.
    """
    blocks = triton.cdiv(T, M)
    free = [(0, program) for program in range(programs)]  # (when the program is free, its number)
    numbers = [[] for _ in range(programs)]
    for first in range(0, heads, heads_at_once):
        for i in reversed(range(blocks)):
            for head in range(first, min(first + heads_at_once, heads)):
                time, program = free[0]
                numbers[program].append(head * blocks + i)
                tiles = triton.cdiv(min((i + 1) * M, T), TILE)
                heapq.heapreplace(free, (time + tiles + 1, program))  # start and end take as long as a tile
    rounds = 1 + max(map(len, numbers), default=0)  # a program reads one number beyond its last block
    columns = [[len(column), *column, *[0] * (rounds - len(column))] for column in numbers]
    return np.array(columns, np.int32).T.copy()


@functools.cache  # without a limit: a captured CUDA graph reads its plan in every replay, so no plan may be freed
def _plan_on(device: torch.device, *arguments) -> Tensor:
    return torch.tensor(plan(*arguments)).to(device)


def plan_on(device: torch.device, *arguments) -> Tensor:
    """Return plan(*arguments) on the device. Each plan is made once."""
    # a fake tensor serves only its FakeTensorMode
    return (_plan_on.__wrapped__ if fake_mode() else _plan_on)(device, *arguments)

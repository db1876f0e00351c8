"""How a matmul with a long sum and few tiles keeps a GPU busy: other programs compute parts of the sum."""

import triton

MOST_SPLITS = 64  # parts of a sum


def split_sum(steps: int, tiles: int, programs: int) -> tuple[int, int]:
    """Return into how many parts to split a sum of `steps` blocks, and how many blocks a part has.

    In a round, every program computes one tile of one part. The time is rounds * (blocks of a part + 8), because to
    write a part and to read it again takes as long as 8 blocks. Every part has at least one block.
    """

    def time(splits: int) -> int:
        return triton.cdiv(tiles * splits, programs) * (triton.cdiv(steps, splits) + (8 if splits > 1 else 0))

    splits = min(range(1, min(steps, MOST_SPLITS) + 1), key=time)
    blocks = triton.cdiv(steps, splits)
    return triton.cdiv(steps, blocks), blocks

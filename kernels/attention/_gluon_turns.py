"""Turns and tickets: in which order the programs of _gluon_backward.py add to a tile of dq, and take blocks of keys.

The blocks of keys take turns at each tile of dq. The block on the diagonal comes first and stores its product. The
blocks before it follow one by one and add theirs. The first block of the head comes last: it loads the sum, adds its
product and writes dq. A counter for each tile says whose turn it is. One warp waits for the turn and another warp
counts up. Each of them waits about 1 us for the L2, and meanwhile the adder computes the next tile.

The blocks of a head start in the order of the turns, short ones first. If all programs are equally fast, block j
reaches a tile of dq one step after block j + 1, and no program waits. A program takes the next block by a ticket: it
adds 1 to a counter in memory. A block waits only for blocks with earlier tickets, and the programs that took those are
running. So the turns cannot deadlock, even if other kernels leave no room for some of the programs.

The sums have room for R heads, as many as are computed at the same time. Head h reuses the memory of head h - R, after
the last turn of head h - R.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.hopper.ring import Ring

BLOCK = gl.constexpr(128)  # keys of a program


class Tickets(NamedTuple):
    """The numbers of the program's next blocks, for all its warps."""

    numbers: gl.shared_memory_descriptor
    ring: Ring


@gluon.jit
def head_and_block(ticket, T):
    """Return the number of a key head, and the number j of a block of its keys. All but the first j blocks see it."""
    blocks = (T + BLOCK - 1) // BLOCK
    return ticket // blocks, blocks - 1 - ticket % blocks


@gluon.jit
def turns_before(head, j, i, heads_in_sums):
    """Return how many blocks add to the memory of tile i of dq before block j of this head.

    First come the earlier heads in this memory, each with i // 2 + 1 blocks. Then come i // 2 - j blocks of this head.
    """
    return head // heads_in_sums * (i // 2 + 1) + i // 2 - j


@gluon.jit
def take_ticket(tickets, ticket_ptr, block):
    """Take the next ticket of the grid for this program's next block, give it to the other warps, and return it."""
    slot = tickets.ring.slot(block)
    tickets.ring.wait_empty(slot)
    ticket = gl.atomic_add(ticket_ptr, 1, sem="relaxed", scope="gpu")
    tickets.numbers.index(slot.index).store(gl.full([1], ticket, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    tickets.ring.arrive_full(slot)
    return ticket


@gluon.jit
def read_ticket(tickets, block):
    """Wait for the ticket of this program's next block, and return it."""
    slot = tickets.ring.slot(block)
    tickets.ring.wait_full(slot)
    ticket = gl.max(tickets.numbers.index(slot.index).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)
    tickets.ring.arrive_empty(slot)
    return ticket


@gluon.jit
def _wait_until(pointer, least):
    """Wait until the number in memory is at least `least`. The caller then sees what was written before the count."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred less; again: ld.acquire.gpu.global.s32 $0, [$1]; setp.lt.s32 less, $0, $2; @less bra again; }",
        "=&r,l,r",  # & because the loop writes the output before it reads the inputs again
        [pointer, least],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_for_turns(products, tickets, turns_ptr, heads_in_sums, all_blocks, T, GROUP: gl.constexpr):
    """Run the warp that waits for the program's turn at each tile of dq, and then lets the adder add."""
    tiles = gl.cdiv(T, BLOCK) * 2
    block, tile = 0, 0
    ticket = read_ticket(tickets, block)
    while ticket < all_blocks:
        head, j = head_and_block(ticket, T)
        for member in range(GROUP):
            turn_ptr = turns_ptr + (head % heads_in_sums * GROUP + member).to(gl.int64) * tiles
            for i in range(2 * j, tiles):
                slot = products.ring.slot(tile)
                products.ring.wait_empty(slot)
                _wait_until(turn_ptr + i, turns_before(head, j, i, heads_in_sums))
                products.ring.arrive_full(slot)
                tile += 1
        block += 1
        ticket = read_ticket(tickets, block)


@gluon.jit
def pass_turns_on(products, tickets, turns_ptr, heads_in_sums, all_blocks, T, GROUP: gl.constexpr):
    """Run the warp that passes the turn at each tile of dq on to the next block, when the adder is done with it."""
    tiles = gl.cdiv(T, BLOCK) * 2
    block, tile = 0, 0
    ticket = read_ticket(tickets, block)
    while ticket < all_blocks:
        head, j = head_and_block(ticket, T)
        for member in range(GROUP):
            turn_ptr = turns_ptr + (head % heads_in_sums * GROUP + member).to(gl.int64) * tiles
            for i in range(2 * j, tiles):
                slot = products.ring.slot(tile)
                mbarrier.wait(products.added.index(slot.index), slot.parity)
                products.ring.arrive_empty(slot)
                gl.atomic_add(turn_ptr + i, 1, sem="release", scope="gpu")
                tile += 1
        block += 1
        ticket = read_ticket(tickets, block)

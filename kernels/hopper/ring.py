"""How the warps of a Gluon kernel hand tiles to each other: a Ring of slots, and the PingPong of two consumers.

Producers fill the slots of a ring in shared memory one after another, and consumers read them in the same order:

    producer                                                 consumer
    slot = ring.slot(0)                                      slot = ring.slot(0)
    for i in range(fills):                                   for i in range(fills):
        full = ring.acquire(slot, BYTES)                         ring.wait_full(slot)
        load(x, [i * ROWS, 0], full, xs.index(slot.index))       total += xs.index(slot.index).load(LAYOUT)
        slot = ring.next(slot)                                   fence_async_shared()  # TMA will overwrite the slot
                                                                 ring.arrive_empty(slot)
                                                                 slot = ring.next(slot)

In a loop over all fills, next(slot) saves a division. slot(i) is for a warp that skips fills or counts them anyway.

Each slot has two barriers:

    full     its producers have filled it: TMA has written the bytes that acquire() names, or warps have arrived
    empty    its consumers have read it

Fill i goes to slot i % SLOTS, in round i // SLOTS, from 0 on. A wait names only the parity of the round. For two slots:

    fill      0    1    2    3    4    5
    slot      0    1    0    1    0    1
    parity    0    0    1    1    0    0

So a wait for fill 4 passes at once, wrongly, if fill 2 has not yet arrived: fill 0 of the same slot has the parity of
fill 4. Therefore a warp waits for every fill of a slot, or knows from other barriers that the fill before has arrived.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language import core
from triton.runtime.jit import constexpr_function

aggregate = getattr(gl, "aggregate", None) or core._aggregate


class Slot(NamedTuple):
    """A slot of a ring in some round: its index, and the parity of the round."""

    index: gl.tensor
    parity: gl.tensor


@aggregate
class Ring:
    """The barriers of a ring's slots. The memory of the slots is beside it: tiles.index(slot.index)."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @constexpr_function
    def __init__(self, full, empty):
        self.full, self.empty = full, empty

    @gluon.jit
    def slot(self, i):
        """Return the slot of fill i."""
        SLOTS: gl.constexpr = self.full.shape[0]
        i = gl.to_tensor(i)
        return Slot(i % SLOTS, i // SLOTS & 1)

    @gluon.jit
    def next(self, slot):
        """Return the slot of the next fill."""
        index, parity = slot.index + 1, slot.parity
        if index == self.full.shape[0]:
            index = 0
            parity ^= 1
        return Slot(index, parity)

    @gluon.jit
    def wait_full(self, slot, pred=True):
        mbarrier.wait(self.full.index(slot.index), slot.parity, pred)

    @gluon.jit
    def wait_empty(self, slot):
        """Wait until the fill of the round before is read. In round 0 this is for parity 1, and passes at once."""
        mbarrier.wait(self.empty.index(slot.index), slot.parity ^ 1)

    @gluon.jit
    def arrive_full(self, slot):
        mbarrier.arrive(self.full.index(slot.index))

    @gluon.jit
    def arrive_empty(self, slot, pred=True):
        mbarrier.arrive(self.empty.index(slot.index), pred=pred)

    @gluon.jit
    def acquire(self, slot, BYTES: gl.constexpr):
        """Wait until the slot is empty, and return the barrier at which TMA must arrive with this many bytes."""
        self.wait_empty(slot)
        full = self.full.index(slot.index)
        mbarrier.expect(full, BYTES)
        return full


@gluon.jit
def start_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return len(ARRIVALS) arrays of COUNT barriers. A barrier of array i waits for ARRIVALS[i] arrivals in a round.

    Call fence_and_sync() before other warps use them.
    """
    arrays = ()
    for _ in gl.static_range(len(ARRIVALS)):
        arrays += (gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout()),)
    for slot in gl.static_range(COUNT):
        for i in gl.static_range(len(ARRIVALS)):
            mbarrier.init(arrays[i].index(slot), count=ARRIVALS[i])
    return arrays


@gluon.jit
def start_ring(SLOTS: gl.constexpr, PRODUCERS: gl.constexpr = 1, CONSUMERS: gl.constexpr = 1):
    """Return a ring whose slots are full after PRODUCERS arrivals, and empty after CONSUMERS. See start_barriers()."""
    full, empty = start_barriers(SLOTS, (PRODUCERS, CONSUMERS))
    return Ring(full, empty)


@aggregate
class PingPong:
    """Two consumers that take turns: while one has its turn, the other does other work."""

    barriers: gl.shared_memory_descriptor

    @constexpr_function
    def __init__(self, barriers):
        self.barriers = barriers

    @gluon.jit
    def wait(self, CONSUMER: gl.constexpr, parity):
        """Wait for this consumer's turn: `parity` is 0 in its first turn, 1 in its second, 0 in its third ...

        Consumer 0 has the first turn of all: its first wait is for the barrier's parity 1, and passes at once.
        """
        mbarrier.wait(self.barriers.index(CONSUMER), parity ^ (1 - CONSUMER))

    @gluon.jit
    def pass_on(self, CONSUMER: gl.constexpr):
        """End the turn of this consumer: the other one may begin."""
        mbarrier.arrive(self.barriers.index(1 - CONSUMER))


@gluon.jit
def start_ping_pong(BARRIERS: gl.constexpr = 2):
    """Return the ping-pong of two consumers. It does not use a third barrier. See start_barriers()."""
    return PingPong(start_barriers(BARRIERS, (1,))[0])


@gluon.jit
def multiply_in_turn(
    total, xs, ws, ring, ping_pong, CONSUMER: gl.constexpr, parity, fill, steps, W_BY_ROWS: gl.constexpr
):
    """Wait for this consumer's turn, and add the product of a tile to total: x W^T, or x W if W_BY_ROWS is False.

    The tile's operands are `steps` fills of xs and ws, from number `fill` on. Return total, the last slot, and the slot
    after it. The last wgmma is still in flight, its slot is not yet released, and the turn is not yet passed on.
    """
    slot = ring.slot(fill)
    last = ring.slot(0)  # not `slot`: while two names have one value, Triton misses that a loop changes one of them
    ping_pong.wait(CONSUMER, parity)
    for step in range(steps):
        ring.wait_full(slot)
        w_tile = ws.index(slot.index).permute((1, 0)) if W_BY_ROWS else ws.index(slot.index)
        total = warpgroup_mma(xs.index(slot.index), w_tile, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=(total,))  # one wgmma stays in flight; the wgmma of slot `last` is done
        ring.arrive_empty(last, pred=step > 0)
        last = slot
        slot = ring.next(slot)
    return total, last, slot

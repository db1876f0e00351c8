"""The KV cache: rows of a prefill in parts and of steps, also in a ring and in fp8."""

import pytest
import torch

from kernels.cache import FP8, Cache, convert


def key_of(positions, sequence):
    """Return the key of a position: two heads of one channel, which hold the position and the sequence."""
    return torch.stack((positions.float(), torch.full_like(positions, sequence).float()), -1).unsqueeze(-1)


def keys_of(lengths, start, T):
    """Return the new keys (B, T, 2, 1) of positions start ... start + T - 1; NaN after the end of a sequence."""
    positions = torch.arange(start, start + T)
    keys = torch.stack([key_of(positions, b) for b in range(len(lengths))])
    for b, length in enumerate(lengths):
        keys[b, max(0, length - start) :] = torch.nan
    return keys


def empty(batch, rows):
    return [(torch.full((batch, rows, 2, 1), -1.0), torch.full((batch, rows, 2, 1), -1.0))]


def locate(cache, T):
    return cache.locate(cache.token_positions(T))


def assert_holds(stored, lengths):
    """Row p % rows of each sequence holds the key of position p, for the last `rows` positions."""
    rows = stored.shape[1]
    for b, length in enumerate(lengths):
        positions = torch.arange(max(0, length - rows), length)
        assert torch.equal(stored[b, positions % rows], key_of(positions, b))


@pytest.mark.parametrize("rows", [5, 8, 32])
@pytest.mark.parametrize("parts", [[20], [3, 17], [8, 8, 4], [1] * 20], ids=str)
@pytest.mark.parametrize("lengths", [(20, 20), (20, 7), (1, 20), (13, 4, 20)], ids=str)
def test_a_prefill_in_parts_and_steps_keep_the_last_rows(lengths, parts, rows):
    kv, start, ends = empty(len(lengths), rows), 0, torch.tensor(lengths)
    for T in parts:
        cache = Cache(kv, start + T, last=ends - 1 - start)
        new = keys_of(lengths, start, T)
        keys, values = cache.append(new, new)
        for b, length in enumerate(lengths):  # attention gets the window's earlier keys in order, then the new keys
            seen = [p for p in range(max(0, start - rows), start + T) if p < length]
            got = keys[b, :, 0, 0]
            assert length <= start or got[~got.isnan()].tolist()[-len(seen) :] == seen
        assert torch.equal(keys.nan_to_num(), values.nan_to_num())
        start += T
    assert_holds(kv[0][0], lengths)
    positions = ends.clone()
    for step in range(7):
        cache = locate(Cache(kv, rows, positions), 1)
        assert cache.lengths.tolist() == [min(length + step + 1, rows) for length in lengths]
        new = torch.stack([key_of(positions[b : b + 1], b) for b in range(len(lengths))])
        cache.append(new, new)
        positions += 1
        assert_holds(kv[0][0], positions.tolist())


def test_a_step_of_several_tokens():
    kv = empty(2, 16)
    positions = torch.tensor([3, 9])
    cache = locate(Cache(kv, 16, positions), 4)
    assert cache.token_positions(4).tolist() == [[3, 4, 5, 6], [9, 10, 11, 12]]
    assert cache.lengths.tolist() == [7, 13]
    new = torch.stack([key_of(torch.arange(p, p + 4), b) for b, p in enumerate(positions.tolist())])
    cache.append(new, new)
    for b, p in enumerate(positions.tolist()):
        assert torch.equal(kv[0][1][b, p : p + 4], new[b])
    assert (kv[0][0] == -1).sum() == 2 * 2 * 12


def test_fp8_takes_the_nearest_value_and_stops_at_the_largest():
    """Compare with all values of e4m3: a sign, 4 bits of exponent and 3 of mantissa; the largest code is NaN."""
    normal = [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)]
    subnormal = [mantissa / 512 for mantissa in range(8)]
    magnitudes = torch.tensor(subnormal + normal[:-1])
    values = torch.cat((magnitudes, -magnitudes))
    x = torch.cat((20 * torch.randn(500, generator=torch.Generator().manual_seed(0)), torch.tensor([1e4, -1e4, 448.0])))
    got = convert(x, FP8).float()
    nearest = (x[:, None] - values).abs().min(1).values
    assert torch.equal((x - got).abs(), nearest)
    assert torch.isin(got, values).all()


@pytest.mark.parametrize("rows", [5, 32])
def test_an_fp8_cache_returns_the_dtype_of_the_keys(rows):
    kv = [tuple(torch.zeros(1, rows, 2, 4, dtype=FP8) for _ in range(2))]
    k = torch.randn(1, 3, 2, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    got, _ = Cache(kv, 3, last=torch.tensor([2])).append(k, k)
    assert torch.equal(got, k)  # the first part of a prefill reads its own keys, not the rounded ones
    got, _ = locate(Cache(kv, 5, torch.tensor([3])), 1).append(k[:, :1], k[:, :1])
    assert got.dtype == torch.bfloat16
    assert torch.equal(got[:, :3], convert(k, FP8).bfloat16())
    assert torch.equal(got[:, 3], convert(k[:, 0], FP8).bfloat16())

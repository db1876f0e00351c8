import pytest
import torch

from kernels.packed import buffer, parted, split

HEADS = (6, 2, 2)


@pytest.fixture
def packed():
    return torch.randn(2, 5, sum(HEADS), 8, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_views_in_order(packed):
    parts = split(packed, HEADS)
    assert torch.equal(torch.cat(parts, 2), packed)
    assert {part.untyped_storage().data_ptr() for part in parts} == {packed.untyped_storage().data_ptr()}


def test_gradients_that_lie_side_by_side_are_not_copied(packed):
    q, k, v = split(packed, HEADS)
    grads = torch.randn_like(packed)
    [got] = torch.autograd.grad((q, k, v), [packed], parted(grads, q, k))
    assert torch.equal(got, grads)
    assert got.data_ptr() == grads.data_ptr()


@pytest.mark.parametrize("change", ["copies", "order", "other", "another", "strides"])
def test_others_are_concatenated(packed, change):
    q, k, v = split(packed, HEADS)
    grads = buffer(q, k).normal_()
    dq, dk, dv = parted(grads, q, k)
    if change == "copies":
        dq, dk, dv = dq.clone(), dk.clone(), dv.clone()
    elif change == "order":
        dk, dv = dv, dk
    elif change == "other":
        dv = torch.randn_like(v)
    elif change == "another":  # another memory's part of the same place
        _, dk, _ = parted(buffer(q, k).normal_(), q, k)
    else:  # in their places, but with other steps
        dk = grads.as_strided(dk.shape, (0, *dk.stride()[1:]), dk.storage_offset())
    [got] = torch.autograd.grad((q, k, v), [packed], (dq, dk, dv))
    assert torch.equal(got, torch.cat((dq, dk, dv), 2))


def test_a_part_without_a_gradient_has_zeros(packed):
    q, _, v = split(packed, HEADS)
    [got] = torch.autograd.grad((q.sum() + 2 * v.sum()), [packed])
    expected = torch.zeros_like(packed)
    expected[:, :, :6], expected[:, :, 8:] = 1, 2
    assert torch.equal(got, expected)


def test_of_other_lengths():
    """Of fewer queries than keys the gradients are views of one buffer as well, cut to what there is."""
    q, k = torch.empty(2, 3, 6, 8), torch.empty(2, 7, 2, 8)
    dq, dk, dv = parted(buffer(q, k), q, k)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, k.shape)


def test_no_break_under_torch_compile(packed):
    def work(packed):
        q, k, v = split(packed, HEADS)
        return (q.sum(2) * k.sum(2) + v.sum(2)).square().sum()

    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    [got], [expected] = (torch.autograd.grad(function(packed), [packed]) for function in (compiled, work))
    torch.testing.assert_close(got, expected)


def test_gradients_of_gradients(packed):
    """Of the sum of cubes: 6 P."""
    y = torch.cat(split(packed, HEADS), 2)
    [dp] = torch.autograd.grad(y.pow(3).sum(), [packed], create_graph=True)
    [again] = torch.autograd.grad(dp.sum(), [packed])
    torch.testing.assert_close(again, 6 * packed)

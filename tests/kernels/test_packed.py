"""split(): views of q, k and v, and gradients that are not copied if they are side by side in memory."""

import pytest
import torch

from kernels.packed import gradient_buffer, gradient_views, split

HEADS = (6, 2, 2)


@pytest.fixture
def packed():
    return torch.randn(2, 5, sum(HEADS), 8, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_split_returns_views_in_order(packed):
    parts = split(packed, HEADS)
    assert torch.equal(torch.cat(parts, 2), packed)
    assert {part.untyped_storage().data_ptr() for part in parts} == {packed.untyped_storage().data_ptr()}


def test_gradients_side_by_side_are_not_copied(packed):
    q, k, v = split(packed, HEADS)
    grads = torch.randn_like(packed)
    [got] = torch.autograd.grad((q, k, v), [packed], gradient_views(grads, q, k))
    assert torch.equal(got, grads)
    assert got.data_ptr() == grads.data_ptr()


@pytest.mark.parametrize("change", ["all copied", "swapped", "one copied", "another buffer", "strides"])
def test_other_gradients_are_concatenated(packed, change):
    """Each change moves one or all of the gradients out of place. The result is right anyway."""
    q, k, v = split(packed, HEADS)
    grads = gradient_buffer(q, k).normal_()
    dq, dk, dv = gradient_views(grads, q, k)
    if change == "all copied":
        dq, dk, dv = dq.clone(), dk.clone(), dv.clone()
    elif change == "swapped":
        dk, dv = dv, dk
    elif change == "one copied":
        dv = torch.randn_like(v)
    elif change == "another buffer":  # dk has the right offset, but in other memory
        _, dk, _ = gradient_views(gradient_buffer(q, k).normal_(), q, k)
    else:  # dk has the right offset, but other strides
        dk = grads.as_strided(dk.shape, (0, *dk.stride()[1:]), dk.storage_offset())
    [got] = torch.autograd.grad((q, k, v), [packed], (dq, dk, dv))
    assert torch.equal(got, torch.cat((dq, dk, dv), 2))


def test_a_part_without_a_gradient_has_zeros(packed):
    q, _, v = split(packed, HEADS)
    [got] = torch.autograd.grad((q.sum() + 2 * v.sum()), [packed])
    expected = torch.zeros_like(packed)
    expected[:, :, :6], expected[:, :, 8:] = 1, 2
    assert torch.equal(got, expected)


def test_gradient_views_have_the_shapes_of_q_and_k_if_their_lengths_differ():
    q, k = torch.empty(2, 3, 6, 8), torch.empty(2, 7, 2, 8)
    dq, dk, dv = gradient_views(gradient_buffer(q, k), q, k)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, k.shape)


def test_torch_compile_makes_one_graph(packed):
    """fullgraph=True raises at a graph break. The gradient equals the uncompiled gradient."""

    def work(packed):
        q, k, v = split(packed, HEADS)
        return (q.sum(2) * k.sum(2) + v.sum(2)).square().sum()

    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    [got], [expected] = (torch.autograd.grad(function(packed), [packed]) for function in (compiled, work))
    torch.testing.assert_close(got, expected)


def test_second_derivative(packed):
    """The second derivative of the sum of P^3 is 6 P."""
    y = torch.cat(split(packed, HEADS), 2)
    [dp] = torch.autograd.grad(y.pow(3).sum(), [packed], create_graph=True)
    [again] = torch.autograd.grad(dp.sum(), [packed])
    torch.testing.assert_close(again, 6 * packed)

"""Stand-ins for the packages of FlashAttention: the formula, with the signatures and conventions of their sources.

STAND_INS[version](monkeypatch) installs a stand-in for one test. It returns None, or a torch Library that the test must
destroy. A stand-in raises if it is called in a way that its package does not document.
"""

import itertools
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import torch


def documented(q, k, v, scale, causal, left=-1, right=-1, lengths=None, bounds=None):
    """Return out and lse as flash-attn's README defines them.

    Causal attention is aligned bottom right. With a window, "query at position i will only attend to keys between
    [i + seqlen_k - seqlen_q - window_size[0], i + seqlen_k - seqlen_q + window_size[1]]". With `bounds`, the tensors
    are packed, and each sequence is a call of its own.
    """
    if bounds is not None:
        assert lengths is None
        assert (bounds.dtype, bounds[0].item(), bounds[-1].item()) == (torch.int32, 0, len(q))
        parts = [
            documented(*(t[None, start:end] for t in (q, k, v)), scale, causal, left, right)
            for start, end in itertools.pairwise(bounds.tolist())
        ]
        return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)
    heads, queries = q.shape[2], q.shape[1]
    k, v = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    for b in range(len(q)):
        keys = k.shape[1] if lengths is None else int(lengths[b])
        for i in range(queries):
            here = i + keys - queries
            last = here if causal else here + right if right >= 0 else keys - 1
            scores[b, :, i, last + 1 :] = -math.inf
            scores[b, :, i, : max(0, here - left) if left >= 0 else 0] = -math.inf
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def gradients(dout, q, k, v, *limits):
    """Return dq, dk, dv. They are computed in another thread, because custom operators run with autograd disabled."""

    def differentiate():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(documented(*leaves, *limits)[0], leaves, dout)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(differentiate).result()


def check_saved(dout, out, lse):
    """Assert that a backward gets tensors in the shapes that its forward returned."""
    assert dout.shape == out.shape
    packed = out.dim() == 3
    assert lse.shape == ((out.shape[1], out.shape[0]) if packed else (out.shape[0], out.shape[2], out.shape[1]))


def same_sequences(cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None):
    """Return the bounds of packed sequences, which must be equal for queries and keys; None if they are not packed."""
    if cu_seqlens_q is None:
        assert (cu_seqlens_k, max_seqlen_q, max_seqlen_k) == (None, None, None)
        return None
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k >= cu_seqlens_q.diff().max()
    return cu_seqlens_q


def install(monkeypatch, name, **functions):
    """Install a module with these functions, and the packages above it."""
    for end in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:end])
        module = sys.modules.get(part) or ModuleType(part)  # fa2 and fa4 are in one package
        module.__path__ = []
        monkeypatch.setitem(sys.modules, part, module)
    vars(module).update(functions)


def fa4(monkeypatch):
    """Install flash_attn/cute/interface.py of 4.0.0b36, with the arguments that we use. A window is an int or None."""

    def forward(
        q, k, v, *, seqused_k=None, softmax_scale=None, causal=False, window_size_left=None, return_lse=False, **packed
    ):
        assert return_lse
        left = -1 if window_size_left is None else window_size_left
        limits = left, -1, seqused_k, same_sequences(**packed)
        return (*documented(q, k, v, softmax_scale, causal, *limits), None, None, None)

    def backward(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, *, window_size_left=None, dq, dk, dv, **packed
    ):
        check_saved(dout, out, lse)
        left = -1 if window_size_left is None else window_size_left
        limits = left, -1, None, same_sequences(**packed)
        for grad, value in zip((dq, dk, dv), gradients(dout, q, k, v, softmax_scale, causal, *limits), strict=True):
            grad.copy_(value)
        return dq, dk, dv

    install(monkeypatch, "flash_attn.cute.interface", _flash_attn_fwd=forward, _flash_attn_bwd=backward)


def fa3(monkeypatch):
    """Install the operators of hopper/flash_api.cpp, with the arguments that we use."""
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    packed = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None"
    library.define(
        f"fwd(Tensor q, Tensor k, Tensor v, *, {packed}, Tensor? seqused_k=None, float? softmax_scale=None, "
        "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, int num_splits=0) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    )
    library.define(
        "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq=None, "
        f"Tensor(b!)? dk=None, Tensor(c!)? dv=None, *, {packed}, float? softmax_scale=None, bool is_causal=False, "
        "int window_size_left=-1, int window_size_right=-1) -> Tensor"
    )

    def forward(
        q, k, v, *, softmax_scale, is_causal=False, window_size_left=-1, seqused_k=None, num_splits=0, **packed
    ):
        assert num_splits == (seqused_k is None)
        limits = window_size_left, -1, seqused_k, same_sequences(**packed)
        return (*documented(q, k, v, softmax_scale, is_causal, *limits), q.new_empty(0), q.new_empty(0))

    def backward(dout, q, k, v, out, lse, dq, dk, dv, *, softmax_scale, is_causal=False, window_size_left=-1, **packed):
        check_saved(dout, out, lse)
        limits = window_size_left, -1, None, same_sequences(**packed)
        values = gradients(dout, q, k, v, softmax_scale, is_causal, *limits)
        for grad, value in zip((dq, dk, dv), values, strict=True):
            grad.copy_(value)
        return lse.clone()

    library.impl("fwd", forward, "CompositeExplicitAutograd")
    library.impl("bwd", backward, "CompositeExplicitAutograd")
    install(monkeypatch, "flash_attn_interface")
    return library


def fa2(monkeypatch):
    """Install flash_attn/flash_attn_interface.py of 2.8."""

    def forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0, 0, None, False)
        out, lse = documented(q, k, v, softmax_scale, causal, window_size_left, window_size_right)
        return out, lse, None, None

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        check_saved(dout, out, softmax_lse)
        values = gradients(dout, q, k, v, softmax_scale, causal, window_size_left, window_size_right)
        for grad, value in zip((dq, dk, dv), values, strict=True):
            grad.copy_(value)

    def varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
    ):  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes) == (0, 0, None)
        bounds = same_sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        limits = window_size_left, window_size_right, None, bounds
        return (*documented(q, k, v, softmax_scale, causal, *limits), None, None)

    def varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
    ):  # fmt: skip
        check_saved(dout, out, softmax_lse)
        bounds = same_sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        limits = window_size_left, window_size_right, None, bounds
        for grad, value in zip((dq, dk, dv), gradients(dout, q, k, v, softmax_scale, causal, *limits), strict=True):
            grad.copy_(value)

    def with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, softmax_scale, causal, window_size, return_softmax_lse=False
    ):
        assert return_softmax_lse
        return documented(q, k_cache, v_cache, softmax_scale, causal, *window_size, cache_seqlens)

    names = {"_flash_attn_forward": forward, "_flash_attn_backward": backward, "flash_attn_with_kvcache": with_kvcache}
    names |= {"_flash_attn_varlen_forward": varlen_forward, "_flash_attn_varlen_backward": varlen_backward}
    install(monkeypatch, "flash_attn.flash_attn_interface", **names)
    sys.modules["flash_attn"].__version__ = "2.8.3"


def built_in(monkeypatch):
    """Give PyTorch's own operators a CPU kernel. PyTorch checks the arguments against their schemas."""
    library = torch.library.Library("aten", "IMPL")

    def forward(
        q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
        window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, **_,
    ):  # fmt: skip
        assert (dropout_p, return_debug_mask, alibi_slopes) == (0, False, None)
        limits = scale, is_causal, window_size_left, window_size_right
        empty = q.new_empty(0)
        if cum_seq_q is None:
            assert seqused_k is None  # PyTorch ignores it without cum_seq_q
            return (*documented(q, k, v, *limits), empty, empty, empty)
        if seqused_k is None:
            bounds = same_sequences(cum_seq_q, cum_seq_k, max_q, max_k)
            return (*documented(q, k, v, *limits, None, bounds), empty, empty, empty)
        outs, lses = [], []
        for b, (start, end, first) in enumerate(zip(cum_seq_q[:-1], cum_seq_q[1:], cum_seq_k[:-1], strict=True)):
            assert end - start == max_q
            keys = slice(first, first + max_k)
            given = (t[None] for t in (q[start:end], k[keys], v[keys]))
            out, lse = documented(*given, *limits, seqused_k[b : b + 1])
            outs.append(out[0])
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, 1), empty, empty, empty  # (B Tq, H, D), (H, B Tq)

    def backward(
        dout, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
        scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        check_saved(dout, out, lse)
        bounds = None if cum_seq_q is None else same_sequences(cum_seq_q, cum_seq_k, max_q, max_k)
        return gradients(dout, q, k, v, scale, is_causal, window_size_left, window_size_right, None, bounds)

    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    return library


STAND_INS = {"fa4": fa4, "fa3": fa3, "fa2": fa2, "torch": built_in}

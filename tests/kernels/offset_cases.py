"""For each of our Triton kernels, a launch whose last program has offsets beyond 2^31 elements: see test_offsets.py.

A case takes before(C), which returns how many rows of C numbers to put before the rows of the case: 0 in the first
call, and in the second call enough for offsets beyond 2^31. Nothing touches their memory. The case returns what the
last program computes.
"""

import importlib
from functools import partial, wraps
from unittest import mock

import pytest
import torch

from kernels import matmul, quantize, sums
from kernels.adamw.triton import BLOCK, adamw
from kernels.attention import _gluon_backward, _triton_backward
from kernels.decode import _few, _many, _qkv
from kernels.fp8 import E4M3, E5M2
from kernels.glu import _triton_fp8 as glu_fp8
from kernels.glu import triton as glu
from kernels.loss import _exponentials, _softmax, _unnormalised
from kernels.mlp import _triton_fp8 as mlp_fp8
from kernels.mlp import triton as mlp
from kernels.muon import _updates as muon_updates
from kernels.muon import triton as muon
from kernels.norm import _fp8 as norm_fp8
from kernels.norm import _triton_backward as norm_backward
from kernels.norm import triton as norm
from kernels.packed import gradient_views
from kernels.rope import rope_table
from kernels.rope import triton as rope

attention = importlib.import_module("kernels.attention.triton")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float16  # the interpreter computes bf16 wrongly


def needs_address_space(test):
    """Skip the test, with the reason, if the machine has too little memory or too few addresses."""

    @wraps(test)
    def skip_if_refused(*arguments, **named):
        try:
            test(*arguments, **named)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            pytest.skip(str(error).rpartition("] ")[2])

    return skip_if_refused


def randn(*size, seed=0, std=1.0):
    return std * torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def half(*size, seed=0):
    return randn(*size, seed=seed).to(DTYPE)


def far(tensor, *strides):
    """Return a copy of `tensor` with these strides."""
    length = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
    memory = torch.empty(length, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, strides).copy_(tensor)


def near_and_far(*strides):
    """Return two functions that copy a tensor: with its own strides, and with these."""
    return torch.clone, lambda tensor: far(tensor, *strides)


def after(rows, tensor):
    """Return `tensor` with so many rows of anything before it."""
    grown = torch.empty(rows + len(tensor), *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    grown[rows:] = tensor
    return grown


def after_in_halves(rows, tensor):
    """Return `tensor` with half of so many rows of anything before each of its halves: the rows of gate and up."""
    count = len(tensor) // 2
    grown = torch.empty(rows + len(tensor), *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    grown.unflatten(0, (2, -1))[:, -count:] = tensor.unflatten(0, (2, count))
    return grown


def after_columns(columns, tensor):
    """Return `tensor` with so many columns of anything before it."""
    rows, width, *rest = tensor.shape
    grown = torch.empty(rows, columns + width, *rest, dtype=tensor.dtype, device=tensor.device)
    grown[:, columns:] = tensor
    return grown


def launch(kernel, grid, **arguments):
    """Launch a kernel with those of the arguments that it takes, and None for its other pointers."""
    given = dict.fromkeys(name for name in kernel.arg_names if name.endswith("_ptr"))
    kernel[grid](**given | {name: value for name, value in arguments.items() if name in kernel.arg_names})


def norm_forward(before):
    x, residual = (after(before(1024), half(4, 1024, seed=seed)) for seed in range(2))
    outputs = norm.forward(x, residual, *half(2, 1024), 1e-5)
    return [tensor[-4:] for tensor in outputs]


def norm_backward_(before):
    dy, dstream, saved = (after(before(1024), half(2, 1024, seed=seed)) for seed in range(3))
    mean, rstd = (after(before(1024), randn(2, seed=seed).abs()) for seed in range(2))
    results = norm_backward.norm_bwd(saved, *half(2, 1024), torch.float32, DTYPE, dy, dstream, mean, rstd)
    return [*(tensor[-2:] for tensor in results[:2]), *results[2:]]


def norm_in_fp8(before):
    x, residual = (after(before(1024), half(32, 1024, seed=seed)) for seed in range(2))
    _, *vectors, rows, columns = norm_fp8.forward(x, residual, *half(2, 1024), 1e-5)
    return [*(tensor[-32:] for tensor in (*vectors, rows)), columns[:, -32:]]


def matmul_by_rows(before):
    x, w = after(before(64), half(70, 64)), half(40, 64, seed=1)
    return [matmul.matmul("linear_fwd", x, w, half(1, 40)[0])[-6:]]


def matmul_to_many_columns(before):
    x, w = half(70, 64), after_columns(before(64), half(64, 128, seed=1))
    return [matmul.matmul("linear_dx", x, w, w_by_rows=False)[-6:, -128:]]


def split_matmul(before):
    """Each part of the sum has 128 rows, and run_one_program returns the last part."""
    a, b = after(before(64), half(256, 64)), after(before(64), half(256, 40, seed=1))
    with mock.patch.object(matmul, "split_sum", lambda steps, *_: (steps // 4, 4)):
        return [matmul.matmul_transposed("linear_dw", a, b)]


def mlp_forward(before):
    x, w, b = half(70, 64), after(before(64), half(128, 64, seed=1)), after(before(64), half(128, seed=2))
    h, a = (torch.empty(70, len(w), dtype=DTYPE) for _ in range(2))
    mlp.fc_and_activation(x, w, b, h, a)
    return h[-8:, -128:], a[-8:, -128:]


def mlp_backward(before):
    dy, w, h = half(70, 64), after_columns(before(64), half(64, 64, seed=1)), after_columns(before(64), half(70, 64))
    a, dh = (torch.empty(70, w.shape[1], dtype=DTYPE) for _ in range(2))
    partial_sums = mlp.proj_and_activation_backward(dy, w, h, a, dh, sums=True)
    return a[:, -64:], dh[:, -64:], partial_sums[:, -64:]


def glu_forward(before):
    x, w, b = after(before(64), half(70, 64)), half(128, 64, seed=1), half(1, 128, seed=2)[0]
    h, a = torch.empty(len(x), 128, dtype=DTYPE), torch.empty(len(x), 64, dtype=DTYPE)
    glu.fc_and_glu(x, w, b, h, a)
    return h[-6:, 32:64], h[-6:, -32:], a[-6:, -32:]


def glu_backward(before):
    dy, w = after(before(64), half(70, 64)), half(64, 64, seed=1)
    h = after(len(dy) - 70, half(70, 128, seed=2))
    a, dh = torch.empty(len(dy), 64, dtype=DTYPE), torch.empty(len(dy), 128, dtype=DTYPE)
    glu.proj_and_glu_backward(dy, w, h, a, dh, sums=False)
    return a[-6:, -32:], dh[-6:, 32:64], dh[-6:, -32:]


def glu_in_fp8(before, backward):
    h = after(before(1024), half(128, 1024))
    (N, F), unit = (len(h), 512), torch.full((), 0.25)
    da = after(N - 128, half(128, 512, seed=1))
    tiles, programs, sizes = quantize.choose_tile_launch("glu_fp8", da, glu_fp8.ROWS)
    rows, columns = quantize.empty_fp8(N, 2 * F, E5M2, DEVICE), quantize.empty_fp8(2 * F, N, E5M2, DEVICE)
    a = quantize.empty_fp8(*((F, N) if backward else (N, F)), E4M3, DEVICE)
    arguments = (h, da, unit, a, rows, columns, torch.empty(tiles, 2 * F), N, F)
    glu_fp8._glu_fp8_kernel[(programs,)](*arguments, SCALE=4.0, BACKWARD=backward, **sizes)
    if not backward:
        return [a[-64:, -64:]]
    sums = arguments[6][-1]
    return a[-64:, -64:], rows[-64:, 448:512], rows[-64:, -64:], columns[448:512, -64:], columns[-64:, -64:], sums[-64:]


def rope_(before, backward):
    """Sequences of two tokens with three heads of 16 channels."""
    qkv = after(before(96), half(5, 96)).view(-1, 2, 3, 16)
    table = rope_table(torch.arange(2), 16).reshape(2, 2, 8).to(DEVICE)
    if backward:
        return [rope.launch_backward(qkv, None, None, table, None, None, 1, 1e-5)[0][-1:]]
    return [rope.launch_forward(qkv, table, 1, None, None, 1e-5)[-1:]]


def loss_exponentials(before):
    x, w, shifts = after(before(64), 0.25 * half(70, 64)), half(72, 64, seed=1), after(before(64), randn(70))
    p = torch.empty(len(x), len(w), dtype=DTYPE)
    sums = _exponentials.exponentials(x, w, shifts - 32, p)  # so that the numbers fit into fp16
    return p[-6:, -8:], sums[-1:, -6:]


def gelu_in_fp8(before, backward):
    h, da = (after(before(1024), half(128, 1024, seed=seed)) for seed in range(2))
    (N, F), unit = h.shape, torch.full((), 0.25)
    tiles, programs, sizes = quantize.choose_tile_launch("gelu_fp8", h)
    rows, columns = quantize.empty_fp8(N, F, E5M2, DEVICE), quantize.empty_fp8(F, N, E5M2, DEVICE)
    a = quantize.empty_fp8(*((F, N) if backward else (N, F)), E4M3, DEVICE)
    arguments = (h, da, unit, a, rows, columns, torch.empty(tiles, F), N, F)
    mlp_fp8._gelu_fp8_kernel[(programs,)](*arguments, SCALE=4.0, ACTIVATION="gelu", BACKWARD=backward, **sizes)
    if not backward:
        return [a[-128:, -64:]]
    return a[-64:, -128:], rows[-128:, -64:], columns[-64:, -128:], arguments[6][-1, -64:]


def cross_entropy(before):
    logits, losses = after(before(65536), half(1, 65536)), torch.empty(before(65536) + 1)
    tensors = {"logits_ptr": logits, "targets_ptr": after(before(65536), torch.tensor([65535])), "losses_ptr": losses}
    tensors |= {"shifts_ptr": torch.empty_like(losses)}
    launch(
        _softmax.cross_entropy_kernel,
        (len(logits),),
        **tensors,
        V=65536,
        BLOCK_V=8192,
        WRITE=True,
        SOFTCAP=None,
        ignore_index=-1,
    )
    return logits[-1], losses[-1], tensors["shifts_ptr"][-1]


def dlogits_in_fp8(before):
    logits = after(before(1024), half(128, 1024))
    (N, V), (_, programs, sizes) = logits.shape, quantize.choose_tile_launch("dlogits_fp8", logits)
    rows, columns = quantize.empty_fp8(N, V, E5M2, DEVICE), quantize.empty_fp8(V, N, E5M2, DEVICE)
    targets, shifts = after(before(1024), torch.arange(128) + 900), after(before(1024), randn(128, seed=1))
    tensors = {"logits_ptr": logits, "targets_ptr": targets, "shifts_ptr": shifts, "rows_ptr": rows}
    tensors |= {"columns_ptr": columns, "scale_ptr": torch.full((1,), 2.0)}
    launch(
        _softmax.dlogits_fp8_kernel,
        (programs,),
        **tensors,
        N=N,
        V=V,
        all_rows=N,
        SOFTCAP=None,
        ignore_index=-1,
        **sizes,
    )
    return rows[-128:, -64:], columns[-64:, -128:]


def scale(before):
    x, factor = after(before(4096), half(1, 4096)), torch.full((1,), 0.3)
    out = torch.empty_like(x, dtype=torch.float32)
    launch(_softmax.scale_kernel, (len(x),), x_ptr=x, factor_ptr=factor, out_ptr=out, n=x.numel(), BLOCK=4096)
    return [out[-1]]


def loss_shift(before):
    x, w = after(before(1024), half(4, 1024)), after(before(1024), half(8, 1024, seed=1))
    targets = after(before(1024), len(w) - 1 - torch.arange(4))
    return [_unnormalised.target_logits(x, w, targets, ignore_index=-1)[-4:]]


def loss_finish(before):
    x, w, p = after(before(4096), half(16, 64)), half(4096, 64, seed=1), after(before(4096), half(16, 4096).abs())
    targets, target_logits = after(before(4096), torch.arange(16) + 4080), after(before(4096), randn(16))
    totals = after_columns(before(4096), randn(32, 16).abs())
    totals[0, -1] = torch.inf  # this row is computed again
    losses = torch.empty(len(x))
    with mock.patch.object(_unnormalised, "target_logits", return_value=target_logits):
        scaled, scales = _unnormalised.unnormalised_gradient(
            x, w, targets, losses, ignore_index=-1, out=p, exponentials=lambda *_: totals
        )
    return p[-16:], losses[-16:], scaled[-16:], scales[-16:]


def quantize_(before):
    x = after(before(1024), half(128, 1024))
    rows, columns, total = quantize.quantize(x, torch.full((), 0.25), sums=True)
    return rows[-128:, -64:], columns[-64:, -128:], total[-64:]


def maxima(before):
    """Program 0 takes the blocks 0, 2^17 and 2^18. The last one has the numbers."""
    x = after(before(1), half(8192))
    others = x[:-8192]
    others[:8192] = 0  # block 0
    others[2**30 :][:8192] = 0  # block 2^17
    largest = torch.empty(max(1, len(x) // 8192 // 2))
    quantize._maxima_kernel[(len(largest),)](x, largest, len(x), **quantize.MAXIMA_LAUNCH)
    return [largest[:1]]


def sum_rows(before):
    x = after(before(4096), half(32, 4096))
    total = torch.empty(len(x) // 32, 4096)
    sums._sum_rows_kernel[(4096 // 64, len(total))](x, total, len(x), 4096, **sums.ROWS)
    return [total[-1, -64:]]


def adamw_(before):
    tensors = [after(before(1), randn(BLOCK, seed=seed).abs()) for seed in range(4)]
    rounded, scalars = torch.empty(len(tensors[0]), dtype=DTYPE), (*torch.full((2,), 0.1), torch.full((), 3.0))
    *state, gradient = tensors
    refuse = torch.zeros((), dtype=torch.bool)
    adamw(*state, rounded, gradient, *scalars, refuse, len(rounded), 0.9, 0.99, 1e-8, 0.1)
    return [tensor[-BLOCK:] for tensor in (*state, rounded)]


def muon_momentum(before):
    momentum, gradient = (after(before(1), half(1, 2, 3, seed=seed).float()) for seed in range(2))
    scale, refuse = torch.full((), 0.5), torch.zeros((), dtype=torch.bool)
    out = muon_updates.update_momentum(momentum, gradient, scale, refuse, 0.9, DTYPE)
    return momentum[-1], out[-1]


def muon_steps(before):
    master, steps = (after(before(1), half(1, 2, 3, seed=seed)) for seed in range(2))
    master, weight = master.float(), torch.empty_like(master)
    scalars = torch.full((), 0.1), torch.zeros((), dtype=torch.bool)
    muon_updates.apply_steps(master, weight, steps, *scalars, length=2.0, weight_decay=0.1)
    return master[-1], weight[-1]


def muon_scale(before):
    return [muon.scaled(after(before(6), half(1, 2, 3)), after(before(6), randn(1).abs()))[-1]]


def symmetric_product(before):
    """The last program has the last matrix's last tile, on the diagonal."""
    x, y = (after(before(64 * 64), half(1, 64, 64, seed=seed)) for seed in range(2))
    return [muon.symmetric_product(x, y, alpha=2.0, beta=3.0, gamma=4.0)[-1]]


def muon_product(before):
    q, x = (after(before(64 * 64), half(1, 64, 64, seed=seed)) for seed in range(2))
    return [muon.product(q, x, 2.0, q.dtype)[-1]]


def heads_of_1m_tokens(before, count):
    """Return tensors (1, T, 33, 64) in (B, H, T, D) order."""
    return [after_columns(before(2048), half(33, 384, 64, seed=seed)).transpose(0, 1)[None] for seed in range(count)]


def attention_forward(before):
    q, k, v = heads_of_1m_tokens(before, 3)
    out, lse = attention.attention_fwd(q, k, v, None, None, True, 0.125, 100)
    return out[0, -128:, 32], lse[0, 32, -128:]


def attention_backward(before):
    q, k, v = heads_of_1m_tokens(before, 3)
    dout, out = (after(before(2048), half(384, 33, 64, seed=seed))[None] for seed in (4, 5))
    lse = after_columns(before(2048), 8 + randn(33, 384))[None]
    options = {"starts": None, "causal": True, "scale": 0.125, "window": 100}
    grads = _triton_backward.attention_bwd(dout, q, k, v, out=out, lse=lse, **options)
    return [grad[0, -64:, 32] for grad in gradient_views(grads, q, k)]


def lse_and_delta(before):
    dout, out = (after(before(2048), half(64, 33, 64, seed=seed))[None] for seed in range(2))
    T, lse = out.shape[1], after_columns(before(2048), randn(33, 64))
    result = torch.empty(33 * T * 2)
    _gluon_backward._lse_delta_kernel[(33 * T // 64,)](dout, out, lse, result, T, T, 33, T // 64, 64, 64)
    return [result[-128:]]


def attention_combine(before):
    parts = torch.stack([half(1, 16, 32, 64, seed=seed) for seed in range(2)])
    parts = after_columns(before(2**15), parts)
    lse = after_columns(before(2**15), randn(2, 1, 32, 16))
    B = parts.shape[1]
    out, total = torch.empty(B, 16, 32, 64), torch.empty(B, 32, 16)
    sizes = {"lse_stride": 16, "heads": 32 * B, "H": 32, "Tq": 16, "D": 64, "SPLITS": 2, "BLOCK_D": 64}
    attention._combine_kernel[(B * 16 * 32,)](parts, lse, out, total, **sizes)
    return out[-1, -1, -1], total[-1, -1, -1]


def decode_norm(before, kernel, centred=True):
    x, residual = (after(before(1024), half(1, 1024, seed=seed)) for seed in range(2))
    tensors = {"x_ptr": x, "residual_ptr": residual, "stream_ptr": torch.empty_like(x), "out_ptr": torch.empty_like(x)}
    tensors |= {"wte_ptr": x, "tokens_ptr": torch.arange(len(x))}
    sizes = {"N": len(x), "T": 1, "wpe_rows": 0, "COUNTS": 0, "K": 1024, "BLOCK_K": 1024, "PARTS": 0, "PDL": False}
    sizes |= {"EPS": 1e-5, "CENTRED": centred}
    launch(kernel, (len(x),), **tensors, ln_weight_ptr=half(1024), **sizes)
    return tensors["out_ptr"][-1], tensors["stream_ptr"][-1]


def decode_matmul(before, kernel, activation=None):
    grow = after_in_halves if activation == "swiglu" else after
    x, w = half(96, 64), grow(before(64), half(32, 64, seed=1))
    sizes = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 64, "PARTS": 1, "LINES": 1}
    return decode_product(kernel, (3, len(w) // 32, 1), x, w, sizes, activation)


def decode_product_of_few_rows(before, kernel, activation="gelu"):
    grow = after_in_halves if activation == "swiglu" else after
    x, w = half(16, 16), grow(before(8), half(32, 16, seed=1))
    sizes = {"ROWS": 16, "BLOCK_N": 16, "BLOCK_K": 128, "SLICES": 8}
    return decode_product(kernel, (len(w) // 16,), x, w, sizes, activation)


def decode_product(kernel, grid, x, w, sizes, activation):
    """Launch a product. The last 16 rows of W are for values, and the 16 rows before them for keys.

    With swiglu, the last 8 rows of each half of W are for the last columns of the result.
    """
    N, K = x.shape
    columns = len(w) // 2 if activation == "swiglu" else len(w)
    out, k, v = (torch.empty(N, width, dtype=DTYPE) for width in (columns, 16, 16))
    tensors = {"x_ptr": x, "residual_ptr": x, "stream_ptr": torch.empty_like(x), "ln_weight_ptr": half(K)}
    tensors |= {"wte_ptr": x, "tokens_ptr": torch.arange(N), "positions_ptr": torch.zeros(N, dtype=torch.int64)}
    tensors |= {"weight_ptr": w, "out_ptr": out, "k_ptr": k, "v_ptr": v}
    common = {"N": N, "T": 1, "wpe_rows": 0, "cache_rows": 1, "COUNTS": 0, "OUT": len(w), "K": K, "D": 16}
    common |= {"Q_WIDTH": len(w) - 32, "KV_WIDTH": 16, "PDL": False, "PRECISION": "ieee"}
    common |= {"ACTIVATION": activation, "EPS": 1e-5, "CENTRED": activation != "swiglu"}
    launch(kernel, grid, **tensors, **common, **sizes)
    return [v[-16:] if "v_ptr" in kernel.arg_names else out[-16:, -8 if activation == "swiglu" else -16 :]]


def decode_qk_norm(before):
    """The last program has the key of the last row."""
    x, k = after(before(48), half(1, 48)), torch.empty(1 + before(48), 1, 16, dtype=DTYPE)
    rope = torch.empty(2, len(x), 8)
    rope[:, -1] = randn(2, 8)
    tensors = {"x_ptr": x, "q_ptr": torch.empty(len(x), 32, dtype=DTYPE), "k_ptr": k, "rope_ptr": rope}
    tensors |= {"q_weight_ptr": half(16), "k_weight_ptr": half(16, seed=1)}
    tensors["positions_ptr"] = torch.zeros(len(x), dtype=torch.int64)
    sizes = {"N": len(x), "T": 1, "cache_rows": 1, "D": 16, "Q_WIDTH": 32, "KV_WIDTH": 16, "EPS": 1e-5, "BLOCK": 8}
    launch(_qkv._qk_norm_kernel, (len(x), 3), **tensors, **sizes, PDL=False)
    return [k[-1]]


CASES = {
    "_norm_fwd_kernel": norm_forward,
    "_norm_bwd_kernel": norm_backward_,
    "_norm_fwd_fp8_kernel": norm_in_fp8,
    "_tiled_matmul_kernel by rows": matmul_by_rows,
    "_tiled_matmul_kernel to many columns": matmul_to_many_columns,
    "_split_matmul_kernel": split_matmul,
    "_mlp_fwd_kernel": mlp_forward,
    "_mlp_bwd_kernel": mlp_backward,
    "_gelu_fp8_kernel forward": partial(gelu_in_fp8, backward=False),
    "_gelu_fp8_kernel backward": partial(gelu_in_fp8, backward=True),
    "_glu_fwd_kernel": glu_forward,
    "_glu_bwd_kernel": glu_backward,
    "_glu_fp8_kernel forward": partial(glu_in_fp8, backward=False),
    "_glu_fp8_kernel backward": partial(glu_in_fp8, backward=True),
    "_rope_fwd_kernel": partial(rope_, backward=False),
    "_rope_bwd_kernel": partial(rope_, backward=True),
    "cross_entropy_kernel": cross_entropy,
    "dlogits_fp8_kernel": dlogits_in_fp8,
    "scale_kernel": scale,
    "_cross_entropy_exp_kernel": loss_exponentials,
    "_cross_entropy_shift_kernel": loss_shift,
    "_cross_entropy_finish_kernel": loss_finish,
    "_quantize_kernel": quantize_,
    "_maxima_kernel": maxima,
    "_sum_rows_kernel": sum_rows,
    "_adamw_kernel": adamw_,
    "_muon_before_kernel": muon_momentum,
    "_muon_after_kernel": muon_steps,
    "_muon_scale_kernel": muon_scale,
    "_muon_symmetric_kernel": symmetric_product,
    "_muon_product_kernel": muon_product,
    "_fwd_kernel": attention_forward,
    "_dq_kernel, _dkdv_kernel": attention_backward,
    "_lse_delta_kernel": lse_and_delta,
    "_combine_kernel": attention_combine,
    "_embed_norm_kernel": partial(decode_norm, kernel=_many._embed_norm_kernel),
    "_norm_kernel": partial(decode_norm, kernel=_many._norm_kernel),
    "_norm_kernel of RMSNorm": partial(decode_norm, kernel=_many._norm_kernel, centred=False),
    "_qk_norm_kernel": decode_qk_norm,
    "_matmul_qkv_kernel": partial(decode_matmul, kernel=_many._matmul_qkv_kernel),
    "_matmul_kernel": partial(decode_matmul, kernel=_many._matmul_kernel),
    "_matmul_kernel of swiglu": partial(decode_matmul, kernel=_many._matmul_kernel, activation="swiglu"),
    "_embed_qkv_kernel": partial(decode_product_of_few_rows, kernel=_few._embed_qkv_kernel),
    "_qkv_kernel": partial(decode_product_of_few_rows, kernel=_few._qkv_kernel),
    "_fc_kernel": partial(decode_product_of_few_rows, kernel=_few._fc_kernel),
    "_fc_kernel of swiglu": partial(decode_product_of_few_rows, kernel=_few._fc_kernel, activation="swiglu"),
    "_fc_kernel of relu2": partial(decode_product_of_few_rows, kernel=_few._fc_kernel, activation="relu2"),
    "_product_kernel": partial(decode_product_of_few_rows, kernel=_few._product_kernel),
}

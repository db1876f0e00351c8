"""The decoders of kernels/decode/: their logits, the cache after a step, and the same bits of a row in any batch.

Logits follow the rule of kernels/check.py, with reference() in the test's dtype as eager. Only a GPU tests bf16,
because Triton's interpreter computes bf16 wrongly.
"""

import zlib
from functools import partial

import numpy as np
import pytest
import torch

from kernels import decode as contract
from kernels.cache import FP8, Cache
from kernels.check import broken_rule
from kernels.decode import Layer, Model, _few, _many, _step, int8, to_float64
from kernels.decode import triton as fused
from kernels.decode._cases import LLAMA, QWEN3
from kernels.registry import Unavailable, backend, impls, load
from kernels.tuned import override_tables
from tests.kernels.test_backends import poison  # noqa: F401 (a fixture)

pytestmark = pytest.mark.filterwarnings("error::FutureWarning")  # of transformers
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
OWN = {"triton": fused, "int8": int8}  # the backends with our Triton kernels
LOSSLESS = [impl for impl in impls("decode") if not getattr(backend("decode", impl), "LOSSY", False)]
# For the kernels for many rows, every feature: splits of keys, groups of heads, rotary positions
MANY = {
    "many_rows": {"batch": 6, "lengths": [4, 0, 9, 11, 30, 2], "tokens": 4},
    "many_keys_and_rows": {"batch": 6, "lengths": [300], "tokens": 4, "rows": 512},
    "many_rows_rope": {"batch": 5, "lengths": [4], "tokens": 5, "heads": 4, "kv_heads": 1, "rope": True},
    "many_rows_odd_width": {"batch": 17, "lengths": [5], "width": 60, "heads": 3, "vocab": 101, "bias": False},
    "many_rows_llama": {"batch": 6, "lengths": [4, 0, 9, 11, 30, 2], "tokens": 4, "hidden": 72, **LLAMA},
    "many_rows_qwen3": {"batch": 17, "lengths": [5], "heads": 3, "kv_heads": 1, "head_dim": 24, "hidden": 50, **QWEN3},
    "many_rows_relu2": {"batch": 17, "lengths": [5], "mlp": "relu2"},
}
# GPT-2's widths, which Triton's interpreter computes too slowly
LARGE = {"lengths": [130], "rows": 256, "vocab": 1000}
WIDTHS = {768: {"width": 768, "heads": 12}, 1600: {"width": 1600, "heads": 25}}
WIDTHS |= {name: contract.SHAPES[name] | LARGE | {"n_layer": 1} for name in ("smollm2-135m", "qwen3-0.6b")}
WIDE = {f"{C}, batch {B}": {**LARGE, **WIDTHS[C], "batch": B} for C in WIDTHS for B in (1, 8, 16, 64, 256)}
CASES = contract.CASES | MANY | (WIDE if GPU else {})


def case_inputs(case, dtype, **changes):
    """Return the arguments of reference() for a case, by its name or as a dict. The seed depends on the name."""
    sizes = CASES[case] if isinstance(case, str) else case
    return contract.inputs(**sizes | changes, dtype=dtype, device=DEVICE, seed=zlib.crc32(str(case).encode()))


def copy_cache(cache, rows=slice(None)):
    """Return a copy of the cache of some sequences."""
    kv = [tuple(t[rows].clone() for t in pair) for pair in cache.kv]
    return cache._replace(kv=kv, positions=cache.positions[rows].clone())


def pack_or_skip(impl, weights, cache):
    """Return the backend's decode() and the result of its pack(). Skip the test if the backend cannot run this."""
    module = backend("decode", impl)
    try:
        decode = load("decode", impl, DEVICE)
        if not hasattr(module, "pack"):
            return decode, weights
        return decode, module.pack(Model(forward=partial(contract.reference, weights), weights=lambda: weights), cache)
    except Unavailable as reason:
        pytest.skip(str(reason))


def run(impl, weights, tokens, cache):
    decode, packed = pack_or_skip(impl, weights, cache)
    try:
        with torch.no_grad():
            return decode(packed, tokens, cache)
    except Unavailable as reason:  # for example several tokens, which pack() does not see
        pytest.skip(str(reason))


@pytest.fixture(autouse=True)
def arguments_are_checked(monkeypatch):
    """Fail if a launch has an argument that the kernel does not take. Triton's interpreter ignores it silently."""
    original = _step.Step.launch

    def launch(step, kernel, grid, **arguments):
        assert arguments.keys() <= {*kernel.arg_names, "num_warps", "num_stages", "maxnreg"}
        original(step, kernel, grid, **arguments)

    monkeypatch.setattr(_step.Step, "launch", launch)


@pytest.fixture
def fp8_cache_on_a_cpu(monkeypatch, fp8_on_a_cpu):
    """Let our kernels run with an fp8 cache on a CPU."""
    if not GPU:
        for module in OWN.values():
            monkeypatch.setattr(module, "check", lambda weights, cache: None)


@pytest.fixture
def independent_rows(monkeypatch):
    """Multiply row by row: in the interpreter's BLAS, the bits of a row depend on its place in the matrix."""
    if GPU:
        return
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, *_):
        products = [np.matmul(a.data[..., i : i + 1, :], b.data) for i in range(a.data.shape[-2])]
        return interpreter.TensorHandle(np.concatenate(products, axis=-2) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def new_rows(cache, T):
    """Return a mask (B, rows) of the cache's rows that a step of T tokens writes."""
    mask = torch.zeros(len(cache.positions), cache.rows, dtype=torch.bool, device=DEVICE)
    return mask.scatter_(1, cache.token_positions(T) % cache.rows, True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("impl", "case"),
    [(i, c) for i in LOSSLESS for c in CASES if i != "persistent" or CASES[c].get("tokens", 1) == 1],
)
def test_against_float64(impl, case, dtype, poison, fp8_cache_on_a_cpu):  # noqa: F811
    """Logits and the new rows of the cache follow the rule. All other rows of the cache keep their bits."""
    arguments = case_inputs(case, dtype)
    weights, tokens, cache = arguments.values()
    T, exact = tokens.shape[1], to_float64(arguments)
    eager, own = copy_cache(cache), copy_cache(cache)
    logits = {
        "truth": contract.reference(**exact),
        "eager": contract.reference(weights, tokens, eager),
        "own": run(impl, weights, tokens, own),
    }
    is_new = new_rows(cache, T)
    results = {name: {"logits": value} for name, value in logits.items()}
    for layer, before in enumerate(cache.kv):
        for i, name in enumerate(("keys", "values")):
            stored = {"truth": exact["cache"], "eager": eager, "own": own}
            stored = {which: kept.kv[layer][i] for which, kept in stored.items()}
            assert torch.equal(stored["own"].view(torch.uint8)[~is_new], before[i].view(torch.uint8)[~is_new])
            if before[i].dtype == FP8:  # a number between two fp8 values may round to either
                new, expected = (stored[which][is_new].float() for which in ("own", "eager"))
                rounding = torch.finfo(dtype).eps * expected.abs().max().item()  # of the numbers before fp8
                torch.testing.assert_close(new, expected, rtol=1 / 8, atol=2**-9 + rounding)
                if dtype == torch.float32:  # in bf16, a tenth of eager's own numbers are not the rounded exact ones
                    assert (new == expected).float().mean() > 0.95
            else:
                for which, value in stored.items():
                    results[which][f"{name} {layer}"] = value[is_new]
    reason = broken_rule(results["own"], results["eager"], results["truth"], {"w": weights.wte}, dtype)
    assert reason is None, reason


def weights_with_nan(weights):
    """Yield (name, weights) for each tensor of the weights. One number of this tensor is NaN."""
    for row in (5, 6):
        wte = with_nan(weights.wte, row)
        yield f"row {row} of wte", weights._replace(wte=wte, head=wte)
    [layer] = weights.layers
    for name in ("wpe", "ln_f_weight", "ln_f_bias"):
        if getattr(weights, name) is not None:
            yield name, weights._replace(**{name: with_nan(getattr(weights, name))})
    for name in Layer._fields:
        if getattr(layer, name) is not None:
            yield name, weights._replace(layers=(layer._replace(**{name: with_nan(getattr(layer, name))}),))


def with_nan(tensor, row=5):
    tensor = tensor.clone()
    tensor[row].view(-1)[0] = torch.nan
    return tensor


SHAPES_WITH_NAN = {
    "cache": {},
    "fp8_cache": {"kv_dtype": FP8},
    "relu2": {"mlp": "relu2"},
    "qwen3": {"hidden": 24, "kv_heads": 1, **QWEN3},
}


@pytest.mark.parametrize("case", SHAPES_WITH_NAN)
@pytest.mark.parametrize("impl", impls("decode"))
def test_nan_in_a_weight_makes_the_logits_nan(impl, case, fp8_cache_on_a_cpu):
    """They are NaN where the reference's are: no minimum, comparison or rounding to integers hides a NaN.

    Token 5 is the input, so NaN in row 6 of wte is only in a logit. Rounding to fp8 concerns only keys and values.
    """
    sizes = {"batch": 1, "lengths": [5], "width": 32, "vocab": 40, **SHAPES_WITH_NAN[case]}
    weights, tokens, cache = case_inputs(sizes, torch.float32).values()
    tokens = torch.full_like(tokens, 5)
    for name, broken in weights_with_nan(weights):
        if case != "fp8_cache" or name.startswith("qkv"):
            expected = contract.reference(broken, tokens, copy_cache(cache)).isnan()
            assert expected.any()
            assert torch.equal(run(impl, broken, tokens, copy_cache(cache)).isnan(), expected), name


SEVERAL = {
    "one": {"batch": 1, "lengths": [9]},
    "splits": {"batch": 2, "lengths": [290, 30], "rows": 512},
    "groups": {"batch": 2, "lengths": [9, 20], "heads": 4, "kv_heads": 1, "rope": True},
    "qwen3": {"batch": 2, "lengths": [9, 20], "heads": 4, "kv_heads": 2, "hidden": 72, "n_layer": 1, **QWEN3},
}
if GPU:
    SEVERAL["wide"] = {"batch": 2, "lengths": [300, 700], "rows": 1024, "width": 768, "heads": 12, "vocab": 1000}
    SEVERAL["eight"] = SEVERAL["wide"] | {"batch": 1, "lengths": [90], "tokens": 8}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("impl", "case"),
    [pytest.param(i, c, marks=[pytest.mark.exhaustive] if i == "int8" else []) for i in OWN for c in SEVERAL],
)
def test_a_row_has_the_same_bits_in_any_step(impl, case, dtype, independent_rows):
    """A step of several tokens equals steps of one token, and a sequence in a batch equals the same sequence alone.

    All bits are equal. The sequence alone has a smaller bucket of keys.
    """
    sizes = {"tokens": 3, "n_layer": 1 if case == "groups" else 2, **SEVERAL[case]}
    weights, tokens, cache = case_inputs(sizes, dtype).values()
    cache = cache._replace(keys=cache.rows)
    decode, packed = pack_or_skip(impl, weights, cache)
    together, one_by_one = copy_cache(cache), copy_cache(cache)
    logits = decode(packed, tokens, together)
    for t in range(tokens.shape[1]):
        step = one_by_one._replace(positions=cache.positions + t)
        assert torch.equal(decode(packed, tokens[:, t : t + 1], step)[:, 0], logits[:, t])
    for pair, other in zip(together.kv, one_by_one.kv, strict=True):
        assert all(map(torch.equal, pair, other))
    last = len(tokens) - 1
    bucket = int(cache.positions[last]) // 64 * 64 + 128
    alone = copy_cache(cache, slice(last, None))._replace(keys=min(bucket, cache.rows))
    assert torch.equal(decode(packed, tokens[last:], alone)[0], logits[last])


@pytest.mark.gpu
@pytest.mark.parametrize("impl", OWN)
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_graph_replays_steps(impl, batch):
    """A CUDA graph of a step, with its early launches, gives the bits of the step itself, at other positions too."""
    sizes = WIDE["768, batch 1"] | {"batch": batch, "rows": 1024}
    weights, tokens, cache = case_inputs(sizes, torch.bfloat16).values()
    cache = cache._replace(keys=cache.rows)
    decode, packed = pack_or_skip(impl, weights, cache)
    other = copy_cache(cache)
    decode(packed, tokens, copy_cache(cache))  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = decode(packed, tokens, cache)
    for _ in range(20):
        graph.replay()
        assert torch.equal(logits, decode(packed, tokens, other))
        tokens.copy_(logits.argmax(-1))
        for positions in (cache.positions, other.positions):
            positions += 1
    assert all(torch.equal(a, b) for pairs in zip(cache.kv, other.kv, strict=True) for a, b in zip(*pairs, strict=True))


@pytest.mark.parametrize("impl", OWN)
@pytest.mark.parametrize("garbage", [1e4, float("nan")])
def test_rows_after_the_last_key_are_ignored(impl, garbage):
    dtype = DTYPES[-1]
    weights, tokens, cache = case_inputs("ragged", dtype, n_layer=1).values()
    dirty = copy_cache(cache)
    unused = torch.arange(cache.rows, device=DEVICE) > cache.positions[:, None]
    for t in (t for pair in dirty.kv for t in pair):
        t[unused] = garbage
    assert torch.equal(run(impl, weights, tokens, dirty), run(impl, weights, tokens, copy_cache(cache)))


def dequantize(matrix, dtype=torch.float32):
    """Return a matrix of int8.quantize() in `dtype`: integer * scale."""
    return (matrix.values.float() * matrix.scale[:, None]).to(dtype)


def error_of(logits, other):
    """Return the root mean square of logits - other, divided by the root mean square of other."""
    return ((logits.double() - other.double()).square().mean() / other.double().square().mean()).sqrt().item()


CHANGES = {
    "few rows, several steps along K": ("several_tokens", {"BLOCK_K": 32, "SLICES": 2}, "{}"),
    "few rows, wide tiles": ("rope", {"BLOCK_N": 32, "SLICES": 4}, "{}"),
    "few rows, short tiles of keys": ("many_keys", {"BLOCK_KEYS": 16}, "vector_attention"),
    "few rows, shared keys, short tiles": ("mqa_rope", {"BLOCK_KEYS": 16}, "attention"),
    "few rows, wide tiles of gate and up": ("qwen3", {"BLOCK_N": 32, "SLICES": 4}, "{}"),
    "many rows, parts of K": ("many_rows", {"PARTS": 2, "BLOCK_K": 16}, "{}_32_rows"),
    "many rows, small tiles": ("many_rows_rope", {"BLOCK_M": 16, "BLOCK_N": 16}, "{}_32_rows"),
    "many rows, small tiles of gate and up": ("many_rows_qwen3", {"BLOCK_M": 16, "BLOCK_N": 16}, "{}_32_rows"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_launch_parameters_do_not_change_the_result(change):
    case, parameters, pattern = CHANGES[change]
    weights, tokens, cache = case_inputs(case, torch.float32, n_layer=1).values()
    expected = run("triton", weights, tokens, copy_cache(cache))
    products = _many.BRANCHES if "PARTS" in parameters else ("qkv", "proj", "fc", "fc_proj", "head")
    kernels = {f"decode_{pattern.format(name)}" for name in products}
    with override_tables(dict.fromkeys(kernels, parameters)) as requests:
        result = run("triton", weights, tokens, copy_cache(cache))
    assert kernels <= requests.keys()
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("N", [1, 3])
def test_fewer_padded_rows(N, monkeypatch):
    """In fp32 all steps have 16 padded rows. With fewer padded rows the logits are the same."""
    weights, tokens, cache = case_inputs({"batch": N, "lengths": [9], "n_layer": 1}, torch.float32).values()
    expected = run("triton", weights, tokens, copy_cache(cache))
    monkeypatch.setattr(_few, "padded_rows", lambda N, dtype: 2 if N == 1 else 4)
    torch.testing.assert_close(run("triton", weights, tokens, copy_cache(cache)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["mqa_rope", "many_sequences", "no_bias", "qwen3", "untied", "many_rows_llama"])
def test_int8_is_the_model_with_rounded_weights(case, dtype):
    """The logits follow the rule if truth and eager use the weights integer * scale."""
    arguments = case_inputs(case, dtype)
    weights, tokens, cache = arguments.values()
    decode, packed = pack_or_skip("int8", weights, cache)
    rounded = packed.map_matrices(partial(dequantize, dtype=dtype))
    truth = contract.reference(**to_float64(arguments | {"weights": rounded}))
    eager = contract.reference(rounded, tokens, copy_cache(cache))
    own = decode(packed, tokens, copy_cache(cache))
    reason = broken_rule({"y": own}, {"y": eager}, {"y": truth}, {"w": weights.wte}, dtype)
    assert reason is None, reason


def test_the_error_of_int8_is_that_of_its_rounding():
    """A weight is off by scale / 2 at most, so a logit by sum |h| scale / 2. The products' errors add in quadrature."""
    weights, tokens, cache = case_inputs("several_tokens", torch.float32, n_layer=2).values()
    run_reference = partial(contract.reference, tokens=tokens)
    exact = run_reference(weights, cache=copy_cache(cache))
    identity = torch.eye(weights.wte.shape[1], device=DEVICE)
    h = run_reference(weights._replace(head=identity), cache=copy_cache(cache))
    head = int8.quantize(weights.head)
    own = fused.decode(weights._replace(head=head), tokens, copy_cache(cache))
    bound = h.abs().sum(-1, keepdim=True) * head.scale / 2
    assert ((own - exact).abs() <= bound * 1.001 + 1e-4).all()
    rounding = max(error_of(dequantize(int8.quantize(m)), m) for m in weights.matrices)
    assert rounding < 0.01
    error = error_of(run("int8", weights, tokens, copy_cache(cache)), exact)
    # with eleven other seeds error / rounding is 1.01 to 1.22: the errors of the matrices add, and each varies
    assert rounding / 2 < error < 2 * rounding * len(weights.matrices) ** 0.5
    assert not dequantize(int8.quantize(torch.zeros(3, 16))).any()


@pytest.mark.parametrize("impl", OWN)
def test_what_the_kernels_cannot_do_is_refused_in_one_line(impl):
    pack = backend("decode", impl).pack

    def reason(cache=None, **sizes):
        weights, _, small = case_inputs({"batch": 2, "lengths": [3], **sizes}, torch.float32).values()
        with pytest.raises(Unavailable) as error:
            pack(Model(forward=None, weights=lambda: weights), small if cache is None else cache)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "heads of up to 256 channels, not 260" in reason(width=260, heads=1)
    _, _, cache = case_inputs({"batch": 2, "lengths": [3]}, torch.float32).values()
    assert "contiguous" in reason(Cache([(k.transpose(1, 2), v) for k, v in cache.kv], 64, cache.positions))
    if not GPU:
        assert "interpreter" in reason(kv_dtype=torch.bfloat16)
        assert "compute capability 8.9" in reason(kv_dtype=FP8)


REFUSED = {
    "norm=rmsnorm": "rmsnorm",
    "norm_eps=0.1": "eps",
    "mlp=swiglu": "swiglu",
    "mlp=relu2": "relu2",
    "head_dim=48": "head_dim",
    "qk_norm=true": "qk_norm",
    "rope_theta=500": "rope_theta",
    "rope_scaling=8.0": "rope_scaling",
    "hidden=136": "hidden",
    "tie_embeddings=false": "untied",
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_refusal_names_the_field_that_is_not_gpt_2s(field):
    weights, *_ = case_inputs(REFUSED[field], torch.float32).values()
    with pytest.raises(Unavailable, match=rf"^kernels\.decode=mine computes GPT-2's shape, .* has .*model\.{field}\b"):
        contract.refuse_other_shapes("mine", weights)
    fields = {name.split("=")[0] for name in REFUSED}
    contract.refuse_other_shapes("mine", weights, computes=fields)


@pytest.mark.parametrize("case", contract.CASES)
def test_a_backend_of_gpt_2_refuses_only_other_shapes(case):
    """The cases with a field of REFUSED, and no others."""
    weights, *_ = case_inputs(case, torch.float32).values()
    if any(field.split("=")[0] in contract.CASES[case] for field in REFUSED):
        with pytest.raises(Unavailable):
            contract.refuse_other_shapes("mine", weights)
    else:
        contract.refuse_other_shapes("mine", weights)


def cost_of_tensors(case):
    """Return the bytes of a case's matrices, of the keys and values that it reads or writes, and of its logits."""
    weights, tokens, cache = case_inputs(case, torch.bfloat16).values()
    keys = int(cache.positions.sum()) + tokens.numel()
    a_key = sum(tensor[0, 0].nbytes for pair in cache.kv for tensor in pair)
    logits = tokens.numel() * len(weights.wte) * 2
    return sum(matrix.nbytes for matrix in weights.matrices) + keys * a_key + logits


@pytest.mark.parametrize("case", ["several_tokens", "gqa", "fp8", "everything", "llama", "relu2", "head_dim"])
def test_bytes_of_a_step(case):
    assert contract.cost(**contract.CASES[case])["forward"][1] == cost_of_tensors(case)


def test_splits_of_the_keys():
    """Splits have 256 keys. With more than 4096 keys there are 16 splits."""
    splits = {keys: _step.plan_splits(keys) for keys in (1, 256, 320, 1024, 4096, 5000, 3_600_000)}
    small = {1: (1, 256), 256: (1, 256), 320: (2, 256), 1024: (4, 256), 4096: (16, 256)}
    assert splits == small | {5000: (16, 313), 3_600_000: (16, 225_000)}


def test_rows_of_fp32_fit_into_shared_memory():
    """A program of a product has its rows of W in shared memory: at most 64 KB, because a block may have 99 (8.6)."""
    for K in (64, 768, 1600, 3072, 6400, 8192):
        assert _few.product_launch(64, K, torch.float32, 132)["BLOCK_N"] * K * 4 <= 2**16
    arguments = case_inputs({"batch": 1, "lengths": [7], "width": 16, "hidden": 6400}, torch.float32)
    exact = contract.reference(**to_float64(arguments))
    assert error_of(run("triton", *arguments.values()), exact) < 1e-5


def test_candidates_change_parameters_that_exist():
    """The candidates of scripts/tune.py keep BLOCK_K and num_warps, which fix the order of a row's sums."""
    launch = _few.product_launch(2304, 768, torch.bfloat16, 132)
    for change in fused.candidates("decode_qkv", launch):
        assert change.keys() <= {"BLOCK_N", "SLICES"} & launch.keys()

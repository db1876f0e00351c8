"""The model against Hugging Face's GPT-2 and Llama's rotary positions, and cost.py against the model's tensors."""

import functools
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from kernels.attention import document_starts
from kernels.cache import Cache
from kernels.compat import TorchDispatchMode
from kernels.registry import (
    AttnConfig,
    KernelError,
    KernelsConfig,
    Unavailable,
    backend,
    impls,
    missing_argument,
    resolve,
    unavailable,
)
from kernels.rope import rope_table, rotate
from kernels.sampling import Sampling
from model import chunks, cost, recompute
from model.config import GPTConfig
from model.decoder import Decoder
from model.executed import call_shapes
from model.gpt import GPT
from model.step import load_ops
from runtime.config import UserError

ROOT = Path(__file__).parents[2]
SMALL = GPTConfig(3, 3, 48, block_size=24, vocab_size=97, pos="learned", bias=True, dropout=0.0)
GPT2 = GPTConfig(12, 12, 768, block_size=1024, vocab_size=50304, pos="learned", bias=True, dropout=0.0)
PUBLISHED = {  # parameters of transformers' GPT2LMHeadModel, whose vocabulary is not padded
    "gpt2_124m": 124_439_808,
    "gpt2_350m": 354_823_168,
    "gpt2_774m": 774_030_080,
    "gpt2_1558m": 1_557_611_200,
}


def ops(attn="eager"):
    """Eager kernels and this attention. It skips the test if the attention cannot run on a CPU."""
    eager, cpu = KernelsConfig(norm="eager", mlp="eager", loss="eager", compile=False), torch.device("cpu")
    if why := unavailable("attention", attn, cpu):
        pytest.skip(why)
    return resolve(eager, AttnConfig(attn), cpu)


def gpt(config=SMALL, attn="eager", seed=0, spread=1.0):
    """A model whose biases and norms are random too, so that a test fails if one of them is not used."""
    torch.manual_seed(seed)
    model = GPT(config, ops(attn))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(spread * 0.1 * torch.randn_like(weight))
    return model


def hugging_face(model):
    """Return transformers' GPT2LMHeadModel with the same weights. It stores some of them transposed.

    With norm=rmsnorm, its norms are PyTorch's RMSNorm.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    c = model.config
    sizes = {"n_positions": c.block_size, "vocab_size": c.vocab_size, "n_layer": c.n_layer, "n_head": c.n_head}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    others = {"n_inner": c.hidden, "layer_norm_epsilon": c.norm_eps, "tie_word_embeddings": c.tie_embeddings}
    config = GPT2Config(**sizes, n_embd=c.n_embd, **others, **ids, **drops)
    config._attn_implementation = "eager"
    theirs = GPT2LMHeadModel(config)
    if c.norm == "rmsnorm":
        body = theirs.transformer
        for parent, name in [(block, ln) for block in body.h for ln in ("ln_1", "ln_2")] + [(body, "ln_f")]:
            setattr(parent, name, nn.RMSNorm(c.n_embd, eps=c.norm_eps))
    state = {f"transformer.{name}": transposed(name, w) for name, w in model.state_dict().items()}
    head = state.pop("transformer.lm_head.weight", model.wte.weight)
    theirs.load_state_dict(state | {"lm_head.weight": head})
    return theirs


def transposed(name, weight):
    return weight.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else weight


def gradients(model, loss):
    loss.backward()
    return {name.removeprefix("transformer."): w.grad for name, w in model.named_parameters()}


NORMS = {"norm": "layernorm", "norm_eps": 0.1}, {"norm": "rmsnorm"}, {"norm": "rmsnorm", "norm_eps": 0.1}
CAPPED = {"logit_softcap": 0.5}  # less than half of the largest logit of gpt()


@pytest.mark.parametrize(
    ("attn", "changes"), [(attn, {}) for attn in impls("attention")] + [("sdpa", c) for c in (*NORMS, CAPPED)]
)
def test_equals_hugging_face(attn, changes):
    """Logits, loss and every gradient against Hugging Face in float64: at most twice the error of its own float32."""
    model = gpt(replace(SMALL, **changes), attn)
    idx, targets = torch.randint(97, (2, 2, 24), generator=torch.Generator().manual_seed(1))

    def theirs(dtype):
        reference = hugging_face(model).to(dtype)
        logits = reference(idx).logits
        if cap := model.config.logit_softcap:
            assert logits.abs().max() > 2 * cap
            logits = cap * torch.tanh(logits / cap)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"logits": logits.detach(), "loss": loss.detach(), **gradients(reference, loss)}

    exact, rounded = theirs(torch.float64), theirs(torch.float32)
    loss = model(idx, targets)
    got = {"logits": model(idx).detach(), "loss": loss.detach(), **gradients(model, loss)}
    assert set(got) == set(exact)
    for name, value in exact.items():
        value = transposed(name, value)
        error, their_error = ((x - value).abs().max() for x in (got[name], transposed(name, rounded[name])))
        eps = torch.finfo(torch.float32).eps * value.abs().max()
        assert error <= 2 * their_error + 2 * eps, f"{name}: {error:.2g}, theirs {their_error:.2g}"


def test_the_loss_ignores_targets_of_minus_1():
    model = gpt()
    idx = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))
    targets = idx.roll(-1, 1)
    targets[:, 10:] = -1
    logits = model(idx)[:, :10].flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, targets[:, :10].flatten())
    torch.testing.assert_close(model(idx, targets), expected)


@pytest.mark.parametrize("pos", ["learned", "rope"])
def test_no_token_sees_a_later_one(pos):
    model = gpt(replace(SMALL, pos=pos))
    idx = torch.randint(97, (1, 24), generator=torch.Generator().manual_seed(1))
    other = idx.clone()
    other[0, 12:] = (other[0, 12:] + 1) % 97
    before, after = model(idx), model(other)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("attn", impls("attention"))
def test_grouped_queries_are_heads_with_the_same_keys(attn):
    """Three query heads over one key head give the logits of three heads with copies of its weights."""
    one = gpt(replace(SMALL, n_kv_head=1), attn)
    three = gpt(SMALL, attn)
    state, D = one.state_dict(), SMALL.head_size
    for name, weight in state.items():
        if ".c_attn." in name:
            q, k, v = weight.split((3 * D, D, D))
            state[name] = torch.cat((q, k, k, k, v, v, v))
    three.load_state_dict(state)
    idx = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(one(idx), three(idx), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attn", impls("attention"))
def test_a_window_limits_what_a_token_sees(attn):
    """Through n layers a token sees n (window - 1) tokens back (Mistral 7B, arXiv:2310.06825)."""
    config = replace(SMALL, pos="rope", window=4)
    if missing_argument(ops(attn).attention, "window"):
        pytest.skip(f"{attn} takes no window")
    model = gpt(config, attn)
    idx = torch.randint(97, (1, 24), generator=torch.Generator().manual_seed(1))
    other = idx.clone()
    other[0, 5] = (other[0, 5] + 1) % 97
    reach = 5 + config.n_layer * (config.window - 1)
    differs = (model(idx) != model(other)).any(-1)[0]
    assert differs[5 : reach + 1].all()
    assert not differs[:5].any()
    assert not differs[reach + 1 :].any()


@pytest.mark.parametrize("attn", impls("attention"))
def test_documents_in_one_sequence_have_their_own_logits(attn):
    """Each of three documents has the logits that it has as a sequence of its own. With rope only distances matter."""
    if missing_argument(ops(attn).attention, "starts"):
        pytest.skip(f"{attn} takes no starts")
    model = gpt(replace(SMALL, pos="rope"), attn)
    idx = torch.randint(97, (1, 24), generator=torch.Generator().manual_seed(1))
    cuts = [0, 1, 9, 24]
    starts = torch.tensor([[max(cut for cut in cuts if cut <= t) for t in range(24)]], dtype=torch.int32)
    logits = model(idx, starts=starts)
    alone = torch.cat([model(idx[:, a:b]) for a, b in pairwise(cuts)], dim=1)
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(idx), alone, rtol=1e-2, atol=1e-2)


def test_an_argument_that_attention_lacks_is_refused_by_name():
    plain = KernelsConfig(norm="eager", mlp="eager", loss="eager", compile=False)
    with pytest.raises(Unavailable, match=r"attention=eager cannot run this: .* takes no wings .*choose attn="):
        resolve(plain, AttnConfig("eager"), torch.device("cpu"), {"attention": ["window", "wings"]})


def test_a_model_with_a_soft_cap_needs_a_loss_that_takes_one(monkeypatch):
    """The registry names those that do. In fp8 the loss must take both arguments."""
    config, cpu = replace(SMALL, logit_softcap=30), torch.device("cpu")
    for impl in ("torch_chunked", "liger"):
        monkeypatch.setattr(backend("loss", impl), "unavailable", lambda device: None)
    message = r"^loss=torch_chunked cannot run this: .* takes no softcap \(kernels/loss/__init__\.py\): choose "
    message += r"kernels\.loss=auto, cutile, eager, gluon, gluon_whole, liger, liger_large, triton, triton_whole, xla$"
    with pytest.raises(Unavailable, match=message):
        load_ops(config, KernelsConfig(loss="torch_chunked"), AttnConfig("eager"), "fp32", cpu)
    with pytest.raises(Unavailable, match=r"^loss=liger cannot run this: .* takes no fp8 .*=auto, eager, triton$"):
        load_ops(config, KernelsConfig(loss="liger"), AttnConfig("eager"), "fp8", cpu)
    load_ops(config, KernelsConfig(loss="liger"), AttnConfig("eager"), "bf16", cpu)


def test_the_logits_of_a_step_with_a_cache_are_capped():
    capped, plain = gpt(replace(SMALL, **CAPPED)), gpt()
    idx, cap = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(1)), CAPPED["logit_softcap"]
    results = []
    for model in (capped, plain):
        keys = [torch.zeros(2, 10, SMALL.kv_heads, SMALL.head_size) for _ in range(2 * SMALL.n_layer)]
        cache = Cache(list(zip(keys[::2], keys[1::2], strict=True)), 9)
        results.append([model(idx, cache=cache)])
        step = cache._replace(keys=10, positions=torch.full((2,), 9))
        results[-1].append(model.forward(idx[:, :1], cache=step))
    for got, uncapped in zip(*results, strict=True):
        torch.testing.assert_close(got, cap * torch.tanh(uncapped / cap))


def test_kernels_fp8_names_the_ops_in_fp8():
    def ops_in_fp8(names):
        chosen = KernelsConfig(mlp="triton_recompute", fp8=names)
        ops = resolve(chosen, AttnConfig("eager"), torch.device("cpu"), in_fp8=True)
        return {op for op, function in ops._asdict().items() if getattr(function, "keywords", {}).get("fp8")}

    with mock.patch.object(backend("mlp", "triton_recompute"), "unavailable", return_value=None):
        assert ops_in_fp8(["linear", "loss"]) == {"linear", "loss"}  # the backend of mlp needs no fp8
        assert ops_in_fp8("loss") == {"loss"}
        assert ops_in_fp8([]) == set()
        with pytest.raises(Unavailable, match=r"^mlp=triton_recompute cannot run this"):
            ops_in_fp8(["mlp"])
    assert KernelsConfig(fp8=["loss", "mlp"]) == KernelsConfig(fp8=["mlp", "loss", "mlp"])
    assert KernelsConfig(fp8=["loss", "mlp", "glu", "linear"]) == KernelsConfig()
    for wrong in (["norm"], ["mpl"], 3, ["decode"], [["mlp"]]):
        with pytest.raises(KernelError, match=r"a list of ops that can run in fp8: linear, mlp, glu, loss$"):
            KernelsConfig(fp8=wrong)
    with pytest.raises(KernelError, match=r"^kernels\.fp8 needs precision=fp8: "):
        resolve(KernelsConfig(fp8=["mlp"]), AttnConfig("eager"), torch.device("cpu"))


def test_the_calls_of_a_step_are_in_fp8_where_the_step_is():
    """auto, the judge and the row's `kernels` describe these calls."""
    for precision, names, expected in (("fp8", None, {"linear", "mlp", "loss"}), ("fp8", ["mlp"], {"mlp"})):
        calls = call_shapes(SMALL, KernelsConfig(fp8=names), precision, (2, 24))
        assert {op for op, arguments in calls.items() if arguments.get("fp8")} == expected
    assert not any("fp8" in arguments for arguments in call_shapes(SMALL, KernelsConfig(), "bf16", (2, 24)).values())


def test_fp8_is_refused_by_backends_without_it(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    message = (
        r"^mlp=triton_recompute cannot run this: .* takes no fp8 .*: choose kernels.mlp=auto, eager, gluon, torchao, "
    )
    message += "triton$"
    with pytest.raises(Unavailable, match=message):
        resolve(KernelsConfig(mlp="triton_recompute"), AttnConfig("eager"), torch.device("cpu"), in_fp8=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(Unavailable, match=r"^precision=fp8 cannot run here: it needs .* 8.9 or newer: choose"):
        resolve(KernelsConfig(), AttnConfig("eager"), torch.device("cuda"), in_fp8=True)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rope_equals_hugging_face(theta):
    """rotate() equals Llama's rotary embedding, which pairs channels as GPT-NeoX does.

    Angles of up to T = 50 are rounded to 2^-24 of their size, and q is at most 4.
    """
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb

    T, H, D = 50, 3, 16
    q = torch.randn(2, T, H, D, generator=torch.Generator().manual_seed(0))
    parameters = {"rope_type": "default", "rope_theta": theta}
    config = LlamaConfig(hidden_size=H * D, num_attention_heads=H, head_dim=D, rope_parameters=parameters)
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(q, torch.arange(T)[None])
    expected, _ = apply_rotary_pos_emb(q.transpose(1, 2), q.transpose(1, 2), cos, sin)
    torch.testing.assert_close(
        rotate(q, rope_table(torch.arange(T).float(), D, theta)), expected.transpose(1, 2), rtol=0, atol=4 * T * 2**-24
    )


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpoints_save_memory_and_change_no_bit(compiled):
    """Loss and gradients are bit-equal, also with dropout. Only the input of each block is saved."""

    def keep(saved, tensor):
        saved.append(tensor)
        return tensor

    results, kept = [], []
    choices = [("none", False), ("block", False), ("block", True)]
    if not compiled:
        choices += [("host", False), ("host", True)]
    for checkpointing, keep_attention in choices:
        torch.compiler.reset()
        model = gpt(replace(SMALL, dropout=0.2, checkpointing=checkpointing, keep_attention=keep_attention), "sdpa")
        idx, targets = torch.randint(97, (2, 2, 24), generator=torch.Generator().manual_seed(1))
        own = {weight.data_ptr() for weight in model.parameters()}
        if compiled:
            model.compile(fullgraph=True, backend="aot_eager")
        torch.manual_seed(2)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(keep, saved), lambda t: t):
            loss = model(idx, targets)
        loss.backward()
        results.append({"loss": loss.detach()} | {name: weight.grad for name, weight in model.named_parameters()})
        sizes = {t.data_ptr(): t.untyped_storage().nbytes() for t in saved if t.is_floating_point()}
        kept.append(sum(size for pointer, size in sizes.items() if pointer not in own))
    for again in results[1:]:
        assert all(torch.equal(value, again[name]) for name, value in results[0].items())
    # (B, T, C) tensors: one a block instead of 24, and 5 outside the blocks, so (3 + 5) / (3 x 24 + 5) = 0.10
    assert kept[1] < 0.13 * kept[0]
    if not compiled:
        block_input = idx.numel() * SMALL.n_embd * 4
        assert kept[1] - kept[3] == SMALL.n_layer * block_input  # checkpointing=host moves it to the host


@pytest.mark.parametrize("tokens", [24, 5])
@pytest.mark.parametrize(
    "changes", [{}, {"pos": "rope", "n_kv_head": 1, "window": 7}, {"bias": False}, {"norm": "rmsnorm"}], ids=str
)
def test_chunks_change_the_last_bits_at_most(changes, tokens, monkeypatch):
    """With one chunk a sequence no bit changes, except with RMSNorm. With five, gradients are sums over chunks.

    The bound is the unit of fp32, 2^-24, times the square root of the 2^6 tokens and 2^5 channels that a number sums.
    """
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2 * tokens * SMALL.n_embd * 4)
    to_host, offloaded = chunks.to_host, []
    monkeypatch.setattr(chunks, "to_host", lambda x: offloaded.append(x.shape[1]) or to_host(x))
    starts = torch.tensor([document_starts((5, 19)), document_starts((24,))])
    idx, targets = torch.randint(97, (2, 2, 24), generator=torch.Generator().manual_seed(1))
    results = []
    for checkpointing in ("none", "chunks"):
        model = gpt(replace(SMALL, **changes, checkpointing=checkpointing), "eager")
        loss = model(idx, targets, starts)
        loss.backward()
        results.append({"loss": loss.detach()} | {name: weight.grad for name, weight in model.named_parameters()})
    for name, truth in results[0].items():
        error = (results[1][name] - truth).norm() / truth.norm()
        # autograd sums the parts of RMSNorm's gradient, which PyTorch composes of several operators on a CPU
        same_order = tokens == 24 and "norm" not in changes
        assert error < (1e-12 if same_order else 2**-24 * 2**5.5), name
    on_host = 2 * SMALL.n_layer * ([24] if tokens == 24 else [5, 5, 5, 5, 4])  # x, and its gradient in the backward
    assert offloaded == on_host
    with torch.no_grad():
        torch.testing.assert_close(model(idx, targets, starts), results[0]["loss"])
    assert offloaded == on_host  # without gradients nothing goes to the host


def test_chunks_on_the_host_are_freed_by_the_backward(monkeypatch):
    """Also if the loss lives on, as in accumulation, and if some weights are frozen."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2 * 5 * SMALL.n_embd * 4)
    to_host, alive = chunks.to_host, weakref.WeakSet()

    def remember(x):
        copy = to_host(x)
        alive.add(copy.untyped_storage())
        return copy

    monkeypatch.setattr(chunks, "to_host", remember)
    model = gpt(replace(SMALL, checkpointing="chunks"), "sdpa")
    for frozen in (model.h[0].ln_1.weight, model.h[1].mlp.c_fc.weight):
        frozen.requires_grad_(False)
    idx, targets = torch.randint(97, (2, 2, 24), generator=torch.Generator().manual_seed(1))
    loss = model(idx, targets)
    assert len(alive) == 5 * SMALL.n_layer
    loss.backward()
    assert len(alive) == 0
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == [
        "h.0.ln_1.weight",
        "h.1.mlp.c_fc.weight",
    ]
    assert loss.isfinite()


def test_a_cache_is_not_read_in_chunks():
    """The second chunk of a prompt attends to the first one, which is in the cache."""
    idx = torch.randint(97, (1, 24), generator=torch.Generator().manual_seed(1))
    caches = []
    for checkpointing in ("none", "chunks"):
        decoder = Decoder(gpt(replace(SMALL, checkpointing=checkpointing)), 1, 64, Sampling(97))
        decoder.prefill(idx[:, :12])
        decoder.prefill(idx[:, 12:])
        caches.append(decoder.kv[-1][0].clone())
    assert torch.equal(*caches)


@pytest.mark.parametrize(("keeps", "times"), [(True, 1), (False, 2)])
def test_keep_attention_avoids_the_second_forward_of_attention(keeps, times):
    class Count(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.count += func.name().endswith("attention_for_cpu")
            return func(*args, **(kwargs or {}))

    idx, targets = torch.randint(97, (2, 2, 24), generator=torch.Generator().manual_seed(1))
    with Count():
        gpt(replace(SMALL, checkpointing="block", keep_attention=keeps), "sdpa")(idx, targets).backward()
    assert Count.count == times * SMALL.n_layer


def test_attention_without_an_operator_cannot_be_kept():
    with pytest.raises(
        Unavailable, match=r"kernels.attention.eager names no operator .*: choose attn=.*sdpa, tilelang, triton$"
    ):
        gpt(replace(SMALL, checkpointing="block", keep_attention=True), "eager")


def test_checkpoints_on_the_host(monkeypatch):
    """Only the input of each block goes to the host, in pinned memory. Without gradients nothing does."""
    offloaded = []

    class Offload(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory):
            assert pin_memory
            super().__init__(self.pack, lambda t: t)

        def pack(self, tensor):
            if tensor.numel():  # the checkpoint of torch 2.11 also saves an empty tensor
                offloaded.append(tensor.shape)
            return tensor.clone()

    monkeypatch.setattr(recompute, "save_on_cpu", Offload)
    idx, targets = torch.randint(97, (2, 2, 24), generator=torch.Generator().manual_seed(1))
    gpt(replace(SMALL, pos="rope", checkpointing="host"))(idx, targets).backward()
    assert offloaded == [(2, 24, SMALL.n_embd)] * SMALL.n_layer
    offloaded.clear()
    with torch.no_grad():
        gpt(replace(SMALL, checkpointing="host"))(idx, targets)
    assert offloaded == []


def test_rope_has_no_table_and_no_longest_length():
    rope = gpt(replace(SMALL, pos="rope"))
    assert not [name for name in rope.state_dict() if "wpe" in name]
    idx = torch.randint(97, (1, 40), generator=torch.Generator().manual_seed(1))
    assert rope(idx).shape == (1, 40, 97)
    with pytest.raises(
        UserError, match=r"a sequence of 40 is beyond the model's position table of model.block_size=24"
    ):
        gpt()(idx)


@pytest.mark.parametrize("pos", ["learned", "rope"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shared", [None, 1])
@pytest.mark.parametrize(("norm", "head_dim"), [("layernorm", None), ("rmsnorm", None), ("layernorm", 20)])
def test_the_count_of_parameters(pos, bias, shared, norm, head_dim):
    config = replace(SMALL, pos=pos, bias=bias, n_kv_head=shared, norm=norm, head_dim=head_dim)
    model = GPT(config, ops())
    assert sum(w.numel() for w in model.parameters()) == cost.parameters(config)
    assert bias == any(name.endswith("bias") for name in model.state_dict())
    assert (bias and norm == "layernorm") == any(".ln_" in name for name in model.state_dict() if "bias" in name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_sizes_of_gpt2(name):
    config = replace(GPT2, vocab_size=50257, **OmegaConf.load(ROOT / f"configs/model/{name}.yaml"))
    assert cost.parameters(config) == PUBLISHED[name]
    with torch.device("meta"):
        assert sum(w.numel() for w in GPT(config, ops()).parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("pos", ["learned", "rope"])
def test_wider_heads_with_zeros_compute_the_same(pos):
    """In twice as many channels, half of them 0, the scores are divided by sqrt(2): so q is multiplied by it."""
    narrow = gpt(replace(SMALL, pos=pos))
    wide = gpt(replace(SMALL, pos=pos, head_dim=32))
    # rotary positions pair channel i with i + D/2, and frequency i of 8 is that of i of 16 only for theta^2
    wide.config.rope_theta = narrow.config.rope_theta**2
    kept = torch.cat([torch.arange(8), torch.arange(16, 24)])  # the channels of a wide head that are not 0
    with torch.no_grad():
        for small, large in zip(narrow.h, wide.h, strict=True):
            for name in ("weight", "bias"):
                rows = getattr(small.attn.c_attn, name).view(3, 3, 16, -1).clone()
                rows[0] *= 2**0.5
                target = getattr(large.attn.c_attn, name).zero_().view(3, 3, 32, -1)
                target[:, :, kept] = rows
            columns = small.attn.c_proj.weight.view(48, 3, 16)
            large.attn.c_proj.weight.zero_().view(48, 3, 32)[:, :, kept] = columns
        shared = {
            name: value for name, value in narrow.state_dict().items() if value.shape == wide.state_dict()[name].shape
        }
        wide.load_state_dict(wide.state_dict() | shared)
        idx = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(wide(idx), narrow(idx))


def test_flops_are_palms():
    """GPT-2 124M at T = 1024: N is 124,475,904 with the vocabulary of 50304, less 786,432 of the position table."""
    assert cost.flops_per_token(GPT2, 1024) == 6 * (124_475_904 - 786_432) + 12 * 12 * 768 * 1024
    assert cost.flops_per_token(replace(GPT2, window=256), 1024) == cost.flops_per_token(GPT2, 256)
    # a token: 12 C^2 weights, norms and biases of 12 layers and the last norm; attention; and one row of logits each
    layer = 12 * 768**2 + 13 * 768
    token = 2 * (12 * layer + 2 * 768) + 4 * 12 * 768 * 1024
    assert cost.prefill_flops(GPT2, 8, 1024) == pytest.approx(8 * (1024 * token + 2 * 50304 * 768))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pos", ["learned", "rope"])
@pytest.mark.parametrize("shared", [None, 1])
def test_the_bytes_of_a_decoding_step(pos, shared, dtype):
    """A step reads the cache, and all weights but the position table, in the compute dtype."""
    config = replace(SMALL, pos=pos, n_kv_head=shared)
    model = GPT(config, ops(), dtype).to(dtype)
    kv = Decoder(model, 2, 64, Sampling(97)).kv  # it rounds up to 64 rows
    assert cost.kv_cache_bytes(config, 2, 64, dtype) == sum(k.nbytes + v.nbytes for k, v in kv)
    weights = sum(w.nbytes for name, w in model.named_parameters() if name != "wpe.weight")
    assert cost.decode_bytes(config, 2, 7, dtype) == weights + sum(k[:, :7].nbytes + v[:, :7].nbytes for k, v in kv)


@pytest.mark.parametrize("pos", ["learned", "rope"])
def test_training_graph_has_no_cache(pos):
    """Without a cache the model is one graph, without an index or a copy. It looks up tokens and learned positions."""
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch.compiler.reset()
    idx = torch.zeros(2, 24, dtype=torch.long)
    torch.compile(gpt(replace(SMALL, pos=pos)), backend=keep, fullgraph=True)(idx, idx)
    [targets] = graphs
    assert not [name for name in targets if "index" in name or "copy" in name]
    assert sum("embedding" in name for name in targets) == (2 if pos == "learned" else 1)


def test_the_initial_weights_are_gpt2s():
    """Norms are 1 and biases 0. The deviation is 0.02, and 0.02 / sqrt(2 n_layer) for c_proj."""
    config = replace(SMALL, block_size=512, vocab_size=2048, n_layer=8, n_head=4, n_embd=256)
    torch.manual_seed(0)
    for name, weight in GPT(config, ops()).named_parameters():
        if weight.dim() == 1:
            is_norm = "ln" in name and name.endswith("weight")
            assert torch.equal(weight, torch.ones_like(weight) if is_norm else torch.zeros_like(weight))
        else:
            std = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02  # sqrt(2 x 8) = 4
            # the relative error of the deviation of n draws is below 5 / sqrt(2n), except once in 10^6 times
            assert abs(weight.std().item() / std - 1) < 5 / (2 * weight.numel()) ** 0.5, name


def test_dropout_is_on_the_embedding_and_both_branches():
    config = replace(SMALL, dropout=0.3)
    model = gpt(config)
    idx = torch.randint(97, (8, 24), generator=torch.Generator().manual_seed(1))
    shares = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _, given, out: shares.append((out == 0).float().mean().item()))
    model(idx)
    assert len(shares) == 1 + 2 * config.n_layer
    n = 8 * 24 * 48
    assert all(abs(share - 0.3) < 5 * (0.3 * 0.7 / n) ** 0.5 for share in shares)
    model.eval()
    plain = gpt(SMALL)
    assert torch.equal(model(idx), plain(idx))


def test_amp_keeps_the_stream_in_fp32():
    """With fp32 weights and bf16 compute, branches and logits are bf16; the stream and the gradients are fp32."""
    streams = []
    eager = ops()

    def norm(x, residual, weight, bias):
        y, residual = eager.norm(x, residual, weight, bias)
        streams.append((y.dtype, residual.dtype, weight.dtype))
        return y, residual

    torch.manual_seed(0)
    model = GPT(SMALL, eager._replace(norm=norm), torch.bfloat16)
    idx = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))
    model(idx, idx).backward()
    assert set(streams) == {(torch.bfloat16, torch.float32, torch.bfloat16)}
    assert {w.grad.dtype for w in model.parameters()} == {torch.float32}
    assert model(idx).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_kv_head": 2}, r"model.n_kv_head=2: model.n_head=3 must be a multiple of it"),
        ({"checkpointing": "all"}, r"model.checkpointing=all: choose none or block or host or chunks"),
        (
            {"checkpointing": "chunks", "dropout": 0.1},
            r"model.checkpointing=chunks does not support dropout",
        ),
        ({"checkpointing": "chunks", "keep_attention": True}, r"model.keep_attention=true works only with model"),
        (
            {"keep_attention": True},
            r"model.keep_attention=true works only with model.checkpointing=block or",
        ),
        ({"window": 0}, r"model.window=0: it must be in \[1, 2\^31\), or null"),
        ({"n_embd": 50}, r"model.n_embd=50 is not a multiple of model.n_head=3"),
        ({"n_layer": 0}, r"model.n_layer=0: it must be from 1 to 1,000"),
        ({"pos": "alibi"}, r"model.pos=alibi: choose learned or rope"),
        ({"dropout": 1.0}, r"model.dropout=1.0: it must be in \[0, 1\)"),
        ({"head_dim": 0}, r"model.head_dim=0: it must be from 1 to 65,536, or null"),
        ({"logit_softcap": 0.0}, r"model.logit_softcap=0.0: it must be a positive number, or null"),
        ({"logit_softcap": -30}, r"model.logit_softcap=-30: it must be a positive number, or null"),
        ({"logit_softcap": float("inf")}, r"model.logit_softcap=inf: it must be a positive number, or null"),
        ({"logit_softcap": "30"}, r"model.logit_softcap=30: its type must be float \| None"),
        ({"rope_theta": 1.0}, r"model.rope_theta=1.0: it must be in \(1, 1e12\)"),
        ({"rope_theta": 5e5}, r"model.rope_theta=500000.0 needs rotary positions: add model.pos=rope"),
        ({"norm": "batchnorm"}, r"model.norm=batchnorm: choose layernorm or rmsnorm"),
        ({"norm_eps": 0.0}, r"model.norm_eps=0.0: it must be in \(0, 1\)"),
        ({"norm_eps": float("nan")}, r"model.norm_eps=nan: it must be in \(0, 1\)"),
        ({"pos": "rope", "n_embd": 45}, r"a head has 15, which is odd"),
        ({"pos": "rope", "head_dim": 5}, r"a head has 5, which is odd"),
    ],
)
def test_impossible_models(changes, message):
    with pytest.raises(UserError, match=message):
        replace(SMALL, **changes)


def test_transformers_imports_from_the_root():
    """transformers looks for a package named `kernels`, and must not take our folder of that name for it."""
    from transformers.utils.import_utils import is_kernels_available

    import kernels

    assert "site-packages" not in kernels.__file__
    assert not is_kernels_available()

"""The model of today (RMSNorm, gated MLP, rotary positions, normalised q and k) against Llama and Qwen3."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from kernels.registry import AttnConfig, KernelsConfig, resolve
from kernels.rope import rope_table
from model import cost
from model.config import GPTConfig
from model.gpt import GPT
from model.optim import OptimConfig
from model.optimizers import make_optimizer
from model.step import build, train_step
from runtime.config import UserError

ROOT = Path(__file__).parents[2]
SHAPE = {"pos": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "dropout": 0.0}
LLAMA = GPTConfig(2, 4, 32, block_size=24, vocab_size=97, n_kv_head=2, hidden=48, rope_theta=500.0, **SHAPE)
CONFIGS = {
    "llama": LLAMA,
    "llama_untied": replace(LLAMA, tie_embeddings=False, norm_eps=1e-3),
    "llama_scaled": replace(LLAMA, rope_theta=500000.0, rope_scaling=32.0, head_dim=32),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=16, norm_eps=1e-6),
}
PRESETS = "smollm2_135m", "smollm2_360m", "qwen3_0_6b", "llama3_2_1b"


def gpt(config, seed=0):
    """A model whose norms are random too, so that a test fails if one of them is not used."""
    torch.manual_seed(seed)
    model = GPT(config, resolve(KernelsConfig(), AttnConfig("eager"), torch.device("cpu")))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def hugging_face(config):
    """Return transformers' Llama or Qwen3 of this shape, without weights of ours."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        rope |= {"rope_type": "llama3", "factor": config.rope_scaling, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 8192}
    theirs = {
        "hidden_size": config.n_embd,
        "intermediate_size": config.hidden_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "attn_implementation": "eager",
    }
    if config.qk_norm:
        return Qwen3ForCausalLM(Qwen3Config(**theirs))
    return LlamaForCausalLM(LlamaConfig(**theirs))


def renamed(state, config):
    """Return our tensors under transformers' names."""
    q, kv = config.n_head * config.head_size, config.kv_heads * config.head_size
    tensors = {"model.embed_tokens.weight": state["wte.weight"], "model.norm.weight": state["ln_f.weight"]}
    tensors["lm_head.weight"] = state["wte.weight" if config.tie_embeddings else "lm_head.weight"]
    names = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_proj": "self_attn.o_proj"}
    names |= {"mlp.c_proj": "mlp.down_proj"}
    names |= {f"attn.{name}": f"self_attn.{name}" for name in ("q_norm", "k_norm")} if config.qk_norm else {}
    for i in range(config.n_layer):
        ours, theirs = f"h.{i}", f"model.layers.{i}"
        for a, b in names.items():
            tensors[f"{theirs}.{b}.weight"] = state[f"{ours}.{a}.weight"]
        parts = state[f"{ours}.attn.c_attn.weight"].split((q, kv, kv))
        for name, part in zip("qkv", parts, strict=True):
            tensors[f"{theirs}.self_attn.{name}_proj.weight"] = part
        gate, up = state[f"{ours}.mlp.c_fc.weight"].chunk(2)
        tensors |= {f"{theirs}.mlp.gate_proj.weight": gate, f"{theirs}.mlp.up_proj.weight": up}
    return tensors


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers(name):
    """Logits, loss and every gradient against transformers in float64: at most twice the error of its own float32."""
    config = CONFIGS[name]
    model = gpt(config)
    idx, targets = torch.randint(97, (2, 2, 24), generator=torch.Generator().manual_seed(1))

    def theirs(dtype):
        reference = hugging_face(config)
        reference.load_state_dict(renamed(model.state_dict(), config))
        reference = reference.to(dtype)
        logits = reference(idx).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        return {"logits": logits.detach(), "loss": loss.detach()} | {
            name: weight.grad for name, weight in reference.named_parameters()
        }

    exact, rounded = theirs(torch.float64), theirs(torch.float32)
    loss = model(idx, targets)
    loss.backward()
    got = renamed({name: weight.grad for name, weight in model.named_parameters()}, config)
    got |= {"logits": model(idx).detach(), "loss": loss.detach()}
    if config.tie_embeddings:
        del got["lm_head.weight"]
    assert set(got) == set(exact)
    for name, value in exact.items():
        error, their_error = ((x - value).abs().max() for x in (got[name], rounded[name]))
        eps = torch.finfo(torch.float32).eps * value.abs().max()
        assert error <= 2 * their_error + 2 * eps, f"{name}: {error:.2g}, theirs {their_error:.2g}"


def test_relu2_is_the_square_of_relu():
    model = gpt(replace(LLAMA, mlp="relu2", bias=True))
    mlp, x = model.h[0].mlp, torch.randn(3, 32)
    torch.testing.assert_close(mlp(x), mlp.c_proj(mlp.c_fc(x).relu() ** 2))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_sizes_of_transformers(name):
    """The presets have as many parameters as transformers' model of the same sizes, and cost.py counts them."""
    values = {"bias": False, "dropout": 0.0, **OmegaConf.load(ROOT / f"configs/model/{name}.yaml")}
    config = GPTConfig(**values)
    with torch.device("meta"):
        count = sum(weight.numel() for weight in hugging_face(config).parameters())
    assert cost.parameters(config) == count
    millions = {"smollm2_135m": 134.5, "smollm2_360m": 361.8, "qwen3_0_6b": 596.0, "llama3_2_1b": 1235.8}  # published
    assert round(count / 1e6, 1) == millions[name]


def test_modern_124m_has_the_budget_of_gpt2():
    base = OmegaConf.load(ROOT / "configs/config.yaml").model
    modern = GPTConfig(**{**base, **OmegaConf.load(ROOT / "configs/model/modern_124m.yaml")})
    gpt2 = GPTConfig(**{**base, **OmegaConf.load(ROOT / "configs/model/gpt2_124m.yaml")})
    assert abs(cost.parameters(modern) / cost.parameters(gpt2) - 1) < 0.01


@pytest.mark.parametrize("config", [*CONFIGS.values(), replace(LLAMA, mlp="relu2"), replace(LLAMA, bias=True)])
def test_parameters_are_counted(config):
    with torch.device("meta"):
        model = gpt(config)
    assert cost.parameters(config) == sum(weight.numel() for weight in model.parameters())
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.n_embd
    assert cost.lookup_parameters(config) == looked_up


def test_the_tables_of_an_untied_model_cost_no_flops():
    """6 FLOPs for each weight of a matmul, and attention's 12 L C T."""
    untied = replace(LLAMA, tie_embeddings=False)
    assert cost.flops_per_token(untied, 24) == cost.flops_per_token(LLAMA, 24)
    assert cost.parameters(untied) == cost.parameters(LLAMA) + 97 * 32


def test_llama3s_scaling_of_frequencies():
    """Fast frequencies stay, slow ones are divided by the factor. At position 1 the angle is the frequency."""
    D, theta, factor = 64, 500000.0, 32.0
    plain, scaled = (torch.atan2(*rope_table(torch.ones(1), D, theta, s)[[1, 0]]).flatten() for s in (None, factor))
    turns = 8192 * plain / (2 * torch.pi)
    torch.testing.assert_close(scaled[turns > 4], plain[turns > 4])
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / factor)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert (plain[between] / factor < scaled[between]).all()
    assert (scaled[between] < plain[between]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp": "silu"}, r"model.mlp=silu: choose gelu or swiglu or relu2"),
        ({"hidden": 0}, r"model.hidden=0: it must be from 1 to 1,048,576, or null"),
        ({"pos": "learned", "qk_norm": True}, r"model.qk_norm=true needs rotary positions: add model.pos=rope"),
        ({"pos": "learned", "rope_scaling": 8.0}, r"model.rope_scaling=8.0 needs rotary positions"),
        ({"rope_scaling": 0.5}, r"model.rope_scaling=0.5: it must be a factor in \[1, 1e6\), or null"),
        ({"tie_embeddings": 1}, r"model.tie_embeddings=1: its type must be bool"),
    ],
)
def test_impossible_models(changes, message):
    with pytest.raises(UserError, match=message):
        replace(LLAMA, **changes)


@pytest.mark.parametrize("checkpointing", ["block", "host", "chunks"])
@pytest.mark.parametrize("name", ["qwen3", "llama_untied"])
def test_checkpoints_change_no_gradient(name, checkpointing, monkeypatch):
    """With chunks, the gradients of the weights are sums over parts of the tokens, here of 5: equal to rounding."""
    monkeypatch.setattr("model.chunks.chunk_tokens", lambda *_: 5)
    idx, targets = torch.randint(97, (2, 2, 24), generator=torch.Generator().manual_seed(1))
    gradients = []
    for mode in ("none", checkpointing):
        model = gpt(replace(CONFIGS[name], checkpointing=mode))
        model(idx, targets).backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=2e-6 * gradient.abs().max().item())


@pytest.mark.parametrize("precision", ["amp", "bf16", "fp8"])
def test_every_precision_trains(precision):
    """The loss of 30 steps on one batch falls by more than the rounding of a precision could explain."""
    config = replace(CONFIGS["qwen3"], tie_embeddings=False)
    model = build(config, KernelsConfig(), AttnConfig("sdpa"), precision, torch.device("cpu"), seed=1)
    idx, targets = torch.randint(97, (2, 2, 24), generator=torch.Generator().manual_seed(1))
    optimizer = make_optimizer(model, OptimConfig(3e-3, 3e-4, 1, 0.1, 0.9, 0.95, 1.0))
    losses = [train_step(model, optimizer, [(idx, targets)], 3e-3)[0].item() for _ in range(30)]
    assert losses[0] == pytest.approx(math.log(97), abs=0.2)
    assert losses[-1] < losses[0] - 1

"""Llama and Qwen3 as transformers saves and loads them: the model, its gradients and its text are transformers' own."""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import nn

from model.config import GPTConfig
from model.export import check_exportable, export
from model.generate import generate
from model.gpt import GPT
from model.pretrained import Pretrained, load_weights, read_pretrained, read_shape
from runtime.config import UserError
from tests.model.test_gpt import ops
from tests.model.test_pretrained import near, saved
from tests.model.test_today import CONFIGS, LLAMA, gpt, hugging_face, renamed

ROOT = Path(__file__).parents[2]
IDX = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))
LONG = {name: replace(config, block_size=96) for name, config in CONFIGS.items()}  # room for 64 new tokens


def theirs(config):
    """transformers' model of a shape, with all its weights random."""
    torch.manual_seed(3)
    model = hugging_face(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


@pytest.fixture
def folder(tmp_path):
    """The folder that transformers' save_pretrained writes for a Llama."""
    theirs(LLAMA).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def rewrite(folder, tensors=lambda held: held, **config):
    """Change the tensors of a folder by a function, and its config by keys. ... removes a key."""
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    file = folder / "model.safetensors"
    save_file({key: w.clone() for key, w in tensors(load_file(file)).items()}, file, {"format": "pt"})
    return str(folder)


def ours(source):
    model = GPT(source.config, ops())
    load_weights(model, source)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_of_transformers(tmp_path, name):
    """Logits and gradients to at most twice transformers' own rounding, and 64 greedy tokens; in one file or many."""
    config = LONG[name]
    reference = theirs(config)
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    source = read_pretrained(str(tmp_path))
    assert (source.config, source.tokenizer) == (replace(config, head_dim=source.config.head_dim), None)
    assert source.config.head_size == config.head_size
    model = ours(source)

    def figures(model, dtype):
        model = model.to(dtype)
        output = model(IDX)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDX[:, 1:].flatten()).backward()
        grads = {name: weight.grad for name, weight in model.named_parameters()}
        model.zero_grad()
        return {"logits": logits.detach()}, grads

    (got, grads), (rounded, their_grads) = figures(model, torch.float32), figures(reference, torch.float32)
    reference.generation_config.eos_token_id = None
    text = reference.generate(IDX[:1, :8], max_new_tokens=64, do_sample=False, pad_token_id=0)
    assert torch.equal(generate(model, IDX[:1, :8], 64, n_vocab=97, temperature=0), text)
    exact, exact_grads = figures(reference, torch.float64)
    got |= {key: grad for key, grad in renamed(grads, config).items() if key in exact_grads}
    assert set(got) == {*exact, *exact_grads}
    for key, value in {**exact, **exact_grads}.items():
        assert near(got[key], value, (rounded | their_grads)[key]), key


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_loads_an_export(tmp_path, name):
    """AutoModelForCausalLM finds every tensor, with our bits, and its logits are ours to its own rounding."""
    from transformers import AutoModelForCausalLM

    config = LONG[name]
    model = gpt(config)
    saved(tmp_path / "run", model)
    source = read_pretrained(str(tmp_path / "run"))
    check_exportable(source, "hf")
    export(source, "hf", tmp_path / "hf")
    their_model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    assert type(their_model).__name__ == ("Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM")
    state, expected = their_model.state_dict(), renamed(model.state_dict(), config)
    assert set(state) == set(expected)
    assert all(torch.equal(weight, expected[key]) for key, weight in state.items())
    with torch.no_grad():
        rounded = their_model(IDX).logits
        assert near(model(IDX), their_model.double()(IDX).logits, rounded)
    back = read_pretrained(str(tmp_path / "hf"))
    assert back.config == replace(config, head_dim=back.config.head_dim)
    assert all(torch.equal(weight, back.weights[key]) for key, weight in source.weights.items())


@pytest.mark.parametrize("changes", [{"bias": True}, {"qk_norm": True, "window": 5}])
def test_biases_and_windows(tmp_path, changes):
    """Llama's attention_bias and mlp_bias, and Qwen3's sliding_window: transformers computes our logits."""
    from transformers import AutoModelForCausalLM

    config = replace(LLAMA, **changes)
    model = gpt(config)
    saved(tmp_path / "run", model)
    source = read_pretrained(str(tmp_path / "run"))
    check_exportable(source, "hf")
    export(source, "hf", tmp_path / "hf")
    their_model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    with torch.no_grad():
        rounded = their_model(IDX).logits
        assert near(model(IDX), their_model.double()(IDX).logits, rounded)
    assert read_shape(str(tmp_path / "hf")).config == config


# config.json of the hub's models, as published
PUBLISHED = {
    "smollm2_135m": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "transformers_version": "4.40.1",
        "vocab_size": 49152,
    },
    "qwen3_0_6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "transformers_version": "4.51.0",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "llama3_2_1b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 64,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_the_presets(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    preset = GPTConfig(**{"dropout": 0.0, "bias": False, **OmegaConf.load(ROOT / f"configs/model/{name}.yaml")})
    found = read_shape(str(tmp_path)).config
    assert replace(found, head_dim=found.head_size) == replace(preset, head_dim=preset.head_size)


def without_prefix(held):
    return {key.removeprefix("model."): weight for key, weight in held.items()}


def with_buffers(held):
    return held | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}


def with_head(held):
    return held | {"lm_head.weight": held["model.embed_tokens.weight"]}


@pytest.mark.parametrize("change", [without_prefix, with_buffers, with_head])
def test_variants_of_a_file(folder, change):
    whole = read_pretrained(str(folder)).weights
    found = read_pretrained(rewrite(folder, change)).weights
    assert list(found) == list(whole)
    assert all(torch.equal(weight, whole[key]) for key, weight in found.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_becomes_fp32(folder, dtype):
    whole = read_pretrained(str(folder)).weights
    found = read_pretrained(rewrite(folder, lambda held: {key: w.to(dtype) for key, w in held.items()})).weights
    assert {weight.dtype for weight in found.values()} == {torch.float32}
    assert all(torch.equal(weight, whole[key].to(dtype).float()) for key, weight in found.items())


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
QWEN3 = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "mlp_bias": ...}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen3_moe"}, "its model_type is qwen3_moe, and only gpt2, llama and qwen3 can be read"),
        ({"attention_bias": True}, "has attention_bias=True and mlp_bias=False: here all projections have biases, or"),
        ({"hidden_act": "gelu"}, "has hidden_act=gelu, and only hidden_act=silu is computed here"),
        ({"pretraining_tp": 2}, "has pretraining_tp=2, and only pretraining_tp=1 is computed here"),
        ({"partial_rotary_factor": 0.5}, "has partial_rotary_factor=0.5, and only partial_rotary_factor=1.0"),
        ({"rope_scaling": YARN}, "has rope_type=yarn, and only default and llama3 are computed here"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "has rope_type=linear"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "has rope_type=dynamic"),
        (
            {"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}},
            "has low_freq_factor=2.0, and only low_freq_factor=1",
        ),
        ({"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 4096}}, "only original_max_position_embed"),
        ({"rope_parameters": {**LLAMA3, "factor": None}}, "its rope factor must be a number, and is None"),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [1]}},
            "has mrope_section for rope_type=default",
        ),
        (
            {"quantization_config": {"bits": 4}},
            "has quantization_config in its .*: hotswap does not know this key; if it",
        ),
        ({"sliding_window": 8}, "has sliding_window in its config.json: hotswap does not know this key"),
        ({"attn_logit_softcapping": 50.0, "new\nkey": 1}, "has attn_logit_softcapping, a str in .* know these keys"),
        (
            {**QWEN3, "max_window_layers": 1},
            "has sliding_window=8 and layer_types=.*: here all layers have the same win",
        ),
        ({"layer_types": ["chunked_attention"] * 2}, "has sliding_window=None and layer_types="),
        ({"num_key_value_heads": "2"}, "its num_key_value_heads must be an integer, and is '2'"),
        ({"hidden_size": ...}, "its hidden_size must be an integer, and is None"),
        ({"tie_word_embeddings": 1}, "cannot be built: model.tie_embeddings=1: its type must be bool"),
        ({"tie_word_embeddings": False}, "is not this model: it lacks lm_head.weight$"),
        (
            {"model_type": "qwen3", "mlp_bias": ...},
            "it lacks layers.0.self_attn.q_norm.weight, layers.0.self_attn.k_no",
        ),
        (
            {"num_key_value_heads": 4},
            r"has in another shape layers.0.self_attn.k_proj.weight \(16, 32\), not \(32, 32\)",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(folder, config, message):
    with pytest.raises(UserError, match=message) as error:
        read_pretrained(rewrite(folder, **config))
    assert "\n" not in str(error.value)


def test_keys_that_change_nothing(folder):
    """Two of transformers 4, dropout, an unset key, and layers that are named full."""
    shape = read_shape(str(folder)).model
    rope = {"rope_parameters": ..., "rope_theta": 500.0, "rope_scaling": {"type": "default"}}
    same = {"torch_dtype": "bfloat16", "attention_dropout": 0.1, "quantization_config": None, "mlp_bias": None}
    source = rewrite(folder, **rope, **same, layer_types=["full_attention"] * 2)
    assert read_shape(source).model == shape


def test_null_means_the_same_as_a_missing_key(folder):
    keys = "rms_norm_eps", "tie_word_embeddings", "rope_theta", "max_window_layers"
    missing = read_shape(rewrite(folder, **dict.fromkeys(keys, ...))).config
    assert (missing.norm_eps, missing.tie_embeddings) == (1e-6, False)  # LlamaConfig's defaults
    assert read_shape(rewrite(folder, **dict.fromkeys(keys))).config == missing


def swapped(held):
    """Rows of q in the place of k's: together they have the rows of c_attn."""
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk"]
    return held | {names[0]: held[names[1]], names[1]: held[names[0]]}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda held: {k: w for k, w in held.items() if "1.mlp.up" not in k}, "it lacks layers.1.mlp.up_proj.weight$"),
        (lambda held: {**held, "score.weight": torch.ones(2, 32)}, "it also has score.weight$"),
        (swapped, "it has in another shape layers.0.self_attn.q_proj.weight"),
        (lambda held: {**held, "lm_head.weight": torch.ones(97, 32)}, "ties the head, but lm_head.weight differs from"),
        (
            lambda held: {k: w.to(torch.int8) if "k_proj" in k else w for k, w in held.items()},
            "holds layers.0.self_attn.k_proj.weight as torch.int8: quantized weights are not read",
        ),
    ],
)
def test_wrong_tensors_are_refused(folder, tensors, message):
    with pytest.raises(UserError, match=message):
        read_pretrained(rewrite(folder, tensors))


@pytest.mark.parametrize(
    ("changes", "format", "message"),
    [
        ({"mlp": "relu2"}, "hf", "has the MLP relu2, which Llama and Qwen3 lack: it cannot be exported"),
        (
            {"norm": "layernorm", "mlp": "gelu"},
            "hf",
            r"has rope positions and shared keys and values \(n_kv_head\), which hf's GPT-2 lacks",
        ),
        (
            {"window": 5},
            "hf",
            r"has a sliding window without normalised q and k \(qk_norm\), which Llama and Qwen3 lack",
        ),
        (
            {"qk_norm": True, "bias": True},
            "hf",
            r"has biases beside normalised q and k \(qk_norm\), which Llama and Qw",
        ),
        ({"logit_softcap": 30.0}, "hf", r"has a soft cap of its logits \(logit_softcap\), which Llama and Qwen3 lack"),
        ({}, "nanogpt", "has rope positions and .* and RMSNorm and the MLP swiglu.*, which nanogpt's GPT-2 lacks"),
    ],
)
def test_mixtures_are_not_exported(changes, format, message):
    values = {field.name: getattr(replace(LLAMA, **changes), field.name) for field in fields(GPTConfig)}
    source = Pretrained({key: value for key, value in values.items() if key != "dropout"}, {}, None, "run")
    with pytest.raises(UserError, match=message):
        check_exportable(source, format)


def test_an_untied_checkpoint_of_ours(tmp_path):
    """Its head is not taken for a copy of wte."""
    model = gpt(CONFIGS["llama_untied"])
    saved(tmp_path / "run", model)
    found = read_pretrained(str(tmp_path / "run"))
    assert asdict(found.config) == asdict(model.config)
    assert torch.equal(found.weights["lm_head.weight"], model.lm_head.weight)

"""The names of a config's keys, and what a user may have meant by an unknown one."""

import difflib
from collections.abc import Iterable
from dataclasses import fields, is_dataclass

# The end of a key -> its names in other projects: Hugging Face's, Lightning's, nanoGPT's, Megatron's
OTHER_NAMES = {
    "learning_rate": "lr base_lr max_lr peak_lr eta",
    "min_lr": "lr_min final_lr min_learning_rate eta_min",
    "warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps warmup_ratio",
    "weight_decay": "wd decay l2",
    "beta1": "b1 betas adam_beta1",
    "grad_clip": "clip clip_grad max_grad_norm max_norm gradient_clip_val gradient_clipping clip_grad_norm",
    "batch_size": "bs batch mbs micro_batch_size device_batch_size per_device_train_batch_size train_batch_size",
    "tokens_per_step": "global_batch_size total_batch_size gradient_accumulation_steps accumulate_grad_batches",
    "max_steps": "steps iters max_iters num_steps num_iterations epochs num_epochs num_train_epochs lr_decay_iters",
    "block_size": "ctx context context_length n_ctx n_positions seq_len seq_length max_seq_len max_position_embeddings",
    "eval_every": "eval_interval eval_steps val_every val_check_interval",
    "log_every": "log_interval logging_steps print_every",
    "checkpoint_every": "save_every save_steps save_interval ckpt_every checkpoint_interval checkpoint_steps",
    "keep_checkpoints": "save_total_limit keep_last",
    "resume": "resume_from resume_from_checkpoint load_checkpoint",
    "n_embd": "d_model hidden_size hidden_dim embed_dim n_embed emb_dim dim width model_dim",
    "n_head": "heads n_heads num_heads num_attention_heads nhead",
    "n_kv_head": "kv_heads n_kv_heads num_kv_heads num_key_value_heads",
    "n_layer": "layers n_layers num_layers num_hidden_layers depth blocks n_block",
    "head_dim": "head_size d_head kv_channels",
    "hidden": "intermediate_size n_inner d_ff ffn_dim ffn_hidden_size",
    "tie_embeddings": "tie_word_embeddings tied_embeddings weight_tying",
    "model.norm": "norm_type normalization layer_norm_type",
    "norm_eps": "rms_norm_eps layer_norm_epsilon layer_norm_eps layernorm_epsilon",
    "rope_theta": "rope_base rotary_base rotary_emb_base",
    "pos": "rope position positions pos_emb position_embedding_type rotary",
    "checkpointing": "gradient_checkpointing activation_checkpointing recompute remat",
    "init_from": "pretrained from_pretrained model_name model_name_or_path weights",
    "checkpoint": "ckpt ckpt_path model_path run",
    "out_dir": "output output_dir outdir save_dir run_dir log_dir default_root_dir",
    "precision": "dtype amp bf16 fp16 fp32 fp8 mixed_precision torch_dtype",
    "device": "gpu gpus cuda cpu accelerator",
    "parallel": "strategy ddp fsdp zero distributed",
    "compile": "torch_compile compiled",
    "impl": "attention attn_implementation flash flash_attention use_flash_attention",
    "data": "dataset dataset_name corpus",
    "path": "data_path data_dir file dataset_path",
    "logger": "wandb tracker report_to tensorboard",
    "max_new_tokens": "max_tokens n_tokens num_tokens length max_length",
    "temperature": "temp",
    "batch": "bs batch_size num_samples n_samples num_return_sequences",
}


def key_names(schema: type, prefix: str = "") -> Iterable[str]:
    """Yield every key of a dataclass, groups and leaves, in dotted form."""
    for field in fields(schema):
        yield prefix + field.name
        if is_dataclass(field.type):
            yield from key_names(field.type, f"{prefix}{field.name}.")


def explain_key(key: str, known: list[str]) -> str:
    """Return the error message for a key that is missing or that the schema, with the keys `known`, does not have."""
    if key in known:
        return f"{key} is missing: neither the command line nor a file in configs/ sets it"
    group = key.rpartition(".")[0]
    siblings = [name for name in known if name.rpartition(".")[0] == group]
    similar = similar_key(key, known, siblings)
    hint = f"did you mean {similar}?" if similar else f"the keys are: {', '.join(siblings or known)}"
    return f"unknown key {key}; {hint}"


def similar_key(key: str, known: list[str], siblings: list[str]) -> str | None:
    """Return the known key that the user may have meant: by its meaning, or by its letters; None if there is none.

    `siblings` are the known keys in the same group. The other keys must be more similar: `task` is not logger.tags.
    """
    last = key.rpartition(".")[2]
    others = [name for name in known if name not in siblings]
    word = last.lower().replace("-", "_")
    for meaning in [last, *(name for name, synonyms in OTHER_NAMES.items() if word in synonyms.split())]:
        for name in (*siblings, *others):
            if f".{name}".endswith(f".{meaning}"):
                return name
    for names, likeness in ((siblings, 0.6), (others, 0.8)):
        by_last_part = {name.rpartition(".")[2]: name for name in names}
        if close := difflib.get_close_matches(last, by_last_part, 1, likeness):
            return by_last_part[close[0]]
    return None

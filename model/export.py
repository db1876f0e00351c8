"""Export a model to the files of transformers or nanoGPT.

The format `hf` is config.json and model.safetensors, which transformers' AutoModelForCausalLM.from_pretrained(FOLDER)
loads: as a Llama or a Qwen3 if the model has the shape of one, otherwise as a GPT-2. It also has the files of the
tokenizer, if one is known, for pipeline("text-generation", FOLDER).
The format `nanogpt` is ckpt.pt, which nanoGPT's sample.py and init_from=resume load. It has AdamW's moments if the
source is a checkpoint of ours that is not sharded. The weights are in fp32, bit-equal to the source's.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from common.files import read_bytes
from common.terminal import class_and_message, one_line, warn
from data.errors import DataError
from data.tokenizer import GPT2, TOKENIZERS, Bytes, byte_characters, gpt2_files
from data.tokenizer_json import open_tokenizer
from model import llama
from model.checks import tensor_shapes
from model.config import EPS
from model.download import CONFIG, WEIGHTS
from model.sources import CONV1D, SIZES, SUPPORTED_VALUES, Pretrained
from runtime import checkpoint
from runtime.config import UserError, check
from runtime.manifest import fsync

FILES = {"hf": (WEIGHTS, CONFIG), "nanogpt": ("ckpt.pt",)}  # format -> its files, in the order of writing
EOT = "<|endoftext|>"


def check_exportable(source: Pretrained, format: str) -> None:
    """Raise UserError if no family of the format has all features of this model. The error names the nearest one."""
    config = source.config
    extras = {
        "rope positions": config.pos == "rope",
        "shared keys and values (n_kv_head)": config.kv_heads != config.n_head,
        "a sliding window": config.window is not None,
        "heads of another width (head_dim)": config.n_head * config.head_size != config.n_embd,
        "normalised q and k (qk_norm)": config.qk_norm,
        "a soft cap of its logits (logit_softcap)": config.logit_softcap is not None,
        "RMSNorm": config.norm == "rmsnorm",
        f"the MLP {config.mlp}": config.mlp != "gelu",
    }
    if format == "nanogpt":
        extras |= {
            "an MLP of another width (hidden)": config.mlp == "gelu" and config.hidden_size != 4 * config.n_embd,
            "a head of its own (tie_embeddings)": not config.tie_embeddings,
            "another epsilon in its norms (norm_eps)": config.norm_eps != EPS,
        }
    families = {f"{format}'s GPT-2 lacks": [name for name, present in extras.items() if present]}
    if format == "hf":
        families["Llama and Qwen3 lack"] = llama.lacking_features(config)
    family, names = min(families.items(), key=lambda item: len(item[1]))
    check(not names, f"{source.name} has {' and '.join(names)}, which {family}: it cannot be exported")


class ExportTokenizer(NamedTuple):
    files: dict[str, bytes]  # name -> content; none: the export has no tokenizer
    ids: dict  # bos_token_id and eos_token_id of config.json


def tokenizer_of_export(source: Pretrained, format: str) -> ExportTokenizer:
    """Return the tokenizer, which `hf` has if it is known.

    It is empty, with a warning, if the files of a tokenizer.json are gone.
    """
    if format != "hf" or source.tokenizer is None:
        return ExportTokenizer({}, {})
    if source.tokenizer in TOKENIZERS:
        eot = TOKENIZERS[source.tokenizer].eot
        return ExportTokenizer(built_in_files(source), {"bos_token_id": eot, "eos_token_id": eot})
    try:
        tokenizer = open_tokenizer(source.tokenizer)
    except DataError as error:
        warn(f"the export has no tokenizer: {error}")
        return ExportTokenizer({}, {})
    stops = list(tokenizer.stops)
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": stops if len(stops) > 1 else tokenizer.eot}
    return ExportTokenizer(tokenizer.files, ids)


def export(source: Pretrained, format: str, folder: Path, tokenizer: ExportTokenizer | None = None) -> list[Path]:
    """Write the model's files into `folder`, and return their paths. Raises UserError if that fails.

    `tokenizer` is what tokenizer_of_export() returned.
    """
    files, ids = tokenizer or ExportTokenizer({}, {})
    if format == "hf":
        config, tensors = to_hugging_face(source, ids)
        text = json.dumps(config, indent=2) + "\n"
        writers = [
            lambda path: checkpoint.save_tensors(tensors, path, {"format": "pt"}),
            lambda path: path.write_text(text, encoding="utf-8"),
        ]
        writers += [partial(Path.write_bytes, data=content) for content in files.values()]
    else:
        try:
            contents = to_nanogpt(source)
        except (ArithmeticError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            reason = class_and_message(error)[:300]
            raise UserError(f"{source.name} has a wrong manifest or {checkpoint.TRAINING}: {reason}") from error
        writers = [lambda path: torch.save(contents, path)]
    names = (*FILES[format], *files)
    write_files(folder, dict(zip(names, writers, strict=True)))
    return [folder / name for name in names]


def built_in_files(source: Pretrained) -> dict[str, bytes]:
    """Return the files of transformers' GPT2Tokenizer for a tokenizer of ours: for gpt2, OpenAI's two files.

    For bytes, the vocabulary has a character for each byte, and there are no merges. Raises DataError if OpenAI's files
    are not cached and cannot be downloaded.
    """
    if source.tokenizer == "gpt2":
        GPT2()  # fills tiktoken's cache
        merges, vocabulary = map(read_bytes, gpt2_files())
    else:
        ids = {character: byte for byte, character in enumerate(byte_characters())}
        merges, vocabulary = b"#version: 0.2\n", json.dumps({**ids, EOT: Bytes.eot}).encode()
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), EOT)
    config = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": source.model["block_size"], **special}
    config |= {"add_prefix_space": False, "clean_up_tokenization_spaces": False}
    settings = (json.dumps(config, indent=2) + "\n").encode()
    return {"merges.txt": merges, "vocab.json": vocabulary, "tokenizer_config.json": settings}


def to_hugging_face(source: Pretrained, ids: dict) -> tuple[dict, dict[str, Tensor]]:
    """Return (config.json, the tensors of model.safetensors) of transformers' model, in fp32.

    `ids` are those of the tokenizer, as tokenizer_of_export() returns them.
    """
    m, ids = source.model, {"bos_token_id": None, "eos_token_id": None} | ids  # transformers' defaults are 1 and 2
    if llama.is_llama(source.config):
        config = llama.write_config(source.config) | ids
        return config, llama.write_tensors(source.weights, source.config)
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "torch_dtype": "float32", **SUPPORTED_VALUES}
    config |= {key: m[key] for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
    config |= {"n_positions": m["block_size"], "n_ctx": m["block_size"], "n_inner": m.get("hidden")}
    config |= {"layer_norm_epsilon": source.config.norm_eps, "tie_word_embeddings": source.config.tie_embeddings} | ids
    # Hugging Face's model always has biases, so a model without biases gets zeros
    shapes = tensor_shapes(replace(source.config, bias=True))
    weights = {name: source.weights[name] if name in source.weights else torch.zeros(shapes[name]) for name in shapes}
    tensors = {name: w.T.contiguous() if CONV1D.fullmatch(name) else w for name, w in weights.items()}
    return config, {name if name == "lm_head.weight" else f"transformer.{name}": w for name, w in tensors.items()}


def to_nanogpt(source: Pretrained) -> dict:
    """Return the contents of nanoGPT's ckpt.pt, of types that torch.load(weights_only=True) accepts.

    If the source is no checkpoint of ours, they are like a new nanoGPT run's: step 0, best loss 1e9, and no moments.
    """
    manifest, training = {}, {}
    if source.checkpoint:
        manifest, training = checkpoint.read_manifest(source.checkpoint), checkpoint.read_training(source.checkpoint)
    config, loss = manifest.get("config") or {}, manifest.get("val_loss")
    model = {f"transformer.{name}": weight for name, weight in source.weights.items()}
    arguments = {key: source.model[key] for key in (*SIZES, "bias")}
    return {
        "model": {**model, "lm_head.weight": source.weights["wte.weight"]},
        "optimizer": adamw_state(source.weights, training, config.get("optim", {})),
        "model_args": {**arguments, "dropout": config.get("model", {}).get("dropout", 0.0)},
        "iter_num": manifest.get("step", 0),
        "best_val_loss": 1e9 if loss is None else loss,
        "config": config or {"data": {"tokenizer": source.tokenizer}},
    }


def adamw_state(weights: dict[str, Tensor], training: dict, optim: dict) -> dict:
    """Return the state dict of nanoGPT's optimizer. It numbers the tensors: matrices first, then the others."""
    parameters = {name: nn.Parameter(weight) for name, weight in weights.items()}
    matrices = [weight for weight in parameters.values() if weight.dim() >= 2]
    others = [weight for weight in parameters.values() if weight.dim() < 2]
    decay = optim.get("weight_decay", 0.1)
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}],
        lr=optim.get("learning_rate", 6e-4),
        betas=(optim.get("beta1", 0.9), optim.get("beta2", 0.95)),
    )
    if "exp_avg" in training and "momentum" not in training:  # nanoGPT has no Muon
        updates = torch.tensor(float(training["updates"]))
        for name, weight in parameters.items():
            moments = {key: training[key][name].float() for key in ("exp_avg", "exp_avg_sq")}
            if any(moment.shape != weight.shape for moment in moments.values()):
                raise ValueError(f"the moments of {name} have another shape")
            optimizer.state[weight] = {"step": updates.clone(), **moments}
    return optimizer.state_dict()


def write_files(folder: Path, writers: dict[str, Callable[[Path], None]]) -> None:
    """Call each writer with a hidden path, and rename the files when all are on the disk. If one fails, none is left.

    Raises UserError if the folder cannot be written, or already has one of the files.
    """
    hidden = {name: folder / f".{name}.unfinished" for name in writers}  # the next export replaces it after a kill
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, writer in writers.items():
            writer(hidden[name])
            fsync(hidden[name])
        check_free(folder, writers)
        for name, path in hidden.items():
            path.rename(folder / name)
        fsync(folder)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises RuntimeError on a full disk
        existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        free = f"{shutil.disk_usage(existing).free / 2**30:.1f} GiB are free there"
        reason = "torch.save broke off" if isinstance(error, RuntimeError) else one_line(error)
        raise UserError(f"path={folder} cannot be written: {reason}; {free}, choose another folder") from error
    finally:
        for path in filter(Path.exists, hidden.values()):
            path.unlink()


def check_free(folder: Path, names: Iterable[str]) -> None:
    """Raise UserError if the folder has a file with one of these names."""
    existing = [name for name in names if (folder / name).exists()]
    check(not existing, f"path={folder} already holds {' and '.join(existing)}: choose another folder")

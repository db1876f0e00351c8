"""A model for other programs: `python -m scripts.export checkpoint=out/RUN format=hf path=FOLDER`.

hf writes config.json and model.safetensors, which transformers' GPT2LMHeadModel.from_pretrained(FOLDER) loads; nanogpt
writes the ckpt.pt of nanoGPT's sample.py and init_from=resume, with AdamW's moments where the checkpoint has them.
The weights are fp32 and bit for bit those of the source.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from data.errors import line
from data.tokenizer import TOKENIZERS
from model.pretrained import COMPUTED, CONFIG, CONV1D, SIZES, WEIGHTS, Pretrained, local, read, shape, shapes
from runtime import checkpoint
from runtime.config import UserError, check, cli

ROOT = Path(__file__).resolve().parent.parent
FILES = {"hf": (WEIGHTS, CONFIG), "nanogpt": ("ckpt.pt",)}  # in the order in which they are written


@dataclass
class Config:
    checkpoint: str | None
    format: str
    path: str | None

    def __post_init__(self):
        check(
            bool(self.checkpoint), "checkpoint is missing: name a run (out/RUN), a checkpoint, gpt2, ... or a ckpt.pt"
        )
        check(self.format in FILES, f"format={self.format}: choose {' or '.join(FILES)}")
        check(bool(self.path), "path is missing: name the folder to write to")


def to_hugging_face(source: Pretrained) -> tuple[dict, dict[str, Tensor]]:
    """(config.json, the tensors of model.safetensors) of transformers' GPT2LMHeadModel, in fp32."""
    m = source.model
    eot = TOKENIZERS[source.tokenizer].eot if source.tokenizer else None
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "torch_dtype": "float32", **COMPUTED}
    config |= {key: m[key] for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
    config |= {"n_positions": m["block_size"], "n_ctx": m["block_size"], "n_inner": None, "tie_word_embeddings": True}
    config |= {"bos_token_id": eot, "eos_token_id": eot}
    biased = shapes(source._replace(model={**m, "bias": True}))  # theirs always has biases: of zeros, they do nothing
    weights = {name: source.weights[name] if name in source.weights else torch.zeros(biased[name]) for name in biased}
    tensors = {name: w.T.contiguous() if CONV1D.fullmatch(name) else w for name, w in weights.items()}
    return config, {f"transformer.{name}": weight for name, weight in tensors.items()}


def to_nanogpt(source: Pretrained, manifest: dict, training: dict) -> dict:
    """nanoGPT's ckpt.pt, of types that torch.load(weights_only=True) knows.

    `manifest` and `training` (exp_avg and exp_avg_sq, {name: tensor} each, and updates) are those of a checkpoint of
    ours; {} and {} is as nanoGPT begins: step 0, best loss 1e9, AdamW without moments.
    """
    config, loss = manifest.get("config") or {}, manifest.get("val_loss")
    model = {f"transformer.{name}": weight for name, weight in source.weights.items()}
    arguments = {key: source.model[key] for key in (*SIZES, "bias")}
    return {
        "model": {**model, "lm_head.weight": source.weights["wte.weight"]},
        "optimizer": adamw(source.weights, training, config.get("optim", {})),
        "model_args": {**arguments, "dropout": config.get("model", {}).get("dropout", 0.0)},
        "iter_num": manifest.get("step", 0),
        "best_val_loss": 1e9 if loss is None else loss,
        "config": config or {"data": {"tokenizer": source.tokenizer}},
    }


def adamw(weights: dict[str, Tensor], training: dict, optim: dict) -> dict:
    """The state dict of nanoGPT's optimizer, which numbers the tensors: first those that decay, then the rest."""
    parameters = {name: nn.Parameter(weight) for name, weight in weights.items()}
    decayed, rest = ([w for w in parameters.values() if (w.dim() >= 2) == matrix] for matrix in (True, False))
    decay = optim.get("weight_decay", 0.1)
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}],
        lr=optim.get("learning_rate", 6e-4),
        betas=(optim.get("beta1", 0.9), optim.get("beta2", 0.95)),
    )
    if "exp_avg" in training:
        updates = torch.tensor(float(training["updates"]))
        for name, weight in parameters.items():
            moments = {key: training[key][name].float() for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[weight] = {"step": updates.clone(), **moments}
    return optimizer.state_dict()


def write(folder: Path, writers: dict[str, Callable[[Path], None]]) -> None:
    """Give each writer a hidden name in `folder`, and rename when all are whole and on the disk; or leave nothing."""
    hidden = {name: folder / f".{name}.{os.getpid()}" for name in writers}
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, writer in writers.items():
            writer(hidden[name])
            checkpoint.sync(hidden[name])
        free(folder, writers)
        for name, path in hidden.items():
            path.rename(folder / name)
        checkpoint.sync(folder)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save says RuntimeError of a full disk
        there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        room = f"{shutil.disk_usage(there).free / 2**30:.1f} GiB are free there"
        why = "torch.save broke off" if isinstance(error, RuntimeError) else line(error)
        raise UserError(f"path={folder} cannot be written: {why}; {room}, choose another folder") from error
    finally:
        for path in filter(Path.exists, hidden.values()):
            path.unlink()
        for path in made:
            with contextlib.suppress(OSError):  # not there, or not empty
                path.rmdir()


def free(folder: Path, names: Iterable[str]) -> None:
    """UserError: a file of one of these names is there."""
    taken = [name for name in names if (folder / name).exists()]
    check(not taken, f"path={folder} already holds {' and '.join(taken)}, which stays: choose another folder")


@cli(Config, configs=ROOT / "configs", name="export")
def main(cfg: Config) -> None:
    folder = local(cfg.path)
    free(folder, FILES[cfg.format])
    found = shape(cfg.checkpoint)
    shared = found.model.get("n_kv_head") not in (None, found.model["n_head"])
    beyond = {"rope positions": found.model["pos"] == "rope", "shared keys and values (n_kv_head)": shared}
    beyond["a sliding window"] = found.model.get("window") is not None
    has = " and ".join(name for name, there in beyond.items() if there)
    check(not has, f"{found.name} has {has}, which {cfg.format}'s GPT-2 does not know: it cannot be exported")
    source = read(cfg.checkpoint)
    if cfg.format == "hf":
        config, tensors = to_hugging_face(source)
        text = json.dumps(config, indent=2) + "\n"
        writers = [lambda path: save_file(tensors, path, metadata={"format": "pt"}), lambda path: path.write_text(text)]
    else:
        manifest, training = {}, {}
        if source.checkpoint:
            manifest = checkpoint.manifest(source.checkpoint)
            training = torch.load(source.checkpoint / checkpoint.TRAINING, "cpu", weights_only=True, mmap=True)
        held = to_nanogpt(source, manifest, training)
        writers = [lambda path: torch.save(held, path)]
    write(folder, dict(zip(FILES[cfg.format], writers, strict=True)))
    count = sum(weight.numel() for weight in source.weights.values()) / 1e6
    written = ", ".join(str(folder / name) for name in FILES[cfg.format])
    print(f"{source.name}: {count:.1f}M parameters in fp32 -> {written}")


if __name__ == "__main__":
    main()

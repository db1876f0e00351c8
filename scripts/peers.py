"""Train another system's model in our loop: `python -m scripts.peers system=transformers liger=true`.

Data, loop, meter and row are those of train.py. lab/peers.py says what runs.
"""

from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from common.terminal import class_and_message
from data.errors import DataError
from kernels.registry import OPS, KernelError, impl_by_op
from lab.commands import command, compose, take_training
from lab.peers import SYSTEMS, PeerRecipe
from runtime.config import UserError, check, parse, value_text
from train import Config as TrainConfig
from train import complete_config, run_recipe

WORDS = "+experiment=throughput", "proof=false", "train.cuda_graph=false"  # before the user's
# Keys of train.py that work only with our model or optimizer -> the value that a peer must have
FIXED = {"proof": False, "profile": False, "init_from": None, "parallel": "ddp", "attn.impl": "sdpa"}
FIXED |= {"train.cuda_graph": False, "train.eval_every": 0, "train.sample_tokens": 0, "train.resume": None}
FIXED |= {"train.checkpoint_every": 0, "kernels.compile_mode": "default", "kernels.adamw": "auto", "kernels.fp8": None}
FIXED |= {"model.dropout": 0.0, "model.checkpointing": "none", "data.mask_documents": False, "optim.name": "adamw"}


@dataclass
class Config:
    system: str
    liger: bool
    path: str | None
    device: str
    out_dir: str | None
    training: list[str]

    def __post_init__(self):
        check(self.system in SYSTEMS, f"system={self.system}: choose {' or '.join(SYSTEMS)}")
        needs_path = self.system == "nanogpt"
        text = "pass path=FOLDER, a checkout of nanoGPT" if needs_path else "path is for system=nanogpt: leave it out"
        check(needs_path == bool(self.path), f"system={self.system} path={value_text(self.path)}: {text}")
        check(not (needs_path and self.liger), "liger=true is for system=transformers: Liger has nothing for nanoGPT")


@command(Config, "peers", errors=(DataError,))
def main(cfg: Config) -> None:
    composed = compose(TrainConfig, "config", [*WORDS, *cfg.training])
    complete_config(composed)
    training = parse(composed, TrainConfig)
    check(training.precision != "fp8", "precision=fp8 is for our kernels: choose bf16, amp or fp32")
    chosen = impl_by_op(training.kernels, training.attn, [op for op in OPS if op != "attention"])
    ours = next((f"kernels.{op}={impl}" for op, impl in chosen.items() if impl != "eager"), None)
    check(ours is None, f"{ours} is for our models: choose kernels=eager, or kernels=compile for torch.compile")
    for key, value in FIXED.items():
        got = attrgetter(key)(training)
        check(got == value, f"a peer trains with {key}={value_text(value)}, not {value_text(got)}")
    for key, default in (("device", "auto"), ("out_dir", None)):
        value = getattr(training, key)
        check(value == default, f"{key}={value_text(value)} stands after --: put it before --")
    training.device, training.out_dir = cfg.device, cfg.out_dir
    path = Path(cfg.path) if cfg.path else None
    recipe = replace(PeerRecipe.of(training), system=cfg.system, liger=cfg.liger, path=path)
    try:
        run_recipe(training, recipe)
    except (UserError, KernelError, DataError, OSError):
        raise
    except Exception as error:  # such as an illegal memory access, which is the row's status already
        raise UserError(f"{recipe.label} failed: {class_and_message(error)}") from error


def main_with_training() -> None:
    take_training()
    main()


if __name__ == "__main__":
    main_with_training()

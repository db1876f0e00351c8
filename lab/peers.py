"""Other systems in our training loop: transformers, with Liger's kernels or without, and nanoGPT.

A peer is a recipe that builds another system's model: train.py's loop, data and meter measure it. It starts from the
weights that our model would have, in the form of model/export.py. So its first loss is our model's, up to rounding.
Only nanoGPT differs: its GELU uses erf, and each activation differs by less than 5e-4.

A peer runs as its users run it: attention by SDPA, torch.compile with its default options (which allow graph breaks),
no CUDA graph, and PyTorch's fused AdamW. With precision=bf16 everything is in bf16, without fp32 masters. With
precision=amp the weights are in fp32, and the forward is under autocast.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn

from common.files import read_bytes
from kernels.gpu import package_unavailable
from kernels.lookup import import_file
from kernels.registry import Unavailable
from lab.recipe import Recipe
from model import cost, llama
from model.config import PRECISIONS
from model.export import check_exportable, to_hugging_face, to_nanogpt
from model.optim import Optimizer, TorchAdamW
from model.sources import Pretrained, random_source
from runtime.config import check
from runtime.device import environment
from runtime.ranks import Ranks

SYSTEMS = {"transformers": "hf", "nanogpt": "nanogpt"}  # system -> the format in which it takes our weights
NAMES = {"nanogpt": "nanoGPT", "liger-kernel": "Liger"}  # in a row


class Peer(nn.Module):
    """peer(idx, targets) -> loss, as a GPT in training. `loss` takes the system's model, idx and targets, (B, T)."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Tensor, Tensor], Tensor], autocast: bool):
        super().__init__()
        self.model, self.loss, self.autocast = model, loss, autocast

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(idx.device.type, torch.bfloat16, enabled=self.autocast):
            return self.loss(self.model, idx, targets)

    def compile(self, **_: object) -> None:
        """Compile the system's model as its users do. Our options, such as fullgraph, are not theirs."""
        self.model.compile()


@dataclass(frozen=True)
class PeerRecipe(Recipe):
    """A recipe whose model and optimizer are another system's."""

    is_ours = False
    system: str = "transformers"  # one of SYSTEMS
    liger: bool = False
    path: Path | None = None  # of a checkout of nanoGPT

    @property
    def label(self) -> str:
        """A short name, such as `transformers+liger+compile-bf16`."""
        parts = {self.system: True, "liger": self.liger, "compile": self.kernels.compile}
        return "+".join(name for name, used in parts.items() if used) + f"-{self.precision}"

    @property
    def versions(self) -> dict[str, str]:
        """package -> version; for nanoGPT the start of its model.py's SHA-256, as a copy may have no commit."""
        if self.system == "nanogpt":
            file = self.path / "model.py"
            return {"nanogpt": hashlib.sha256(read_bytes(file)).hexdigest()[:8] if file.is_file() else "not found"}
        return {name: installed_version(name) for name in ("transformers", *(["liger-kernel"] if self.liger else []))}

    @property
    def chosen_kernels(self) -> dict[str, str | bool]:
        """`peer` names what runs, such as "transformers 5.17.0 + Liger 0.8.5 + torch.compile"."""
        parts = [f"{NAMES.get(package, package)} {version}" for package, version in self.versions.items()]
        parts += ["torch.compile"] if self.kernels.compile else []
        return {"peer": " + ".join(parts), "attention": "sdpa", "compile": self.kernels.compile}

    @property
    def source(self) -> Pretrained:
        """Our model without its weights."""
        return random_source(asdict(self.model))._replace(name="this model")

    @property
    def their_kind(self) -> str:
        """The model_type of transformers' model of this shape."""
        if not llama.is_llama(self.model):
            return "gpt2"
        return "qwen3" if self.model.qk_norm else "llama"

    def check_kernels(self, device: torch.device) -> dict[str, str]:
        """Raise Unavailable if the system is not here, and UserError if it has no model of this shape."""
        check_exportable(self.source, SYSTEMS[self.system])
        if self.system == "nanogpt":
            found = (self.path / "model.py").is_file()
            reason = None if found else f"{self.path} has no model.py: pass path=FOLDER, a checkout of nanoGPT"
        else:
            reason = package_unavailable("transformers", "transformers.AutoModelForCausalLM")
        if self.liger and not reason:
            symbol = f"liger_kernel.transformers.apply_liger_kernel_to_{self.their_kind}"
            reason = package_unavailable("liger-kernel", symbol)
        if reason:
            raise Unavailable(f"{self.label} cannot run here: {reason}")
        return {}

    def build(self, device: torch.device, weights: Pretrained | None = None) -> Peer:
        """Return the system's model with the initial weights of ours, not compiled."""
        ours = Recipe.build(replace(self, precision="fp32"), device).state_dict()
        source = self.source._replace(weights={name: weight.cpu() for name, weight in ours.items()})
        del ours
        if self.system == "nanogpt":
            model, loss = nanogpt(source, self.path), lambda model, idx, targets: model(idx, targets)[1]
        else:
            model, loss = transformers(source, self.liger), transformers_loss
        theirs, expected = sum(weight.numel() for weight in model.parameters()), cost.parameters(self.model)
        text = f"{self.label} has {theirs:,} parameters, but our model has {expected:,}: choose a model that both have"
        check(theirs == expected, text)
        return Peer(model.to(device, PRECISIONS[self.precision][0]).train(), loss, autocast=self.precision == "amp")

    def make_optimizer(self, model: Peer, ranks: Ranks | None = None, **options: bool) -> Optimizer:
        optimizer = TorchAdamW(model, self.optim, ranks, masters=False, **options)
        optimizer.kernels = {"adamw": f"eager (torch {torch.__version__}, fused)"}
        return optimizer

    def kernel_facts(self, shape: tuple[int, int], device: torch.device, optimizer: Optimizer) -> dict[str, dict]:
        kernels = self.chosen_kernels | optimizer.kernels
        return {"kernels": kernels, "slower": {}, "env": environment(device) | self.versions}


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not found"


def nanogpt(source: Pretrained, path: Path) -> nn.Module:
    """Return nanoGPT's model, of the checkout at `path`, with these weights."""
    module, contents = import_file(path / "model.py", "nanogpt_model"), to_nanogpt(source)
    model = module.GPT(module.GPTConfig(**contents["model_args"]))
    model.load_state_dict(contents["model"])
    return model


def transformers(source: Pretrained, liger: bool) -> nn.Module:
    """Return transformers' model with these weights. Liger replaces parts of transformers in the whole process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config, tensors = to_hugging_face(source, {})
    if liger:
        import liger_kernel.transformers

        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{config['model_type']}")()
    no_dropout = ("attn_pdrop", "embd_pdrop", "resid_pdrop") if config["model_type"] == "gpt2" else ()
    theirs = AutoConfig.for_model(**config, **dict.fromkeys(no_dropout, 0.0), use_cache=False)
    model = AutoModelForCausalLM.from_config(theirs, attn_implementation="sdpa")
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    wrong = {*missing, *unexpected} - ({"lm_head.weight"} if source.config.tie_embeddings else set())
    check(not wrong, f"{type(model).__name__} has other weights than our model: {', '.join(sorted(wrong)[:3])}")
    return model


def transformers_loss(model: nn.Module, idx: Tensor, targets: Tensor) -> Tensor:
    return model(input_ids=idx, labels=targets, shift_labels=targets).loss

"""Weights from elsewhere: Hugging Face's GPT-2, nanoGPT's ckpt.pt, and our own checkpoints (scripts/export.py writes).

All hold the same tensors under nearly the same names: both others put `transformer.` before them, keep the tied head a
second time and, in old files, the causal mask; Hugging Face's projections (Conv1D) are transposed. What is read is
compared with the model's own state dict, so nothing is left out, left over or of another shape, and fp32 comes out.

The MLP here computes GPT-2's GELU, by tanh. So did nanoGPT at first; later it computes GELU by erf, also for OpenAI's
weights, and a ckpt.pt does not say by which it was trained. The two differ by less than 5e-4 an activation.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from data.errors import line
from data.tokenizer import TOKENIZERS, Tokenizer, reachable
from kernels.registry import AttnConfig, KernelsConfig, Ops, resolve
from model.gpt import GPT, PRECISIONS, GPTConfig
from runtime import checkpoint
from runtime.config import UserError, check

OPENAI = re.compile(r"(openai-community/)?gpt2(-medium|-large|-xl)?")  # on the hub, all with the tokenizer gpt2
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
TRAINING = ("dropout", "checkpointing", "keep_attention")  # fields of GPTConfig that a checkpoint does not pass on
FREE = (*TRAINING, "window")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CONV1D = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")
MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # a buffer of old files
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
HUB_SECONDS = 1.5  # in which the hub has to answer
COMPUTED = {  # key of Hugging Face's config.json -> its default, which is all that is computed here
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}  # reorder_and_upcast_attn is about rounding only


class Pretrained(NamedTuple):
    """A model from somewhere; the vocabulary is the source's (GPT-2's 50257), since rows of padding change the loss."""

    model: dict  # GPTConfig's fields, without TRAINING's
    weights: dict[str, Tensor]  # fp32, on the CPU, under the names and in the order of GPT's state dict
    tokenizer: str | None  # gpt2 | bytes | None where neither the source nor its vocabulary tells
    name: str  # for people: "gpt2", "out/RUN at step 20"
    checkpoint: Path | None = None  # its folder, if it is one of ours


def read(source: str) -> Pretrained:
    """The model that `source` names: a run's folder or a checkpoint of ours; Hugging Face's GPT-2, by its name on the
    hub or by a folder with config.json and safetensors; nanoGPT's ckpt.pt, or the folder that holds it.

    UserError: it cannot be had, is damaged, or is not the model that is computed here.
    """
    found, state = opened(source)
    return found._replace(weights=checked(state(), found))


def shape(source: str) -> Pretrained:
    """The same with weights {}, and as good as for free: of a hub model only config.json is downloaded."""
    return opened(source)[0]


def fitted(found: Pretrained, given: dict) -> dict:
    """GPTConfig's fields for a model that starts from `found`; `given` are those that the user asks for.

    The position table may become shorter, and a rope model has none; FREE may be others, for no weight depends on them.
    UserError: anything else differs.
    """
    longest = given.get("block_size", 0) if found.model["pos"] == "rope" else found.model["block_size"]
    for key, value in given.items():
        if key == "block_size":
            check(value <= longest, f"model.block_size={value} is more than the {longest} positions of {found.name}")
        elif key not in FREE:
            held = found.model.get(key)
            check(value == held, f"model.{key}={value}, but {found.name} has {held}: leave model.{key} out")
    return {**found.model, **{key: given[key] for key in given if key in ("block_size", *FREE)}}


@torch.no_grad()
def load(model: GPT, pretrained: Pretrained) -> None:
    """Copy the weights into a built model, whatever its device and stored dtype; a shorter position table takes the
    first rows, as nanoGPT's crop_block_size. UserError: another model."""
    weights, length = dict(pretrained.weights), model.config.block_size
    if "wpe.weight" in weights and model.wpe is not None:
        held = len(weights["wpe.weight"])
        check(length <= held, f"model.block_size={length} is more than the {held} positions of {pretrained.name}")
        weights["wpe.weight"] = weights["wpe.weight"][:length]
    compare(weights, {name: weight.shape for name, weight in model.state_dict().items()}, pretrained.name)
    model.load_state_dict(weights)


def build(
    source: Pretrained,
    kernels: KernelsConfig,
    attn: AttnConfig,
    precision: str,
    device: torch.device,
    needs: Sequence[str] = (),
) -> GPT:
    """The model that was read, on `device` and in eval mode; `needs` as in resolve()."""
    stored, compute = PRECISIONS[precision]
    torch.set_float32_matmul_precision("highest")  # fp32 is the parity reference: no TF32
    with torch.device("meta"):  # no weights are drawn only to be overwritten
        config = GPTConfig(**source.model, dropout=0.0)
        model = GPT(config, resolve(kernels, attn, device, [*config.needs, *needs]), compute).to(stored)
    model.to_empty(device=device)
    load(model, source)
    return model.eval()


def by_vocabulary(size: int) -> str | None:
    """The tokenizer with so many ids, or so many when padded to a multiple of 64: gpt2 from 50,257 to 50,304."""
    for name, each in TOKENIZERS.items():
        if each.n_vocab <= size <= -(-each.n_vocab // 64) * 64:
            return name
    return None


def tokenizer_of(source: Pretrained, asked: str | None) -> Tokenizer:
    """The one asked for, else the source's own. UserError: there is none such, or the ids are not its."""
    name, size, known = asked or source.tokenizer, source.model["vocab_size"], " or ".join(TOKENIZERS)
    check(name is not None, f"{source.name} does not tell its tokenizer, nor do its {size} ids: pass tokenizer={known}")
    check(name in TOKENIZERS, f"tokenizer={name}: choose {known}")
    ids = TOKENIZERS[name].n_vocab
    check(ids <= size, f"tokenizer={name} has {ids} ids, and {source.name} only {size}: name the one of its training")
    return TOKENIZERS[name]()


def local(source: str) -> Path:
    """A path, with the home folder for `~`. UserError: a name as no file can have: of nobody's home, or too long."""
    try:
        path = Path(source).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{source}: there can be no such file or folder: {line(error)}") from error
    return path


def opened(source: str) -> tuple[Pretrained, Callable[[], dict[str, Tensor]]]:
    """What the source says of itself, without weights, and what reads its tensors, under its own names."""
    path = local(source)
    if path.is_file():
        check(path.suffix == ".pt", f"{source} is not nanoGPT's ckpt.pt: name a .pt file, or the folder of a model")
        return nanogpt(path, source)
    if path.is_dir():
        if (path / CONFIG).exists():
            return hugging_face(source, lambda weights: path)
        return nanogpt(path / "ckpt.pt", source) if (path / "ckpt.pt").exists() else ours(path)
    check(HUB_NAME.fullmatch(source) is not None, f"{source}: there is no such file or folder")
    return hugging_face(source, lambda weights: hub(source, weights))


def ours(path: Path) -> tuple[Pretrained, Callable]:
    folder = checkpoint.find(path)
    facts = checkpoint.manifest(folder)
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    config = facts["config"]
    model = {key: value for key, value in config["model"].items() if key not in TRAINING}
    found = Pretrained(model, {}, config["data"]["tokenizer"], f"{run} at step {facts['step']}", folder)

    def state() -> dict[str, Tensor]:
        checkpoint.verified(folder)
        return checkpoint.read_weights(folder)

    return found, state


def nanogpt(path: Path, name: str) -> tuple[Pretrained, Callable]:
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {line(error)}") from error
    except Exception as error:  # the unpickler may raise any
        raise UserError(
            f"{path} cannot be read as nanoGPT's ckpt.pt: it is damaged, or holds more than tensors and plain values, "
            "which may be any program and is not run"
        ) from error
    whole = isinstance(held, dict) and all(isinstance(held.get(key), dict) for key in ("model", "model_args"))
    check(whole, f"{path} is not nanoGPT's ckpt.pt: it has no `model` and `model_args`")
    arguments = held["model_args"]
    foreign = sorted(set(arguments) - {*SIZES, "bias", "dropout"})
    check(not foreign, f"{path} is of a changed nanoGPT: its model_args have {', '.join(foreign)}")
    model = {**sizes(arguments, dict(zip(SIZES, SIZES, strict=True)), name), "pos": "learned"}
    model["bias"] = arguments.get("bias", True)  # nanoGPT had no choice at first
    config = held.get("config") or {}
    bpe = {"openwebtext": "gpt2", "shakespeare": "gpt2"}  # nanoGPT's data sets in GPT-2's tokens
    tokenizer = (config.get("data") or {}).get("tokenizer") or bpe.get(config.get("dataset"))  # the first: our export
    return Pretrained(model, {}, tokenizer or by_vocabulary(model["vocab_size"]), name), lambda: held["model"]


def hugging_face(name: str, folder: Callable[[bool], Path]) -> tuple[Pretrained, Callable]:
    """`folder(weights)` is where config.json is, and the weights too where they are asked for."""
    config = read_json(folder(False) / CONFIG)
    kind = config.get("model_type")
    check(kind == "gpt2", f"{name} is another architecture: its model_type is {kind}, and only gpt2 can be read")
    names = {**dict(zip(SIZES, SIZES, strict=True)), "block_size": "n_positions"}
    model = {**sizes(config, names, name), "pos": "learned", "bias": True}
    for key, value in {**COMPUTED, "n_inner": 4 * model["n_embd"]}.items():
        held = config.get(key)
        check(held in (None, value), f"{name} has {key}={held}, and only {key}={value} is computed here")

    def state() -> dict[str, Tensor]:
        files = weight_files(folder(True))
        check(
            bool(files),
            f"{name} has no {WEIGHTS}, and pickled weights (.bin) are not read, for they may hold any program; convert "
            f'them: python -c "from transformers import GPT2LMHeadModel as M; '
            f"M.from_pretrained('{name}').save_pretrained('FOLDER')\", then name FOLDER",
        )
        tensors = {}
        for file in files:
            try:
                tensors |= load_file(file)
            except (OSError, SafetensorError) as error:
                raise UserError(f"{file} cannot be read: {line(error)}; fetch it again") from error
        tied = config.get("tie_word_embeddings", True) or "lm_head.weight" in tensors
        check(tied, f"{name} has tie_word_embeddings=false and no lm_head.weight: its head is missing")
        return {key: w.T if CONV1D.fullmatch(key) and w.dim() == 2 else w for key, w in tensors.items()}

    tokenizer = "gpt2" if OPENAI.fullmatch(name) else by_vocabulary(model["vocab_size"])
    return Pretrained(model, {}, tokenizer, name), state


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder: one, those that an index names, or none."""
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        return [folder / WEIGHTS] if (folder / WEIGHTS).exists() else []
    files = read_json(folder / INDEX).get("weight_map") or {}
    return [folder / file for file in sorted(set(files.values()))]


def hub(name: str, weights: bool) -> Path:
    """The folder of a hub model in huggingface_hub's cache (which heeds HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE).

    Nothing is asked for what is cached; of what is not, the hub first has to answer within HUB_SECONDS, since the
    library alone tries for 23 s. UserError: it does not.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError:
        raise UserError(f"{name} is on the hub, which needs huggingface_hub: pip install huggingface_hub") from None
    files = (CONFIG, WEIGHTS, "model-*.safetensors", INDEX) if weights else (CONFIG,)
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=files, local_files_only=True))
        held = weight_files(folder) if weights else [folder / CONFIG]
        if held and all(file.exists() for file in held):
            return folder
    except errors.LocalEntryNotFoundError:
        pass  # not cached
    except errors.HFValidationError as error:
        raise UserError(f"{name}: there is no such file or folder, nor can the hub have it: {error}") from error
    absent = f"{name}: there is no such file or folder, it is not in the hub's cache, and"
    check(
        not constants.HF_HUB_OFFLINE,
        f"{absent} HF_HUB_OFFLINE keeps from downloading it: unset it, or name a folder with {CONFIG} and {WEIGHTS}",
    )
    check(
        reachable(constants.ENDPOINT, HUB_SECONDS),
        f"{absent} {constants.ENDPOINT} cannot be reached: fetch it once with a network, or name a folder with "
        f"{CONFIG} and {WEIGHTS}",
    )
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=files))
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{absent} {constants.ENDPOINT} says {error.response.status_code}: is that its name?"
        ) from error
    except (OSError, errors.HTTPError) as error:
        raise UserError(f"{name} could not be downloaded from {constants.ENDPOINT}: {line(error)}") from error


def sizes(held: dict, names: dict[str, str], source: str) -> dict[str, int]:
    for key in names.values():
        check(type(held.get(key)) is int, f"{source} does not tell its size: {key} is {held.get(key, 'missing')}")
    return {ours: held[theirs] for ours, theirs in names.items()}


def read_json(path: Path) -> dict:
    try:
        held = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {line(error)}") from error
    check(isinstance(held, dict), f"{path} is not a JSON object")
    return held


def checked(state: dict[str, Tensor], found: Pretrained) -> dict[str, Tensor]:
    """A source's tensors as fp32 under our names and in our order. UserError: they are not those of this model."""
    weights = {re.sub(r"^(_orig_mod\.)?(transformer\.)?", "", name): weight for name, weight in state.items()}
    weights = {name: weight for name, weight in weights.items() if not MASK.fullmatch(name)}
    head = weights.pop("lm_head.weight", None)
    expected = shapes(found)
    compare(weights, expected, found.name)
    for name, weight in weights.items():
        check(weight.dtype in FLOATS, f"{found.name} holds {name} as {weight.dtype}: quantized weights are not read")
    check(
        head is None or torch.equal(head, weights["wte.weight"]),
        f"{found.name} has an untied head: its lm_head.weight is not wte.weight, and here they are one",
    )
    return {name: weights[name].float().contiguous() for name in expected}


def shapes(found: Pretrained) -> dict[str, torch.Size]:
    """The model's state dict, as it would be built. UserError: the sizes are not possible."""
    try:
        config = GPTConfig(**found.model, dropout=0.0)
    except UserError as error:
        raise UserError(f"{found.name} is no model that can be built: {error}") from error
    with torch.device("meta"):
        model = GPT(config, Ops(*[None] * len(Ops._fields)))  # it is not called
    return {name: weight.shape for name, weight in model.state_dict().items()}


def compare(weights: dict[str, Tensor], expected: dict[str, torch.Size], source: str) -> None:
    """UserError: names what is missing, unknown or of another shape, the first three of each."""
    wrong = [name for name in expected if name in weights and weights[name].shape != expected[name]]
    differs = {
        "lacks": [name for name in expected if name not in weights],
        "has, unknown here,": [name for name in weights if name not in expected],
        "has in another shape": [f"{name} {tuple(weights[name].shape)}, not {tuple(expected[name])}" for name in wrong],
    }
    told = [
        f"{what} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for what, names in differs.items()
        if names
    ]
    check(not told, f"{source} is not this model: it {'; it '.join(told)}")

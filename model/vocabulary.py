"""The size of a model's vocabulary: the tokenizer's number of ids, padded to a multiple of 64 as in nanoGPT."""

from omegaconf import DictConfig, OmegaConf

from data.errors import DataError
from data.tokenizer import TOKENIZERS
from data.tokenizer_json import tokenizer_size
from runtime.config import UserError


def padded(ids: int) -> int:
    """Return the next multiple of 64: 50,304 for GPT-2's 50,257 ids."""
    return -(-ids // 64) * 64


def take_vocabulary(cfg: DictConfig, key: str) -> None:
    """Replace model.vocab_size=null in a composed config by the size for the tokenizer that `key` names, or for bytes.

    Raises UserError if there is no such tokenizer, or if it cannot be read.
    """
    model, tokenizer = cfg.get("model"), OmegaConf.select(cfg, key) or "bytes"
    if not model or "vocab_size" not in model or model.vocab_size is not None:
        return
    try:
        model.vocab_size = padded(tokenizer_size(tokenizer, key))
    except DataError as error:
        raise UserError(str(error)) from error


def guess_tokenizer(vocab_size: int) -> str | None:
    """Return the tokenizer whose number of ids fits: gpt2 for 50,257 to 50,304, its size padded to a multiple of 64."""
    for name, tokenizer in TOKENIZERS.items():
        if tokenizer.n_vocab <= vocab_size <= padded(tokenizer.n_vocab):
            return name
    return None

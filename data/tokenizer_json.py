"""Tokenizers of other models, as transformers stores them: tokenizer.json and the files beside it.

Only byte-level BPE is read, as GPT-2, Llama 3, SmolLM2 and Qwen have it: each id stands for bytes of UTF-8, so text can
be streamed and counted. SentencePiece's tokenizers (Llama 2, Mistral) are refused: they encode a space differently
at the start of a text, so a long text could not be cut (split_into_pieces).
"""

import hashlib
import json
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from common.files import read_bytes
from common.terminal import one_line
from data.errors import DataError
from data.hub import HUB_NAME, snapshot
from data.shards import stamp
from data.tokenizer import TOKENIZERS, Tokenizer, byte_characters

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
GENERATION, MODEL = "generation_config.json", "config.json"
FILES = TOKENIZER, SETTINGS, GENERATION, MODEL
MOST_BYTES = 2**28  # Gemma's tokenizer.json, with 262,144 ids, has 33 MB
PROBES = ("a", "Z", "é", "世", "1", ".", "'s", "#", "\U0001f642", "\u0301")  # one of each kind of character


def open_tokenizer(name: str, key: str = "tokenizer") -> Tokenizer:
    """Return the tokenizer of this name: a key of TOKENIZERS, a folder with tokenizer.json, or owner/name on the hub.

    Raises DataError, which names the config's `key`, if there is none, or if it cannot be read.
    """
    check_name(name, key)
    if name in TOKENIZERS:
        return TOKENIZERS[name]()
    folder = Path(name)
    if not is_folder(name):
        if not HUB_NAME.fullmatch(name):
            raise DataError(
                f"{key}={name}: there is no such folder; a run that trained with it has a copy: pass {key}=out/RUN"
            )
        folder = snapshot(name, FILES, lambda found: (found / TOKENIZER).exists(), f"a folder with {TOKENIZER}")
    return open_folder(folder)


def check_name(name: str, key: str = "tokenizer") -> None:
    """Raise DataError if no tokenizer can have this name. It looks at no file but the folder of this name."""
    is_path = isinstance(name, str) and ("/" in name or name in (".", "..") or is_folder(name))
    if name not in TOKENIZERS and not is_path:
        known = " or ".join(TOKENIZERS)
        raise DataError(f"{key}={name}: choose {known}, or name a folder with {TOKENIZER} or owner/name on the hub")


def is_folder(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except (OSError, ValueError):  # the name is too long, or holds a NUL
        return False


def tokenizer_size(name: str, key: str) -> int:
    """Return the number of ids of a tokenizer as open_tokenizer() does. The built-in ones need no files for it."""
    return TOKENIZERS[name].n_vocab if name in TOKENIZERS else open_tokenizer(name, key).n_vocab


def same_tokenizer(a: str, b: str) -> bool:
    """Return whether two names are of the same tokenizer. Raises DataError if one cannot be read."""
    return a == b or (not {a, b} & {*TOKENIZERS} and open_tokenizer(a).name == open_tokenizer(b).name)


class TokenizerJson(Tokenizer):
    """The tokenizer of a folder. Its name has a hash of what decides the ids, and no path.

    `eot` is its end of text: eos_token of tokenizer_config.json, else the first eos_token_id of generation_config.json
    or config.json. All of these stop a generated text. Raises DataError if the files cannot be read.
    """

    stops: tuple[int, ...] = ()  # an attribute, in the place of the property

    def __init__(self, folder: Path):
        import tokenizers

        self.folder, path = folder, folder / TOKENIZER
        try:
            self.content = read_bytes(path, MOST_BYTES)
        except FileNotFoundError:
            known = " or ".join(TOKENIZERS)
            raise DataError(f"{folder} has no {TOKENIZER}: name a folder that has one, or {known}") from None
        except OSError as error:
            raise DataError(f"{path} cannot be read: {one_line(error)}") from None
        try:
            facts = json.loads(self.content)
            self.encoding = tokenizers.Tokenizer.from_str(self.content.decode())
        except Exception as error:  # tokenizers raises Exception itself
            raise DataError(f"{path} cannot be read: {one_line(error)}") from None
        self.encoding.no_truncation()
        self.encoding.no_padding()
        if problem := why_not_byte_level(facts) or why_not_split(self.encoding):
            raise DataError(f"{path}: {problem}, and only byte-level BPE is read, as of GPT-2, Llama 3 and Qwen")
        self.n_vocab = max(self.encoding.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.settings = read_object(folder / SETTINGS)
        self.stops = self._stops()
        self.eot = self.stops[0]
        digest = hashlib.sha256(self.content + str(self.eot).encode()).hexdigest()
        self.name = f"tokenizer-{digest[:12]}"

    def __reduce__(self) -> tuple:
        return reopen, (self.folder, self.name)

    def encode(self, text: str) -> np.ndarray:
        self.encoding.encode_special_tokens = True  # text that looks like a special token is text
        return np.array(self.encoding.encode(text, add_special_tokens=False).ids, self.dtype)

    def encode_prompt(self, text: str) -> np.ndarray:
        self.encoding.encode_special_tokens = False
        return np.array(self.encoding.encode(text).ids, self.dtype)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return b"".join(self.bytes_by_id[i] for i in ids if i < self.n_vocab)

    @cached_property
    def bytes_by_id(self) -> list[bytes]:
        """The bytes of text of each id. Special tokens have none."""
        bytes_of = {character: byte for byte, character in enumerate(byte_characters())}
        added = self.encoding.get_added_tokens_decoder()
        table = [b""] * self.n_vocab
        for token, i in self.encoding.get_vocab(with_added_tokens=True).items():
            if i == self.eot or (i in added and added[i].special):
                continue
            is_text = i in added or not all(character in bytes_of for character in token)
            table[i] = token.encode() if is_text else bytes(bytes_of[character] for character in token)
        return table

    @property
    def files(self) -> dict[str, bytes]:
        """The files of a folder with this tokenizer, which transformers' AutoTokenizer reads, too."""
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.settings}
        if settings.get("eos_token") is None:
            settings["eos_token"] = self.encoding.id_to_token(self.eot)
        files = {TOKENIZER: self.content, SETTINGS: to_json(settings)}
        if len(self.stops) > 1:
            files[GENERATION] = to_json({"eos_token_id": list(self.stops)})
        return files

    @property
    def bos(self) -> int | None:
        """The id of bos_token, for a model's config.json; None if the settings name none."""
        token = self._token("bos_token")
        return self.encoding.token_to_id(token) if isinstance(token, str) else None

    def _token(self, key: str) -> Any:
        """Return the content of a special token in the settings; None if they name none."""
        token = self.settings.get(key)
        return token.get("content") if isinstance(token, dict) else token

    def _stops(self) -> tuple[int, ...]:
        """Return the ids of the ends of text. Raises DataError if there is none, or if one is wrong."""
        token = self._token("eos_token")
        found = [] if token is None else [self.encoding.token_to_id(token) if isinstance(token, str) else token]
        for name in (GENERATION, MODEL):
            ids = read_object(self.folder / name).get("eos_token_id")
            found += ids if isinstance(ids, list) else [] if ids is None else [ids]
        stops = list(dict.fromkeys(i if type(i) is int and 0 <= i < self.n_vocab else None for i in found))
        if not stops or None in stops:
            what = "names an end of text that is none of its ids" if stops else "names no end of text"
            raise DataError(f"{self.folder / TOKENIZER} {what}: correct eos_token in its {SETTINGS}")
        return tuple(stops)


def open_folder(folder: Path) -> TokenizerJson:
    """Return the tokenizer of a folder. It is read again only if a file changed: 150,000 ids take 1.3 s."""
    return read_folder(folder, tuple(file_stamp(folder / name) for name in FILES))


@lru_cache(maxsize=2)
def read_folder(folder: Path, stamps: tuple) -> TokenizerJson:
    return TokenizerJson(folder)


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a file's stamp; None if it has none, so that reading it says why."""
    try:
        return stamp(path.stat())
    except OSError:
        return None


@lru_cache(maxsize=1)  # a worker gets the tokenizer with every chunk of text
def reopen(folder: Path, name: str) -> TokenizerJson:
    """Return the tokenizer in another process. Raises DataError if its file has changed."""
    tokenizer = TokenizerJson(folder)
    if tokenizer.name != name:
        raise DataError(f"{folder / TOKENIZER} changed while it was in use: run the same command again")
    return tokenizer


def why_not_byte_level(facts: dict) -> str | None:
    """Return why the ids of a tokenizer.json are no bytes of text; None if they are."""

    def kinds(part: Any) -> list[str]:
        """Return the types of a part of the pipeline, or of the members of a Sequence."""
        if not isinstance(part, dict):
            return []
        members = next((part[key] for key in ("pretokenizers", "normalizers", "decoders") if key in part), None)
        return [str(part.get("type"))] if members is None else [kind for member in members for kind in kinds(member)]

    model, normalizer = facts.get("model") or {}, kinds(facts.get("normalizer"))
    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}"
    if kinds(facts.get("decoder")) != ["ByteLevel"] or "ByteLevel" not in kinds(facts.get("pre_tokenizer")):
        return "it is not byte-level"
    return f"it changes the text ({normalizer[0]})" if set(normalizer) - {"NFC"} else None


def why_not_split(encoding: Any) -> str | None:
    """Return why the ids of a long text are not those of its pieces (split_into_pieces); None if they are."""
    for before in PROBES:
        for after in PROBES:
            whole, start = (encoding.encode(text, add_special_tokens=False).ids for text in (f"{before}\n", after))
            if encoding.encode(f"{before}\n{after}", add_special_tokens=False).ids != whole + start:
                return "it joins a line feed to the next line, or adds a space"
    return None


def read_object(path: Path) -> dict:
    """Return the JSON object in a file; {} if there is no file. Raises DataError if it is something else."""
    try:
        value = json.loads(read_bytes(path, MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object")
    return value


def to_json(value: dict) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()

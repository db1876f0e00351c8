"""Turn a stream of tokens into text: whole characters only, up to a stop."""

import codecs
from collections.abc import Iterable

from data.tokenizer import Tokenizer


def stop_ids(tokenizer: Tokenizer, stops: list[int | str] | None) -> tuple[int, ...]:
    """Return the token ids that end a text: the ids in `stops`, and the tokenizer's own. Empty if `stops` is None."""
    return () if stops is None else (*tokenizer.stops, *(stop for stop in stops if isinstance(stop, int)))


class Text:
    """The text of one sequence while its tokens arrive. `stopped` is true after a stop token or a stop text.

    add() and finish() return new text that no later token can change. add() holds back a character until all its bytes
    are there, and the end of the text while a stop text may begin in it. The stop text itself is left out. `stops` are
    texts and token ids. The tokenizer's own stops always end a text, unless `stops` is None. `tokens` has the tokens so
    far, with the last token of the stop.
    """

    def __init__(self, tokenizer: Tokenizer, stops: list[int | str] | None):
        self.decode_bytes = tokenizer.decode_bytes
        self.stop_ids = stop_ids(tokenizer, stops)
        self.stop_texts = [stop for stop in stops or [] if isinstance(stop, str)]
        self.tokens: list[int] = []
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds the bytes of half a character
        self.held = ""  # whole characters that add() has not returned yet
        self.stopped = False

    def add(self, tokens: Iterable[int]) -> str:
        """Add tokens up to the first stop, and return the new text."""
        # One by one with stop texts, because `tokens` must end with the last token of the stop
        groups = [[token] for token in tokens] if self.stop_texts else [list(tokens)]
        text = ""
        for group in groups:
            if self.stopped:
                break
            text += self._add_tokens(group)
        return text

    def finish(self) -> str:
        """Return the rest of the text when no more tokens come; "" after a stop."""
        if self.stopped:
            return ""
        self.held += self.decoder.decode(b"", final=True)
        text = self._release()
        text, self.held = text + self.held, ""
        return text

    def _add_tokens(self, new: list[int]) -> str:
        end = min((new.index(stop) for stop in self.stop_ids if stop in new), default=len(new))
        self.tokens += new[: end + 1]
        self.held += self.decoder.decode(self.decode_bytes(new[:end]))
        if end == len(new):
            return self._release()
        text = self.finish()
        self.stopped = True
        return text

    def _release(self) -> str:
        """Remove and return the part of `held` before a stop text, or before an end that may begin a stop text."""
        found = [index for index in map(self.held.find, self.stop_texts) if index >= 0]
        if found:
            text, self.held, self.stopped = self.held[: min(found)], "", True
            return text
        beginnings = (n for stop in self.stop_texts for n in range(1, len(stop)) if self.held.endswith(stop[:n]))
        end = len(self.held) - max(beginnings, default=0)
        text, self.held = self.held[:end], self.held[end:]
        return text

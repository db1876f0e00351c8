"""Turn a stream of tokens into text: whole characters only, up to a stop."""

from data.tokenizer import Tokenizer


class Text:
    """The text of one sequence while its tokens arrive. `stopped` is true after a stop token or a stop text.

    add() and finish() return new text that no later token can change. add() holds back a character until all its bytes
    are there, and the end of the text while a stop text may begin in it. The stop text itself is left out. `stops` are
    texts and token ids. The tokenizer's eot is always a stop.
    """

    def __init__(self, tokenizer: Tokenizer, stops: list[int | str]):
        self.decode = tokenizer.decode
        self.ids = {tokenizer.eot, *(stop for stop in stops if isinstance(stop, int))}
        self.stops = [stop for stop in stops if isinstance(stop, str)]
        self.pending: list[int] = []  # tokens whose last character lacks bytes
        self.taken = 0  # characters of the text of `pending` that are already in `held`
        self.held = ""  # whole characters that add() has not returned yet
        self.stopped = False

    def add(self, token: int) -> str:
        """Add a token, and return the new text."""
        if token in self.ids:
            text = self.finish()
            self.stopped = True
            return text
        self.pending.append(token)
        text = self.decode(self.pending)
        whole = text.removesuffix("\ufffd")  # the last character decodes to U+FFFD while it is incomplete
        self.held += whole[self.taken :]
        if whole == text:
            self.pending, self.taken = [], 0
        else:
            self.taken = len(whole)
        return self._release()

    def finish(self) -> str:
        """Return the rest of the text, when no more tokens come."""
        self.held += self.decode(self.pending)[self.taken :]
        self.pending, self.taken = [], 0
        text = self._release()
        text, self.held = text + self.held, ""
        return text

    def _release(self) -> str:
        """Take from `held` what comes before a stop text, or before what may be the beginning of one."""
        found = [index for index in map(self.held.find, self.stops) if index >= 0]
        if found:
            text, self.held, self.stopped = self.held[: min(found)], "", True
            return text
        beginnings = (n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n]))
        end = len(self.held) - max(beginnings, default=0)
        text, self.held = self.held[:end], self.held[end:]
        return text

"""The text of generated tokens while they come: whole characters, and where it ends."""

from data.tokenizer import Tokenizer


class Text:
    """The text of one sequence as its tokens come; `stopped` once a stop token or a stop text has come.

    add() and finish() give what is certain by then. The last character is held back while more bytes may belong to it,
    and the end of the text while it may be the beginning of a stop text, which itself is left out. `stops` are texts
    and token ids; the tokenizer's eot is always one.
    """

    def __init__(self, tokenizer: Tokenizer, stops: list[int | str]):
        self.decode = tokenizer.decode
        self.ids = {tokenizer.eot, *(stop for stop in stops if isinstance(stop, int))}
        self.stops = [stop for stop in stops if isinstance(stop, str)]
        self.pending: list[int] = []  # tokens whose text is not whole
        self.taken = 0  # characters of it that went to `held`
        self.held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        if token in self.ids:
            text = self.finish()
            self.stopped = True
            return text
        self.pending.append(token)
        text = self.decode(self.pending)
        whole = text.removesuffix("\ufffd")  # what an unfinished character decodes to, at most one of them
        self.held += whole[self.taken :]
        self.pending, self.taken = (self.pending, len(whole)) if whole != text else ([], 0)
        return self._release()

    def finish(self) -> str:
        """The rest: no more tokens come."""
        self.held += self.decode(self.pending)[self.taken :]
        self.pending, self.taken = [], 0
        text = self._release()
        text, self.held = text + self.held, ""
        return text

    def _release(self) -> str:
        found = [at for at in map(self.held.find, self.stops) if at >= 0]
        if found:
            text, self.held, self.stopped = self.held[: min(found)], "", True
            return text
        starts = (n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n]))
        keep = len(self.held) - max(starts, default=0)
        text, self.held = self.held[:keep], self.held[keep:]
        return text

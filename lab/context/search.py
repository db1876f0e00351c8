"""Search for the longest length that fits: start at a prediction, double the steps, then bisect."""

import math
from collections.abc import Callable, Sequence

import torch

from common.terminal import printable
from lab.context.attempt import WINDOW, predict, tokens_before_last_chunks
from lab.context.prober import REFUSED, Prober, ProbeResult
from lab.recipe import Recipe
from runtime.config import check
from runtime.run import Run

OCTAVE = 128  # how many lengths there are from one power of two to the next
INDICES = 23 * OCTAVE  # number of lengths, which are all below 2^30 tokens
UNPREDICTED_START = 1024  # tokens at which a search without a prediction starts
LONGEST_START = 2**24  # a search starts at this many tokens at most
# Two short attempts come first, at 1/16 and 1/8 of min(start, SHORT) tokens. At 1/4 and 1/2 they took 140 s
SHORT = 2**20
SHORT_CHUNKS = 2**22  # instead of SHORT, if in chunks: 1/16 is 6 chunks of GPT-2 124M; below, memory is not linear


def length_of(index: int) -> int:
    """Return one of the lengths that are tried: 128, 129, ... 255, and their doubles, in steps of 0.4 to 0.8%."""
    octave, step = divmod(index, OCTAVE)
    return (OCTAVE + step) << octave


def index_of(length: float) -> int:
    """Return the index of the longest of these lengths up to `length`, which is at least 128."""
    octave = int(length).bit_length() - OCTAVE.bit_length()
    return OCTAVE * octave + (int(length) >> octave) - OCTAVE


def last_that_fits(fits: Callable[[int], bool], start: int, step: int) -> int | None:
    """Return an index that fits while the next index does not; None if not even index 0 fits.

    The steps from `start` double, then a bisection follows. No index is tried above an index that did not fit.
    """
    low, high, index = -1, INDICES, start
    while high - low > 1:
        if fits(index):
            low = index
        else:
            high = index
        if low < 0:
            index = max(0, high - step)
        elif high == INDICES:
            index = min(low + step, INDICES - 1)
        else:
            index = (low + high) // 2
        step = min(2 * step, OCTAVE)
    return None if low < 0 else low


def extrapolate_start(rows: list[dict], gib: float) -> float:
    """Return the T at which a line through the peaks of two rows reaches `gib`, in [OCTAVE, LONGEST_START]."""
    short, long = sorted(rows, key=lambda row: row["T"])
    gib_a_token = max(long["peak_gib"] - short["peak_gib"], 1e-9) / (long["T"] - short["T"])
    length = short["T"] + (gib - short["peak_gib"]) / gib_a_token
    return min(max(length, OCTAVE), LONGEST_START)


def predict_longest(recipe: Recipe, mode: str, usable_gib: float, device: torch.device) -> dict | None:
    """Return the prediction for the longest T whose peak is at most `usable_gib`; None if not even 128 tokens fit."""
    rows: dict[int, dict] = {}  # T -> prediction, in the order in which they are made

    def predict_at(index: int) -> dict:
        length = length_of(index)
        if length not in rows:
            rows[length] = predict(recipe, mode, length, device)
        return rows[length]

    def start() -> int:
        """Return where the line through the last two predictions reaches `usable_gib`."""
        return index_of(extrapolate_start([*rows.values()][-2:], usable_gib))

    for length in (8192, 16384):
        predict_at(index_of(length))
    for _ in range(8):  # two suffice if memory is linear in T; attn=eager takes more
        predict_at(start())  # at millions of tokens, the line through the first two was up to 31% off
    index = last_that_fits(lambda index: predict_at(index)["peak_gib"] <= usable_gib, start(), step=1)
    return None if index is None else predict_at(index)


def fit_step_seconds(rows: list[dict]) -> Callable[[int], float]:
    """Return a function from T to the seconds of a step: a T + b T^2 through two rows, where b T^2 is attention.

    Without two successful rows, the function returns 0.
    """
    rows = [row for row in rows if row["status"] == "ok"]
    if len(rows) < 2:
        return lambda length: 0.0
    short, long = rows
    short_rate, long_rate = (row["seconds"] / row["T"] for row in rows)
    quadratic = max(0.0, (long_rate - short_rate) / (long["T"] - short["T"]))
    linear = max(0.0, long_rate - quadratic * long["T"])
    return lambda length: (linear + quadratic * length) * length


class Search:
    """The search in one mode. `earlier` are attempts of a stopped search, which are not repeated."""

    def __init__(
        self, prober: Prober, recipe: Recipe, mode: str, prediction: ProbeResult, run: Run, earlier: Sequence = ()
    ):
        self.prober, self.recipe, self.mode, self.prediction = prober, recipe, mode, prediction
        self.run, self.earlier = run, earlier
        self.compiled = recipe.kernels.compile and mode == "train"  # torch.compile compiles no prefill
        self.rows: list[dict] = []  # one for each attempt
        self.step_seconds = fit_step_seconds([])  # T -> expected seconds of one step

    def two_step_seconds(self, length: int) -> float:
        """Return the expected seconds of two steps. Every attempt that ran out of time doubles the expectation."""
        # a timeout with `why` is an attempt that was not run
        timeouts = sum(row["status"] == "timeout" and "why" not in row for row in self.rows)
        return 2 * self.step_seconds(length) * 2**timeouts

    def is_slow(self, length: int) -> bool:
        """Return whether two steps are expected to exceed the time limit of an attempt."""
        return self.two_step_seconds(length) > 0.8 * 60 * self.prober.minutes  # a fifth of the time is for starting up

    def can_shorten(self, length: int) -> bool:
        """Return whether an attempt at this length can be shortened. A short prompt has only last chunks."""
        return self.prediction.can_shorten and (self.mode == "train" or tokens_before_last_chunks(length) > 0)

    def attempt(self, length: int) -> dict:
        """Try this length and return its row. An attempt that takes too long is repeated, shortened if possible."""
        row = self.one_attempt(length)
        if row["status"] == "timeout" and self.can_shorten(length) and not row["shortened"]:
            return self.one_attempt(length)  # after a timeout, it is shortened
        return row

    def one_attempt(self, length: int) -> dict:
        """Take the row of an earlier attempt, or run an attempt if there is time. Keep, print and return the row."""
        timed_out = any(row["status"] == "timeout" and row["T"] <= length for row in self.rows)
        shortened = self.can_shorten(length) and (timed_out or self.is_slow(length))
        row = {"T": length, "shortened": shortened}
        earlier_row = self.find_earlier(row)
        if earlier_row:
            row = earlier_row
        elif length > (self.prediction.host_tokens or length):
            tokens = self.prediction.host_tokens
            why = f"not run: the host's free memory holds the inputs of {tokens:,} tokens"
            row |= {"status": "host memory", "why": why}
        elif self.is_slow(length) and not shortened:
            seconds = self.two_step_seconds(length)
            row |= {"status": "timeout", "why": f"not run: two steps would take {seconds:.0f} s"}
        else:
            result = self.prober.attempt(self.mode, length, shortened)
            row = result.row or {**row, "status": result.failure}
            if result.why:
                row["why"] = result.why
            if not self.rows:  # a config that is refused at the first length is refused at every length
                check(not row["status"].startswith(REFUSED), row["status"].removeprefix(REFUSED))
        self.rows.append(row)
        print(attempt_line(self.mode, row), flush=True)
        if not earlier_row:
            self.run.log(len(self.rows), {"mode": self.mode, **row})
        return row

    def find_earlier(self, row: dict) -> dict | None:
        """Return the row of an earlier attempt in this mode with these T and `shortened`; None if there is none.

        A row with the status "host memory" does not count, because the host may have more free memory now.
        """
        wanted = {**row, "mode": self.mode}
        for earlier in self.earlier:
            was_run = earlier.get("status") != "host memory"
            if was_run and all(earlier.get(key) == value for key, value in wanted.items()):
                return {key: value for key, value in earlier.items() if key not in ("mode", "step")}
        return None

    def first_index(self, predicted: int | None) -> int:
        """Return the index to start at, by the prediction and by two short attempts.

        If attempts cannot be shortened, the index is lowered until a step is not slow, at most to 0.
        """
        host_tokens = self.prediction.host_tokens or math.inf
        start = min(predicted or UNPREDICTED_START, host_tokens)
        if start > 4 * WINDOW:
            longest = SHORT_CHUNKS if self.recipe.model.checkpointing == "chunks" else SHORT
            short = [self.attempt(min(start, longest) // divisor) for divisor in (16, 8)]
            self.step_seconds = fit_step_seconds([row for row in short if not row["shortened"]])
            start = min(self.correct_start(predicted, short), host_tokens)
        index = index_of(start)
        if self.can_shorten(length_of(index)):
            return index
        while index > 0 and self.is_slow(length_of(index)):
            index -= 1
        return index

    def correct_start(self, predicted: int, short: list[dict]) -> float:
        """Return the T to start at, by the prediction and two short attempts.

        The prediction ignores NCCL's memory, so several ranks start lower. If the prediction misses an op's memory or
        ignores torch.compile, and the short attempts differ from it by 5%, they replace it.
        """
        if any(row["status"] != "ok" for row in short):
            return predicted
        usable_gib = min(row.get("room_gib", self.prediction.usable_gib) for row in short)
        start = extrapolate_start(short, usable_gib)  # it was 1.4% off at 4.7 million tokens
        missing = extrapolate_start(short, self.prediction.usable_gib) - start
        predicted = max(predicted - missing, OCTAVE)
        is_uncertain = self.compiled or self.prediction.row.get("opaque")
        return start if is_uncertain and abs(start / predicted - 1) >= 0.05 else predicted

    def longest(self) -> dict:
        """Search, print the result, and return the figures of this mode for the row."""
        predicted = self.prediction.row and self.prediction.row["T"]
        step = 1 if predicted else OCTAVE  # on an H200 predictions were 0.05% off
        first = self.first_index(predicted)
        index = last_that_fits(lambda index: self.attempt(length_of(index))["status"] == "ok", first, step)
        length = None if index is None else length_of(index)
        # the last attempt at a length counts: it may be shortened
        failed = {row["T"]: row["status"] for row in self.rows if row["status"] != "ok" and row["T"] > (length or 0)}
        figures = {"predicted": None if self.compiled else predicted, "tries": self.rows}
        figures["limit"] = failed[min(failed)] if failed else None
        if length:
            figures |= self.figures_at(length)
        print(summary(self.mode, figures, length))
        kernels = {"kernels": figures.pop("kernels")} if "kernels" in figures else {}
        figures = {f"context/{self.mode}/{key}": value for key, value in figures.items()}
        return {f"context/max_{self.mode}": length, **figures, **kernels}

    def figures_at(self, length: int) -> dict:
        """Return the measured and the predicted figures at the longest length, and in training its `kernels`."""
        best = next(row for row in self.rows if row["T"] == length and row["status"] == "ok")
        names = "seconds", "window", "computed", "peak_gib", "reserved_gib"
        figures = {key: best[key] for key in names if key in best}
        figures["headroom_gib"] = self.prediction.limit_gib - (best["reserved_gib"] or best["peak_gib"])
        if best["shortened"]:
            figures["seconds_of_full_attention"] = self.two_step_seconds(length) / 2
        result = self.prober.predict(self.mode, length)
        if self.mode == "train" and result.kernels:
            figures["kernels"] = result.kernels
        if result.row and not self.compiled:
            figures["prediction"] = result.row
            figures["prediction_error"] = result.row["peak_gib"] / best["peak_gib"] - 1
        return figures


def attempt_line(mode: str, row: dict) -> str:
    """Return one attempt in a line, for the terminal."""
    reason = row.get("why", "")
    cells = [f"{mode:<8} T {row['T']:>11,}", reason if reason.startswith("not run") else row["status"]]
    if row["status"] == "ok":
        cells.append(f"{row['seconds']:.3f} s")
    if row.get("peak_gib") is not None:
        reserved = f" ({row['reserved_gib']:.2f} reserved)" if row["reserved_gib"] else ""
        cells.append(f"peak {row['peak_gib']:.2f} GiB{reserved}")
    if row.get("window"):
        cells.append(f"window {row['window']}")
    if row.get("computed", row["T"]) < row["T"]:
        cells.append(f"the last {row['computed']:,} computed")
    return printable(" | ".join(cells))


def summary(mode: str, figures: dict, length: int | None) -> str:
    """Return the result of a search in a line, for the terminal. `figures` come from Search.longest()."""
    if not length:
        return printable(f"{mode:<8} not even {OCTAVE} tokens: {figures['limit']}")
    predicted = ""
    if prediction := figures.get("prediction"):
        predicted = f", predicted {prediction['peak_gib']:.2f} ({figures['prediction_error']:+.1%})"
    return printable(
        f"{mode:<8} the longest T is {length:,}: peak {figures['peak_gib']:.2f} GiB{predicted}, "
        f"{figures['headroom_gib']:.2f} to spare; the next length: {figures['limit']}"
    )

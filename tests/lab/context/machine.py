"""A fake Prober, and a fake Run, for tests of the search."""

from lab.context.prober import ProbeResult
from lab.context.search import index_of, length_of
from runtime.device import GIB
from runtime.signals import Stopped


class Machine:
    """Gives the results of child processes on a device of 80 GiB. It is also a fake Run, whose log() keeps the figures.

    T tokens take 64 KiB x T, and 1e-6 T + `quadratic` T^2 seconds, or 1e-6 T if shortened. Lengths below 2^17 take
    `bend` GiB more, and lengths above 2^17 take `late` times as long. Lengths above `crash` crash. `predicted` is the
    prediction of the bytes a token.
    """

    LIMIT = 1310720

    def __init__(self, predicted=2**16, quadratic=0.0, can_shorten=True, crash=None, bend=0.0, late=1, minutes=5):
        self.predicted, self.quadratic, self.crash = predicted, quadratic, crash
        self.bend, self.late, self.minutes = bend, late, minutes
        self.attempted, self.logged, self.row, self.stop = [], [], {}, None
        self.first = ProbeResult(limit_gib=80.0, usable_gib=80.0, can_shorten=can_shorten)
        self.first.row = predicted and self.prediction(80 * GIB / predicted)

    def prediction(self, length):
        length = length_of(index_of(length))
        return {"T": length, "peak_gib": length * self.predicted / GIB}

    def seconds(self, length):
        return (1e-6 * length + self.quadratic * length**2) * (self.late if length > 2**17 else 1)

    def predict(self, mode, length=None):
        if length:
            return ProbeResult(row=self.predicted and self.prediction(length))
        return self.first

    def attempt(self, mode, length, shortened):
        if len(self.attempted) == self.stop:
            raise Stopped(130, "SIGINT")
        self.attempted.append(length)
        seconds = 1e-6 * length if shortened else self.seconds(length)
        if 2 * seconds > 60 * self.minutes:
            return ProbeResult(failure="timeout")
        if self.crash and length > self.crash:
            return ProbeResult(failure="failed: an illegal memory access")
        gib = min(80, length * 2**16 / GIB + self.bend * (length < 2**17))
        row = {"T": length, "shortened": shortened}
        row |= {"window": 4096 if shortened else None} if mode == "train" else {"computed": 2**15}
        if length > self.LIMIT:
            row |= {"status": "oom", "why": "out of memory"}
        else:
            row |= {"status": "ok", "seconds": seconds, "loss": 10.8}
        return ProbeResult(row=row | {"peak_gib": gib, "reserved_gib": gib})

    def log(self, step, figures):
        self.logged.append(figures)

"""A colour for each choice, the same in every panel, and colours for parts of a whole; told apart by the colour-blind.

Okabe and Ito's (https://jfly.uni-koeln.de/color/) for choices, then some of Paul Tol's "muted", as for parts
(https://personal.sron.nl/~pault/). `var(--ink)` and the like are page.css's, of the light and of the dark.
"""

from collections.abc import Iterable
from itertools import cycle

INK, QUIET, CARD, GRID = "var(--ink)", "var(--quiet)", "var(--card)", "var(--grid)"
CHOICES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8C6BB1", "#999933", "#8B5A2B", "#7F8C8D")
CHOICES += ("#44AA99", "#AA4499", "#DDCC77", "#882255")
SYMBOLS = "circle", "square", "diamond", "cross"  # of choices whose colour is taken
PARTS = ("#4477AA", "#88CCEE", "#44AA99", "#DDCC77", "#CC6677", "#AA4499", "#999933", "#117733", "#882255")
FAMILIES = ("gemm", "attention", "norm", "loss", "mlp", "optimizer", "elementwise", "copy")


def colours(names: Iterable[str]) -> dict[str, str]:
    """Of choices, in the order in which they come first; a backend has that of the first choice made of it alone."""
    found: dict[str, str] = {}
    unused = cycle(CHOICES)
    for name in dict.fromkeys(names):
        own = next((colour for known, colour in found.items() if known.split(" · ")[0] == name), None)
        found[name] = own or next(unused)
    return found


def parts(names: Iterable[str]) -> dict[str, str]:
    """Of a whole: a known family has one of its own, and what is left is grey."""
    order = dict.fromkeys([*FAMILIES, *names])
    found = dict(zip((name for name in order if name != "other"), PARTS * 9, strict=False))
    return found | {"other": "#A0A0A0"}


def readable(colour: str) -> str:
    """Black or white, on it."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#fff"

"""A colour for each choice, the same in every panel, and colours for parts of a whole; told apart by the colour-blind.

Okabe and Ito's (https://jfly.uni-koeln.de/color/) for choices, then some of Paul Tol's "muted", as for parts
(https://personal.sron.nl/~pault/). `var(--ink)` and the like are page.css's, of the light and of the dark.
"""

from collections.abc import Collection, Iterable
from itertools import cycle

INK, QUIET, CARD, GRID = "var(--ink)", "var(--quiet)", "var(--card)", "var(--grid)"
CHOICES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8C6BB1", "#999933", "#8B5A2B", "#7F8C8D")
CHOICES += ("#44AA99", "#AA4499", "#DDCC77", "#882255")
SYMBOLS = "circle", "square", "diamond", "cross"  # of choices whose colour is taken
PARTS = ("#4477AA", "#88CCEE", "#44AA99", "#DDCC77", "#CC6677", "#AA4499", "#999933", "#117733", "#882255")


def colours(choices: Iterable[str], backends: Collection[str] = ()) -> dict[str, str]:
    """In the order in which they come first; a backend has that of the first choice made of it alone."""
    found = dict(zip(dict.fromkeys(choices), cycle(CHOICES), strict=False))
    own = {name.split(" · ")[0]: colour for name, colour in reversed(found.items())}
    known = {name: own[name] for name in backends if name in own}
    free = cycle([colour for colour in CHOICES if colour not in known.values()] or CHOICES)
    return found | {name: known.get(name) or next(free) for name in dict.fromkeys(backends)}


def parts(names: Iterable[str]) -> dict[str, str]:
    """Of a whole; what is left is grey."""
    found = dict(zip((name for name in names if name != "other"), cycle(PARTS), strict=False))
    return found | {"other": "#A0A0A0"}


def readable(colour: str) -> str:
    """Black or white, on it."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#fff"

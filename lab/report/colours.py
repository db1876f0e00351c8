"""Colours of the report: one for each choice in every panel, and one for each part of a whole.

Colour-blind readers can distinguish them. The colours of choices are Okabe and Ito's (https://jfly.uni-koeln.de/color/),
then some of Paul Tol's "muted" (https://personal.sron.nl/~pault/). The colours of parts are mostly "muted". page.css
defines `var(--ink)` and the other variables, for a light and for a dark page.
"""

from collections.abc import Collection, Iterable
from itertools import cycle

INK, QUIET, CARD, GRID = "var(--ink)", "var(--quiet)", "var(--card)", "var(--grid)"
CHOICE_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8C6BB1", "#999933", "#8B5A2B"]
CHOICE_COLOURS += ["#7F8C8D", "#44AA99", "#AA4499", "#DDCC77", "#882255"]
CHOICE_SYMBOLS = "circle", "square", "diamond", "cross"  # the n-th choice of a colour has the n-th symbol
PART_COLOURS = ["#4477AA", "#88CCEE", "#44AA99", "#DDCC77", "#CC6677", "#AA4499", "#999933", "#117733", "#882255"]
PART_COLOURS += ["#332288", "#E69F00", "#8B5A2B"]
GREY = "#A0A0A0"


def choice_colours(choices: Iterable[str], backends: Collection[str] = ()) -> dict[str, str]:
    """Return a colour for each name of a choice, in the order of the names, and for each name of a backend.

    A backend has the colour of the first choice whose kernels are that backend alone. The other backends take colours
    that no backend has yet.
    """
    colours = dict(zip(dict.fromkeys(choices), cycle(CHOICE_COLOURS), strict=False))
    colour_of_kernels = {name.split(" · ")[0]: colour for name, colour in reversed(colours.items())}
    shared = {name: colour_of_kernels[name] for name in backends if name in colour_of_kernels}
    free = cycle([colour for colour in CHOICE_COLOURS if colour not in shared.values()] or CHOICE_COLOURS)
    return colours | {name: shared.get(name) or next(free) for name in dict.fromkeys(backends)}


def part_colours(parts: Iterable[str]) -> dict[str, str]:
    """Return a colour for each part of a whole; the part "other" is grey."""
    named = [part for part in parts if part != "other"]
    return dict(zip(named, cycle(PART_COLOURS), strict=False)) | {"other": GREY}


def text_colour(background: str) -> str:
    """Return black or white, whichever is readable on this "#RRGGBB"."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#fff"

"""Colours of the report: one for each family of kernels in every panel, and one for each part of a whole.

Colour-blind readers can distinguish them. The first six are Okabe and Ito's (https://jfly.uni-koeln.de/color/); the
others are some of Paul Tol's "muted" (https://personal.sron.nl/~pault/). The colours of parts are mostly "muted".
page.css has INK, QUIET, CARD and GRID, too.
"""

from collections.abc import Collection, Iterable
from itertools import cycle

from lab.report.describe import kernels_family

INK, QUIET, CARD, GRID = "black", "#6c6e75", "white", "#e8e8e5"
CHOICE_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"]
BACKEND_COLOURS = [*CHOICE_COLOURS, "#8C6BB1", "#999933", "#8B5A2B", "#7F8C8D", "#44AA99", "#AA4499", "#DDCC77"]
BACKEND_COLOURS += ["#882255"]
FP8 = "fp8"  # the family of our kernels in fp8
FAMILY_COLOURS = dict(zip(("eager", "compile", "triton", "gluon", FP8), CHOICE_COLOURS, strict=False))
FAMILY_COLOURS |= {"triton + compile": BACKEND_COLOURS[6], "gluon + compile": BACKEND_COLOURS[7]}
SYMBOLS = ["circle", "square", "diamond", "cross", "triangle-up", "x", "star", "pentagon", "triangle-down", "hexagon"]
SYMBOLS += ["diamond-tall", "triangle-left", "triangle-right", "hexagram"]
DASHES = "solid", "dot", "longdash"  # "dash" is for references
PART_COLOURS = ["#4477AA", "#88CCEE", "#44AA99", "#DDCC77", "#CC6677", "#AA4499", "#999933", "#117733", "#882255"]
PART_COLOURS += ["#332288", "#E69F00", "#8B5A2B", "#00708A", "#7A9E2E"]
GREY = "#A0A0A0"


def choice_colours(choices: Iterable[str], backends: Collection[str] = ()) -> dict[str, str]:
    """Return the colour of its family for each name of a choice, and of FP8, and a colour for each name of a backend.

    A backend that is a family has the family's colour. The other backends have colours of their own.
    """
    families = {name: kernels_family(name) for name in (*choices, FP8)}
    colours = assign_colours(families.values(), FAMILY_COLOURS)
    return {name: colours[family] for name, family in families.items()} | assign_colours(backends, colours)


def assign_colours(names: Iterable[str], fixed: dict[str, str], reserved: Collection[str] = ()) -> dict[str, str]:
    """Return a colour for each name: its own in `fixed`, or else the next unused one of BACKEND_COLOURS.

    No name gets a colour in `reserved` unless `fixed` gives it.
    """
    names = list(dict.fromkeys(names))
    used = {fixed[name] for name in names if name in fixed} | {*reserved}
    free = cycle([colour for colour in BACKEND_COLOURS if colour not in used])
    return {name: fixed.get(name) or next(free) for name in names}


def attention_styles(choices: Iterable[str], styles: tuple[str, ...]) -> dict[str, str]:
    """Return the style of its attention for each name of a choice; `styles` is SYMBOLS or DASHES."""
    names = {name: name.partition(" · ")[2] for name in choices}
    attentions = dict(zip(dict.fromkeys(names.values()), cycle(styles), strict=False))
    return {name: attentions[attention] for name, attention in names.items()}


def part_colours(parts: Iterable[str]) -> dict[str, str]:
    """Return a colour for each part of a whole; the part "other" is grey."""
    named = [part for part in parts if part != "other"]
    return dict(zip(named, cycle(PART_COLOURS), strict=False)) | {"other": GREY}


def text_on(fill: str) -> str:
    """Return black or white, whichever has the higher contrast to "#rrggbb". It is at least 4.58."""
    return max(("#000000", "#ffffff"), key=lambda text: contrast(text, fill))


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours "#rrggbb", from 1 to 21 (WCAG 2.2)."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    """Return the relative luminance of "#rrggbb" (WCAG 2.2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

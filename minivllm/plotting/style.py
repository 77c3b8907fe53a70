"""One look for all chapters: the same fonts and sizes, and the same colour for the same thing.

Colours are those of Petroff (2021), made to be told apart by people with any kind of colour vision. A kernel keeps
its colour through the whole course; requests get theirs in the order in which they arrive. Neighbours differ in
lightness too, so that figures survive a grey printer.
"""

import matplotlib as mpl
from matplotlib.colors import to_hex

_BLUE, _ORANGE, _RED, _GREY, _PURPLE, _BROWN, _VERMILION, _TAN, _SLATE, _CYAN = (
    to_hex(colour) for colour in mpl.color_sequences["petroff10"]
)

KERNEL_COLOURS = {"flash": _BLUE, "paged": _ORANGE, "mla": _PURPLE, "reference": _SLATE}
REQUEST_COLOURS = (_CYAN, _VERMILION, _TAN, _BROWN)
HIGHLIGHT = _RED
"""What a figure wants to be looked at: the sampled token, the failing row."""
MUTED = _GREY
"""What is there for comparison: the tokens that were not sampled, what is not used."""
INK = "#222222"
FAINT = "#d0d0d0"
PLATE = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.9}
"""What a text stands on where it would cross lines or hatches (`bbox`)."""
TOKEN_LOOKS = {
    "prefill": {"facecolor": KERNEL_COLOURS["flash"], "edgecolor": "white"},
    "recompute": {"facecolor": KERNEL_COLOURS["flash"], "edgecolor": "white", "hatch": "////"},
    "decode": {"facecolor": KERNEL_COLOURS["paged"], "edgecolor": "white"},
    "accepted": {"facecolor": KERNEL_COLOURS["mla"], "edgecolor": "white"},
    "rejected": {"facecolor": "white", "edgecolor": HIGHLIGHT, "hatch": "xxxx"},
    "preempted": {"facecolor": "white", "edgecolor": MUTED, "hatch": "...."},
}
"""What scheduled tokens were, for patches. Long rows of prefill have the colour of the kernel that is made for them,
and so have decodes; hatches tell apart what was done twice, in vain, or not at all."""

_STYLE = {
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "figure.figsize": (7.0, 3.5),
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.linewidth": 0.8,
}


def use_style() -> None:
    """Apply the course's style to all figures that follow."""
    mpl.rcParams.update(_STYLE)


def request_colour(index: int) -> str:
    """The colour of the request that arrived as number `index`; colours come round again after the last."""
    return REQUEST_COLOURS[index % len(REQUEST_COLOURS)]

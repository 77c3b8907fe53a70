"""Figures of chapter 02: holes in contiguous memory, what a page wastes, the order in which blocks are handed out."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from minivllm.plotting.style import HIGHLIGHT, INK, KERNEL_COLOURS, MUTED, PLATE, request_colour

HOLE = {"facecolor": "white", "edgecolor": MUTED, "hatch": "////"}
"""How free memory looks."""

Extent = tuple[str, int, int]
"""Who holds it, the first slot, how many slots."""


def memory_layouts(layouts: Mapping[str, Sequence[Extent]], num_slots: int, title: str) -> tuple[Figure, Axes]:
    """A strip of memory for each moment, with its holders side by side; holes are hatched and say how long they are.

    Args:
        layouts: label -> extents that do not overlap; the first label is on top.
        num_slots: length of the memory.
    """
    fig, ax = plt.subplots(figsize=(7.0, 1.0 + 0.6 * len(layouts)))
    names = dict.fromkeys(name for extents in layouts.values() for name, _, _ in extents)
    colours = {name: request_colour(number) for number, name in enumerate(names)}
    for row, extents in enumerate(layouts.values()):
        end = 0
        for name, first, length in sorted(extents, key=lambda extent: extent[1]):
            _strip(ax, row, end, first - end, f"{first - end} free", HOLE)
            _strip(ax, row, first, length, f"{name}: {length}", {"facecolor": colours[name], "edgecolor": INK})
            end = first + length
        _strip(ax, row, end, num_slots - end, f"{num_slots - end} free", HOLE)
    ax.set_yticks(range(len(layouts)), list(layouts))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set(xlim=(0, num_slots), ylim=(len(layouts) - 0.5, -0.5), title=title, xlabel="slot of the cache")
    return fig, ax


def _strip(ax: Axes, row: int, first: int, length: int, text: str, look: Mapping[str, object]) -> None:
    if length > 0:
        ax.add_patch(Rectangle((first, row - 0.32), length, 0.64, linewidth=0.8, **look))
        ax.text(first + length / 2, row, text, ha="center", va="center_baseline", size=9, bbox=PLATE)


def waste_by_block_size(
    block_sizes: Sequence[int], mean: Sequence[float], largest: Sequence[float], title: str
) -> tuple[Figure, Axes]:
    """Slots that a request holds and does not use, as points on the lines that were predicted.

    Args:
        block_sizes: slots of a block, ascending.
        mean, largest: for each size, the mean and the largest waste of a request, in slots, as measured.
    """
    fig, ax = plt.subplots(figsize=(7.0, 3.6))
    bound = [size - 1 for size in block_sizes]
    half = [value / 2 for value in bound]
    ax.plot(block_sizes, bound, color=INK, linewidth=1.2, linestyle="--")
    ax.plot(block_sizes, half, color=INK, linewidth=1.2)
    ax.plot(
        block_sizes, largest, "^", color=HIGHLIGHT, markersize=8, clip_on=False, zorder=5, label="largest, measured"
    )
    look = {"color": KERNEL_COLOURS["paged"], "markeredgecolor": INK, "markersize": 8, "clip_on": False, "zorder": 5}
    ax.plot(block_sizes, mean, "o", label="mean, measured", **look)
    ax.set_xscale("log", base=2)
    ax.set_yscale("symlog", base=2, linthresh=1)
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    for axis, ticks in ((ax.xaxis, block_sizes), (ax.yaxis, [0, *_powers_of_two(bound[-1])])):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(plain)
        axis.set_minor_formatter(NullFormatter())
    middle = len(block_sizes) // 2
    for text, values, offset, ha, va in (
        ("predicted bound:\nblock size - 1", bound, (-14, 10), "right", "bottom"),
        ("predicted mean:\nhalf of it", half, (14, -12), "left", "top"),
    ):
        place = (block_sizes[middle], values[middle])
        ax.annotate(text, place, offset, textcoords="offset points", ha=ha, va=va)
    ax.set(xlim=(block_sizes[0] / 1.3, block_sizes[-1] * 1.3), ylim=(0, bound[-1] * 1.8), title=title)
    ax.set(xlabel="block size (slots)", ylabel="slots held and not used, a request")
    ax.legend(loc="lower right", frameon=False)
    return fig, ax


def _powers_of_two(highest: float) -> list[int]:
    return [2**power for power in range(0, 32, 2) if 2**power <= highest * 1.8]


def free_queue(states: Mapping[str, Sequence[tuple[int, str | None]]], title: str) -> tuple[Figure, Axes]:
    """The free queue after each event, a row an event; the block on the left is handed out next.

    Args:
        states: label -> (block id, what the block is named for, such as "A[1]", or None) for each free block in order.
    """
    fig, ax = plt.subplots(figsize=(7.0, 1.0 + 0.46 * len(states)))
    owners = dict.fromkeys(name.partition("[")[0] for queue in states.values() for _, name in queue if name)
    colours = {owner: request_colour(number) for number, owner in enumerate(sorted(owners))}
    for row, queue in enumerate(states.values()):
        for place, (block_id, name) in enumerate(queue):
            colour = colours[name.partition("[")[0]] if name else "white"
            ax.add_patch(Rectangle((place - 0.46, row - 0.4), 0.92, 0.8, facecolor=colour, edgecolor=INK))
            text = f"{block_id}  {name}" if name else str(block_id)
            ax.text(place, row, text, ha="center", va="center_baseline", size=9, bbox=PLATE if name else None)
    longest = max(map(len, states.values()), default=0)
    ax.set_yticks(range(len(states)), list(states))
    ax.set_xticks(range(longest))
    ax.tick_params(axis="both", length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.set(xlim=(-0.6, max(longest, 1) - 0.4), ylim=(len(states) - 0.4, -0.6), title=title)
    ax.set_xlabel("place in the free queue (0: handed out next; coloured: can be found)")
    return fig, ax

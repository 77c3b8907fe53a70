"""Figures of the KV cache: who holds which block and when, what is stored and what is wasted, who shares a prefix."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from minivllm.engine.trace_metrics import Occupancy
from minivllm.engine.trace_views import BlockSpan, PrefixNode
from minivllm.plotting.style import FAINT, INK, KERNEL_COLOURS, MUTED, PLATE, request_colour
from minivllm.plotting.timeline import number_steps

SHARED_HATCH = "////"
_MAX_BLOCKS_WITH_NAMES = 40
_SLOT_LOOKS = {
    "holds a token": {"facecolor": KERNEL_COLOURS["paged"], "edgecolor": "white"},
    "kept for later": {"facecolor": FAINT, "edgecolor": "white"},
    "never used": {"facecolor": "white", "edgecolor": MUTED, "hatch": "////"},
}


def blocks_over_time(
    spans: Sequence[BlockSpan], req_ids: Sequence[str], num_blocks: int, num_steps: int, title: str, first: int = 0
) -> tuple[Figure, Axes]:
    """The pool, a row a block, over the steps: coloured by the request that holds it, hatched where several do.

    Args:
        spans: from `trace_views.block_spans`; what lies outside the steps shown is cut off.
        req_ids: in the order that gives each its colour.
        num_steps: how many steps are shown, from `first` on.
    """
    fig, ax = plt.subplots(figsize=(7.0, min(8.0, max(2.6, 1.1 + 0.2 * num_blocks))))
    colours = {req_id: request_colour(number) for number, req_id in enumerate(req_ids)}
    end = first + num_steps
    # Between hundreds of rows, gaps and outlines would be all there is to see.
    is_small = num_blocks <= _MAX_BLOCKS_WITH_NAMES
    height, linewidth = (0.9, 0.5) if is_small else (1.0, 0.0)
    widest: dict[tuple[str, ...], tuple[int, float, int]] = {}
    for span in spans:
        left, right = max(span.first, first), min(span.end, end)
        if left >= right:
            continue
        hatch = SHARED_HATCH if len(span.owners) > 1 else None
        look = {"facecolor": colours[span.owners[0]], "edgecolor": INK if hatch else "white", "hatch": hatch}
        ax.add_patch(Rectangle((left, span.block_id - height / 2), right - left, height, linewidth=linewidth, **look))
        place = (right - left, (left + right) / 2, span.block_id)
        widest[span.owners] = max(place, widest.get(span.owners, place), key=lambda p: p[0])
    if is_small:
        _name_owners(ax, widest, num_steps)
    ax.set(xlim=(first, end), ylim=(num_blocks - 0.5, -0.5), title=title)
    number_steps(ax, first, end)
    ax.set(xlabel="engine step (hatched: held by several requests)", ylabel="block of the pool")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    return fig, ax


def _name_owners(ax: Axes, widest: Mapping[tuple[str, ...], tuple[int, float, int]], num_steps: int) -> None:
    """Write the owners once, into their longest span, where the name has room."""
    for owners, (width, middle, block_id) in widest.items():
        text = " + ".join(owners) if len(owners) <= 3 else f"{len(owners)} requests"
        if width / num_steps >= 0.012 * (len(text) + 2):
            ax.text(middle, block_id, text, ha="center", va="center_baseline", size=8, weight="bold", bbox=PLATE)


def cache_occupancy(
    occupancy: Occupancy, title: str, ends: float | None = None, with_contiguous: bool = True
) -> tuple[Figure, Axes]:
    """Slots of the cache over time: with a token, kept for later, never used; and what contiguous rows would take.

    Args:
        occupancy: from `trace_metrics.occupancy`.
        ends: when the last step ended, in seconds; None: when it began.
        with_contiguous: draw what the running requests would reserve with max_model_len slots each.
    """
    fig, ax = plt.subplots(figsize=(7.0, 3.8))
    times = [*occupancy.starts, occupancy.starts[-1] if ends is None else ends]
    bottom = [0] * len(times)
    layers = (occupancy.stored, occupancy.kept_for_later, occupancy.never_used)
    for (label, look), values in zip(_SLOT_LOOKS.items(), layers, strict=True):
        top = [low + value for low, value in zip(bottom, [*values, values[-1]], strict=True)]
        ax.fill_between(times, bottom, top, step="post", linewidth=0.4, label=label, **look)
        bottom = top
    highest = occupancy.capacity
    if with_contiguous:
        contiguous = [*occupancy.contiguous, occupancy.contiguous[-1]]
        look = {"color": INK, "linewidth": 1.6, "linestyle": "--", "label": "contiguous would take"}
        ax.step(times, contiguous, where="post", **look)
        highest = max(highest, *contiguous)
    ax.axhline(occupancy.capacity, color=INK, linewidth=1)
    label, place = f"the cache: {occupancy.capacity:,} slots", (times[-1], occupancy.capacity)
    ax.annotate(label, place, (-4, 4), textcoords="offset points", ha="right", va="bottom", bbox=PLATE)
    ax.set(xlim=(times[0], times[-1]), title=title, xlabel="time (s)", ylabel="slots of the KV cache")
    ax.set_ylim(0, highest * 1.12)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    fig.legend(loc="outside lower left", ncols=4, frameon=False, columnspacing=1.2)
    return fig, ax


def reserved_slots(policies: Mapping[str, Occupancy], title: str) -> tuple[Figure, Axes]:
    """For each way of allocating, what the slots that it reserved held, as shares summed over all steps.

    Args:
        policies: label -> `trace_metrics.occupancy` of a run, the first on top.
    """
    fig, ax = plt.subplots(figsize=(7.0, 1.3 + 0.55 * len(policies)))
    for row, occupancy in enumerate(policies.values()):
        left = 0.0
        for (label, look), share in zip(_SLOT_LOOKS.items(), occupancy.shares, strict=True):
            ax.barh(row, share * 100, left=left, height=0.7, label=label if row == 0 else None, **look)
            if share >= 0.05:
                ax.text(left + share * 50, row, f"{share:.0%}", ha="center", va="center_baseline", bbox=PLATE)
            left += share * 100
    ax.set_yticks(range(len(policies)), list(policies))
    ax.set(xlim=(0, 100), ylim=(len(policies) - 0.5, -0.5), title=title, xlabel="share of the reserved slots (%)")
    ax.tick_params(axis="y", length=0)
    fig.legend(loc="outside lower left", ncols=3, frameon=False)
    return fig, ax


def prefix_branches(root: PrefixNode, title: str, unit: str = "blocks") -> tuple[Figure, Axes]:
    """The tree of shared beginnings, from left to right: a bar a run, hatched where several requests hold it.

    Args:
        root: from `trace_views.prefix_tree`.
        unit: what an item of the tree is, in the plural.
    """
    fig, ax = plt.subplots(figsize=(7.0, 1.1 + 0.42 * root.num_leaves))
    colours = {req_id: request_colour(number) for number, req_id in enumerate(root.req_ids)}
    deepest = _draw_node(ax, root, start=0, top=0, colours=colours)
    ax.set(xlim=(0, deepest * 1.25 or 1), ylim=(root.num_leaves - 0.5, -0.5), title=title)
    ax.set(xlabel=f"{unit} from the beginning (hatched: held once, used by several requests)")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    return fig, ax


def _draw_node(ax: Axes, node: PrefixNode, start: int, top: int, colours: Mapping[str, str]) -> int:
    """A node and what grows from it, in rows from `top` on; returns how far to the right it reaches."""
    row, end = top + (node.num_leaves - 1) / 2, start + len(node.items)
    is_shared = len(node.req_ids) > 1
    if node.items:
        look = {"facecolor": colours[node.req_ids[0]], "edgecolor": INK, "hatch": SHARED_HATCH if is_shared else None}
        ax.add_patch(Rectangle((start, row - 0.3), len(node.items), 0.6, linewidth=0.8, **look))
        for edge in range(start + 1, end):
            ax.plot([edge, edge], [row - 0.3, row + 0.3], color=INK, linewidth=0.6)
    reach = end
    for child in node.children:
        child_row = top + (child.num_leaves - 1) / 2
        if node.items:
            ax.plot([end, end], [row, child_row], color=INK, linewidth=1.2)
        reach = max(reach, _draw_node(ax, child, end, top, colours))
        top += child.num_leaves
    in_children = {req_id for child in node.children for req_id in child.req_ids}
    ending_here = [req_id for req_id in node.req_ids if req_id not in in_children]
    if ending_here and not node.children:
        ax.annotate(", ".join(ending_here), (end, row), (6, 0), textcoords="offset points", va="center_baseline")
    elif is_shared and node.items:
        text = f"{len(node.req_ids)} requests"
        ax.text((start + end) / 2, row, text, ha="center", va="center_baseline", size=9, bbox=PLATE)
    return reach

"""Figures of chapter 04: where pages lie, what a packed tile sees, who has work, what a split weighs."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from minivllm.plotting.style import FAINT, INK, KERNEL_COLOURS, MUTED, request_colour


def page_walk(
    block_table: Sequence[int], seq_len: int, block_size: int, num_blocks: int, title: str
) -> tuple[Figure, Axes]:
    """Positions of one request in a row, the pool in another, and a line from each table entry to its block.

    Only entries that hold a token are drawn; slots of a held block without a token are hatched.
    """
    fig, ax = plt.subplots(figsize=(7.0, 2.7))
    entries = range(-(-seq_len // block_size))
    left = (num_blocks - len(entries)) * block_size / 2
    for block in range(num_blocks):
        held = block in [block_table[entry] for entry in entries]
        for offset in range(block_size):
            x = block * block_size + offset
            ax.add_patch(Rectangle((x, 0), 1, 1, facecolor="none", edgecolor=MUTED if held else FAINT))
        ax.text((block + 0.5) * block_size, -0.6, f"block {block}", ha="center", va="center", size=9)
    for entry in entries:
        block, colour = block_table[entry], request_colour(entry)
        for offset in range(block_size):
            position, x = entry * block_size + offset, block * block_size + offset
            if position >= seq_len:
                ax.add_patch(Rectangle((x, 0), 1, 1, facecolor="none", edgecolor=MUTED, hatch="////"))
                continue
            for at, y in ((left + position, 4), (x, 0)):
                ax.add_patch(Rectangle((at, y), 1, 1, facecolor=colour, edgecolor=INK))
                ax.text(at + 0.5, y + 0.48, position, ha="center", va="center", size=9)
        middle = left + (entry * block_size + min((entry + 1) * block_size, seq_len)) / 2
        ax.text(middle, 5.5, f"[{entry}] = {block}", ha="center", va="center", size=9)
        ax.plot([middle, (block + 0.5) * block_size], [3.9, 1.1], color=colour, linewidth=2.5)
    ax.set(xlim=(-0.3, num_blocks * block_size + 0.3), ylim=(-1.1, 6.0), title=title)
    ax.set_yticks([0.5, 4.5, 5.5], ["pool", "request", "table"])
    ax.xaxis.set_major_locator(NullLocator())
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return fig, ax


def packed_tile(
    tokens: Sequence[int], heads: Sequence[int], seen: Sequence[Sequence[bool]], title: str
) -> tuple[Figure, Axes]:
    """One tile of queries: a row is a pair (token, head), a column a key; what the row sees is filled.

    Args:
        tokens: query token of each row; rows of one token share a colour.
        heads: query head of each row.
        seen: for each row, whether it sees each key.
    """
    fig, ax = plt.subplots(figsize=(7.0, 0.9 + 0.24 * len(tokens)))
    for row, (token, keys) in enumerate(zip(tokens, seen, strict=True)):
        for key, visible in enumerate(keys):
            colour = request_colour(token) if visible else "none"
            ax.add_patch(Rectangle((key, row), 1, 1, facecolor=colour, edgecolor=INK if visible else FAINT))
    labels = [f"row {row}: token {t}, head {h}" for row, (t, h) in enumerate(zip(tokens, heads, strict=True))]
    ax.set_yticks([row + 0.5 for row in range(len(tokens))], labels, size=9)
    ax.set_xticks([key + 0.5 for key in range(len(seen[0]))], range(len(seen[0])), size=9)
    ax.set(xlim=(0, len(seen[0])), ylim=(len(tokens), 0), title=title, xlabel="key, by its position in the request")
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return fig, ax


def processors_at_work(
    batch_sizes: Sequence[int], lines: Mapping[str, Sequence[int]], num_processors: int, title: str
) -> tuple[Figure, Axes]:
    """Multiprocessors that have a program, over the batch size; one labelled line a way of cutting the work."""
    fig, ax = plt.subplots()
    for (label, counts), style in zip(lines.items(), ("-o", "--s", ":^"), strict=False):
        ax.plot(batch_sizes, counts, style, color=KERNEL_COLOURS["paged"])
        place = {"xytext": (-10, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
        ax.annotate(label, (batch_sizes[0], counts[0]), weight="bold", **place)
    ax.hlines(num_processors, batch_sizes[0], batch_sizes[-1], color=MUTED, linewidth=1, zorder=0)
    ax.text(batch_sizes[-1], num_processors * 1.02, f"all {num_processors}", ha="right", va="bottom")
    ax.set_xscale("log", base=2)
    ax.set_xticks(batch_sizes, [str(size) for size in batch_sizes])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set(xlim=(batch_sizes[0] / 2.4, batch_sizes[-1] * 1.2), ylim=(0, num_processors * 1.2), title=title)
    ax.set(xlabel="requests in the step, one new token each", ylabel="multiprocessors with work")
    return fig, ax


def split_weights(weights: Sequence[Sequence[float]], title: str) -> tuple[Figure, Axes]:
    """One bar a head, a segment a split: the share exp(lse_i - lse) with which its output enters the merge."""
    fig, ax = plt.subplots(figsize=(7.0, 1.0 + 0.45 * len(weights)))
    widest = [max(range(len(weights)), key=lambda head, i=i: weights[head][i]) for i in range(len(weights[0]))]
    for head, shares in enumerate(weights):
        start = 0.0
        for split, share in enumerate(shares):
            ax.barh(head, share, left=start, color=request_colour(split), edgecolor="white")
            if widest[split] == head:
                ax.text(start + share / 2, head, f"split {split}: {share:.2f}", ha="center", va="center", weight="bold")
            elif share >= 0.05:
                ax.text(start + share / 2, head, f"{share:.2f}", ha="center", va="center")
            start += share
    ax.set_yticks(range(len(weights)), [f"head {head}" for head in range(len(weights))])
    ax.set(xlim=(0, 1), ylim=(len(weights) - 0.5, -0.5), title=title)
    ax.set(xlabel="weight of the split's output, $\\exp(lse_i - lse)$")
    ax.tick_params(axis="y", length=0)
    return fig, ax

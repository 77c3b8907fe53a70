"""Figures of chapter 00: what the sampler chose from, who owns which block, what each step computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from minivllm.plotting.style import FAINT, HIGHLIGHT, INK, MUTED, request_colour


@dataclass(frozen=True)
class CachedRequest:
    """A request as the paged KV cache sees it."""

    label: str
    block_table: Sequence[int]
    """Entry i is the block of its tokens i * block_size .. (i + 1) * block_size - 1."""
    tokens: Sequence[str]
    """Texts of the tokens whose K and V are in the cache."""


def next_token_bars(
    tokens: Sequence[str], probabilities: Sequence[float], chosen: int, title: str
) -> tuple[Figure, Axes]:
    """One bar a candidate, most likely first; the chosen one stands out.

    Args:
        tokens: texts of the candidates, in the order of the bars.
        probabilities: one a candidate, 0 to 1.
        chosen: index of the candidate that became the next token.
    """
    fig, ax = plt.subplots()
    colours = [HIGHLIGHT if index == chosen else MUTED for index in range(len(tokens))]
    bars = ax.barh(range(len(tokens)), probabilities, color=colours)
    labels = [f"{p:.2f}" + ("  chosen" if index == chosen else "") for index, p in enumerate(probabilities)]
    ax.bar_label(bars, labels, padding=4)
    ax.set_yticks(range(len(tokens)), [f'"{_visible(token)}"' for token in tokens])
    ax.invert_yaxis()
    ax.margins(x=0.15)
    ax.set(xlabel="probability of being the next token", ylabel="candidate (quotes show its spaces)", title=title)
    return fig, ax


def block_map(requests: Sequence[CachedRequest], num_blocks: int, block_size: int, title: str) -> tuple[Figure, Axes]:
    """The pool of blocks, a row each, a cell a slot: whose token lies there, what is free, what is held unused.

    A slot that several requests read is striped in their colours; a slot that is held but not written is hatched.
    """
    fig, ax = plt.subplots(figsize=(7.0, 0.6 + 0.4 * num_blocks))
    for block_id in range(num_blocks):
        owners = [request for request in requests if block_id in request.block_table]
        entries = [f"{request.label}[{list(request.block_table).index(block_id)}]" for request in owners]
        ax.text(block_size + 0.1, block_id, ", ".join(entries) or "free", va="center", color=INK)
        for offset in range(block_size):
            _draw_slot(ax, requests, block_id, offset, block_size)
    ax.set(xlim=(0, block_size + 1.2), ylim=(num_blocks - 0.5, -0.5), title=title)
    ax.set_xticks([offset + 0.5 for offset in range(block_size)], range(block_size))
    ax.set_yticks(range(num_blocks))
    ax.set(xlabel="offset within the block", ylabel="block of the pool")
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return fig, ax


def step_timeline(steps: Sequence[Mapping[str, int]], title: str) -> tuple[Figure, Axes]:
    """What each step computed: a bar a step, a segment a request, its number of tokens inside.

    Args:
        steps: for each step, request label -> tokens scheduled (`SchedulerOutput.num_scheduled_tokens`).
    """
    fig, ax = plt.subplots()
    labels = list(dict.fromkeys(label for step in steps for label in step))
    widest = {label: max(range(len(steps)), key=lambda i, label=label: steps[i].get(label, 0)) for label in labels}
    for index, step in enumerate(steps):
        bottom = 0
        for label, count in step.items():
            colour = request_colour(labels.index(label))
            ax.bar(index, count, bottom=bottom, color=colour, edgecolor="white", label=label)
            ax.text(index, bottom + count / 2, count, ha="center", va="center")
            if widest[label] == index:
                ax.text(index + 0.5, bottom + count - 0.4, f"request {label}", va="center", weight="bold")
            bottom += count
    ax.set_xticks(range(len(steps)))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="engine step", ylabel="tokens computed in the step", title=title)
    return fig, ax


def _draw_slot(ax: Axes, requests: Sequence[CachedRequest], block_id: int, offset: int, block_size: int) -> None:
    text, colours, is_held = "", [], False
    for number, request in enumerate(requests):
        if block_id not in request.block_table:
            continue
        is_held = True
        position = list(request.block_table).index(block_id) * block_size + offset
        if position < len(request.tokens):
            text = _visible(request.tokens[position])
            colours.append(request_colour(number))
    top, height = block_id - 0.42, 0.84
    for stripe, colour in enumerate(colours):
        stripe_height = height / len(colours)
        ax.add_patch(Rectangle((offset, top + stripe * stripe_height), 1, stripe_height, facecolor=colour))
    if is_held and not colours:
        ax.add_patch(Rectangle((offset, top), 1, height, fill=False, edgecolor=MUTED, hatch="////"))
    ax.add_patch(Rectangle((offset, top), 1, height, fill=False, edgecolor=INK if is_held else FAINT))
    ax.text(offset + 0.54, block_id, text, ha="center", va="center", size=11)
    ax.text(offset + 0.04, block_id, block_id * block_size + offset, size=8, va="center")


def _visible(token: str) -> str:
    return token.replace("\n", "\\n")

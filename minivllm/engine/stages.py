"""Which layers of a model a stage of a pipeline holds. Pure Python: the worker, the simulator and figures ask here.

stage 0            embedding, layers [0, e0)
stage i            layers [e(i-1), ei)
the last stage     its layers, final norm, head; it samples, and holds the drafter
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Stage number `index` of `size`, with the layers [first_layer, end_layer)."""

    index: int
    size: int
    first_layer: int
    end_layer: int

    @classmethod
    def whole(cls, num_layers: int) -> "Stage":
        """A model in one piece."""
        return cls(0, 1, 0, num_layers)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)


def split_layers(num_layers: int, num_stages: int) -> list[Stage]:
    """The layers in order, as even as can be.

    What does not divide goes to the stages before the last, back to front: the last one has the head to compute too,
    and the first the embedding.

    Raises:
        ValueError: there are more stages than layers.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"pipeline_parallel_size is {num_stages}, but the model has {num_layers} layers, and a stage needs one at "
            f"least: use at most {num_layers} stages"
        )
    share, rest = divmod(num_layers, num_stages)
    counts = [share] * num_stages
    for index in range(num_stages - 2, num_stages - 2 - rest, -1):
        counts[index] += 1
    ends = [sum(counts[: index + 1]) for index in range(num_stages)]
    return [Stage(index, num_stages, end - counts[index], end) for index, end in enumerate(ends)]

"""Which part of a checkpoint's tensor a rank holds: the layer declares it next to the name, the loader reads it.

    Share   one dimension: start .. start + size of `whole`
    Shard   a parameter, and the share of each dimension of its tensor

                 0        start      start + size        whole
                 |--- others ---|---- this rank ----|--- others ---|

The layers of one rank are small layers of the usual kind. Two ways to divide a linear layer, y = x W^T:

    by outputs ("column parallel": columns of W^T)   each rank has all of x and makes a part of y     nothing is sent
    by inputs  ("row parallel")                      each rank has a part of x, and y is a sum        one all_reduce

One of each in turn (q, k, v then o; gate, up then down) costs one all_reduce a pair, since what the first makes is what
the second needs: heads for attention, columns for the MLP.
"""

from typing import NamedTuple

from torch import Tensor

from minivllm.worker.tensor_parallel import current_group


class Share(NamedTuple):
    """A rank's part of a dimension. In a padded one (`split_padded`) it may reach beyond the whole."""

    whole: int
    start: int
    size: int

    def times(self, count: int) -> "Share":
        """The same part of a dimension in which each element is `count` of them: heads to rows."""
        return Share(self.whole * count, self.start * count, self.size * count)

    @property
    def is_whole(self) -> bool:
        return self == (self.whole, 0, self.whole)

    @property
    def stored(self) -> slice:
        """What there is to read; shorter than `size` where padding begins, and empty beyond it."""
        return slice(min(self.start, self.whole), min(self.start + self.size, self.whole))


class Shard(NamedTuple):
    """Where a part of a checkpoint's tensor goes: `tensor` has the sizes of the shares, padding included."""

    tensor: Tensor
    shares: tuple[Share, ...]


Slot = Tensor | Shard | None
"""Where a checkpoint's tensor goes: all of it, a part of it, or nowhere since it is another rank's."""


def whole(size: "int | Share") -> Share:
    """All of a dimension; a share stays what it is."""
    return size if isinstance(size, Share) else Share(size, 0, size)


def slot(tensor: Tensor, *shares: Share) -> Slot:
    """The slot of a parameter: the parameter itself where this rank holds all of it."""
    return tensor if all(share.is_whole for share in shares) else Shard(tensor, shares)


def split(name: str, count: int) -> Share:
    """The current rank's even part. Raises ValueError where the ranks do not divide `count`, the config's `name`."""
    group = current_group()
    if count % group.size:
        raise ValueError(
            f"tensor_parallel_size={group.size} does not divide {name}={count}: use a divisor, {_divisors(count)}"
        )
    size = count // group.size
    return Share(count, group.rank * size, size)


def split_or_replicate(name: str, count: int) -> Share:
    """The same; where there are more ranks than elements, as many ranks as it takes hold the same one."""
    group = current_group()
    if group.size <= count:
        return split(name, count)
    if group.size % count:
        raise ValueError(
            f"tensor_parallel_size={group.size} is neither a divisor nor a multiple of {name}={count}: use one of those"
        )
    return Share(count, group.rank * count // group.size, 1)


def split_padded(count: int) -> Share:
    """The current rank's part of `count` rounded up to a multiple of the ranks: the last ones may get padding."""
    group = current_group()
    size = -(-count // group.size)
    return Share(count, group.rank * size, size)


def _divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0 and (n <= 16 or n == count))

"""What became of the drafts, position by position.

Position j is the j-th token that a verification can emit: position 0 holds the first draft, position k only ever the
bonus token. A draft is reached only if all before it were accepted, so the counts fall with j.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class SpecDecodeStats:
    """Counts over the steps in which drafts were verified; plain decodes do not count."""

    num_verifications: int = 0
    drafted: list[int] = field(default_factory=list)
    """For each position, verifications that had a draft there."""
    accepted: list[int] = field(default_factory=list)
    """Of these, the drafts that the target agreed with."""
    emitted: list[int] = field(default_factory=list)
    """For each position, verifications that put a token into the output there; what follows a stop does not count."""

    def record(self, num_drafts: int, num_accepted: int, num_emitted: int) -> None:
        """One verification of one request."""
        self.num_verifications += 1
        for counts, number in ((self.drafted, num_drafts), (self.accepted, num_accepted), (self.emitted, num_emitted)):
            counts += [0] * (num_drafts + 1 - len(counts))
            for position in range(number):
                counts[position] += 1

    @classmethod
    def total(cls, parts: "Iterable[SpecDecodeStats]") -> "SpecDecodeStats":
        """The counts of several requests together."""
        total = cls()
        for part in parts:
            total.num_verifications += part.num_verifications
            for mine, its in (
                (total.drafted, part.drafted), (total.accepted, part.accepted), (total.emitted, part.emitted)
            ):  # fmt: skip
                mine += [0] * (len(its) - len(mine))
                for position, count in enumerate(its):
                    mine[position] += count
        return total

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafts that were accepted, 0 to 1."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a verification yields on average, the recovered or bonus token included: 1 to k + 1."""
        return 1 + self.num_accepted / self.num_verifications if self.num_verifications else 1.0

"""An account of rows: what was read, kept, cut and left out."""

from dataclasses import asdict, dataclass, field
from typing import Any

from zagora_jax.data.sources import Location

LOCATIONS_KEPT = 5


@dataclass
class Tally:
    """A count of rows, with the places of the first few."""

    count: int = 0
    first: list[Location] = field(default_factory=list)

    def add(self, location: Location) -> None:
        """Counts a row."""
        self.count += 1
        if len(self.first) < LOCATIONS_KEPT:
            self.first.append(location)

    def __str__(self) -> str:
        places = "; ".join(map(str, self.first))
        return f"{self.count:,} ({places}{'; ...' if self.count > len(self.first) else ''})"


@dataclass
class SourceStatistics:
    """What one source gives.

    Attributes:
        name: as it stands in the options.
        files: how many files it has.
        kept: rows of it that are trained on.
        tokens: tokens of those rows.
        passes: how often an epoch goes through them.
    """

    name: str
    files: int
    kept: int
    tokens: int
    passes: float = 1.0


@dataclass
class Statistics:
    """What became of the rows that were read.

    Attributes:
        rows: rows read.
        kept: rows that are trained on; of a long text that was split, each part is one.
        tokens: tokens of the kept rows.
        supervised_tokens: those of them that the model learns to write.
        weight: the sum of their weights in the loss; equals their number unless rows or turns have weights.
        longest: tokens of the longest kept row.
        other_part: rows that belong to the other part of the data, such as those held out.
        truncated: kept rows that were cut off at the sequence length.
        split: rows longer than the sequence length that were split in parts.
        cut_away: rows left out since all supervised tokens stood past the sequence length.
        unsupervised: rows left out since they have no supervised token: empty, or without an assistant turn.
        ends_with_user: conversations whose last turn is not the assistant's; that turn teaches nothing.
        sources: what each source gives.
        complete: whether all rows were read; the command check may stop earlier.
    """

    rows: int = 0
    kept: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    weight: float = 0.0
    longest: int = 0
    other_part: int = 0
    truncated: Tally = field(default_factory=Tally)
    split: Tally = field(default_factory=Tally)
    cut_away: Tally = field(default_factory=Tally)
    unsupervised: Tally = field(default_factory=Tally)
    ends_with_user: Tally = field(default_factory=Tally)
    sources: list[SourceStatistics] = field(default_factory=list)
    complete: bool = True

    @property
    def left_out(self) -> int:
        """Rows that teach nothing, and so are left out."""
        return self.cut_away.count + self.unsupervised.count

    def __str__(self) -> str:
        """A line for the numbers, one for each kind of row that deserves a look, and one for each of many sources."""
        share = self.supervised_tokens / self.tokens if self.tokens else 0.0
        weighted = abs(self.weight - self.supervised_tokens) > 1e-3 * self.supervised_tokens
        notes = {
            "cut off at the sequence length": self.truncated,
            "longer than the sequence length, split": self.split,
            "left out, all supervised tokens past the sequence length": self.cut_away,
            "left out, no supervised token": self.unsupervised,
            "with a last turn that is not the assistant's, and not supervised": self.ends_with_user,
        }
        return "\n".join(
            [
                f"{self.kept:,} of {self.rows:,} rows, {self.tokens:,} tokens, longest row {self.longest:,}, "
                f"{self.supervised_tokens:,} supervised ({share:.1%})"
                + (f", weighing {self.weight:,.1f} in the loss" if weighted else ""),
                *(f"rows {what}: {tally}" for what, tally in notes.items() if tally.count),
                *self._shares(),
            ]
        )

    def _shares(self) -> list[str]:
        """How much of an epoch each source is, where there are several or one is not gone through just once."""
        if len(self.sources) < 2 and all(source.passes == 1 for source in self.sources):
            return []
        total = sum(source.passes * source.tokens for source in self.sources) or 1
        return [
            f"{source.name}: {source.kept:,} rows, {source.tokens:,} tokens, {source.passes:g} passes an epoch, "
            f"{source.passes * source.tokens / total:.1%} of its tokens"
            for source in self.sources
        ]

    def to_json(self) -> dict[str, Any]:
        """The same for a program: JSON values under the attributes' names."""
        return {
            name: {"count": value["count"], "first": [Location(*place)._asdict() for place in value["first"]]}
            if isinstance(value, dict)
            else value
            for name, value in asdict(self).items()
        }

"""`tc.Admission`: the rule by which a table decides which keys get a row. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from thermocline.errors import require, whole_number
from thermocline.utils.text_format import parse_size

Otherwise = Literal["initial", "zero", "shared"]

SHARED_KEY = 0x7368617265642121
"""Key of the row that keys not admitted share with otherwise="shared". Data should not contain it."""
MOST_SKETCHED = 65535
"""Largest `count` with a sketch: its cells have 16 bits."""
_LEAST_MEMORY = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A rule for which keys get a row: by their number of occurrences in training, or by chance.

    A key with a row is admitted. Any other key is admitted in the training batch in which its count reaches `count`,
    with all its occurrences there, or if the draw of one of its occurrences has a value below `probability`; it stays
    admitted while it has a row. Evaluation counts nothing. Give either count or probability.
    """

    count: int | None = None
    """Occurrences at which a key is admitted; 1 admits all keys."""
    probability: float | None = None
    """Probability with which one occurrence admits its key: a function of (seed, table, key, batch, position)."""
    sketch: bool = False
    """Count in a count-min sketch, whose counts are never too small: keys may be admitted early, none late."""
    memory: str | int = "64MB"
    """Memory of the counters. Exact ones have 15 bytes per key; beyond the memory the smallest counts are dropped. A
    sketch of M bytes counts more than N * 22 / M too many with a probability below 2 %, after N occurrences."""
    otherwise: Otherwise = "initial"
    """Vector of a key that is not admitted: its initial row or zeros, neither of which is trained, or one shared row,
    which is trained."""

    def __post_init__(self) -> None:
        rule = "a number of occurrences from 1, or None with a probability"
        require(self.count is not None or self.probability is not None, "Admission.count", self.count, rule)
        fine = self.count is None or self.probability is None
        require(fine, "Admission.probability", self.probability, f"None with count={self.count}: give one of them")
        if self.count is not None:
            fine = not isinstance(self.count, bool) and whole_number(self.count, "Admission.count") >= 1
            require(fine and self.count < 2**31, "Admission.count", self.count, "a number of occurrences from 1")
            fine = not self.sketch or self.count <= MOST_SKETCHED
            require(fine, "Admission.count", self.count, f"at most {MOST_SKETCHED} with sketch=True")
        if self.probability is not None:
            fine = isinstance(self.probability, (int, float)) and not isinstance(self.probability, bool)
            fine = fine and 0 < self.probability <= 1
            require(fine, "Admission.probability", self.probability, "a number above 0 and up to 1")
            require(not self.sketch, "Admission.sketch", self.sketch, "False with a probability: it counts nothing")
        fine = parse_size(self.memory, "Admission.memory") >= _LEAST_MEMORY
        require(fine, "Admission.memory", self.memory, f"a size of at least {_LEAST_MEMORY} bytes")
        rule = f"one of {', '.join(get_args(Otherwise))}"
        require(self.otherwise in get_args(Otherwise), "Admission.otherwise", self.otherwise, rule)

    @property
    def memory_bytes(self) -> int:
        """`memory` in bytes."""
        return parse_size(self.memory, "Admission.memory")

    @property
    def counting(self) -> str:
        """How occurrences are counted: "exact", "sketch" or "probability". Saved counters have one kind."""
        if self.probability is not None:
            return "probability"
        return "sketch" if self.sketch else "exact"

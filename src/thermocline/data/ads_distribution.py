"""The distribution of `tc.SyntheticAds`: keys and their frequencies, dense features and labels."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence

from thermocline.core import core
from thermocline.errors import ThermoclineError, require, require_type, whole_number


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdsDistribution:
    """Parameters of the distribution; they determine every example, whatever the batch size and number of threads."""

    keys: int | Sequence[int] = 1_000_000
    """Total number of keys, up to 2**63, divided among the fields; or one number per field."""
    fields: int = 26
    """Number of fields, if `keys` is one number."""
    nonzeros: int | tuple[int, int] | None = None
    """Ids per example, distributed evenly over the fields; or (least, most). None means one per field."""
    zipf: float | Sequence[float] = 1.05
    """Zipf exponent of the key frequencies (0: uniform); or one per field."""
    spread: float = 100.0
    """Ratio of the key counts of the largest and the smallest field."""
    dense: int = 0
    """Number of dense features."""
    seed: int = 0
    """Seed of ids, dense features, labels and teacher."""
    base_rate: float = 0.2
    """Fraction of labels that are 1."""
    signal: float = 2.5
    """Standard deviation of the teacher's logits: 2.5 gives the teacher an AUC near 0.85."""
    label_noise: float = 0.05
    """Fraction of labels drawn with `base_rate` instead of by the teacher."""

    field_keys: tuple[int, ...] = dataclasses.field(init=False, repr=False)
    """Number of keys of each field."""
    field_zipf: tuple[float, ...] = dataclasses.field(init=False, repr=False)
    """Zipf exponent of each field."""
    nonzeros_range: tuple[int, int] = dataclasses.field(init=False, repr=False)
    """Least and most ids per example."""

    def __post_init__(self) -> None:
        for name in ("fields", "dense", "seed"):
            object.__setattr__(self, name, whole_number(getattr(self, name), name))
        for name in ("spread", "base_rate", "signal", "label_noise"):
            require_type(getattr(self, name), int | float, name, "a number")
        require(self.dense >= 0, "dense", self.dense, "at least 0")
        require(0 <= self.seed < 2**64, "seed", self.seed, "from 0 to 2**64 - 1")
        keys, nonzeros = _field_sizes(self.keys, self.fields, self.nonzeros, self.spread)
        object.__setattr__(self, "field_keys", keys)
        object.__setattr__(self, "nonzeros_range", nonzeros)
        object.__setattr__(self, "field_zipf", _exponents(self.zipf, len(keys)))

    def digest(self) -> str:
        """Return a digest of all parameters, which positions store."""
        sizes = [self.seed, self.field_keys, self.field_zipf, self.nonzeros_range, self.dense]
        parameters = [*sizes, self.base_rate, self.signal, self.label_noise]
        return hashlib.blake2b(json.dumps(parameters).encode(), digest_size=8).hexdigest()

    def generator(self, threads: int) -> core.Synth:
        """Return the C++ generator of this distribution."""
        sizes = (list(self.field_keys), list(self.field_zipf), *self.nonzeros_range, self.dense)
        try:
            return core.Synth(self.seed, *sizes, self.base_rate, self.signal, self.label_noise, threads)
        except ThermoclineError as error:
            raise ValueError(str(error)) from None


def _field_sizes(
    keys: int | Sequence[int], fields: int, nonzeros: int | tuple[int, int] | None, spread: float
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the number of keys of each field, and the least and most ids per example."""
    if isinstance(keys, Iterable) and not isinstance(keys, str):
        sizes = tuple(whole_number(size, f"keys[{i}]") for i, size in enumerate(keys))
        return sizes, _nonzeros_range(len(sizes) if nonzeros is None else nonzeros)
    keys = whole_number(keys, "keys", "a whole number, or one per field")
    require(1 <= fields <= 65536, "fields", fields, "from 1 to 65536")
    ids = _nonzeros_range(fields if nonzeros is None else nonzeros)
    return _divide_keys(keys, fields, spread, -(-ids[1] // fields)), ids


def _exponents(zipf: float | Sequence[float], fields: int) -> tuple[float, ...]:
    """Return one Zipf exponent per field."""
    for exponent in zipf if isinstance(zipf, Iterable) else [zipf]:
        require_type(exponent, int | float, "zipf", "a number, or one per field")
    exponents = tuple(zipf) if isinstance(zipf, Iterable) else (float(zipf),) * fields
    if len(exponents) != fields:
        raise ValueError(f"{len(exponents)} zipf exponents for {fields} fields: give one, or one per field")
    return exponents


def _nonzeros_range(nonzeros: int | tuple[int, int]) -> tuple[int, int]:
    rule = "a number from 1 to 2**24, or (least, most)"
    pair = nonzeros if isinstance(nonzeros, (tuple, list)) and len(nonzeros) == 2 else (nonzeros, nonzeros)
    low, high = (whole_number(number, "nonzeros", rule) for number in pair)
    require(1 <= low <= high <= 1 << 24, "nonzeros", nonzeros, rule)
    return low, high


def _divide_keys(keys: int, fields: int, spread: float, least: int) -> tuple[int, ...]:
    """Divide `keys` among fields in a falling geometric series of ratio `spread`, at least `least` each."""
    require(1 <= keys <= 1 << 63, "keys", keys, "from 1 to 2**63")
    require(1 <= spread <= 1e6, "spread", spread, "from 1 to 1e6")
    # Rounded to integers, so that the last bit of pow does not change the data.
    shares = [round(2**30 * spread ** (-field / max(fields - 1, 1))) for field in range(fields)]
    sizes = [max(least, keys * share // sum(shares)) for share in shares]
    sizes[0] = keys - sum(sizes[1:])
    if sizes[0] < least:
        raise ValueError(
            f"{keys} keys are too few: each of {fields} fields needs {least}, the most ids of one example in a field"
        )
    return tuple(sizes)

"""`tc.hashing`: sparse vectors over all 2^64 keys -> sparse vectors over k bins, so that a table has a largest size.

OpOsrp        one permutation + one sign random projection: the source's way. Binary in, binary out
CountSketch   the same before the sign is taken: bins with signed weights
Modulo        the hashing trick: key mod k, nothing else

Each is usable alone, on CSR arrays or on a `tc.Batch`, and as [data.hashing] of a config: batches are then hashed as
they are read, before anything else sees their keys.

fields="per_example", as in the paper: an example is one vector over all keys, whatever their field, and becomes one
bag. fields="per_field" hashes each (example, field) by itself with the same permutation: fields, and so the model's
shape, stay, and only collisions are lost; keys of different fields that share a slot share its row. A field with
one key per example is then simply hashed to one of 2k slots.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from thermocline.batch import Batch, Floats, Offsets
from thermocline.config.data import Hashing
from thermocline.core import core
from thermocline.embedding.arrays import Keys
from thermocline.errors import require
from thermocline.utils.cpu_affinity import cores

Bags = tuple[Keys, Offsets, Floats | None]
Fields = Literal["per_example", "per_field"]


class Hasher:
    """What the three share: settings, batches in and batches out. Results depend on (k, seed) and the values alone."""

    kind: Literal["op_osrp", "count_sketch", "modulo"]

    def __init__(self, k: int, seed: int = 0, *, fields: Fields = "per_example", threads: int | None = None) -> None:
        """
        k         bins: 1 to 2**40, not necessarily a power of two
        seed      of permutation and projection
        fields    "per_example": an example is one vector and becomes one bag; "per_field": each of its fields is
        threads   none: all cores, where a batch is large enough
        """
        name = type(self).__name__
        # numpy's whole numbers are as good.
        k, seed = (int(value) if isinstance(value, np.integer) else value for value in (k, seed))
        try:
            self.settings = Hashing(kind=self.kind, k=k, seed=seed, fields=fields)
        except ValueError as error:
            raise ValueError(str(error).replace("data.hashing.", f"{name}: ", 1)) from None
        fine = threads is None or (isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1)
        require(fine, f"{name}: threads", threads, "a whole number, at least 1, or none: all cores")
        self.k = k
        self.seed = seed
        self._threads = cores() if threads is None else threads

    @property
    def slots(self) -> int:
        """Ids that come out are below this: rows that a table can have at most."""
        return self.k

    def hash(self, ids: Any, offsets: Any, weights: Any = None) -> Bags:
        """Bags as CSR: those of bag b are ids[offsets[b] : offsets[b + 1]]. Returns ids, offsets and weights.

        A bag is the vector that has, at each of its ids, the sum of that id's weights (none: 1 each).
        """
        return self._hash(Batch(ids, offsets, 1, weights))

    def __call__(self, batch: Batch) -> Batch:
        """The same batch over bins; dense features, label and position ride along."""
        if not isinstance(batch, Batch):
            raise TypeError(
                f"{type(self).__name__} was called with a {type(batch).__name__}: it takes a tc.Batch; arrays go to "
                "hash(ids, offsets, weights)"
            )
        fields = self.settings.fields_of(batch.fields)
        if fields != batch.fields:
            batch = dataclasses.replace(batch, offsets=batch.offsets[:: batch.fields], fields=fields)
        ids, offsets, weights = self._hash(batch)
        return dataclasses.replace(batch, ids=ids, offsets=offsets, weights=weights, prepared={})

    def _hash(self, batch: Batch) -> Bags:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}(k={self.k}, seed={self.seed}, fields={self.settings.fields!r})"


class OpOsrp(Hasher):
    """Permute all keys, cut them into k bins, keep the sign of each bin's random projection z = sum of u_i r_i.

    Bin b becomes slot 2b + 1 where z > 0, slot 2b where z < 0, and none where z = 0: at most 2k rows. The ids of a bag
    come out ascending. r_i is +1 or -1, by (seed, key): sums over binary data are whole numbers, so that no order of
    ids can show, and z is the count-sketch. Two keys that meet in a bin cancel half the time.
    """

    kind = "op_osrp"

    def __init__(self, k: int, seed: int = 0, *, fields: Fields = "per_example", threads: int | None = None) -> None:
        super().__init__(k, seed, fields=fields, threads=threads)
        self._core = core.OpOsrp(k, seed, self._threads)

    @property
    def slots(self) -> int:
        return 2 * self.k

    def _hash(self, batch: Batch) -> Bags:
        return (*self._core.slots(batch.ids, batch.weights, batch.offsets), None)


class CountSketch(Hasher):
    """OpOsrp's bins with z itself as weight; those with z = 0 are left out.

    Over all seeds, <z(u), z(v)> is <u, v> on average.
    """

    kind = "count_sketch"

    def __init__(self, k: int, seed: int = 0, *, fields: Fields = "per_example", threads: int | None = None) -> None:
        super().__init__(k, seed, fields=fields, threads=threads)
        self._core = core.OpOsrp(k, seed, self._threads)

    def _hash(self, batch: Batch) -> Bags:
        return self._core.sketch(batch.ids, batch.weights, batch.offsets)


class Modulo(Hasher):
    """key mod k; weights stay, and keys that meet stand in their bag twice. There is nothing random: no seed."""

    kind = "modulo"

    def _hash(self, batch: Batch) -> Bags:
        return batch.ids % np.uint64(self.k), batch.offsets, batch.weights


_KINDS: dict[str, type[Hasher]] = {kind.kind: kind for kind in (OpOsrp, CountSketch, Modulo)}


def make(settings: Hashing | None, threads: int | None = None) -> Hasher | None:
    """What [data.hashing] asks for; none: keys stay as they are."""
    if settings is None:
        return None
    return _KINDS[settings.kind](settings.k, settings.seed, fields=settings.fields, threads=threads)

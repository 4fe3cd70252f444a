"""`tc.hashing`: feature hashing of 64-bit keys into k bins, which bounds the size of a table.

OpOsrp        one permutation + one sign random projection (Zhao et al., MLSys 2020). Binary input, binary output
CountSketch   the same bins without taking the sign: bins with signed weights
Modulo        the hashing trick: key mod k

A hasher works on CSR arrays, on a `tc.Batch`, or as [data.hashing] of a config, which hashes batches as they are read.

fields="per_example", as by Zhao (2026), treats an example as one vector over the keys of all fields, and returns one
bag per example. fields="per_field" hashes each bag separately with the same permutation and keeps the fields; keys of
different fields in the same slot share a row. A field with one key per example then maps to one of 2k slots.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from thermocline.arrays import Floats, Keys, Offsets
from thermocline.batch import Batch
from thermocline.config.data import Hashing
from thermocline.core import core
from thermocline.errors import require
from thermocline.utils.cpu_affinity import cores

Bags = tuple[Keys, Offsets, Floats | None]
Fields = Literal["per_example", "per_field"]


class Hasher:
    """Base of the hashers. The result depends only on (k, seed) and the input, not on `threads` or the order of ids."""

    kind: Literal["op_osrp", "count_sketch", "modulo"]

    def __init__(self, k: int, seed: int = 0, *, fields: Fields = "per_example", threads: int | None = None) -> None:
        """
        k         number of bins: 1 to 2**40, not necessarily a power of two
        seed      seed of permutation and projection
        fields    "per_example": one bag per example; "per_field": one bag per example and field
        threads   maximum number of threads; None means all cores
        """
        name = type(self).__name__
        k, seed = (int(value) if isinstance(value, np.integer) else value for value in (k, seed))
        try:
            self.settings = Hashing(kind=self.kind, k=k, seed=seed, fields=fields)
        except ValueError as error:
            raise ValueError(str(error).replace("data.hashing.", f"{name}: ", 1)) from None
        valid = threads is None or (isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1)
        require(valid, f"{name}: threads", threads, "a whole number, at least 1, or None for all cores")
        self.k = k
        self.seed = seed
        self._threads = cores() if threads is None else threads

    @property
    def slots(self) -> int:
        """Upper bound of the hashed ids, and of the number of rows in a table."""
        return self.k

    def hash(self, ids: Any, offsets: Any, weights: Any = None) -> Bags:
        """Hash bags in CSR layout, where bag b is ids[offsets[b] : offsets[b + 1]]; return ids, offsets and weights.

        A bag is a sparse vector: its value at an id is the sum of the id's weights (1 each without weights).
        """
        return self._hash(Batch(ids, offsets, 1, weights))

    def __call__(self, batch: Batch) -> Batch:
        """Hash the ids of a batch; dense features, label and position stay unchanged."""
        if not isinstance(batch, Batch):
            raise TypeError(
                f"{type(self).__name__} was called with a {type(batch).__name__}: it takes a tc.Batch; for arrays call "
                "hash(ids, offsets, weights)"
            )
        fields = self.settings.fields_of(batch.fields)
        if fields != batch.fields:
            batch = dataclasses.replace(batch, offsets=batch.offsets[:: batch.fields], fields=fields, names=None)
        ids, offsets, weights = self._hash(batch)
        return dataclasses.replace(batch, ids=ids, offsets=offsets, weights=weights, prepared={})

    def _hash(self, batch: Batch) -> Bags:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}(k={self.k}, seed={self.seed}, fields={self.settings.fields!r})"


class OpOsrp(Hasher):
    """One permutation + one sign random projection: the sign of z = sum of u_i r_i over the keys i of each of k bins.

    Bin b becomes slot 2b + 1 if z > 0, slot 2b if z < 0, and is dropped if z = 0: at most 2k rows. The ids of a bag are
    returned in ascending order. r_i is +1 or -1 as a function of (seed, key): for binary data z is an integer, so that
    the order of ids does not matter, and equals the count-sketch. Two keys in one bin cancel with probability 1/2.
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
    """The bins of OpOsrp with z as weight; bins with z = 0 are dropped.

    The expectation of <z(u), z(v)> over the seeds is <u, v>.
    """

    kind = "count_sketch"

    def __init__(self, k: int, seed: int = 0, *, fields: Fields = "per_example", threads: int | None = None) -> None:
        super().__init__(k, seed, fields=fields, threads=threads)
        self._core = core.OpOsrp(k, seed, self._threads)

    def _hash(self, batch: Batch) -> Bags:
        return self._core.sketch(batch.ids, batch.weights, batch.offsets)


class Modulo(Hasher):
    """key mod k; weights stay, and colliding keys stay separate entries of their bag. `seed` has no effect."""

    kind = "modulo"

    def _hash(self, batch: Batch) -> Bags:
        return batch.ids % np.uint64(self.k), batch.offsets, batch.weights


_KINDS: dict[str, type[Hasher]] = {kind.kind: kind for kind in (OpOsrp, CountSketch, Modulo)}


def make_hasher(settings: Hashing | None, threads: int | None = None) -> Hasher | None:
    """Return the hasher for [data.hashing]; None if the config has none."""
    if settings is None:
        return None
    return _KINDS[settings.kind](settings.k, settings.seed, fields=settings.fields, threads=threads)

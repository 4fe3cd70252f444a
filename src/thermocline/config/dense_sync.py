"""`DenseSync`: how the dense parameters of all ranks are kept together; the section [dist.dense_sync]. No torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from thermocline.errors import require
from thermocline.utils.text_format import Size, parse_size

Merge = Literal["v_frozen", "all", "params"]
Mode = Literal["gradients", "v_frozen", "all", "params"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseSync:
    """Averages gradients every step; or lets every rank step by itself and merges the models every k steps."""

    every: int = 1
    """Steps from merge to merge: k. 1, and no `merge`: gradients are averaged every step, models never drift apart."""
    merge: Merge | None = None
    """What a merge averages. v_frozen (none, where `every` is above 1): parameters and Adam's second moments; all ranks
    divide by the merged ones until the next merge, their own m and v go on. It also merges after steps 1, 2, 4, 8 and
    so on below k. all: parameters and the whole state of the optimizer. params: parameters only; the ranks' second
    moments part ways, and some models suffer."""
    every_m: int | None = None
    """Steps between merges of first moments, of merge "all"; none: as `every`."""
    every_v: int | None = None
    """Steps between merges of second moments, of merges "all" and "v_frozen"; none: as `every`."""
    amsgrad: bool = False
    """The merged second moments never fall (merge "v_frozen")."""
    exact: bool = False
    """Sums in the one fixed order, so that a run of all ranks in one process has the same bits. It sends no more."""
    bucket: Size = "25MB"
    """Gradients are averaged in pieces of about so many bytes; memory for one piece is all it takes."""

    def __post_init__(self) -> None:
        for name in ("every", "every_m", "every_v"):
            value = getattr(self, name)
            if value is not None or name == "every":
                require(value is not None and value >= 1, f"dense_sync.{name}", value, "at least 1")
        ways = ("v_frozen", "all", "params")
        require(self.merge is None or self.merge in ways, "dense_sync.merge", self.merge, f"one of {', '.join(ways)}")
        way, only = self.mode, "none, unless merge is"
        require(self.every_m is None or way == "all", "dense_sync.every_m", self.every_m, f'{only} "all"')
        fine = self.every_v is None or way in ("all", "v_frozen")
        require(fine, "dense_sync.every_v", self.every_v, f'{only} "all" or "v_frozen"')
        fine = not self.amsgrad or way == "v_frozen"
        require(fine, "dense_sync.amsgrad", self.amsgrad, 'false, unless merge is "v_frozen"')
        require(parse_size(self.bucket, "dense_sync.bucket") > 0, "dense_sync.bucket", self.bucket, "above 0")

    @property
    def mode(self) -> Mode:
        """What is averaged, with `merge` resolved."""
        return self.merge or ("gradients" if self.every == 1 else "v_frozen")

    def periods(self) -> tuple[int | None, int | None, int | None]:
        """Steps between merges of parameters, first and second moments; none: they stay each rank's own."""
        m = self.every if self.every_m is None else self.every_m
        v = self.every if self.every_v is None else self.every_v
        return self.every, m if self.mode == "all" else None, None if self.mode in ("params", "gradients") else v

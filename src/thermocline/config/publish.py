"""`Publish`, the section [publish]: versions for serving that a training run publishes. Imports no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import FiniteFloat, model_validator

from thermocline.config.fields import Count, Duration, Maybe, NonNegative
from thermocline.config.messages import reject
from thermocline.config.section import section
from thermocline.serving.row_format import Precision

SERVED = ("min_norm", "max_rows", "min_frequency", "min_score")
"""Keys that choose the rows that are served."""


@section("publish")
class Publish:
    """Publication of the rows during training, between steps: first a base, then deltas. It changes no bit of them."""

    folder: Maybe[str] = None
    """Folder of the publication. By default nothing is published. The end of a run is always published."""
    every_steps: Maybe[Count] = None
    """Steps between versions."""
    every: Maybe[Duration] = None
    """Time between versions, such as "30s", also while the run waits for files."""
    precision: Precision = "fp32"
    """Stored form of a served weight."""
    min_norm: Maybe[NonNegative] = None
    """Serve only rows whose weights have at least this L2 norm."""
    max_rows: Maybe[Count] = None
    """Serve at most this number of rows, those with the largest norms. Every delta then reads all rows."""
    min_frequency: Maybe[Count] = None
    """Serve only rows whose key occurred at least this many times. Needs the statistic frequency (rows.statistics)."""
    min_score: Maybe[FiniteFloat] = None
    """Serve only rows with at least this score, (show - click) * nonclick_coeff + click * click_coeff with the
    coefficients of [expiry] or its defaults. Needs the statistics show and click (rows.statistics)."""
    base_every: Count = 100
    """Publish a base again after this number of deltas, and delete versions older than the last two bases."""
    on_error: Literal["stop", "warn"] = "stop"
    """When a version cannot be written: stop saves and ends the run; warn trains on and tries again later."""

    @model_validator(mode="after")
    def _check_folder(self) -> Self:
        for name in ("every_steps", "every", *SERVED) if self.folder is None else ():
            if (value := getattr(self, name)) is not None:
                reject(name, value, "left out unless folder is set")
        return self

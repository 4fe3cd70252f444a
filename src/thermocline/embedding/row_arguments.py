"""Checks and converts the arguments of `Table.load_rows`."""

from __future__ import annotations

from typing import Any

import numpy as np

from thermocline.arrays import Floats, Keys, as_keys, as_numpy, floats_of
from thermocline.embedding.optimizers import initial_state
from thermocline.embedding.table_spec import TableSpec


def rows_to_load(spec: TableSpec, keys: Any, rows: Any, state: Any) -> tuple[Keys, Floats]:
    """Return the keys and float32[n, dim + state]. Raises TypeError or ValueError that names the argument."""
    wanted = as_keys(keys)
    width = spec.optimizer.state_floats(spec.dim)
    values = np.empty((len(wanted), spec.dim + width), np.float32)
    values[:, : spec.dim] = floats_of(rows, (len(wanted), spec.dim), "rows")
    if state is None:
        values[:, spec.dim :] = initial_state(spec.optimizer)
        return wanted, values
    given = as_numpy(state, "state")
    if width == 1 and given.ndim == 1:
        given = given[:, None]
    values[:, spec.dim :] = floats_of(given, (len(wanted), width), "state")
    return wanted, values

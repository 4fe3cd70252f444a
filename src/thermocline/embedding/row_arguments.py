"""Checks and converts the arguments of `Table.load_rows`."""

from __future__ import annotations

from typing import Any

import numpy as np

from thermocline.arrays import Floats, Keys, as_keys, as_numpy, floats_of
from thermocline.embedding.optimizers import initial_state
from thermocline.embedding.table_spec import TableSpec


def rows_to_load(spec: TableSpec, keys: Any, rows: Any, state: Any) -> tuple[Keys, Floats]:
    """Return the keys and float32[n, `row_floats`], with statistics 0.

    Raises TypeError or ValueError that names the argument.
    """
    wanted = as_keys(keys)
    width = spec.optimizer.state_floats(spec.dim)
    values = np.zeros((len(wanted), spec.row_floats), np.float32)
    trained = slice(spec.dim, spec.dim + width)
    values[:, : spec.dim] = floats_of(rows, (len(wanted), spec.dim), "rows")
    if state is None:
        values[:, trained] = initial_state(spec.optimizer)
        return wanted, values
    given = as_numpy(state, "state")
    if width == 1 and given.ndim == 1:
        given = given[:, None]
    values[:, trained] = floats_of(given, (len(wanted), width), "state")
    return wanted, values

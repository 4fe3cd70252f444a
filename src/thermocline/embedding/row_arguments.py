"""Rows of a table as `Table.load_rows` receives and `read_rows` returns them: weights and optimizer state.

The last step of a row that catches up (`lazy="catch_up"`) is in neither: rows are read and loaded as of the last step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thermocline.arrays import Floats, Keys, as_keys, as_numpy, floats_of
from thermocline.embedding.optimizers import initial_state
from thermocline.embedding.table_spec import TableSpec


def split_rows(spec: TableSpec, rows: Floats) -> tuple[Floats, Floats]:
    """Return weights, float32[n, dim], and optimizer state, float32[n, state]."""
    return rows[:, : spec.dim], rows[:, spec.dim : spec.dim + _state_floats(spec)]


def rows_to_load(spec: TableSpec, step: int, keys: Any, rows: Any, state: Any) -> tuple[Keys, Floats]:
    """Return the keys and whole rows, as of step `step`, with statistics 0.

    Raises TypeError or ValueError that names the argument.
    """
    wanted = as_keys(keys)
    width = _state_floats(spec)
    values = np.zeros((len(wanted), spec.row_floats), np.float32)
    weights, states = split_rows(spec, values)
    weights[:] = floats_of(rows, (len(wanted), spec.dim), "rows")
    if spec.optimizer.catches_up:
        values.view(np.uint32)[:, spec.trained_floats - 1] = step
    if state is None:
        states[:] = initial_state(spec.optimizer)
        return wanted, values
    given = as_numpy(state, "state")
    if width == 1 and given.ndim == 1:
        given = given[:, None]
    states[:] = floats_of(given, (len(wanted), width), "state")
    return wanted, values


def _state_floats(spec: TableSpec) -> int:
    return spec.optimizer.state_floats(spec.dim) - spec.optimizer.catches_up

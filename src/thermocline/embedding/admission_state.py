"""State of an admission filter in checkpoints: its counters as of the last step. Keys with a row are not a part of it.

Over ranks every rank saves the counters of the keys that it owns. Another number of ranks joins the states of the ranks
that had its keys: exact counters move with their keys; a sketch, whose cells belong to no key, is the largest value of
each cell, which never counts too few.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from thermocline.arrays import Keys, Mask
from thermocline.core import core
from thermocline.embedding.admission import Admission

State = Mapping[str, Any]


def save_state(filter: core.AdmissionFilter, admission: Admission) -> dict[str, Any]:
    """Return the state as of the last step, for a checkpoint."""
    batches, dropped, keys, counts, cells, admitted = filter.save()
    return {
        "counting": admission.counting,
        "batches": batches,
        "dropped": dropped,
        "keys": torch.from_numpy(keys.view(np.int64)),
        "counts": torch.from_numpy(counts.view(np.int32)),
        "cells": torch.from_numpy(cells.view(np.int16)),
        "admitted": torch.from_numpy(admitted.view(np.int64)),
    }


def join_states(states: Sequence[State], owns: Callable[[Keys], Mask]) -> State | None:
    """Join the states of the ranks that had the keys of this process; None: nothing was saved.

    owns   returns which keys have their row in this process
    """
    if not states:
        return None
    keys, counts = _joined(states, "keys"), _joined(states, "counts")
    admitted, cells = _joined(states, "admitted"), [state["cells"] for state in states]
    own = torch.from_numpy(owns(keys.numpy().view(np.uint64)))
    largest = cells[0]
    if len({len(sketch) for sketch in cells}) == 1:
        unsigned = np.maximum.reduce([sketch.numpy().view(np.uint16) for sketch in cells])
        largest = torch.from_numpy(unsigned.view(np.int16))
    return {
        "counting": states[0]["counting"],
        "batches": max(int(state["batches"]) for state in states),
        "dropped": sum(int(state["dropped"]) for state in states),
        "keys": keys[own],
        "counts": counts[own],
        "cells": largest,
        "admitted": admitted[torch.from_numpy(owns(admitted.numpy().view(np.uint64)))],
    }


def _joined(states: Sequence[State], name: str) -> torch.Tensor:
    return torch.cat([state[name] for state in states])


def load_state(filter: core.AdmissionFilter, admission: Admission, state: State | None, table: str) -> int:
    """Continue from a state, after the rows that belong to it were restored; None: all counts are 0.

    Counters of another kind, and a sketch of another size, cannot be continued: a warning says so. Return the number of
    batches trained so far.
    """
    empty = np.empty(0, np.uint64)
    keys = counts = cells = admitted = empty
    batches = dropped = 0
    if state is not None:
        batches, admitted = int(state["batches"]), state["admitted"].numpy().view(np.uint64)
        kind = admission.counting
        size = filter.stats.counter_bytes
        if state["counting"] != kind or (kind == "sketch" and state["cells"].nbytes != size):
            warnings.warn(
                f"table {table!r}: the checkpoint has admission counters of kind {state['counting']}, "
                f"{state['cells'].nbytes or state['keys'].nbytes} bytes, this table counts by {kind} in {size} "
                "bytes: keys without a row count from 0",
                stacklevel=2,
            )
        else:
            dropped = int(state["dropped"])
            keys, counts, cells = state["keys"].numpy(), state["counts"].numpy(), state["cells"].numpy()
    filter.load(batches, dropped, keys.view(np.uint64), counts.astype(np.uint32), cells.astype(np.uint16), admitted)
    return batches

"""`tc.ModelState`: a model and the rows of its tables, for torch.distributed.checkpoint.

Rows are saved in `PARTS` parts by hash, whatever the number of ranks, so that any number of ranks can load them: a rank
asks for the parts that overlap the hashes it owns. Ranks that own hashes of the same part exchange its rows, and each
returns all of it: torch.distributed.checkpoint writes one of the equal copies.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, SupportsIndex

import numpy as np
import safetensors.torch
import torch

from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.distributed.key_sharding import overlapping_ranks, owner_of
from thermocline.embedding.state_dict import (
    MAX_BYTES,
    AnyTable,
    Tensors,
    bytes_of,
    load_tables,
    rows_of_process,
    tables_of,
    too_large,
)
from thermocline.utils.text_format import parse_size

PARTS = 64
_ROWS = ("keys", "weights", "state")
"""Tensors with an element per row."""


class ModelState:
    """A model and the rows of its tables, for torch.distributed.checkpoint (the `Stateful` protocol).

        dcp.save({"app": tc.ModelState(model)}, checkpoint_id=folder)
        dcp.load({"app": tc.ModelState(model)}, checkpoint_id=folder)

    Any number of ranks can load what any number saved. Collective: all ranks save or load.

    max_bytes   raises `BudgetError` if the rows of this rank take more
    """

    def __init__(self, model: torch.nn.Module, *, max_bytes: str | SupportsIndex = MAX_BYTES) -> None:
        self._model = model
        self._max_bytes = parse_size(max_bytes, "max_bytes")

    def state_dict(self) -> dict[str, Any]:
        """Return the dense state of the model, and the parts of the rows that this rank saves or needs.

        A part is a safetensors file as bytes. Collective.
        """
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        left, tables = self._max_bytes, {}
        for name, table in tables_of(self._model).items():
            runner = CollectiveRunner.of([table.storage])
            tensors = runner.run_all("saving rows", functools.partial(_own_rows, table, left))
            left -= bytes_of(tensors)
            tables[name] = _parts(runner, tensors)
        return {"model": get_model_state_dict(self._model), "tables": tables}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load parts of any number of ranks: rows first, then the dense part."""
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        tables = tables_of(self._model)
        saved = {name: _joined(map(safetensors.torch.load, state["tables"][name].values())) for name in tables}
        load_tables(tables, saved)
        set_model_state_dict(self._model, state["model"])


def _own_rows(table: AnyTable, limit: int) -> Tensors:
    tensors = rows_of_process(table, limit)
    if tensors is None:
        raise too_large(table, limit)
    return tensors


def _parts(runner: CollectiveRunner, tensors: Tensors) -> dict[str, bytes]:
    """Return the parts that this rank owns rows of, by name. Collective."""
    part_of = owner_of(tensors["keys"].numpy().view(np.uint64), PARTS)
    own = {part: _select(tensors, part_of == part) for part in overlapping_ranks(runner.rank, runner.world, PARTS)}
    shared = {part: _numpy(rows) for part, rows in own.items() if len(overlapping_ranks(part, PARTS, runner.world)) > 1}
    for rank, pieces in enumerate(runner.gather("saving rows", lambda: shared)):
        for part, piece in pieces.items():
            if rank != runner.rank and part in own:
                own[part] = _joined([own[part], {name: torch.from_numpy(value) for name, value in piece.items()}])
    return {f"part-{part:02}-of-{PARTS}": safetensors.torch.save(_sorted(rows)) for part, rows in own.items()}


def _numpy(tensors: Tensors) -> dict[str, np.ndarray[Any, Any]]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _select(tensors: Tensors, rows: np.ndarray[Any, Any]) -> Tensors:
    return {name: tensor[torch.from_numpy(rows)] if name in _ROWS else tensor for name, tensor in tensors.items()}


def _joined(parts: Iterable[Tensors]) -> Tensors:
    """Return the rows of all parts; the description of the table is that of the first."""
    collected = list(parts)
    rows = {name: torch.cat([part[name] for part in collected]) for name in _ROWS if name in collected[0]}
    return {**collected[0], **rows}


def _sorted(tensors: Tensors) -> Tensors:
    return _select(tensors, np.argsort(tensors["keys"].numpy().view(np.uint64)))

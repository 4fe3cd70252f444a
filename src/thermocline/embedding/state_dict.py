"""`tc.state_dict` and `tc.load_state_dict`: a model together with the rows of its tables, as tensors.

`checkpoint/model_state.py` does the same for torch.distributed.checkpoint. Keys of one table in the dict, beside those
of `model.state_dict()`:

    tables/<name>/keys       int64[n], bit patterns, ascending as unsigned numbers
    tables/<name>/weights    float32[n, dim]; below fp32 uint8[n, bytes], as stored
    tables/<name>/state      float32[n, state]: optimizer state, then the words of row statistics as bit patterns
    tables/<name>/scale      float64[3], only with a learned quantization scale
    tables/<name>/table      uint8, JSON text: name, layout, step (embedding/table_state.py) and learning rate

Rows are loaded bit for bit, whatever the tiers and the device of the table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, SupportsIndex

import numpy as np
import torch

from thermocline.arrays import Floats, Keys
from thermocline.embedding.bag import EmbeddingBag
from thermocline.embedding.member_keys import member_keys
from thermocline.embedding.member_table import MemberTable
from thermocline.embedding.quant_scale import LearnedScale
from thermocline.embedding.row_version import RowVersion
from thermocline.embedding.step_rates import parse_runs
from thermocline.embedding.table import Table
from thermocline.embedding.table_state import decode, describe, encode, require_same_table
from thermocline.errors import BudgetError, FormatError, ThermoclineError
from thermocline.tiers.ssd import SsdStore
from thermocline.utils.text_format import format_size, parse_size

_PREFIX = "tables/"
MAX_BYTES = "1GB"
Tensors = dict[str, torch.Tensor]
AnyTable = Table | MemberTable


def state_dict(
    model: torch.nn.Module, *, rows: bool = False, max_bytes: str | SupportsIndex = MAX_BYTES
) -> dict[str, Any]:
    """Return `model.state_dict()` and, with `rows`, all rows of the tables of its bags. Call it between steps.

    max_bytes   raises `BudgetError` if the rows of all tables take more; larger tables are saved by `tc.Checkpoints`

    Over several ranks every rank gets the rows of all ranks. Collective.
    """
    state: dict[str, Any] = dict(model.state_dict())
    if rows:
        left = parse_size(max_bytes, "max_bytes")
        for name, table in tables_of(model).items():
            tensors = _all_rows(table, left)
            left -= bytes_of(tensors)
            state |= {f"{_PREFIX}{name}/{part}": tensor for part, tensor in tensors.items()}
    return state


def load_state_dict(model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load a `tc.state_dict(model, rows=True)`: replaces all rows, steps and learning rates, then the dense part.

    With `ssd`, rows are durable after the next commit. Raises `FormatError`, before it changes anything, if a table
    differs. Over several ranks every rank passes the whole state and takes the rows it owns.
    """
    tables = tables_of(model)
    dense = {key: value for key, value in state.items() if not key.startswith(_PREFIX)}
    saved: dict[str, Tensors] = {}
    for key in state.keys() - dense.keys():
        _, name, part = key.split("/")
        saved.setdefault(name, {})[part] = state[key]
    if set(saved) != set(tables):
        have = f"it has those of {sorted(saved)}" if saved else "it has none: save with tc.state_dict(model, rows=True)"
        raise FormatError(f"the state must have the rows of tables {sorted(tables)}, but {have}")
    load_tables(tables, saved)
    model.load_state_dict(dense, strict=strict)


# ---- the dense part, for `tc.Checkpoints`


def bags_of(model: torch.nn.Module | None) -> dict[str, EmbeddingBag]:
    """Return the bags of a model by module name."""
    modules = {} if model is None else dict(model.named_modules())
    return {name: module for name, module in modules.items() if isinstance(module, EmbeddingBag)}


def tables_of(model: torch.nn.Module) -> dict[str, AnyTable]:
    """Return the tables of the model's bags, by table name."""
    tables = list(dict.fromkeys(bag.table for bag in bags_of(model).values()))
    by_name = {table.name: table for table in tables}
    if len(by_name) != len(tables):
        names = [table.name for table in tables]
        raise ValueError(f"tables are {names}: their names must be unique (Table(name=...))")
    return by_name


def dense_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """Return `model.state_dict()` without the descriptions of tables: a checkpoint has its own."""
    descriptions = _description_keys(model)
    return {key: value for key, value in model.state_dict().items() if key not in descriptions}


def load_dense_state_dict(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load a `dense_state_dict`; the caller has restored the tables."""
    current = {key: bag.get_extra_state() for key, bag in _description_keys(model).items()}
    model.load_state_dict({**state, **current})


def _description_keys(model: torch.nn.Module) -> dict[str, EmbeddingBag]:
    return {f"{name}." * bool(name) + "_extra_state": bag for name, bag in bags_of(model).items()}


# ---- rows


def rows_of_process(table: AnyTable, limit: int) -> Tensors | None:
    """Return the rows of this process, in the order of their keys; None if they take more than `limit` bytes."""
    if table.pending_gradients:
        raise ThermoclineError(f"table {table.name!r} has unapplied gradients: save between steps")
    row_bytes = 8 + table.spec.row_bytes
    pieces: list[tuple[Keys, Floats]] = []
    for keys, rows in table.backend.rows(table.checkpoint_store, 65536):
        own = table.own_rows(keys)
        limit -= row_bytes * int(own.sum())
        if limit < 0:
            return None
        pieces.append((keys[own], rows[own]))
    keys = np.concatenate([np.empty(0, np.uint64), *(keys for keys, _ in pieces)])
    order = np.argsort(table.ids_of(keys))
    keys = keys[order]
    if table.precision.kind == "fp32":
        floats = table.spec.row_floats
        stored = np.concatenate([np.empty((0, floats), np.float32), *(rows for _, rows in pieces)])[order]
    else:
        stored = table.dram.read_stored(keys)  # `rows` has written back what HBM had
    return _as_tensors(table, table.ids_of(keys), stored)


def _as_tensors(table: AnyTable, keys: Keys, stored: Floats) -> Tensors:
    words = table.precision.weight_words(table.dim)
    weights = stored[:, :words].copy()
    tensors = {
        "keys": torch.from_numpy(keys.view(np.int64)),
        "weights": torch.from_numpy(weights if table.precision.kind == "fp32" else weights.view(np.uint8)),
        "state": torch.from_numpy(stored[:, words:].copy()),
        "table": encode({**describe(table), "lr": float(table.lr), **_rates(table)}),
    }
    if (scale := table.backend.learned_scale) is not None:
        tensors["scale"] = torch.tensor(dataclasses.astuple(scale), dtype=torch.float64)
    return tensors


def _rates(table: AnyTable) -> dict[str, Any]:
    return {} if table.rate_runs is None else {"rates": table.rate_runs}


def _all_rows(table: AnyTable, limit: int) -> Tensors:
    """Return the rows of all ranks. Collective."""
    tensors = rows_of_process(table, limit)
    if table.groups is None:
        if tensors is None:
            raise too_large(table, limit)
        return tensors
    comm, doing = table.groups.train, "gathering the rows of a state_dict"
    own = np.array([-1 if tensors is None else len(tensors["keys"])])
    counts = comm.all_gather(own, doing)[:, 0].tolist()
    row_bytes = 8 + table.spec.row_bytes
    if min(counts) < 0 or row_bytes * sum(counts) > limit:
        raise too_large(table, limit)
    assert tensors is not None
    parts = {}
    for part in ("keys", "weights", "state"):
        values = tensors[part].numpy()
        padded = np.zeros((max(counts), *values.shape[1:]), values.dtype)
        padded[: len(values)] = values
        gathered = comm.all_gather(padded, doing) if padded.nbytes else [padded] * len(counts)
        parts[part] = np.concatenate([rows[:count] for rows, count in zip(gathered, counts, strict=True)])
    order = np.argsort(parts["keys"].view(np.uint64))
    return tensors | {part: torch.from_numpy(values[order]) for part, values in parts.items()}


def too_large(table: AnyTable, limit: int) -> BudgetError:
    return BudgetError(
        f"the rows of table {table.name!r} take more than the {format_size(limit)} left of max_bytes: raise max_bytes, "
        "or save with tc.Checkpoints, which writes rows to files"
    )


def bytes_of(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def check_rows(table: AnyTable, saved: Tensors) -> None:
    """Raise unless the saved rows are of this table and it can be changed now. Changes nothing."""
    missing = {"keys", "weights", "state", "table"} - set(saved)
    if missing:
        raise FormatError(f"the state lacks {sorted(missing)} of table {table.name!r}: save it again")
    require_same_table(decode(saved["table"]), table)
    row_bytes = table.spec.row_bytes
    if _stored(saved).shape != (len(saved["keys"]), row_bytes):
        raise FormatError(f"the rows of table {table.name!r} in the state are damaged: they have the wrong shape")
    table.backend.require_idle()
    if table.checkpoint_store is not None:
        _ = table.checkpoint_store.epoch  # raises if it is closed


def _stored(saved: Tensors) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return uint8[n, row_bytes]: weights, then state."""
    parts = [saved[part].cpu().numpy() for part in ("weights", "state")]
    widths = [part.itemsize * math.prod(part.shape[1:]) for part in parts]
    columns = [np.frombuffer(part.tobytes(), np.uint8) for part in parts]
    rows = [column.reshape(len(part), width) for column, part, width in zip(columns, parts, widths, strict=True)]
    return np.concatenate(rows, 1)


def owned_rows(table: Table, saved: Tensors) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return table.owns(saved["keys"].cpu().numpy().view(np.uint64))


def load_tables(tables: Mapping[str, AnyTable], saved: Mapping[str, Tensors]) -> None:
    """Replace all rows of tables by the saved ones. Raises before it changes anything if a table differs.

    Over several ranks every rank passes rows of all ranks and takes those that it owns.
    """
    by_storage: dict[Table, dict[str, Tensors]] = {}
    for name, table in tables.items():
        check_rows(table, saved[name])
        by_storage.setdefault(table.storage, {})[name] = saved[name]
    loads = [(storage, _stored_together(storage, parts)) for storage, parts in by_storage.items()]
    for storage, tensors in loads:
        load_rows(storage, tensors, owned_rows(storage, tensors))


def _stored_together(storage: Table, parts: Mapping[str, Tensors]) -> Tensors:
    """Return the rows of tables that are stored together as those of one table."""
    members = {member.name: member for member in storage.spec.members}
    if not members:
        (tensors,) = parts.values()
        return tensors
    if missing := members.keys() - parts.keys():
        raise FormatError(
            f"tables {sorted(parts)} are stored with {sorted(missing)}, which the model does not read: their rows "
            "would be lost. Make bags of all tables, or other tc.Tiers for the model"
        )
    described = {name: decode(tensors["table"]) for name, tensors in parts.items()}
    for key in ("step", "lr"):
        values = {name: description.get(key) for name, description in described.items()}
        if len(set(values.values())) > 1:
            raise FormatError(f"tables that are stored together have one {key}, but the state has {values}")
    keys = [
        member_keys(parts[name]["keys"].cpu().numpy().view(np.uint64), member.salt, f"table {name!r}")
        for name, member in members.items()
    ]
    joined = {part: torch.cat([parts[name][part] for name in members]) for part in ("weights", "state")}
    first = next(iter(members))
    return {"keys": torch.from_numpy(np.concatenate(keys).view(np.int64)), **joined, "table": parts[first]["table"]}


def load_rows(table: Table, saved: Tensors, owned: np.ndarray[Any, np.dtype[np.bool_]] | None) -> None:
    """Replace all rows of the table by the saved ones. After an error the table has its previous rows."""
    keys, rows = saved["keys"].cpu().numpy().view(np.uint64), _stored(saved)
    if owned is not None:
        keys, rows = keys[owned], np.ascontiguousarray(rows[owned])
    scale = LearnedScale(*saved["scale"].tolist()) if "scale" in saved else None
    backend = table.backend
    table.discard_gradients()
    undo = table.reopen if table.store is not None else backend.undo_point()
    try:
        backend.replace_rows((), scale)  # first: the tiers write changed rows to the store in the background
        _delete_rows(table.store)
        backend.import_rows(keys, rows)
    except BaseException:
        undo()
        raise
    _delete_rows(table.checkpoint_store)  # the next save writes the loaded rows to it
    description = decode(saved["table"])
    version = RowVersion(description["history"], description["step"])
    table.set_version(version, parse_runs(description.get("rates")))
    backend.statistics.load(description.get("statistics"))
    table.lr = description.get("lr", table.lr)


def _delete_rows(store: SsdStore | None) -> None:
    if store is not None:
        for keys, _ in store.scan():
            store.delete(keys)

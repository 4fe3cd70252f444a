"""Describes which rows of which table a `state_dict` belongs to, and checks it when the `state_dict` is loaded."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from thermocline.embedding.row_version import RowVersion
from thermocline.errors import FormatError, ThermoclineError

if TYPE_CHECKING:
    from thermocline.embedding.member_table import MemberTable
    from thermocline.embedding.table import Table
    from thermocline.tiers.ssd import SsdStore

    AnyTable: TypeAlias = Table | MemberTable

_FORMAT = 1
_KEYS = {"format", "table", "layout", "history", "step", "ssd", "store", "epoch", "committed"}
_PADDING = 1024
"""Descriptions are padded to a multiple of these bytes: torch.distributed.checkpoint loads tensors of equal size."""


def describe(table: AnyTable) -> dict[str, Any]:
    """Return name, layout and version of a table, and its newest commit, as JSON."""
    version = table.version
    path, epoch, committed = _newest_commit(table, version)
    statistics = table.spec.statistics
    return {
        "format": _FORMAT,
        "table": table.name,
        "layout": table.layout,
        "history": version.history,
        "step": version.step,
        "ssd": table.store_root is not None,
        "store": path,
        "epoch": epoch,
        "committed": committed,
        **({"statistics": table.backend.statistics.to_json(statistics)} if statistics else {}),
    }


def _newest_commit(table: AnyTable, version: RowVersion) -> tuple[str | None, int, bool]:
    """Return folder and epoch of the newest commit, and whether it has the rows of `version`."""
    store: SsdStore | None = table.store or table.checkpoint_store
    with contextlib.suppress(ThermoclineError):  # a closed store has no epoch
        if store is not None and store.epoch:
            folder = os.path.abspath(table.store_root or store.path)
            return folder, store.epoch, RowVersion.of_commit(store.note, store.epoch) == version
    return None, 0, False


def encode(description: dict[str, Any]) -> torch.Tensor:
    """Return uint8: JSON text, padded with spaces. A tensor, as programs expect nothing else in a `state_dict`."""
    text = json.dumps(description).encode()
    return torch.frombuffer(bytearray(text.ljust(-(-len(text) // _PADDING) * _PADDING)), dtype=torch.uint8)


def decode(state: torch.Tensor) -> dict[str, Any]:
    """Return the description that `encode` converted."""
    try:
        description = json.loads(bytes(state.cpu().numpy().astype("uint8", casting="no")))
        if description["format"] != _FORMAT:
            cause = f"it has format {description['format']}, this version reads {_FORMAT}"
        elif missing := _KEYS - description.keys():
            cause = f"it lacks {sorted(missing)}"
        else:
            return description  # type: ignore[no-any-return]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        cause = f"it is not the JSON text that state_dict() wrote ({error})"
    raise FormatError(f"the description of a table in the state_dict (_extra_state) cannot be read: {cause}")


def require_same_table(saved: dict[str, Any], table: AnyTable) -> None:
    """Raise `FormatError` unless the description is of a table with this name and layout."""
    if saved["table"] != table.name:
        raise FormatError(
            f"the state_dict is of table {saved['table']!r}, but this one is {table.name!r}: make it with "
            f"name={saved['table']!r}, or load the state_dict that belongs to it"
        )
    layout = json.loads(json.dumps(table.layout))
    for key, before in {"statistics": [], **saved["layout"]}.items():  # added later
        if layout.get(key) != before:
            raise FormatError(
                f"the state_dict is of table {table.name!r} with {key} {before}, but this one has {layout.get(key)}: "
                "make it with the arguments of the training"
            )


def require_same_rows(saved: dict[str, Any], table: AnyTable) -> None:
    """Raise `FormatError`, with the remedy, unless the table has the rows that the description names."""
    require_same_table(saved, table)
    version = RowVersion(saved["history"], saved["step"])
    now = table.version
    if version != now:
        place = f", commit {saved['epoch']} of {saved['store']}" if saved["committed"] else ""
        other = " of another training" if version.history and now.history and version.step == now.step else ""
        raise FormatError(
            f"the state_dict belongs to the rows of table {table.name!r} {_step(version)}{place}, but the table is "
            f"{_step(now)}{other}: {_remedy(saved, table)}"
        )


def _step(version: RowVersion) -> str:
    return f"at step {version.step}" if version.history else "untrained"


def _remedy(saved: dict[str, Any], table: AnyTable) -> str:
    rows = "tc.Checkpoints or tc.state_dict(model, rows=True), and load those with tc.load_state_dict(model, state)"
    if not saved["history"]:
        return "open a new table for it"
    if not saved["committed"]:
        return f"its rows had not been committed; open the commit of that step, or save rows with {rows}"
    if not saved["ssd"]:
        return "restore the rows first, with tc.Checkpoints(...).restore()"
    if table.store_root is None or os.path.abspath(table.store_root) != saved["store"]:
        return f"open it with ssd={saved['store']!r}, epoch={saved['epoch']}"
    if table.store is not None and saved["epoch"] in table.store.epochs:
        return f"call table.reopen(epoch={saved['epoch']}) before load_state_dict"
    return f"that commit is not kept any more; save rows with {rows}"

"""`require_equal`: compares settings over ranks. Ranks with different settings would train different models silently.

Every rank sends a digest of 32 bytes. Only if digests differ do ranks send more: first a digest per setting, then the
values of the first setting that differs.

Thread     the training thread (`Groups.train`); collective
Blocks     until every rank has called it, at most `dist.timeout` seconds
Raises     `ConfigError` with the same text on every rank
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from thermocline.distributed.communicator import Communicator

_DOING = "comparing settings"
_MAX_SHOWN = 3


def require_equal(comm: Communicator | None, settings: Mapping[str, Any], fix: str) -> None:
    """Raise unless all ranks pass equal settings: JSON values by name, in the order in which they are reported.

    comm   None: one process, also one that simulates ranks; there is nothing to compare
    fix    end of the message: what a user has to do
    """
    if comm is None or comm.topology.world == 1:
        return
    digests = {name: _digest(value) for name, value in settings.items()}
    total = np.frombuffer(bytearray.fromhex(_digest(sorted(digests.items()))), np.uint8)
    gathered = comm.all_gather(total, _DOING)
    if (gathered == gathered[0]).all():
        return
    runner = CollectiveRunner(comm)
    by_rank = runner.gather(_DOING, lambda: digests)
    names = dict.fromkeys(itertools.chain.from_iterable(by_rank))
    different = [name for name in names if len({rank.get(name) for rank in by_rank}) > 1]
    name = different[0]
    values = runner.gather(_DOING, lambda: json.loads(_canonical(settings[name])) if name in settings else _Missing)
    raise ConfigError(f"{_describe(name, values)}{_others(different[1:])}: {fix}")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def versions() -> dict[str, str]:
    """Return the versions that results depend on bit by bit."""
    import torch

    from thermocline import __version__

    return {
        "the version of thermocline": __version__,
        "the version of torch": str(torch.__version__),
        "the version of numpy": np.__version__,
    }


def dense_settings(
    parameters: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    sync: Any,
) -> dict[str, Any]:
    """Return shapes, optimizers with their settings, and the synchronization `sync` of a dense model."""
    named = {"dense parameter": parameters, "dense buffer": buffers}
    found = {f"{kind} {i}": shape_text(t) for kind, tensors in named.items() for i, t in enumerate(tensors)}
    for i, optimizer in enumerate(optimizers):
        found[f"dense optimizer {i}"] = type(optimizer).__name__
        for j, group in enumerate(optimizer.param_groups):
            values = {**group, "params": [shape_text(parameter) for parameter in group["params"]]}
            found |= flatten({name: _plain(value) for name, value in values.items()}, f"dense optimizer {i}.group {j}.")
    return {**found, **flatten(dataclasses.asdict(sync), "dense_sync.")}


def shape_text(tensor: torch.Tensor) -> str:
    """Return dtype and shape, such as "float32[3, 4]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _plain(value: Any) -> Any:
    """Return the value of a tensor: a learning rate may be one."""
    return value.tolist() if hasattr(value, "tolist") else value


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_comparable)


def _comparable(value: Any) -> Any:
    """Return JSON values for another type, equal in all processes: without addresses or the order of a set."""
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    name: str = getattr(value, "__qualname__", type(value).__qualname__)
    return name if " at 0x" in str(value) else str(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


_Missing = {"thermocline": "missing"}
"""Stands for a setting that a rank does not have: JSON, so that it can be sent."""


def _describe(name: str, values: Sequence[Any]) -> str:
    """Return "name is A on ranks 0, 2 and B on rank 1"; of lists, only the first item that differs."""
    while all(isinstance(value, list) for value in values):
        index = next(i for i in itertools.count() if len({_canonical(_item(value, i)) for value in values}) > 1)
        name, values = f"{name}[{index}]", [_item(value, index) for value in values]
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault("missing" if value == _Missing else _show(value), []).append(rank)
    parts = [f"{value} on {_rank_list(having)}" for value, having in ranks.items()]
    shown, more = parts[:_MAX_SHOWN], len(parts) - _MAX_SHOWN
    text = " and ".join(shown) if len(shown) == 2 else "; ".join(shown)
    return f"{name} is {text}" + (f"; and {more} more values" if more > 0 else "")


def _item(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else _Missing


def _show(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _rank_list(ranks: Sequence[int]) -> str:
    """Return "rank 1", or "ranks 0, 2-5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(texts)


def _others(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return f" ({', '.join(names[:_MAX_SHOWN])}{more} also differ{'s' if len(names) == 1 else ''})"

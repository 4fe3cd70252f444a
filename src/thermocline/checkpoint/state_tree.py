"""Serializes the state of a rank: a safetensors file with all values but tensors as JSON in its header. No pickle."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from thermocline.checkpoint.manifest import Json, sha256_hex
from thermocline.errors import CorruptionError, FormatError
from thermocline.utils.untrusted_files import open_regular

Tensors = dict[str, torch.Tensor]
_VALUES, _CHECKSUM = "thermocline", "sha256"
"""Keys of a file's header."""
_MAX_HEADER = 100_000_000
"""Largest header that safetensors reads."""


@dataclasses.dataclass(slots=True)
class RankState:
    """The state of a checkpoint that a rank restores, beside its rows."""

    model: dict[str, Any] | None
    optimizers: list[dict[str, Any]]
    sync: dict[str, Any] | None = None
    """State of `DenseParameters`; None if the model is a mean over ranks."""
    random: dict[str, Any] | None = None
    """Random states; None if another number of ranks saved."""
    tables: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """State of the tables beside their rows (`Table.rank_state`), by name: that of this rank, or, if another number of
    ranks saved, one of each rank that had rows of this one."""


# ---- trees


def pack(value: Any, tensors: Tensors, path: str) -> Json:
    """Convert a nested value to JSON, and add its tensors to `tensors` by path. `unpack` is the inverse."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case torch.Tensor():
            while path in tensors:  # {"a": {"b": ...}} and {"a/b": ...} have the same path, as have the keys 1 and "1"
                path += "'"
            tensors[path] = value
            return {"tensor": path}
        case np.generic():
            return value.item()
        case dict():
            return {"dict": [[pack(k, tensors, path), pack(v, tensors, f"{path}/{k}")] for k, v in value.items()]}
        case list() | tuple():
            items = [pack(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
    raise TypeError(
        f"{path} is a {type(value).__name__}: a checkpoint holds only tensors, numbers, strings, lists and dicts"
    )


def unpack(value: Json, tensors: Tensors) -> Any:
    """Return the value that `pack` converted."""
    match value:
        case {"tensor": path}:
            return tensors[path]
        case {"dict": items}:
            return {unpack(k, tensors): unpack(v, tensors) for k, v in items}
        case {"tuple": items}:
            return tuple(unpack(v, tensors) for v in items)
        case list():
            return [unpack(v, tensors) for v in value]
    return value


def encode(tensors: Tensors, values: Json = None) -> bytes:
    """Serialize tensors and JSON values as a safetensors file.

    Tensors that share memory are copied: the format does not allow it. The values have a checksum of their own, so that
    `read_values` need not read the tensors.
    """
    seen: set[int] = set()
    separate: Tensors = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        address = copy.untyped_storage().data_ptr()
        separate[name] = copy.clone() if address in seen else copy
        seen.add(address)
    text = json.dumps(values, separators=(",", ":"))
    return safetensors.torch.save(separate, {_VALUES: text, _CHECKSUM: sha256_hex(text.encode())})


def decode(data: bytes) -> Tensors:
    """Return the tensors of a safetensors file. Raises `FormatError` for other bytes."""
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise FormatError(f"the state of a rank is not a safetensors file that this version reads ({error})") from None


def values_of(data: bytes, name: str) -> Json:
    """Return the values of a file that `encode` wrote; `name` is its path, for errors. Only the header is needed."""
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        text = header[_VALUES]
        if sha256_hex(text.encode()) != header[_CHECKSUM]:
            raise ValueError("its checksum does not match its content")
        return json.loads(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptionError(f"{name} is damaged: its header is not that of a rank's state ({error})") from None


def read_values(path: Path) -> Json:
    """Return the values of a file that `encode` wrote; reads its header only. Raises `CorruptionError`."""
    with open_regular(path) as file:
        length = file.read(8)
        size = int.from_bytes(length, "little")
        if size > min(_MAX_HEADER, os.fstat(file.fileno()).st_size):
            raise CorruptionError(f"{path} is damaged: its header has {size} bytes")
        return values_of(length + file.read(size), str(path))


def check_dense(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise `FormatError` unless the saved model and optimizers match the current ones in names, shapes and groups."""
    saved_shapes, shapes = (_shapes(state["model"]) for state in (saved, current))
    for name in {**saved_shapes, **shapes}:
        if saved_shapes.get(name) != shapes.get(name):
            raise FormatError(
                f"the checkpoint is of another model: {name} is {saved_shapes.get(name, 'missing')} in the checkpoint "
                f"and {shapes.get(name, 'missing')} in this model"
            )
    saved_groups, groups = ([_groups(optimizer) for optimizer in state["optimizers"]] for state in (saved, current))
    if saved_groups != groups:
        raise FormatError(
            f"the checkpoint has other dense optimizers: {saved_groups} (parameters per group), but this run has "
            f"{groups}"
        )


_MOMENTS = frozenset(
    {"acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev"}
    | {"square_avg", "step_size", "sum", "v_hat"}
)
"""Names in the state of torch's optimizers that hold a number per element of the parameter."""


def check_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Raise an error if the optimizer cannot load the state, or could not step with it. Changes nothing."""
    trial = copy.copy(optimizer)  # shares the current state; loading replaces the state of `trial` only
    with _value_errors():
        torch.optim.Optimizer.load_state_dict(trial, saved)
    for group in trial.param_groups:
        for name, default in optimizer.defaults.items():
            value = group.get(name, default)
            if isinstance(default, float) and not isinstance(value, int | float | torch.Tensor):
                raise TypeError(f"{name} of an optimizer is {value!r}: it must be a number")
        for parameter in group["params"]:
            for name, value in trial.state.get(parameter, {}).items():
                if name in _MOMENTS and (not isinstance(value, torch.Tensor) or value.shape != parameter.shape):
                    shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                    raise ValueError(f"{name} of an optimizer is {shape}, its parameter is {list(parameter.shape)}")


def _shapes(model: dict[str, Any] | None) -> dict[str, str]:
    return {
        name: f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        for name, value in (model or {}).items()
    }


def _groups(optimizer: dict[str, Any]) -> str:
    return f"{optimizer['kind']} {[len(group['params']) for group in optimizer['state']['param_groups']]}"


# ---- random states


def random_state() -> dict[str, Any]:
    """Return the states of the global generators of torch, NumPy and Python.

    A loader with its own generator must put its state into `Batch.position`.
    """
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    state["numpy"] = {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def check_random_state(state: dict[str, Any]) -> None:
    """Raise an error if `set_random_state` would. Changes no generator."""
    with _value_errors():
        torch.Generator().set_state(state["torch"])
        random.Random().setstate(state["python"])
        numpy = np.random.get_state(legacy=False)
        assert isinstance(numpy, dict)
        np.random.RandomState(getattr(np.random, numpy["bit_generator"])()).set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            for device, saved in enumerate(state["cuda"]):
                torch.Generator(f"cuda:{device}").set_state(saved)


@contextlib.contextmanager
def _value_errors() -> Iterator[None]:
    """Re-raise errors of torch and Python about a value as ValueError."""
    try:
        yield
    except (ArithmeticError, RuntimeError) as error:
        raise ValueError(str(error)) from error


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the result of `random_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])

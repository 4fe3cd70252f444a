"""What a checkpoint holds beside rows: trees of tensors and plain values, as safetensors and JSON, never pickle."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import safetensors.torch
import torch

from thermocline.checkpoint.manifest import Json
from thermocline.errors import FormatError

Tensors = dict[str, torch.Tensor]


# ---- trees


def pack(value: Any, tensors: Tensors, path: str) -> Json:
    """`value` as JSON; tensors go to `tensors`, under the path that leads to them. `unpack` gives it back as it was."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case torch.Tensor():
            while path in tensors:  # of {"a": {"b": ...}} and {"a/b": ...}, of 1 and "1"
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
        f"{path} is a {type(value).__name__}: a checkpoint holds tensors, numbers, text, lists and dicts only"
    )


def unpack(value: Json, tensors: Tensors) -> Any:
    """What `pack` was given."""
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


def encode(tensors: Tensors) -> bytes:
    """A safetensors file. Tensors that share memory are written once each."""
    seen: set[int] = set()
    plain: Tensors = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        where = copy.untyped_storage().data_ptr()
        plain[name] = copy.clone() if where in seen else copy
        seen.add(where)
    return safetensors.torch.save(plain)


def decode(data: bytes) -> Tensors:
    """The tensors of a safetensors file."""
    return safetensors.torch.load(data)


def check_dense(saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Raises `FormatError` unless a saved model and its optimizers fit the ones that are here."""
    was, now = (_shapes(state["model"]) for state in (saved, here))
    for name in {**was, **now}:
        if was.get(name) != now.get(name):
            raise FormatError(
                f"the checkpoint is of another model: {name} is {was.get(name, 'not there')} in the checkpoint and "
                f"{now.get(name, 'not there')} here"
            )
    groups_were, groups = ([_groups(optimizer) for optimizer in state["optimizers"]] for state in (saved, here))
    if groups_were != groups:
        raise FormatError(
            f"the checkpoint has other dense optimizers: {groups_were} (parameters per group), here {groups}"
        )


def _shapes(model: dict[str, Any] | None) -> dict[str, str]:
    return {
        name: f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        for name, value in (model or {}).items()
    }


def _groups(optimizer: dict[str, Any]) -> str:
    return f"{optimizer['kind']} {[len(group['params']) for group in optimizer['state']['param_groups']]}"


# ---- random numbers


def random_state() -> dict[str, Any]:
    """Of torch, NumPy's and Python's global generators. A loader's own randomness belongs into its position."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    state["numpy"] = {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Back to what `random_state` found."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])

"""Checkpoint manifests: JSON with a checksum of the content. Loads no torch."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from thermocline.errors import CorruptionError

Json = Any
"""A value that JSON can hold: see `require_json`."""


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def encode_manifest(manifest: dict[str, Json]) -> bytes:
    """Serialize a manifest to JSON, with a checksum of its content under "checksum"."""
    return _dump({**manifest, "checksum": sha256_hex(_dump(manifest))})


def decode_manifest(data: bytes, name: str) -> dict[str, Json]:
    """Parse and verify a manifest; `name` is its path, for errors.

    Raises `CorruptionError` unless `data` has the checksum that `encode_manifest` wrote.
    """
    try:
        manifest = json.loads(data)
        checksum = manifest.pop("checksum")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptionError(f"{name} is damaged: it is not a checkpoint's manifest ({error})") from None
    if sha256_hex(_dump(manifest)) != checksum:
        raise CorruptionError(f"{name} is damaged: its checksum does not match its content")
    return manifest  # type: ignore[no-any-return]


def _dump(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def require_json(value: Any, name: str) -> None:
    """Raise TypeError unless JSON preserves `value` exactly; `name` is its name in the error.

    Rejects values that JSON would change silently: a tuple becomes a list, an integer key becomes a string.
    """
    match value:
        case None | bool() | int() | float() | str():
            return
        case list():
            for i, item in enumerate(value):
                require_json(item, f"{name}[{i}]")
        case dict() if all(isinstance(key, str) for key in value):
            for key, item in value.items():
                require_json(item, f"{name}[{key!r}]")
        case _:
            raise TypeError(
                f"{name} is a {type(value).__name__}: it must be JSON (None, bool, number, string, list, or dict with "
                "string keys)"
            )

"""Loads the C++ module. Use the classes of `thermocline.embedding`, which check arguments and explain errors."""

from __future__ import annotations

try:
    from thermocline.core import _core as core
except ImportError as error:
    raise ImportError(
        f"Thermocline's C++ module does not load ({error}): build it with `make build-inplace` in a source tree, "
        "or install the package with `pip install .`"
    ) from error

__all__ = ["core"]

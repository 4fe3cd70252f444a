"""Embedding tables larger than memory: rows in HBM, DRAM and SSD, exact and crash-safe.

`__init__.pyi` lists the public names. Each is imported on first use: `import thermocline` loads neither torch nor NumPy
nor the C++ core.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import lazy_loader

__version__ = "0.1.0"

# By default, OpenMP threads spin while they wait and take cores from the pipeline's threads: a sixth of a machine with
# two cores. OpenMP reads the variable when torch loads it, so thermocline must be imported before torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_MODULES = {  # public name -> module
    "hashing": "thermocline.data.feature_hashing",
    "nn": "thermocline.embedding.torch_modules",
}
_load_name, _, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = ["__version__", *_names, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _names:
        return _load_name(name)
    raise AttributeError(f"module 'thermocline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Where a result was made: processor, memory, GPU, versions, and which build this is. No names of hosts or folders."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import thermocline
from thermocline.utils.cpu_affinity import cores
from thermocline.utils.machine import memory_bytes

_PACKAGES = ("torch", "numpy", "triton")


def describe() -> dict[str, Any]:
    """As JSON, at this moment."""
    return {**_constant(), "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")}


@functools.cache
def _constant() -> dict[str, Any]:
    return {
        "cpu": _processor(),
        "cores": cores(),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "gpu": _gpu(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "thermocline": thermocline.__version__,
        "build": build(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def gpu_bytes() -> int:
    """Of the GPU that torch would use; 0: there is none."""
    import torch

    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0


@functools.cache
def build() -> str:
    """A digest of the package's sources and its C++ module: results with the same one come from the same program."""
    root = Path(thermocline.__file__).parent
    digest = hashlib.blake2b(digest_size=5)
    for path in sorted([*root.rglob("*.py"), *root.rglob("_core*.so")]):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def words(environment: dict[str, Any]) -> str:
    """One line."""
    gpu = f", {environment['gpu']}" if environment["gpu"] else ", no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"{environment['cpu']}, {environment['cores']} cores, {environment['memory_gb']} GB of memory{gpu}; "
        f"thermocline {environment['thermocline']} (build {environment['build']}), Python {environment['python']}, "
        f"{versions}; {environment['date']}"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

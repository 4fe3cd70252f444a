"""Description of the machine and the program that made a result. It contains no host names and no paths."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import thermocline
from thermocline.utils.cpu_affinity import cores
from thermocline.utils.machine import memory_bytes

_PACKAGES = ("torch", "numpy", "triton")
_HERE = Path(__file__).parent


def describe() -> dict[str, Any]:
    """Return processor, memory, GPU, versions and the current date as JSON."""
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
        "commit": commit(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def gpu_bytes() -> int:
    """Return the memory size of torch's default GPU, or 0 without a GPU."""
    import torch

    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0


@functools.cache
def build() -> str:
    """Return a digest of the Python sources and the C++ module: equal digests mean the same program."""
    digest = hashlib.blake2b(digest_size=5)
    for root in (Path(thermocline.__file__).parent, _HERE):
        for path in sorted([*root.rglob("*.py"), *root.rglob("_core*.so")]):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


@functools.cache
def commit() -> str | None:
    """Return the git commit of the source tree, with "+" after it if files were changed; None without git.

    A copy of the tree on another machine has the commit in benchmarks/COMMIT, which counts where it fits the sources.
    """
    if (recorded := _recorded_commit()) is not None:
        return recorded

    def git(*words: str) -> str:
        run = subprocess.run(["git", "-C", str(_HERE), *words], capture_output=True, text=True, check=True)
        return run.stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _recorded_commit() -> str | None:
    """Return the commit in benchmarks/COMMIT if its digest fits the sources: see benchmarks/common.py."""
    folder = _HERE.parent / "benchmarks"
    if not (folder / "COMMIT").exists():
        return None
    spec = importlib.util.spec_from_file_location("benchmarks_common", folder / "common.py")
    assert spec is not None
    assert spec.loader is not None
    common = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = common  # its dataclasses look their module up
    spec.loader.exec_module(common)
    recorded, _, digest = (folder / "COMMIT").read_text().strip().partition(" ")
    return recorded if digest == common.source_digest() else None


def summary(environment: Mapping[str, Any]) -> str:
    """Format a description as one line."""
    gpu = f", {environment['gpu']}" if environment["gpu"] else ", no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    commit = f", commit {environment['commit']}" if environment.get("commit") else ""
    return (
        f"{environment['cpu']}, {environment['cores']} cores, {environment['memory_gb']} GB of memory{gpu}; "
        f"thermocline {environment['thermocline']} (build {environment['build']}{commit}), "
        f"Python {environment['python']}, {versions}; {environment['date']}"
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

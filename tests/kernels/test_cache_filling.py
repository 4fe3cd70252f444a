"""Worker processes compile kernels under the keys that this process looks up in Triton's cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton.language as tl
from triton.runtime.jit import JITFunction

from thermocline.kernels.cache_filling import hash_source

_FACTOR = tl.constexpr(4)


@JITFunction
def _scaled(x):  # type: ignore[no-untyped-def]
    return x * _FACTOR


@JITFunction
def _top(x):  # type: ignore[no-untyped-def]
    return _scaled(x)


def test_hash_of_a_kernel_does_not_depend_on_what_was_hashed_before() -> None:
    keys = []
    for before in ([], [_scaled]):
        for function in (_top, _scaled):
            function.hash, function.used_global_vals = None, {}
        for function in before:
            assert function.cache_key
        hash_source(_top)
        keys.append(_top.cache_key)
    assert keys[0] == keys[1]


def compiled_in(cache: Path, *command: str) -> dict[str, Any]:
    """Run helpers/compile_in_processes.py with this cache and, if given, another command of the workers."""
    script = Path(__file__).parents[1] / "helpers" / "compile_in_processes.py"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(script), *command], capture_output=True, text=True, env=environment, timeout=280
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


@pytest.mark.timeout(600)
def test_kernels_of_workers_are_found_in_the_cache(tmp_path: Path) -> None:
    first = compiled_in(tmp_path)
    assert first["started"] == 3
    assert first["compiled"] == len(first["hits"]) == 7
    assert all(hit for _, hit in first["hits"])
    second = compiled_in(tmp_path)
    assert (second["started"], second["compiled"]) == (0, 0), "the list beside the cache says that it is filled"
    assert all(hit for _, hit in second["hits"])
    (entry,) = tmp_path.glob("*/__grp__*_set_flags_kernel.json")
    entry.unlink()
    third = compiled_in(tmp_path)
    assert (third["started"], third["compiled"]) == (3, 1)
    assert all(hit for _, hit in third["hits"])


def test_kernels_are_compiled_here_if_workers_fail(tmp_path: Path) -> None:
    figures = compiled_in(tmp_path, "false")
    assert figures["compiled"] == 0
    assert [hit for _, hit in figures["hits"]] == [False] * 7

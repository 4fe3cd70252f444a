"""The hash of Triton's files is computed once, before the first kernels ask for it."""

from __future__ import annotations

import threading

import pytest

from thermocline.utils import compiler_hash

cache = pytest.importorskip("triton.runtime.cache", reason="Triton is not installed")


def test_hash_is_computed_once_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    monkeypatch.setattr(compiler_hash, "_thread", None)
    monkeypatch.setattr(cache, "triton_key", lambda: computed.append(threading.current_thread().name))
    compiler_hash.wait_for_hash()  # nothing was started: nothing to wait for
    for _ in range(3):
        compiler_hash.start_hashing()
    compiler_hash.wait_for_hash()
    assert computed == ["thermocline-compiler-hash"]


def test_a_triton_without_the_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_hash, "_thread", None)
    monkeypatch.delattr(cache, "triton_key")
    compiler_hash.start_hashing()
    compiler_hash.wait_for_hash()

"""The functions that are called to compile kernels ahead launch the kernels of a training step."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import thermocline as tc
from thermocline.kernels import INTERPRETED
from thermocline.tiers import compile_ahead
from thermocline.tiers.hbm_backend import HbmBackend

DEVICE = "interpreter" if INTERPRETED else "cuda"


def table_of(optimizer: Any, precision: tc.Precision) -> tc.Table:
    return tc.Table(4, optimizer, hbm="64KB", mem="1MB", device=DEVICE, precision=precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [tc.SGD(), tc.RowWiseAdagrad(), tc.Adam(weight_decay=0.1)], ids=str)
def test_step_can_be_called_for_every_layout(monkeypatch: pytest.MonkeyPatch, optimizer: Any, precision: Any) -> None:
    """On a CPU nothing is compiled: the calls themselves must work, and are replaced where they would launch."""
    table = table_of(optimizer, tc.Precision(precision))
    backend = table.backend
    assert isinstance(backend, HbmBackend)
    calls: Counter[str] = Counter()
    for name in ("update_rows", "find_or_insert", "set_flags", "copy_in", "pool_rows", "index_gradients"):
        original = getattr(compile_ahead, name)

        def call(*args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            calls[name] += 1
            return original(*args, **options) if name in ("find_or_insert", "pool_rows", "index_gradients") else None

        monkeypatch.setattr(compile_ahead, name, call)
    compile_ahead.call_step(backend.hbm, backend._codec, table.spec)
    assert calls == {
        "update_rows": 1, "find_or_insert": 1, "set_flags": 1, "copy_in": 1, "pool_rows": 2, "index_gradients": 1
    }  # fmt: skip
    table.close()


@pytest.mark.gpu
@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 does not compile ahead")
def test_first_step_compiles_only_what_is_not_known_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    from thermocline.kernels.launch import Kernel

    table = table_of(tc.Adam(lr=0.123), tc.Precision())
    backend = table.backend
    assert isinstance(backend, HbmBackend)
    thread = compile_ahead.compile_ahead(backend.hbm, backend._codec, table.spec)
    assert thread is not None
    thread.join()
    late: list[str] = []
    compile_now = Kernel._compile
    monkeypatch.setattr(
        Kernel, "_compile", lambda self, *args: late.append(str(self._function)) or compile_now(self, *args)
    )
    bag = tc.EmbeddingBag(table, 3)
    keys = np.arange(96, dtype=np.uint64)
    batch = tc.Batch(keys, np.arange(97), 3, label=torch.zeros(32))
    bag(batch).sum().backward()
    table.step()
    torch.cuda.synchronize()
    assert len(late) <= 3, "a step launches about twelve kernels"
    table.close()


def test_write_back_without_changed_rows_launches_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run writes back before its first step: compiling the copy would delay that step."""
    table = table_of(tc.SGD(), tc.Precision())
    monkeypatch.setattr("thermocline.tiers.hbm.copy_out", lambda *_: pytest.fail("a copy was launched"))
    table.write_back()
    table.close()

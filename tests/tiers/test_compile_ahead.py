"""The functions that are called to compile kernels ahead launch the kernels of a training step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thermocline as tc
from thermocline.kernels import INTERPRETED, insert
from thermocline.tiers import compile_ahead
from thermocline.tiers.hbm_backend import HbmBackend
from thermocline.utils.cpu_affinity import cores

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
    for name in (
        "update_rows", "find_or_insert", "set_flags", "copy_in", "pool_rows", "index_gradients", "copy_header",
        "find_resident",
    ):  # fmt: skip
        original = getattr(compile_ahead, name)

        def call(*args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            calls[name] += 1
            return original(*args, **options) if name in ("find_or_insert", "pool_rows", "index_gradients") else None

        monkeypatch.setattr(compile_ahead, name, call)
    compile_ahead.call_step(backend.hbm, backend.updates.codec, table.spec)
    assert calls == {
        "update_rows": 2, "find_or_insert": 2, "set_flags": 1, "copy_in": 1, "pool_rows": 2, "index_gradients": 1,
        "copy_header": 1, "find_resident": 1,
    }  # fmt: skip
    table.close()


@pytest.mark.skipif(not INTERPRETED, reason="the launches of the interpreter are recorded")
def test_launches_of_a_step_are_those_that_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare types and alignments of tensors, and constants; also when planning is recorded, from the second window,
    and when all keys were resident for some windows."""
    from triton.runtime.interpreter import GridExecutor

    launched: set[Any] = set()
    run = GridExecutor.__call__

    def record(self: Any, *args: Any, **constants: Any) -> None:
        tensors = tuple((arg.dtype, arg.data_ptr() % 16) for arg in args if isinstance(arg, torch.Tensor))
        launched.add((self.fn.__module__, self.fn.__name__, tensors, *sorted(constants.items())))

    def record_and_run(self: Any, *args: Any, **constants: Any) -> Any:
        record(self, *args, **constants)
        return run(self, *args, **constants)

    table = table_of(tc.Adam(lr=0.123), tc.Precision())
    backend = table.backend
    assert isinstance(backend, HbmBackend)
    backend.plan_graphs.enabled = backend.plans_on_device = True
    monkeypatch.setattr(GridExecutor, "__call__", record)
    compile_ahead.call_step(backend.hbm, backend.updates.codec, table.spec)
    ahead = frozenset(launched)
    launched.clear()
    monkeypatch.setattr(GridExecutor, "__call__", record_and_run)
    bag = tc.EmbeddingBag(table, 3)
    for _ in range(8):
        batch = tc.Batch(np.arange(96, dtype=np.uint64), np.arange(97), 3, label=torch.zeros(32))
        bag(batch).sum().backward()
        table.step()
    assert any(("STORED", True) in launch for launch in launched), "planning is recorded"
    assert any("_find_resident_kernel" in launch for launch in launched), "all keys were resident"
    assert len(launched) >= 10
    assert launched <= ahead
    table.close()


@pytest.mark.parametrize("tiles", [1, 2, 4, 5])
def test_lists_of_an_insertion_are_aligned_for_any_number_of_ids(monkeypatch: pytest.MonkeyPatch, tiles: int) -> None:
    """Triton compiles another kernel for a pointer that is not a multiple of 16."""
    table = table_of(tc.SGD(), tc.Precision())
    backend = table.backend
    assert isinstance(backend, HbmBackend)
    addresses: list[int] = []

    class Recorder:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **_: addresses.extend(arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor))

    for name in ("_claim_kernel", "_count_kernel", "_assign_kernel", "_resolve_kernel"):
        monkeypatch.setattr(insert, name, Recorder())
    keys = torch.zeros(1024 * tiles, dtype=torch.int64, device=backend.device)
    insert.find_or_insert(backend.hbm.index, backend.hbm.residents, keys, used=0, now=1, completed=0, evict=False)
    assert len(addresses) > 20
    assert not any(address % 16 for address in addresses)
    table.close()


@pytest.mark.gpu
@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 does not compile ahead")
def test_first_step_compiles_only_what_is_not_known_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    from thermocline.kernels.launch import Kernel

    table = table_of(tc.Adam(lr=0.123), tc.Precision())
    backend = table.backend
    assert isinstance(backend, HbmBackend)
    thread = compile_ahead.compile_ahead(backend.hbm, backend.updates.codec, table.spec)
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


FIRST_TABLE = """
import json, threading
import torch, triton
import thermocline as tc
from thermocline.utils.compile_workers import workers
own = []
def listener(*, src, cache_hit, **_):
    if not cache_hit:
        own.append(src.name)
triton.knobs.compilation.listener = listener
workers.start_early("a test")
table = tc.Table(4, tc.Adam(), hbm="64KB", mem="1MB", device="cuda")
for thread in threading.enumerate():
    if thread.name == "thermocline-compile":
        thread.join()
print(json.dumps({"workers": workers.compiled, "own": own, "running": len(workers._processes)}))
table.close()
"""


@pytest.mark.gpu
@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 does not compile ahead")
@pytest.mark.skipif(cores() < 3, reason="fewer than 3 workers")
def test_workers_compile_all_kernels_of_the_list_into_an_empty_cache(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", FIRST_TABLE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["workers"] >= 16
    assert figures["own"] == []
    assert figures["running"] == 0


def test_write_back_without_changed_rows_launches_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run writes back before its first step: compiling the copy would delay that step."""
    table = table_of(tc.SGD(), tc.Precision())
    monkeypatch.setattr("thermocline.tiers.hbm.copy_out", lambda *_: pytest.fail("a copy was launched"))
    table.write_back()
    table.close()

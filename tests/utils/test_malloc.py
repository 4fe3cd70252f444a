"""Training steps reuse the memory that earlier steps freed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import thermocline as tc

STEPS = """
import resource
import numpy as np
import thermocline as tc

table = tc.Table(4, tc.SGD(lr=0.1), mem="4MB", device="cpu")
bag = tc.EmbeddingBag(table, fields=2)
ads = tc.SyntheticAds(keys=100, fields=2, batch_size=8, examples=160)
faults = []
for batch in tc.prefetch(ads, table):
    arrays = [np.ones(2_000_000, np.float32) for _ in range(4)]
    bag(batch).sum().backward()
    table.step()
    del arrays
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[9])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc and the page fault counts of Linux")
@pytest.mark.parametrize(("settings", "reused"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "131072"}, False)])
def test_freed_memory_is_reused(settings: dict[str, str], reused: bool) -> None:
    """Ten steps of 32 MB in pages of 4 KB cause few page faults, unless the environment configures malloc."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    env = {**inherited, "PYTHONPATH": str(Path(tc.__file__).parents[1]), **settings}
    done = subprocess.run([sys.executable, "-c", STEPS], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) < 4000) == reused, done.stdout

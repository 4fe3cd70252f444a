"""Compiles kernels of a step as on a GPU, without one: the driver is a stand-in, and nothing is loaded or launched.

Prints JSON: kernels that workers compiled, and per kernel of this process whether Triton's cache had it. Arguments: the
command of the workers; none: the real one. TRITON_CACHE_DIR is the cache.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

SOME = {"_update_kernel", "_hot_kernel", "_claim_kernel", "_set_flags_kernel"}
"""Kernels with tuples, stored constants and called functions; the others would take more time."""


class StandIn:
    """Triton's driver of an H200."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main(command: list[str]) -> None:
    torch.cuda.is_available = lambda: True  # before thermocline.kernels chooses the interpreter
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    import thermocline as tc
    from thermocline.kernels import launch
    from thermocline.tiers.compile_ahead import call_step
    from thermocline.tiers.hbm_backend import HbmBackend
    from thermocline.utils import compile_workers

    hits: list[tuple[str, bool]] = []

    def listener(*, src: Any, cache_hit: bool, **_: Any) -> None:
        hits.append((src.name, cache_hit))

    triton.runtime.driver.set_active(StandIn())  # type: ignore[arg-type]
    triton.knobs.compilation.listener = listener
    launch._handles = lambda compiled, tail: (None, None, None, tail)  # type: ignore[assignment]
    workers = compile_workers.workers
    workers._count = 3
    if command:
        workers._command = command
    workers.start_early("a run")
    started = len(workers._processes)
    table = tc.Table(16, tc.Adam(), hbm="64KB", mem="1MB", device="interpreter")
    backend = table.backend
    assert isinstance(backend, HbmBackend)
    launch_any = launch.Kernel.launch

    def launch_some(self: Any, grid: Any, args: Any, constants: Any) -> None:
        if self._function.__name__ in SOME:
            launch_any(self, grid, args, constants)

    launch.Kernel.launch = launch_some  # type: ignore[method-assign]
    with launch.compiling_only(1):  # Python 3.11 cannot parse kernels on two threads
        call_step(backend.hbm, backend.updates.codec, table.spec)
    assert not workers._processes
    print(json.dumps({"started": started, "compiled": workers.compiled, "hits": hits}))


if __name__ == "__main__":
    main(sys.argv[1:])

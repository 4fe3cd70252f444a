"""Timing of GPU benchmarks: CUDA events around each piece of work, with the L2 cache flushed before it."""

from __future__ import annotations

from collections.abc import Callable

import torch

Work = Callable[[int], object]


def time_ms(
    work: Work,
    rounds: int,
    *,
    before: Callable[[], None] = lambda: None,
    warm: int = 3,
    flush_bytes: int = 512 * 2**20,
    ahead_cycles: int = 2_000_000,
) -> list[float]:
    """Device milliseconds of work(0), work(1) ..., after `warm` untimed calls; `before` runs untimed before each.

    The device first sleeps for `ahead_cycles`, so that the host has launched all kernels before the first one starts.
    """
    flush = torch.empty(flush_bytes, dtype=torch.int8, device="cuda")
    events = []
    for n in range(warm + rounds):
        before()
        flush.fill_(n % 100)
        torch.cuda._sleep(ahead_cycles)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work(n)
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events[warm:]]

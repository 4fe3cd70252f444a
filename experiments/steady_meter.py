"""Measurement of a training: a ramp-up until the look-ahead has its full size, then the steady state; and its curve."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import models
from experiments.experiment import Json

POINTS = 60
"""Maximum number of points of a curve."""
WARM_UP = 8
"""Least batches of a ramp-up: by then a GPU's kernels are compiled."""
_GROWTH = 1.05  # a look-ahead larger by this factor is still growing
_QUIET = 0.08  # share of the longest ramp-up during which the look-ahead must not grow
_SAMPLES = 400  # least number of samples of the counters in the steady state


class SteadyMeter:
    """Reads the counters of all tiers while a table is trained, and decides when the training ends."""

    HORIZONS = 5
    """Least number of horizons of a measurement."""

    def __init__(
        self, table: Any, *, ramp: float, seconds: float, horizons: int, commit: float, resident_before: int
    ) -> None:
        """
        ramp       most seconds of the ramp-up; 0: the measurement begins with the first batch
        seconds    least seconds of the measurement
        horizons   least length of the measurement in batches that are loaded ahead
        commit     seconds between commits of the store
        resident_before   resident memory of the process before the table was made
        """
        self._table, self._ramp, self._seconds, self._horizons, self._commit = table, ramp, seconds, horizons, commit
        self._batches = self._examples = self._commits = 0
        self._horizon = 0
        self._grown = (0.0, 0, 0)  # seconds, batches and batches ahead when the look-ahead was last seen to grow
        self._ahead_bytes = 0
        self._resident = 0
        self.stages_at_end: Sequence[Any] = ()
        """Stages of the pipeline after the training."""
        self._resident_before = resident_before
        self._begin = time.perf_counter()
        self._samples = [self._read()]
        self._steady: int | None = None if ramp else 0  # number of the sample with which the measurement begins
        self._busy: dict[str, tuple[float, int]] = {}

    def after_batch(self, examples: int, ahead: Any, stages: Sequence[Any]) -> bool:
        """Count a batch; return whether the training continues.

        ahead    counters of the look-ahead; None: there is none
        stages   counters of the pipeline's stages
        """
        self._batches += 1
        self._examples += examples
        now = time.perf_counter() - self._begin
        self._watch(now, ahead)
        settled = self._steady is None and self._is_settled(now)
        if settled or now - self._samples[-1]["seconds"] >= self._seconds / _SAMPLES:
            self._samples.append(self._read())
        if settled:
            self._steady = len(self._samples) - 1
            self._busy = {stage.name: (stage.busy_seconds, stage.items) for stage in stages}
        if self._table.store is not None and now > (self._commits + 1) * self._commit:
            models.commit(self._table.store, self._table.store.note)
            self._commits += 1
        if self._steady is None or len(self._samples) < self._steady + 3:
            return True
        begin = self._samples[self._steady]
        enough = self._batches - begin["batches"] >= max(2, self._horizons * self._horizon)
        return now - begin["seconds"] < self._seconds or not enough

    def _watch(self, now: float, ahead: Any) -> None:
        """Follow the size of the look-ahead."""
        if ahead is None:
            return
        self._ahead_bytes = max(self._ahead_bytes, ahead.most_bytes)
        if ahead.batches_ahead > _GROWTH * self._grown[2]:
            self._grown = (now, self._batches, ahead.batches_ahead)
        self._horizon = max(self._horizon, ahead.batches_ahead)

    def _is_settled(self, now: float) -> bool:
        """Whether the look-ahead has stopped growing: for a time, and for twice its own length."""
        seconds, batches, _ = self._grown
        quiet = now - seconds >= _QUIET * self._ramp and self._batches - batches >= 2 * self._horizon
        return self._batches >= WARM_UP and (quiet or now >= self._ramp)

    def _read(self) -> dict[str, float]:
        mem, store, hbm = self._table.dram.stats(), self._table.store, self._table.hbm
        self._resident = max(self._resident, resident_bytes())
        counts: dict[str, float] = {
            "seconds": time.perf_counter() - self._begin, "cpu_seconds": time.process_time(),
            "batches": self._batches, "examples": self._examples,
            "mem_hits": mem.hits, "mem_all": mem.hits + mem.misses,
            "puts": mem.puts, "puts_in_pulls": mem.puts_in_pulls, "evictions": mem.evictions, "pinned": mem.pinned,
        }  # fmt: skip
        if hbm is not None:
            top = hbm.stats()
            counts |= {"hbm_hits": top.ids - top.misses, "hbm_all": top.ids}
            # A row that was loaded ahead is found in DRAM when HBM asks for it, but came from SSD for this use.
            hits = max(0, mem.read_hits - mem.loaded_ahead)
            counts |= {"mem_hits": hits, "mem_all": mem.reads, "loaded_ahead": mem.loaded_ahead}
        if store is not None:
            ssd = store.stats()
            counts |= {name: getattr(ssd, name) for name in ("bytes_read", "reads", "bytes_written", "merges")}
            counts |= {"disk_bytes": ssd.disk_bytes, "keys_read": ssd.keys_read, "stall_seconds": ssd.stall_seconds}
            counts |= {"log_bytes": ssd.log_bytes, "merge_bytes_read": ssd.merge_bytes_read}
        return counts

    def record(self) -> Json:
        """Return the steady state's speed and counters, the whole curve, and the memory in use."""
        assert self._steady is not None
        self._samples.append(self._read())
        begin, end = self._samples[self._steady], self._samples[-1]
        change = {name: end[name] - begin[name] for name in end}
        cuts = sorted({round(i * (len(self._samples) - 1) / POINTS) for i in range(POINTS + 1)})
        curve = [self._samples[cut] for cut in cuts]
        return {
            "examples_per_s": change["examples"] / change["seconds"],
            "steady": change,
            "ramp_seconds": begin["seconds"],
            "horizon": self._horizon,
            "curve": [
                {name: now[name] - before[name] for name in now} | {"at": now["seconds"]}
                for before, now in itertools.pairwise(curve)
            ],
            "stage_ms": self._stage_ms(change["batches"]),
            "memory": self._memory(),
        }

    def _stage_ms(self, batches: float) -> dict[str, float]:
        """Return the busy time of each stage per batch in the steady state."""
        before = {stage.name: self._busy.get(stage.name, (0.0, 0))[0] for stage in self.stages_at_end}
        return {stage.name: 1000 * (stage.busy_seconds - before[stage.name]) / batches for stage in self.stages_at_end}

    def _memory(self) -> Json:
        """Return bytes of DRAM: counted by the tier with the batches in flight, and by which the process grew."""
        mem, store, limits = self._table.dram.stats(), self._table.store, self._table.spec.lookahead
        reserved = 0 if limits is None else limits.bytes
        return {
            "budget": mem.budget,
            "counted": mem.bytes_total - reserved + self._ahead_bytes,
            "ahead": self._ahead_bytes,
            "ahead_limit": reserved,
            "store_budget": 0 if store is None else store.stats().mem_budget,
            "store": 0 if store is None else store.stats().mem_total,
            "process_grew": self._resident - self._resident_before,
            "hbm_budget": 0 if self._table.hbm is None else self._table.hbm.budget,
            "row_bytes": self._table.dram.row_bytes,
        }


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

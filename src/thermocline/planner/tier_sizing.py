"""Tier sizes for a data set: memory per hit rate from key frequencies, and the report of `thermocline data stats`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from thermocline.data.key_stats import KeyHistogram, Report
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.precision import FP32, Precision
from thermocline.embedding.row_statistics import NO_STATISTICS, RowStatistics
from thermocline.tiers.dram import DramTier
from thermocline.utils.text_format import format_size, plural

_TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Hit rates for which `suggest_sizes` computes a memory size."""
_SSD_MEM_PER_KEY = 10
"""DRAM of the SSD store per key, in bytes: 4 to 5 for index and filter, the rest for buffers."""
_SSD_MEM_LEAST = 32_000_000
_DISK_FACTOR = 2.5
"""Disk bytes per byte of rows: retained checkpoints and unmerged data (2.2 in the demo)."""


def suggest_sizes(
    histogram: KeyHistogram,
    batches: int,
    dim: int,
    optimizer: Optimizer,
    pinned_batches: int,
    precision: Precision = FP32,
    statistics: RowStatistics = NO_STATISTICS,
) -> Report:
    """Compute the bytes of a model's rows, and the memory size for each hit rate of `_TARGETS`.

    The hit rate counts rows that already exist, under LRU eviction (Che's approximation). This is conservative: the
    default policy keeps frequent rows longer.
    """
    per_row = _mem_bytes_per_row(dim, optimizer, precision, statistics)
    row_bytes = precision.row_bytes(dim, optimizer) + statistics.bytes
    rates = -np.expm1(-histogram.counts / batches)  # probability that a batch contains the key
    repeats = histogram.weights * np.maximum(0.0, batches * rates - 1)  # the first occurrence creates the row
    unique = float((histogram.weights * rates).sum())
    keys = histogram.keys
    pinned_rows = min(unique * pinned_batches, keys)

    def recently_used(age: float) -> np.ndarray[Any, Any]:
        """Probability that a key was used in the last `age` batches."""
        return -np.expm1(-rates * age)

    sizes = []
    for target in _TARGETS:
        low, high = 0.0, 64.0 * batches
        for _ in range(60):
            middle = (low + high) / 2
            hits = float((repeats * recently_used(middle)).sum() / repeats.sum()) if repeats.sum() else 1.0
            low, high = (middle, high) if hits < target else (low, middle)
        rows = min(max(float((histogram.weights * recently_used(high)).sum()), pinned_rows), keys)
        sizes.append({"hit_rate": target, "rows": math.ceil(rows), "mem": math.ceil(1.05 * rows * per_row)})
    return {
        "row_bytes": row_bytes,
        "mem_bytes_per_row": per_row,
        "rows_bytes": math.ceil(keys * row_bytes),
        "unique_rows_per_batch": math.ceil(unique),
        "pinned_batches": pinned_batches,
        "least_mem": math.ceil(1.05 * pinned_rows * per_row),
        "mem_for_hit_rate": sizes,
        "mem_for_all_rows": math.ceil(1.05 * keys * per_row),
        "ssd_mem": max(_SSD_MEM_LEAST, math.ceil(_SSD_MEM_PER_KEY * keys)),
        "disk": math.ceil(_DISK_FACTOR * keys * (row_bytes + 8)),
    }


def _mem_bytes_per_row(dim: int, optimizer: Optimizer, precision: Precision, statistics: RowStatistics) -> float:
    """Bytes of DRAM per row, with index, metadata and buffers, as the tier divides its budget."""
    budget = 16_000_000
    return (
        budget / DramTier(dim, optimizer, budget=budget, threads=1, precision=precision, statistics=statistics).capacity
    )


def tiers_toml(sizes: Report, machine: int) -> str:
    """Write a [tiers] section for a machine with `machine` bytes of DRAM.

    Uses DRAM only if all rows fit half of the machine's memory; else DRAM and SSD, with the highest hit rate that fits.
    """
    if sizes["mem_for_all_rows"] <= machine // 2:
        return f'[tiers]\nmem = "{_round_up(sizes["mem_for_all_rows"])}"'
    fitting = [size["mem"] for size in sizes["mem_for_hit_rate"] if size["mem"] <= machine // 2]
    mem = max(fitting, default=max(machine // 2, sizes["least_mem"]))
    return f'[tiers]\nmem = "{_round_up(mem)}"\nssd = "rows"\nssd_mem = "{_round_up(sizes["ssd_mem"])}"'


def _round_up(size: float) -> str:
    """Round up to two digits and format for a config."""
    unit = 10 ** max(6, math.floor(math.log10(max(size, 1))) - 1)
    rounded = math.ceil(size / unit) * unit
    return f"{rounded // 10**9}GB" if rounded % 10**9 == 0 else f"{math.ceil(rounded / 10**6)}MB"


def describe(report: Report, machine: int) -> Iterator[str]:
    """Yield the report as lines of text."""
    per, about = report["nonzeros_per_example"], "" if report["exact"] else "about "
    yield f"examples     {report['examples']:,}, {report['positive']:.2%} positive"
    spread = f" ({per['least']} to {per['most']})" if per["least"] != per["most"] else ""
    fields = plural(report["fields"], "field")
    yield f"nonzeros     {per['mean']:.4g} per example{spread} in {fields}, {report['dense']} dense"
    yield f"keys         {about}{report['keys']:,} unique of {report['nonzeros']:,} occurrences"
    top1, top10 = report["share_of_top_1_percent"], report["share_of_top_10_percent"]
    skew = f"the top 1 % of keys are {top1:.1%} of occurrences, the top 10 % {top10:.1%}"
    yield f"skew         {skew}; Zipf {report['zipf']:.2f}"
    largest = sorted(report["per_field"], key=lambda field: -field["keys"])[:5]
    yield "large fields " + ", ".join(
        f"{field.get('name', field['field'])}: {field['keys']:,} (Zipf {field['zipf']:.2f})" for field in largest
    )
    sizes = report.get("model")
    if sizes is None:
        return
    model = f"{sizes['name']}, {sizes['optimizer']}"
    yield f"rows         {format_size(sizes['rows_bytes'])}: {sizes['row_bytes']} bytes per key ({model})"
    unique, least = sizes["unique_rows_per_batch"], format_size(sizes["least_mem"])
    yield f"batch        {unique:,} unique rows in {report['batch_size']:,} examples"
    batches = plural(sizes["pinned_batches"], "batch", "batches")
    yield f"least mem    {least}: the rows of {batches}, pinned at the same time"
    yield "memory       hit rate of existing rows, with LRU eviction"
    for size in sizes["mem_for_hit_rate"]:
        yield f"             {size['hit_rate']:4.0%}  mem {format_size(size['mem'])} ({size['rows']:,} rows)"
    yield f"             100%  mem {format_size(sizes['mem_for_all_rows'])}: all rows, no ssd needed"
    yield f"SSD          {format_size(sizes['disk'])} of disk, ssd_mem {format_size(sizes['ssd_mem'])}"
    yield f"suggested for this machine ({format_size(machine)} of memory):"
    yield tiers_toml(sizes, machine)

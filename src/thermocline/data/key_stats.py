"""What a data set asks of a machine: keys, skew, nonzeros; the bytes of its rows, and which memory serves how many."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from thermocline.batch import Batch
from thermocline.data.key_counts import Counted, KeyCounts
from thermocline.embedding.arrays import as_numpy
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.precision import FP32, Precision
from thermocline.tiers.dram import DramTier
from thermocline.utils.text_format import format_size, plural

Report = dict[str, Any]
_TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
_SSD_MEM_PER_KEY = 10
"""Bytes of the store's DRAM per key: its index with filter has 4 to 5, and buffers (docs/benchmarks.md)."""
_SSD_MEM_LEAST = 32_000_000
_DISK_FACTOR = 2.5
"""Disk per byte of rows: retained checkpoints and what is not merged yet (2.2 in the demo)."""


def count(batches: Iterable[Batch], advance: Callable[[int], None] = lambda more: None) -> tuple[Report, Counted]:
    """Figures of the examples, and of their keys. One pass, bounded memory."""
    counts = KeyCounts()
    examples = nonzeros = fields = dense = steps = 0
    positive = 0.0
    least, most = math.inf, 0
    for batch in batches:
        per_bag = np.diff(batch.offsets)
        per_example = per_bag.reshape(-1, batch.fields).sum(1)
        of_bag = np.tile(np.arange(batch.fields, dtype=np.uint16), batch.examples)
        counts.add(batch.ids, np.repeat(of_bag, per_bag))
        steps += 1
        examples += batch.examples
        nonzeros += len(batch.ids)
        least, most = min(least, int(per_example.min())), max(most, int(per_example.max()))
        if batch.label is not None:
            positive += float((as_numpy(batch.label, "label") > 0).sum())
        fields, dense = batch.fields, 0 if batch.dense is None else batch.dense.shape[1]
        advance(batch.examples)
    if not examples:
        raise ValueError("the data has no examples")
    found = counts.result()
    report: Report = {
        "examples": examples,
        "positive": positive / examples,
        "fields": fields,
        "dense": dense,
        "nonzeros": nonzeros,
        "nonzeros_per_example": {"mean": nonzeros / examples, "least": least, "most": most},
        "keys": round(found.keys),
        "exact": counts.rate == 1,
        "share_of_top_1_percent": found.share_of_top(0.01),
        "share_of_top_10_percent": found.share_of_top(0.1),
        "zipf": found.zipf(),
        "batches": steps,
        "per_field": [
            {
                "field": i,
                "keys": round(part.keys),
                "share_of_top_1_percent": part.share_of_top(0.01),
                "zipf": part.zipf(),
            }
            for i, part in ((i, found.of_field(i)) for i in range(fields))
        ],
    }
    return report, found


def suggest(
    counted: Counted,
    batches: int,
    dim: int,
    optimizer: Optimizer,
    pinned_batches: int,
    precision: Precision = FP32,
) -> Report:
    """Bytes of a model's rows, and the memory it takes to find a share of them there.

    The hit rate is that of rows which exist already, when the least recently used leave first (Che's approximation):
    a careful estimate, for often used rows stay longer under the default policy.
    """
    per_row = _mem_bytes_per_row(dim, optimizer, precision)
    row_bytes = precision.row_bytes(dim, optimizer)
    rates = -np.expm1(-counted.counts / batches)  # chance that a batch has the key
    again = counted.weights * np.maximum(0.0, batches * rates - 1)  # the first time it is new
    unique = float((counted.weights * rates).sum())
    keys = counted.keys
    in_flight = min(unique * pinned_batches, keys)  # rows that the pipeline pins at a time

    def kept(age: float) -> np.ndarray[Any, Any]:
        """Chance that a key was used in the last `age` batches."""
        return -np.expm1(-rates * age)

    sizes = []
    for target in _TARGETS:
        low, high = 0.0, 64.0 * batches
        for _ in range(60):
            middle = (low + high) / 2
            hits = float((again * kept(middle)).sum() / again.sum()) if again.sum() else 1.0
            low, high = (middle, high) if hits < target else (low, middle)
        rows = min(max(float((counted.weights * kept(high)).sum()), in_flight), keys)
        sizes.append({"hit_rate": target, "rows": math.ceil(rows), "mem": math.ceil(1.05 * rows * per_row)})
    everything = math.ceil(1.05 * keys * per_row)
    ssd = {"ssd_mem": max(_SSD_MEM_LEAST, math.ceil(_SSD_MEM_PER_KEY * keys))}
    ssd["disk"] = math.ceil(_DISK_FACTOR * keys * (row_bytes + 8))
    return {
        "row_bytes": row_bytes,
        "mem_bytes_per_row": per_row,
        "rows_bytes": math.ceil(keys * row_bytes),
        "unique_rows_per_batch": math.ceil(unique),
        "pinned_batches": pinned_batches,
        "least_mem": math.ceil(1.05 * in_flight * per_row),
        "mem_for_hit_rate": sizes,
        "mem_for_all_rows": everything,
        **ssd,
    }


def _mem_bytes_per_row(dim: int, optimizer: Optimizer, precision: Precision) -> float:
    """Index, metadata and buffers counted, as the tier itself divides a budget."""
    budget = 16_000_000
    return budget / DramTier(dim, optimizer, budget=budget, threads=1, precision=precision).capacity


def memory_of_machine() -> int:
    """Bytes of DRAM."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def tiers_toml(sizes: Report, machine: int) -> str:
    """A [tiers] section: memory only if the rows take at most half of the machine's, else the most hits that does."""
    if sizes["mem_for_all_rows"] <= machine // 2:
        return f'[tiers]\nmem = "{_round_up(sizes["mem_for_all_rows"])}"'
    fitting = [size["mem"] for size in sizes["mem_for_hit_rate"] if size["mem"] <= machine // 2]
    mem = max(fitting, default=max(machine // 2, sizes["least_mem"]))
    return f'[tiers]\nmem = "{_round_up(mem)}"\nssd = "rows"\nssd_mem = "{_round_up(sizes["ssd_mem"])}"'


def _round_up(size: float) -> str:
    """At least `size`, two digits, as a config has it."""
    unit = 10 ** max(6, math.floor(math.log10(max(size, 1))) - 1)
    rounded = math.ceil(size / unit) * unit
    return f"{rounded // 10**9}GB" if rounded % 10**9 == 0 else f"{math.ceil(rounded / 10**6)}MB"


def describe(report: Report, machine: int) -> Iterator[str]:
    """Lines for a person."""
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
    of = f"{sizes['name']}, {sizes['optimizer']}"
    yield f"rows         {format_size(sizes['rows_bytes'])}: {sizes['row_bytes']} bytes a key ({of})"
    unique, least = sizes["unique_rows_per_batch"], format_size(sizes["least_mem"])
    yield f"a batch      {unique:,} unique rows of {report['batch_size']:,} examples"
    batches = plural(sizes["pinned_batches"], "batch", "batches")
    yield f"least mem    {least}: the rows of {batches} are in use at a time"
    yield "memory       hit rate of rows that exist (least recently used leave first)"
    for size in sizes["mem_for_hit_rate"]:
        yield f"             {size['hit_rate']:4.0%}  mem {format_size(size['mem'])} ({size['rows']:,} rows)"
    yield f"             100%  mem {format_size(sizes['mem_for_all_rows'])}: all rows, no ssd needed"
    yield f"SSD          {format_size(sizes['disk'])} of disk, ssd_mem {format_size(sizes['ssd_mem'])}"
    yield f"suggested for this machine ({format_size(machine)} of memory):"
    yield tiers_toml(sizes, machine)

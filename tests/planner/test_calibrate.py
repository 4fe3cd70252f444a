"""Figures of rows from several measurements."""

from __future__ import annotations

from typing import Any

import pytest

from thermocline.planner import calibrate

DIMS = (8, 64, 15)


def costs(dim: int, *, dedup: float, slower: float = 1.0) -> dict[str, float]:
    """Costs of a machine on which all kernels but dedup take `slower` times as long."""
    rows = {"pull_row": 80e-9, "plan_id": 6e-9, "pool": (5 + 0.5 * dim) * 1e-9}
    # Measured apart, sum and apply take twice as long as the fused update.
    update = {"sum": (2 + dim) * 1e-9, "apply": (4 + 2 * dim) * 2e-9}
    update["update"] = (update["sum"] + 0.5 * update["apply"]) / 2
    return {"dedup_id": dedup, **{name: slower * seconds for name, seconds in (rows | update).items()}}


def test_the_lowest_cost_of_several_measurements_counts() -> None:
    slow_rows, slow_dedup = (
        [costs(dim, dedup=dedup, slower=slower) | {"unique_share": 0.5} for dim in DIMS]
        for dedup, slower in ((18e-9, 1.5), (40e-9, 1.0))
    )
    both = calibrate._row_figures([slow_rows, slow_dedup])
    assert both["dedup_id_ns"] == pytest.approx(18)
    assert both["pull_row_ns"] == pytest.approx(80)
    assert both["pool_float_ns"] == pytest.approx(0.5)
    assert both["pool_id_ns"] == pytest.approx(5)
    # Sum and apply are scaled to the fused update, which takes half as long; apply has two floats per weight.
    assert both["sum_float_ns"] == pytest.approx(0.5)
    assert both["apply_float_ns"] == pytest.approx(1)
    assert both["apply_row_ns"] == pytest.approx(4)


def test_costs_of_a_miss_are_separated_and_never_negative() -> None:
    def measured(*costs: float) -> list[calibrate._MissCost]:
        counts = [(0.8, 0.5), (0.3, 0.0), (0.75, 1.1), (0.95, 0.05)]  # requests and written pages per row
        row, read, write = costs
        stats: Any = None
        return [
            calibrate._MissCost(row + reads * read + pages * write, 0.4, reads, pages, 6.0, stats)
            for reads, pages in counts
        ]

    assert calibrate._fit_misses(measured(2e-6, 2.5e-6, 6e-6)) == pytest.approx((2e-6, 2.5e-6, 6e-6))
    row, read, write = calibrate._fit_misses(measured(2e-6, -0.5e-6, 6e-6))
    assert read == 1e-9
    assert (row, write) == pytest.approx((1.64e-6, 6e-6), rel=0.1)

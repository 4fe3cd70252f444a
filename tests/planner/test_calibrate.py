"""Figures of rows from several measurements."""

from __future__ import annotations

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

"""Errors of measuring with two ranks."""

from __future__ import annotations

import sys

import pytest

from thermocline.errors import ThermoclineError
from thermocline.planner.calibrate_ranks import measure_ranks


def test_failed_rank_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ThermoclineError, match="measuring two ranks failed: a rank exited with status 1"):
        measure_ranks(timeout=20)

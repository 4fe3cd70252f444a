"""Two ranks of this machine, measured."""

from __future__ import annotations

import sys

import pytest

from thermocline.errors import ThermoclineError
from thermocline.planner.calibrate_ranks import measure_pair


def test_a_rank_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ThermoclineError, match="two ranks on this machine: one ended with 1"):
        measure_pair(limit=20)

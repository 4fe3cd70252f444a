"""The parts of long test runs: kept results, continuation, time limits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from faults.long_run import Unit, run


def unit(name: str, code: str) -> Unit:
    return Unit(name, (sys.executable, "-c", code))


def test_results_are_kept_and_only_passed_units_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker, results = tmp_path / "ran", tmp_path / "results.jsonl"
    append = f"open({str(marker)!r}, 'a').write('x')"
    units = [unit("good", append), unit("bad", f"{append}; print('why'); raise SystemExit(1)")]
    assert run(units, results, 1, "abc") == 1
    assert run(units, results, 1, "abc") == 1
    assert marker.read_text() == "xxx"  # the good unit once, the bad one twice
    entries = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(entry["unit"], entry["result"]) for entry in entries] == [
        ("good", "passed"), ("bad", "failed"), ("bad", "failed")]  # fmt: skip
    assert entries[1]["output"] == ["why"]
    assert {entry["commit"] for entry in entries} == {"abc"}
    assert run(units[:1], results, 1, "other") == 0  # another commit is tested again
    assert marker.read_text() == "xxxx"
    assert "1 units passed, 0 failed, 0 not finished, commit other" in capsys.readouterr().out


def test_a_unit_beyond_the_time_is_not_finished(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    units = [unit("slow", "import time; time.sleep(60)"), unit("next", "")]
    assert run(units, results, 0.01, "abc") == 3
    (entry,) = map(json.loads, results.read_text().splitlines())
    assert (entry["unit"], entry["result"]) == ("slow", "not finished")
    assert run(units[1:], results, 1, "abc") == 0

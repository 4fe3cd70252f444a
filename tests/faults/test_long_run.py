"""The parts of long test runs: kept results, continuation, time limits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from faults.long_run import JOB, PARAMETERS, ROOT, Unit, cpp_units, grouped, run, sanitized_units


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


def test_jobs_run_units_at_once_each_with_its_own_number(tmp_path: Path) -> None:
    results, folder = tmp_path / "results.jsonl", tmp_path / "jobs"
    folder.mkdir()
    both = f"""
import pathlib, time
pathlib.Path({str(folder)!r}, "{JOB}").touch()
while len(list(pathlib.Path({str(folder)!r}).iterdir())) < 2:
    time.sleep(0.01)
"""
    assert run([unit("a", both), unit("b", both)], results, 1, "abc", jobs=2) == 0
    assert {path.name for path in folder.iterdir()} == {"0", "1"}
    assert sorted(json.loads(line)["unit"] for line in results.read_text().splitlines()) == ["a", "b"]


def test_long_cpp_tests_are_run_in_parts_of_their_seeds(tmp_path: Path) -> None:
    binary = tmp_path / "tests"
    binary.write_text("#!/bin/sh\necho Store.A Store.B FaultsCrash.ReplayX FaultsFuzz.Y\n")
    binary.chmod(0o755)
    units = cpp_units("cpp", binary, long=True)
    replays = [f"cpp FaultsCrash.ReplayX {part}/10" for part in range(1, 11)]
    assert [unit.name for unit in units] == ["cpp Store.", *replays, "cpp FaultsFuzz.Y"]
    assert [dict(unit.env).get("THERMOCLINE_PART") for unit in units] == [None, *(n.split()[2] for n in replays), None]
    assert all(dict(unit.env)["THERMOCLINE_LONG"] == "1" for unit in units)
    assert sum("Replay" in unit.name for unit in cpp_units("tsan", binary, long=False)) == 5


def test_parameters_are_divided_into_units_that_miss_none() -> None:
    kills = [f"tests/faults/test_kill.py::test_x[{i}]" for i in range(3)]
    options = [f"tests/exact/test_exact.py::test_y[{i}-a]" for i in range(2 * PARAMETERS + 1)]
    units = grouped([*kills, *options, "tests/a.py::test_z"])
    assert [test for ids in units.values() for test in ids] == [*kills, *options, "tests/a.py::test_z"]
    assert list(units)[:3] == kills
    assert list(units)[-2:] == [
        f"tests/exact/test_exact.py::test_y {2 * PARAMETERS + 1} to {2 * PARAMETERS + 1} of {2 * PARAMETERS + 1}",
        "tests/a.py::test_z",
    ]
    assert len(units) == 3 + 3 + 1


@pytest.mark.parametrize(("kind", "sanitizer"), [("tsan-python", "thread"), ("asan-python", "address")])
def test_every_file_of_sanitized_tests_is_a_unit(tmp_path: Path, kind: str, sanitizer: str) -> None:
    with pytest.raises(SystemExit, match=f"make {kind}-tests"):
        sanitized_units(kind, tmp_path)
    (tmp_path / kind).mkdir()
    module = tmp_path / kind / "_core.abi3.so"
    module.touch()
    units = sanitized_units(kind, tmp_path)
    files = [unit.command[-1] for unit in units]
    assert {"tests/pipeline/test_lookahead.py", "tests/serving/test_publication.py"} <= {*files}
    assert len({*files}) == len(files) == len({unit.name for unit in units})
    assert all((ROOT / file).is_file() for file in files)
    assert {unit.command[2:4] for unit in units} == {(sanitizer, str(module))}

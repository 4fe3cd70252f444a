"""The lists of planted bugs: they match the present sources and tests, and documents have their number."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from faults.long_run import mutant_units, planted_bugs
from faults.planted_bugs import Mutant, mismatches, plant

ROOT = Path(__file__).parents[2]
SOURCES = {"mutants": ROOT / "csrc", "mutants_python": ROOT / "src" / "thermocline"}


@pytest.mark.parametrize("script", SOURCES)
def test_every_planted_bug_matches_the_sources_once(script: str) -> None:
    """Otherwise mutants.py stops before its first bug, and only `make test-faults` runs it."""
    assert mismatches(planted_bugs(script), SOURCES[script]) == []


def test_tests_of_planted_bugs_exist() -> None:
    for mutant in planted_bugs("mutants_python"):
        file, _, name = mutant.tests.partition("::")
        assert (ROOT / file).exists(), mutant.name
        assert not name or f"def {name}(" in (ROOT / file).read_text(), mutant.name


@pytest.mark.parametrize("script", SOURCES)
def test_every_planted_bug_is_in_a_unit(script: str) -> None:
    names = [name for each in mutant_units(script) for name in each.command[2:]]
    assert len(names) == len(set(names))
    assert sorted(names) == sorted(mutant.name for mutant in planted_bugs(script))


@pytest.mark.parametrize(("script", "language"), [("mutants", "C[+][+]"), ("mutants_python", "Python")])
def test_documents_have_the_number_of_planted_bugs(script: str, language: str) -> None:
    text = (ROOT / "tests" / "faults" / "README.md").read_text()
    assert re.findall(rf"(\d+) planted bugs in {language}", text) == [str(len(planted_bugs(script)))]


def test_bugs_that_do_not_match_are_reported_before_any_test_runs(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    wrong = [
        Mutant("twice", "a.py", "= 1", "= 2"),
        Mutant("gone", "a.py", "z", ""),
        Mutant("moved", "b.py", "x", ""),
        Mutant("same", "a.py", "x", "x"),
    ]
    found = mismatches([Mutant("good", "a.py", "x", "z"), *wrong], tmp_path)
    assert [line.split("'")[1] for line in found] == ["twice", "gone", "moved", "same"]
    with pytest.raises(SystemExit, match=r"'gone' does not match a\.py: its text occurs 0 times"):
        plant(wrong, tmp_path, "list.py", lambda: pytest.fail("ran"), lambda mutant: pytest.fail("ran"))


def test_the_time_limit_of_a_bug_follows_the_time_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine tests are slow with and without a bug: that is no detection."""
    planted_bugs("mutants_python")  # makes the module importable
    script = sys.modules["mutants_python"]
    clock = [0.0]
    limits: list[float] = []

    def slow(package: Path, tests: str, seconds: float) -> str:
        clock[0] += 200
        limits.append(seconds)
        return "failed" if len(limits) > 1 else ""

    monkeypatch.setattr(script, "first_failure", slow)
    monkeypatch.setattr(script.time, "monotonic", lambda: clock[0])
    assert script.main(["names of temporary files are predictable"]) == 0
    assert limits == [script.CLEAN_LIMIT, 2000]


def test_the_time_limit_of_a_bug_in_cpp_follows_the_time_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted_bugs("mutants")
    script = sys.modules["mutants"]
    copy = script.Copy.__new__(script.Copy)  # without its build
    copy.build_dir, copy.clean_at, copy.seconds = tmp_path, tmp_path / "clean", {}
    copy.digest, copy.build = script.hashlib.sha256(), lambda: None
    clock = [0.0]
    limits: list[float] = []

    def slow(command: list[str], timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        clock[0] += 200 if command[1] == "Slow." else 1
        limits.append(timeout)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(script.subprocess, "run", slow)
    monkeypatch.setattr(script.time, "monotonic", lambda: clock[0])
    for _ in range(2):  # the second time from the file
        assert copy.passes_clean(["Slow.", "Fast."]) == ""
        assert copy.first_failure(["Slow.", "Fast."]) == ""
        copy.seconds = {}
    assert limits == [script.CLEAN_LIMIT, script.CLEAN_LIMIT, *[2000, script.BUG_LIMIT] * 2]

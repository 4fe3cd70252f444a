"""Statistics of compare_checkouts.py, and the commit that benchmarks record."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("compare_checkouts")


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("common")


def runs(times: list[float], digest: str = "a") -> list[dict[str, Any]]:
    return [{"processor_s": time, "wall_s": 2 * time, "digest": digest} for time in times]


def test_upper_bound_covers_the_spread_of_the_ratios(compare: Any) -> None:
    assert compare.upper_bound([1.02] * 15) == pytest.approx(1.02)
    ratios = [0.9, 1.1] * 8
    assert 1.0 < compare.upper_bound(ratios) <= 1.1
    assert compare.upper_bound(ratios) == compare.upper_bound(ratios)  # fixed seed


def test_ratio_pairs_runs_of_one_round(compare: Any) -> None:
    """Both sides slow down in the second half: the paired ratio is not affected."""
    old = [1.0] * 8 + [3.0] * 8
    figures = compare.summarise({"old": runs(old), "new": runs([1.01 * time for time in old])})
    assert figures["processor_s"]["ratio"] == pytest.approx(1.01)
    assert figures["processor_s"]["upper_bound"] == pytest.approx(1.01)
    assert all(claim.met for claim in compare.claims_of("ssd", figures, 1.05))


def test_slower_checkout_and_different_results_miss_the_target(compare: Any) -> None:
    slower = compare.summarise({"old": runs([1.0] * 15), "new": runs([1.06] * 15)})
    assert [claim.met for claim in compare.claims_of("ssd", slower, 1.05)] == [False, True]
    different = compare.summarise({"old": runs([1.0] * 15), "new": runs([1.0] * 15, digest="b")})
    assert [claim.met for claim in compare.claims_of("ssd", different, 1.05)] == [True, False]


def test_commit_is_read_from_the_commit_file_if_it_fits_the_sources(
    common: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    monkeypatch.setattr(common, "FOLDER", folder)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert common.commit() == "unknown"
    (folder / "COMMIT").write_text(f"abc1234+changes {common.source_digest()}\n")
    assert common.commit() == "abc1234+changes"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=test", "-c", "user.email=test@example.com"]
    for command in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "--message", "first"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    assert common.commit() == "abc1234+changes"  # the file fits the sources: another repository does not matter
    (folder / "other.py").write_text("pass\n")
    assert common.commit() == head.stdout.strip()

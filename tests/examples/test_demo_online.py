"""A short online demo: training follows files and publishes, a server has each version, all files are removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import demo_online


def test_the_demo_serves_what_it_trains_and_leaves_no_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    observers: list[demo_online.Observer] = []
    report = demo_online.print_report
    monkeypatch.setattr(
        demo_online, "print_report", lambda console, seen: (observers.append(seen), report(console, seen))
    )
    demo_online.main(seconds=3, before=4, examples=500, picture=None, folder=tmp_path)
    text = " ".join(capfd.readouterr().out.split())
    for word in (
        "following",
        "interrupted and saved at step 7",
        "freshness, median",
        "AUC, newest",
        "rows alive",
    ):
        assert word in text
    (observer,) = observers
    assert [window.second for window in observer.windows] == [4, 5, 6]
    # Every click was served after it happened; the last version is the whole stream's.
    assert all(window.fresh is not None and window.fresh > 0 for window in observer.windows)
    assert (observer.version["step"], observer.version["event_time"]) == (7, 6)
    assert observer.frozen.version.event_time == 3
    assert observer.rows > observer.windows[0].rows
    assert list(tmp_path.iterdir()) == []


def test_labels_drift() -> None:
    clicks = demo_online.Clicks(20_000)
    rates = []
    for second in (0, 30):
        lines = [line.split(",") for line in clicks.second(second)]
        chosen = [int(line[0]) for line in lines if int(line[3][1:]) % 8 == 0 and int(line[4][1:]) % 8 == 0]
        rates.append(sum(chosen) / len(chosen))
    assert abs(rates[0] - rates[1]) > 0.1

"""The live page in Chromium: figures, light and dark, phone and desktop, a run that starts, grows and ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import helpers.browser as browser
import helpers.watched_run as watched
import pytest

from thermocline.watch.server import WatchServer

PROGRAM = browser.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=browser.ABSENT)
MARKS = "svg.none path"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    assert PROGRAM is not None
    with browser.started(PROGRAM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchServer]:
    with WatchServer(tmp_path / "ads", poll_seconds=0.05) as made:
        yield made


def shown(tab: browser.Browser, element: str) -> str:
    return str(tab.value(f"document.getElementById({element!r}).innerText")).strip()


def lines(tab: browser.Browser, element: str) -> list[str]:
    return [line for line in shown(tab, element).split("\n") if line.strip()]


def open_page(tab: browser.Browser, server: WatchServer, width: int = 1280, dark: bool = False) -> None:
    tab.open(server.url, width=width, dark=dark)
    tab.wait_for("document.documentElement.dataset.drawn !== undefined")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_readable(
    tab: browser.Browser, server: WatchServer, tmp_path: Path, width: int, dark: bool
) -> None:
    watched.write(tmp_path / "ads")
    open_page(tab, server, width, dark)
    browser.check_readable(tab, width, origin=server.url, texts=90)
    contrasts = browser.contrasts(tab, MARKS)
    assert len(contrasts) > 60
    assert [pair for pair in contrasts if pair[0] < 4.5] == []
    drawn = tab.value("[...document.querySelectorAll('.chart svg')].map(s => s.querySelectorAll('path').length)")
    assert len(drawn) == 4
    assert min(drawn) >= 1
    unnamed = "[...document.querySelectorAll('button,[role=meter],[role=progressbar],svg[role=img]')]"
    unnamed += ".filter(e => !(e.textContent.trim() || e.ariaLabel)).length"
    assert tab.value(unnamed) == 0


def test_the_figures_are_those_of_the_run(tab: browser.Browser, server: WatchServer, tmp_path: Path) -> None:
    watched.write(tmp_path / "ads")
    open_page(tab, server)
    assert [shown(tab, name) for name in ("name", "state", "speed", "auc", "valid", "loss")] == [
        "ads", "Training", "1.00 M", "0.7200", "0.7612", "0.4800",
    ]  # fmt: skip
    assert shown(tab, "position") == "Step 200 of 1,000 · epoch 1 of 2"
    assert shown(tab, "times").startswith("1 min 4")
    assert lines(tab, "tier-hbm") == ["HBM", "22 M rows", "3 GB of 4 GB budget"]
    assert lines(tab, "tier-ssd") == ["SSD", "1.80 G rows", "240 GB; disk 60 % full"]
    assert "2,000 rows/s loaded" in shown(tab, "pipe-hbm")
    assert "SSD 4.0 %" in shown(tab, "shares").replace("\n", " ")
    assert lines(tab, "ahead")[::2] == [
        "Batches ahead", "Rows loaded ahead", "Late rows", "Read rate", "Memory",
    ]  # fmt: skip
    assert shown(tab, "ranks-title") == "2 ranks"
    assert tab.value("document.querySelectorAll('#ranks tbody tr').length") == 2
    assert tab.value("document.getElementById('alert').hidden")


def test_a_run_that_starts_grows_and_ends(tab: browser.Browser, server: WatchServer, tmp_path: Path) -> None:
    run = tmp_path / "ads"
    open_page(tab, server)
    assert shown(tab, "state") == "Waiting"
    assert shown(tab, "path") == str(run)
    assert tab.value("document.querySelector('.kpis').hidden")
    watched.write(run, 2)
    tab.wait_for("document.getElementById('state').textContent === 'Training'")
    assert shown(tab, "speed") == "1.00 M"
    (run / "status.json").write_text(json.dumps(watched.status(20, waiting=True)))
    tab.wait_for("document.getElementById('state').textContent === 'Waiting for files'")
    watched.append(run, {"event": "progressive", "step": 20, "epoch": 0, "auc": 0.8125, "logloss": 0.4})
    tab.wait_for("document.getElementById('valid').textContent === '0.8125'")
    assert shown(tab, "valid-note").startswith("progressive validation at step 20")
    watched.append(run, watched.train_row(30, examples_per_s=1234.0))
    tab.wait_for("document.getElementById('speed').textContent === '1,234'")
    causes = {"ads": "base file 7: wrong checksum <b>"}
    watched.append(run, watched.train_row(40, damaged_partitions=2, damage=causes))
    tab.wait_for("!document.getElementById('alert').hidden")
    assert shown(tab, "alert").split("\n")[0] == "Damage: 2 partitions are set aside"
    assert "wrong checksum <b>" in shown(tab, "alert")
    ended = watched.status(40, state="stopped", ending="stopped by an error", error="BudgetError: HBM budget exceeded")
    (run / "status.json").write_text(json.dumps(ended))
    tab.wait_for("document.getElementById('state').textContent === 'Stopped'")
    assert "BudgetError: HBM budget exceeded" in shown(tab, "alert")
    assert browser.page_errors(tab, server.url) == []


def test_the_button_and_keys(tab: browser.Browser, server: WatchServer, tmp_path: Path) -> None:
    watched.write(tmp_path / "ads")
    open_page(tab, server)
    colour = "getComputedStyle(document.body).backgroundColor"
    light = tab.value(colour)
    tab.value("document.getElementById('theme').click()")
    assert tab.value(colour) != light
    open_page(tab, server)  # the choice is kept
    assert tab.value(colour) != light
    tab.value("document.getElementById('theme').click()")
    assert tab.value(colour) == light
    tab.value("document.querySelector('#chart-auc svg').focus()")
    for key, step in (("Home", 200), ("Home", 10), ("ArrowRight", 20)):
        tab.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        assert tab.value("document.querySelector('#chart-auc .readout').innerText").split()[:2] == ["step", str(step)]

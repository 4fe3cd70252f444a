"""`make demo`, small: it runs without a terminal, prints its table and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from thermocline import demo


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.main(rows=30_000, batches=3, store_memory="32MB", tier_memory="32MB", seconds=30, folder=tmp_path)
    text = capsys.readouterr().out
    for what in ("30,000 rows", "fill", "train    100%", "hit rate", "DRAM per key", "disk used"):
        assert what in text
    assert list(tmp_path.iterdir()) == []

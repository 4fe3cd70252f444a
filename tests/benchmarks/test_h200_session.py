"""The calls of a session on an H200: they fit their limits and name scripts and options that exist."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import h200_session

    return h200_session


def test_every_call_fits_its_limit_and_returns_few_files(session: Any) -> None:
    names = [part.name for parts in session.CALLS for part in parts]
    assert len(set(names)) == len(names)
    for parts in session.CALLS:
        assert sum(part.seconds for part in parts) < 540, "nine minutes"
        assert len(parts) + 1 <= 8, "a call returns at most eight files"


def test_commands_name_scripts_and_options_that_exist(session: Any) -> None:
    for part in (part for parts in session.CALLS for part in parts):
        words = part.command("OUT")
        if words[:2] == [sys.executable, "-m"]:
            options = (ROOT / "experiments/__main__.py").read_text() if words[2] == "experiments" else ""
        elif words[0] == sys.executable:
            options = (ROOT / words[1]).read_text()
        else:
            continue
        for word in words if options else ():
            known = word in options or f"{word[2:].replace('-', '_')}: Annotated" in options
            assert not word.startswith("--") or known or word == "--no-page", f"{part.name}: {word}"
    assert sys.executable not in session.listing()
    assert session.BUILD.command("OUT")[-1] == f"PYTHON={sys.executable}"
    assert "hbm-step-65536 (40 s): python benchmarks/hbm_step.py --batches 65536 --precision bf16" in session.listing()


def test_a_failing_or_slow_part_does_not_stop_the_others(
    session: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(name: str, code: str, seconds: float = 0.1) -> Any:
        return session.Part(name, seconds, ["python", "-c", code, "{out}"])

    parts = [
        part("writes", "import sys, pathlib; pathlib.Path(sys.argv[1], 'writes.json').write_text('{}'); print('done')"),
        part("fails", "raise SystemExit(3)"),
        part("misses", "raise SystemExit(1)"),
        part("long", "", 1e6),
        part("sleeps", "import time; time.sleep(1000)"),
    ]
    outcome = session.run(parts, tmp_path, tmp_path / "log", 3.0)
    assert outcome["sleeps"].startswith("over ")
    del outcome["sleeps"]
    assert outcome == {"writes": "ok", "fails": "exit 3", "misses": "exit 1", "long": "skipped"}
    assert (tmp_path / "writes.json").exists()
    assert "done" in (tmp_path / "log").read_text()
    assert "fails: exit 3" in capsys.readouterr().out


def test_an_unknown_call_is_a_usage_error(session: Any, tmp_path: Path) -> None:
    for arguments in (["--call", "99", "--out", str(tmp_path)], ["--call", "1"], []):
        with pytest.raises(SystemExit, match="2"):
            session.main(arguments)

"""Atomic writes against symlinks, predictable names, other writers and killed processes."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from thermocline.utils import atomic_file
from thermocline.utils.atomic_file import atomic_path, atomic_write

KILLED = """
import os, signal, sys
from pathlib import Path
from thermocline.utils.atomic_file import atomic_path
with atomic_path(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_replaces_the_file_with_the_permissions_of_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    atomic_write(path, b"1")
    atomic_write(path, b"2")
    (tmp_path / "b").touch()
    assert path.read_bytes() == b"2"
    assert sorted(os.listdir(tmp_path)) == ["a.json", "b"]
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "b").stat().st_mode)


@pytest.mark.parametrize("name", ["a.json.tmp", ".a.json.tmp"])
def test_planted_symlinks_are_not_followed(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to(victim)
    (folder / "a.json").symlink_to(victim)
    atomic_write(folder / "a.json", b"1")
    with atomic_path(folder / "a.json") as temporary:
        temporary.write_text("2")
    assert victim.read_text() == "precious"
    assert not (folder / "a.json").is_symlink()
    assert (folder / "a.json").read_text() == "2"


def test_temporary_file_is_new_and_its_name_unpredictable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for _ in range(3):
        with atomic_path(tmp_path / "a") as temporary:
            names.add(temporary.name)
    assert len(names) == 3
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(atomic_file.secrets, "token_hex", lambda size: "0" * 2 * size)
    (tmp_path / f".a.{'0' * 16}.tmp").symlink_to(victim)  # an attacker who guesses the name
    with pytest.raises(FileExistsError):
        atomic_write(tmp_path / "a", b"1")
    assert victim.read_text() == "precious"


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        atomic_write(tmp_path / "a", "text")  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


def test_file_of_a_killed_process_is_removed_by_the_next_write(tmp_path: Path) -> None:
    target = tmp_path / "scores.csv"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    (tmp_path / ".other.0123456789abcdef.tmp").touch()
    with atomic_path(target):
        assert left not in os.listdir(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".other.0123456789abcdef.tmp", "scores.csv"]


def test_concurrent_writers_of_one_file(tmp_path: Path) -> None:
    """A writer must not remove the temporary file of another one."""
    target = tmp_path / "a"

    def write(number: int) -> None:
        for _ in range(50):
            try:
                atomic_write(target, bytes([number]) * 100)
            except OSError as error:
                errors.append(error)

    errors: list[OSError] = []
    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(set(target.read_bytes())) == 1
    assert os.listdir(tmp_path) == ["a"]


def test_long_names(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 127)
    atomic_write(path, b"1")
    assert path.read_bytes() == b"1"

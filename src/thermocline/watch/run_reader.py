"""Reads the files of a run as it writes them: status.json, metrics.jsonl, config.toml.

The run may be absent, in progress, finished, or resumed meanwhile. Files are untrusted: sizes are limited, wrong lines
are left out, and nothing that a file names is opened.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import socket
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

from thermocline.errors import ThermoclineError
from thermocline.utils.untrusted_files import open_regular, read_limited

Point = dict[str, Any]
"""One event of metrics.jsonl with the figures that the charts draw."""

MAX_POINTS = 1500
"""Events that are kept; of longer runs every second, fourth, ... event."""
_MAX_FILE_BYTES = 1 << 20
_MAX_READ_BYTES = 1 << 24
"""Bytes of metrics.jsonl that one `poll` reads; the next continues."""
_SILENT_SECONDS = 60.0
"""Age of status.json from which a run on another machine counts as silent."""
_CHARTED = ("step", "epoch", "loss", "auc", "logloss", "ne", "calibration", "examples_per_s", "time")
_TIERS = ("hbm", "mem", "ssd", "new")
_SETUP = {
    "model": ("name", "dim", "precision"),
    "tiers": ("hbm", "mem", "ssd", "lookahead", "policy", "device"),
    "train": ("batch_size", "optimizer", "lr", "dense_precision", "pull_window"),
    "data": ("format",),
}


class RunReader:
    """State and history of one run. Thread safety: all methods may run on any thread."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = Path(run_dir)
        self._lock = threading.Lock()
        self._generation = 0
        self._start_over()

    def _start_over(self) -> None:
        """Forget the history: the file is new, or a resumed run has replaced it."""
        self._generation += 1
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._rest = b""
        self._points: list[Point] = []
        self._stride = 1
        self._skip = 0
        self._tables: dict[str, Any] = {}
        self._latest: dict[str, Any] | None = None

    def poll(self, seen: tuple[int, int] = (0, 0)) -> tuple[dict[str, Any], tuple[int, int]]:
        """Read what is new; return the state, and a cursor for the next call.

        The state has "points": those after the cursor `seen`, or all, with "reset", if earlier ones have changed.
        """
        with self._lock:
            with contextlib.suppress(OSError, ThermoclineError):
                self._read_metrics()
            reset = seen[0] != self._generation
            points = self._points[0 if reset else seen[1] :]
            state = {**self._state(), "reset": reset, "points": points, "latest": self._latest}
            return state, (self._generation, len(self._points))

    # ---- metrics.jsonl

    def _read_metrics(self) -> None:
        try:
            with open_regular(self.run_dir / "metrics.jsonl") as file:
                facts = os.fstat(file.fileno())
                if self._file != (facts.st_dev, facts.st_ino) or facts.st_size < self._offset:
                    self._start_over()
                    self._file = (facts.st_dev, facts.st_ino)
                file.seek(self._offset)
                data = file.read(_MAX_READ_BYTES)
        except FileNotFoundError:
            if self._file is not None:
                self._start_over()
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_FILE_BYTES:
            self._rest = b""
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):  # not an event: leave it out
                self._add(_parse(line))

    def _add(self, row: dict[str, Any]) -> None:
        if not (isinstance(row["event"], str) and _is_number(row["step"])):
            return
        point = {name: row[name] for name in _CHARTED if _is_number(row.get(name))}
        point["event"] = row["event"][:100]
        if point["event"] != "train":
            self._keep(point)
            return
        for name, shares in row["tables"].items():
            if any(share is not None for share in shares.values()):  # with a GPU, a log may come before its rows
                self._tables[name] = shares
        ranks = row.get("ranks", [])
        # Runs of earlier versions have no figures per rank: shares instead of rows per second.
        used = [{tier: rank[f"used_{tier}_per_s"] for tier in _TIERS} for rank in ranks] or self._tables.values()
        point["tiers"] = {tier: sum(found.get(tier) or 0 for found in used) for tier in _TIERS}
        latest = ("stages", "damage", "damaged_partitions", "rate", "examples", "ranks")
        self._latest = {**point, **{name: row.get(name) for name in latest}, "tables": self._tables}
        self._latest["ahead"] = row.get("lookahead")
        self._skip += 1
        if self._skip >= self._stride:
            self._skip = 0
            self._keep(point)

    def _keep(self, point: Point) -> None:
        """Add a point. If there are too many, keep every second of the more frequent kind: training or evaluation."""
        self._points.append(point)
        if len(self._points) <= MAX_POINTS:
            return
        train = [point for point in self._points if point["event"] == "train"]
        other = [point for point in self._points if point["event"] != "train"]
        if len(train) >= len(other):
            train = train[1::2]
            self._stride *= 2
        else:
            other = other[1::2]
        self._points = sorted([*train, *other], key=lambda point: point["step"])
        self._generation += 1

    # ---- state

    def _state(self) -> dict[str, Any]:
        status = self._status()
        return {
            "name": self.run_dir.absolute().name,
            "path": str(self.run_dir.absolute()),
            "now": time.time(),
            "state": self._life(status),
            "status": status,
            "setup": self._setup(),
            "disk": self._disk(),
        }

    def _status(self) -> dict[str, Any] | None:
        try:
            return _parse(read_limited(self.run_dir / "status.json", _MAX_FILE_BYTES))
        except (OSError, ValueError, ThermoclineError):
            return None

    def _life(self, status: dict[str, Any] | None) -> str:
        """Return "waiting", "training", "silent" (no sign of life), "finished", "stopped" or "unknown"."""
        if status is None:
            if self._latest is None:
                return "waiting"
            return "finished" if any(point["event"] == "test" for point in self._points) else "unknown"
        state = status.get("state")
        if state != "training":
            return state if state in ("finished", "stopped") else "unknown"
        process, updated = status.get("process"), status.get("updated")
        if status.get("host") == socket.gethostname() and isinstance(process, int):
            return "training" if _is_alive(process) else "silent"
        recent = isinstance(updated, (int, float)) and time.time() - updated < _SILENT_SECONDS
        return "training" if recent else "silent"

    def _setup(self) -> dict[str, Any]:
        """Return the settings of config.toml that the page shows; empty without the file."""
        try:
            config = tomllib.loads(read_limited(self.run_dir / "config.toml", _MAX_FILE_BYTES).decode())
        except (OSError, ValueError, RecursionError, ThermoclineError):
            return {}
        shown = {}
        for section, keys in _SETUP.items():
            values: Any = config.get(section)
            for key in keys if isinstance(values, dict) else ():
                value = values.get(key)
                if isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)):
                    shown[f"{section}.{key}"] = value
        return shown

    def _disk(self) -> dict[str, int] | None:
        """Return size and free bytes of the disk of the run's folder."""
        try:
            usage = shutil.disk_usage(self.run_dir)
        except OSError:
            return None
        return {"total": usage.total, "free": usage.free}


def _parse(text: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for anything else, also for NaN and infinity, which JSON lacks."""

    def finite(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"{text} is not JSON")
        return number

    try:
        value = json.loads(text, parse_constant=finite, parse_float=finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # of another user
    return True

"""`RunReader`: runs that are absent, in progress, finished, resumed, damaged or of an earlier version."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import helpers.watched_run as watched
import pytest

from thermocline.watch import run_reader
from thermocline.watch.run_reader import RunReader


def test_a_run_is_read_as_it_grows(tmp_path: Path) -> None:
    run = tmp_path / "later"
    reader = RunReader(run)
    state, seen = reader.poll()
    assert (state["state"], state["points"], state["latest"], state["disk"]) == ("waiting", [], None, None)
    watched.write(run, 3)
    state, seen = reader.poll(seen)
    assert (state["state"], state["reset"]) == ("training", True)
    assert [(point["event"], point["step"]) for point in state["points"]] == [
        ("train", 10), ("train", 20), ("train", 30), ("valid", 100),
    ]  # fmt: skip
    assert state["points"][0]["tiers"]["ssd"] == 2 * 1000  # the rates of both ranks
    assert len(state["latest"]["ranks"]) == 2
    assert state["setup"] == {"model.name": "dcnv2", "model.dim": 16, "tiers.mem": "2GB", "train.batch_size": 4096}
    line = json.dumps(watched.train_row(40))
    with (run / "metrics.jsonl").open("a") as file:  # a line of which only the beginning is written yet
        file.write(line[:50])
        file.flush()
        state, seen = reader.poll(seen)
        assert (state["points"], state["reset"]) == ([], False)
        file.write(line[50:] + "\n")
    state, seen = reader.poll(seen)
    assert [point["step"] for point in state["points"]] == [40]
    assert reader.poll(seen)[0]["points"] == []


def test_a_resumed_run_replaces_the_history(tmp_path: Path) -> None:
    reader = RunReader(watched.write(tmp_path, 5))
    _, seen = reader.poll()
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines()[:2]
    (tmp_path / "new").write_text("\n".join(kept) + "\n")
    (tmp_path / "new").replace(tmp_path / "metrics.jsonl")
    state, seen = reader.poll(seen)
    assert state["reset"]
    assert [point["step"] for point in state["points"]] == [10, 20]
    (tmp_path / "metrics.jsonl").unlink()
    state, seen = reader.poll(seen)
    assert (state["reset"], state["points"], state["latest"]) == (True, [], None)


def test_long_histories_are_thinned_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_reader, "MAX_POINTS", 100)
    reader, seen, steps = RunReader(watched.write(tmp_path, 0)), (0, 0), []
    for start in range(0, 1000, 50):
        watched.append(tmp_path, *(watched.train_row(start + i) for i in range(1, 51)))
        state, seen = reader.poll(seen)
        steps = ([] if state["reset"] else steps) + [point["step"] for point in state["points"]]
        assert len(steps) <= 101
    assert steps == sorted(steps)
    gaps = {b - a for a, b in itertools.pairwise(steps) if 100 not in (a, b)}
    assert max(gaps) <= 32
    assert state["latest"]["step"] == 1000
    assert any(point["event"] == "valid" for point in reader.poll()[0]["points"])
    windows = [{"event": "progressive", "step": 1000 + i, "epoch": 0, "auc": 0.7} for i in range(400)]
    watched.append(tmp_path, *windows)
    kinds = [point["event"] for point in reader.poll()[0]["points"]]
    assert len(kinds) <= 100
    assert min(kinds.count("train"), kinds.count("progressive")) > 20


def test_wrong_lines_and_files_are_left_out(tmp_path: Path) -> None:
    wrong = ["{", "[]", "null", "1", '{"event": "train", "step": 1}', '{"event": "train", "step": NaN, "tables": {}}']
    watched.append(tmp_path, *wrong, watched.train_row(10, loss=None), "\u00ff")
    (tmp_path / "status.json").write_text("[1, 2]")
    (tmp_path / "config.toml").write_text("[model")
    state, _ = RunReader(tmp_path).poll()
    assert [point["step"] for point in state["points"]] == [10]
    assert "loss" not in state["points"][0]
    assert (state["status"], state["setup"], state["state"]) == (None, {}, "unknown")
    json.loads(json.dumps(state, allow_nan=False))


def test_wrong_lines_neither_raise_nor_grow_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_reader, "MAX_POINTS", 10)
    wrong = ['{"event": "valid"}', '{"event": "valid", "step": "1"}', '{"event": 5, "step": 1}']
    wrong += ['{"event": "valid", "step": 1e999}', '{"event": ' + "[" * 200_000]
    watched.append(tmp_path, *wrong, {"event": "valid", "step": 1, "auc": "x" * 1000, "loss": True, "ne": 0.5})
    watched.append(tmp_path, *({"event": "valid", "step": step} for step in range(2, 100)))
    nested = "[" * 200_000
    (tmp_path / "status.json").write_text(nested)
    (tmp_path / "config.toml").write_text(f"a = {nested}")
    state, _ = RunReader(tmp_path).poll()
    assert len(state["points"]) <= 10
    assert all(isinstance(point["step"], int) for point in state["points"])
    assert state["status"] is None
    monkeypatch.setattr(run_reader, "MAX_POINTS", 1000)
    assert RunReader(tmp_path).poll()[0]["points"][0] == {"event": "valid", "step": 1, "ne": 0.5}
    json.dumps(state, allow_nan=False)


def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "status.json", "config.toml"):
        os.mkfifo(tmp_path / name)
    assert RunReader(tmp_path).poll()[0]["state"] == "waiting"


def test_states_of_a_run(tmp_path: Path) -> None:
    def state_of(**fields: object) -> str:
        (tmp_path / "status.json").write_text(json.dumps(watched.status(10, **fields)))
        return str(RunReader(tmp_path).poll()[0]["state"])

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert state_of() == "training"
    assert state_of(process=ended.pid) == "silent"
    assert state_of(host="another") == "training"
    assert state_of(host="another", updated=0) == "silent"
    assert state_of(state="finished", process=ended.pid) == "finished"
    assert state_of(state="stopped") == "stopped"
    assert state_of(state="odd") == "unknown"


def test_a_run_of_an_earlier_version_has_shares_and_no_status(tmp_path: Path) -> None:
    row = watched.train_row(10)
    del row["ranks"], row["time"]
    watched.append(tmp_path, row, {"event": "test", "step": 10, "epoch": 1, "auc": 0.75})
    state, _ = RunReader(tmp_path).poll()
    assert state["state"] == "finished"
    assert state["points"][0]["tiers"] == {"hbm": 0.8, "mem": 0.15, "ssd": 0.04, "new": 0.01}

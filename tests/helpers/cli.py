"""Command-line runs that take about a second, in this process or in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from typer.testing import CliRunner

import thermocline as tc
from thermocline.checkpoint import state_tree
from thermocline.cli.main import app

SMALL = """
[data]
format = "synth"
[data.synth]
keys = 3000
fields = 4
examples = 1600
valid_examples = 400
test_examples = 400
[model]
name = "dnn"
dim = 4
hidden = [8]
dropout = 0.1
embedding_l2 = 1e-5
initial = 0.05
[tiers]
mem = "4MB"
ssd_mem = "16MB"
[train]
batch_size = 100
optimizer = "adam"
lr = 0.01
log_every = 1
tensorboard = false
torch_threads = 1
run_dir = "run"
"""
STEPS = 16


def write_config(folder: Path, text: str = SMALL, name: str = "small.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def invoke(*words: Any) -> Any:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


def done(*words: Any) -> str:
    """Run a command that must succeed; return its stdout."""
    result = invoke(*words)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return str(result.stdout)


def start(*words: Any, program: Sequence[str] = ("-m", "thermocline"), **env: str) -> subprocess.Popen[str]:
    """Start a command, or another Python `program`, in a child process."""
    source = str(Path(tc.__file__).parent.parent)
    return subprocess.Popen(
        [sys.executable, "-u", *program, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source, **env},
        start_new_session=True,
    )


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def state_of(run_dir: Path, store: Path | None = None) -> dict[str, bytes]:
    """Return all bytes of a run's newest checkpoint: rows by key, dense state, random state, position in the data."""
    manifest = json.loads(sorted((run_dir / "checkpoints").glob("*.json"))[-1].read_text())
    state = {"step": json.dumps(manifest["step"]).encode()}
    for file in manifest["files"]:
        path = run_dir / "checkpoints" / file
        state["values"] = json.dumps(state_tree.read_values(path)).encode()
        tensors = safetensors.numpy.load_file(path)
        state |= {name: tensor.tobytes() for name, tensor in tensors.items()}
    epoch = manifest["tables"]["table"]["epoch"]
    with tc.SsdStore.open(store or run_dir / "stores" / "table", read_only=True, epoch=epoch) as rows:
        keys, values = (np.concatenate(parts) for parts in zip(*rows.scan(), strict=True))
    order = np.argsort(keys)
    return {**state, "keys": keys[order].tobytes(), "rows": values[order].tobytes()}

"""`thermocline train` starts the processes that compile kernels where it will train on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from thermocline.cli import run_commands
from thermocline.config.schema import Config
from thermocline.utils import compile_workers


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Identities of runs for which workers are started, on a machine that has a GPU."""
    identities: list[str] = []
    monkeypatch.setattr(compile_workers.workers, "start_early", identities.append)
    monkeypatch.setattr(compile_workers, "is_used", lambda: True)
    monkeypatch.setattr(run_commands, "_GPU", tmp_path)
    return identities


def config_of(*sets: str) -> Config:
    return Config.parse("", ['data.format="synth"', *sets])


def test_runs_with_equal_kernels_have_one_identity(started: list[str]) -> None:
    for sets in (["train.lr=0.1"], ["train.lr=0.2", "train.batch_size=7"], ['train.optimizer="sgd"'], ["model.dim=24"]):
        run_commands._start_compile_workers(config_of(*sets))
    assert len(started) == 4
    assert started[0] == started[1]
    assert len(set(started)) == 3


def test_no_workers_without_a_gpu_or_on_the_cpu(
    started: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_commands._start_compile_workers(config_of('tiers.device="cpu"'))
    monkeypatch.setattr(run_commands, "_GPU", tmp_path / "absent")
    run_commands._start_compile_workers(config_of())
    monkeypatch.setattr(run_commands, "_GPU", tmp_path)
    monkeypatch.setattr(compile_workers, "is_used", lambda: False)
    run_commands._start_compile_workers(config_of())
    assert not started

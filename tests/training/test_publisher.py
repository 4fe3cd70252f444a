"""[publish]: versions of a training run, unchanged bits, resumption, failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from helpers.stream import CONFIG, write_file
from helpers.train import weights_of

import thermocline as tc
from thermocline import serving
from thermocline.cli.serving import ExportOptions, export
from thermocline.errors import ConfigError, RankError, ThermoclineError
from thermocline.serving.version import read_version, versions
from thermocline.training.run import Run
from thermocline.training.scoring import Scorer


@pytest.fixture
def ads(tmp_path: Path) -> Path:
    """One file of 10 batches."""
    write(tmp_path, 0, 160)
    return tmp_path


def write(folder: Path, number: int, examples: int) -> None:
    values = np.random.default_rng(number).zipf(1.3, (examples, 2)) % 90
    rows = ((int((a + b) % 3 == 0), 1000 * number + i, a, b) for i, (a, b) in enumerate(values))
    write_file(folder / "in" / f"{number}.csv", rows)


class Kill(tc.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: tc.Trainer, loss: torch.Tensor) -> None:
        if trainer.progress.step == self.step:
            raise InterruptedError


def train(folder: Path, *callbacks: tc.Callback, resume: bool = False, **sets: Any) -> tuple[bytes, dict[int, Any]]:
    """Train; return the bits of rows and weights, and the served part of every row."""
    overrides = [f"{name.replace('__', '.')}={value}" for name, value in sets.items()]
    with Run(tc.Config.parse(CONFIG.format(folder=folder), overrides), resume=resume) as run:
        run.fit(resume=resume, callbacks=callbacks)
        pieces = list(run.table.rows())
        keys, rows = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        order = np.argsort(keys)
        served = dict(zip(keys.tolist(), rows[:, : run.table.dim], strict=True))
        return rows[order].tobytes() + weights_of(run.model), served


def published(folder: Path) -> list[Any]:
    return [read_version(path) for _, path in sorted(versions(folder / "served").items())]


def check_served(folder: Path, rows: dict[int, Any]) -> None:
    """Check that the current version has exactly these rows."""
    with serving.open(folder / "served") as snapshot:
        keys = np.array(sorted(rows), np.uint64)
        assert np.array_equal(snapshot.lookup(keys), np.stack([rows[int(key)] for key in keys]))


@pytest.mark.parametrize("ssd", [False, True])
def test_versions_have_step_and_watermark_and_training_is_unchanged(ads: Path, ssd: bool) -> None:
    def store(name: str) -> dict[str, Any]:
        return {"train__run_dir": ads / name, **({"tiers__ssd": ads / name / "store"} if ssd else {})}

    whole, _ = train(ads, data__shuffle="false", **store("whole"))
    publish = {"publish__folder": ads / "served", "publish__every_steps": 3}
    result, rows = train(ads, data__shuffle="false", **publish, **store("run"))
    assert result == whole
    assert [(v.kind, v.step, v.event_time) for v in published(ads)] == [
        ("base", 3, 47), ("delta", 6, 95), ("delta", 9, 143), ("delta", 10, 159)]  # fmt: skip
    dense = {"config.toml", "features.json", "dense.safetensors"}  # for `serve --score`
    assert all({file.name for file in version.files} == dense for version in published(ads))
    check_served(ads, rows)


def test_a_base_again_and_the_end_of_old_versions(ads: Path) -> None:
    _, rows = train(ads, publish__folder=ads / "served", publish__every_steps=1, publish__base_every=3)
    # Ten versions, of which 1, 5 and 9 are bases; those older than the last two bases are deleted.
    kinds = ["base", "delta", "delta", "delta", "base", "delta"]
    assert [(v.number, v.kind) for v in published(ads)] == list(enumerate(kinds, 5))
    check_served(ads, rows)


def test_thresholds_of_the_config_choose_the_rows(ads: Path) -> None:
    rule = {"publish__min_frequency": 4, "publish__min_score": 1.5, "expiry__nonclick_coeff": 0.5}
    options: dict[str, Any] = {
        "publish__folder": ads / "served", "publish__every_steps": 4,
        "rows__statistics": '["frequency", "show", "click"]', "expiry__every": 6, "expiry__decay": 0.9, **rule,
    }  # fmt: skip
    overrides = [f"{name.replace('__', '.')}={value}" for name, value in options.items()]
    with Run(tc.Config.parse(CONFIG.format(folder=ads), overrides)) as run:
        with pytest.warns(RuntimeWarning, match="all rows are compared"):
            run.fit()
        keys = np.concatenate([keys for keys, _ in run.table.rows()])
        seen = run.table.read_statistics(keys)
        scores = (seen["show"].astype(float) - seen["click"]) * 0.5 + seen["click"]
        expected = (seen["frequency"] >= 4) & (scores >= 1.5)
        run_dir = run.config.train.run_dir
    assert [(v.kind, v.step) for v in published(ads)] == [("base", 4), ("delta", 8), ("delta", 10)]
    assert 0 < expected.sum() < len(keys)
    assert serving.open(ads / "served").find(keys)[1].tolist() == expected.tolist()
    # The same rule as flags of `thermocline export`, on the checkpoint of the run: its decays and coefficients count.
    export(str(run_dir), str(ads / "exported"), ExportOptions(min_frequency=4, min_score=1.5))
    assert serving.open(ads / "exported").find(keys)[1].tolist() == expected.tolist()


def test_a_threshold_without_its_statistic_is_refused(ads: Path) -> None:
    with pytest.raises(ConfigError, match=r"publish\.min_frequency is 4: it needs the statistic 'frequency'"):
        train(ads, publish__folder=ads / "served", publish__min_frequency=4)
    train(ads)
    with pytest.raises(ConfigError, match=r"min_score is 2\.0: it needs the statistic 'show'"):
        export(str(ads / "run"), str(ads / "out"), ExportOptions(min_score=2.0))


def test_a_resumed_run_continues_with_deltas(ads: Path) -> None:
    options: dict[str, Any] = {"publish__folder": ads / "served", "publish__every_steps": 2}
    with pytest.raises(InterruptedError):
        train(ads, Kill(9), train__checkpoint_every=5, **options)
    assert [(v.kind, v.step) for v in published(ads)] == [("base", 2), ("delta", 4), ("delta", 6), ("delta", 8)]
    # Resumed at step 5: a delta cannot go back from step 8 to 6.
    _, rows = train(ads, resume=True, **options)
    assert [(v.kind, v.step) for v in published(ads)[4:]] == [("base", 6), ("delta", 8), ("delta", 10)]
    check_served(ads, rows)


def test_versions_by_time_while_the_run_waits(tmp_path: Path) -> None:
    write(tmp_path, 0, 40)

    class Arrival(tc.Callback):
        def on_wait(self, trainer: tc.Trainer) -> None:
            if published(tmp_path) and not (tmp_path / "in" / "1.csv").exists():
                write(tmp_path, 1, 40)

    follow: dict[str, Any] = {"data__follow": "true", "data__follow_idle": "60s", "data__shuffle": "false"}
    (tmp_path / "served").mkdir()
    publish: dict[str, Any] = {"publish__folder": tmp_path / "served", "publish__every": 0.3}
    _, rows = train(tmp_path, Arrival(), train__steps=6, **publish, **follow)
    # The version of step 3 appeared while the run waited: the second file was written after it.
    found = [(v.step, v.event_time) for v in published(tmp_path)]
    assert (3, 39) in found
    assert found[-1] == (6, 1039)
    check_served(tmp_path, rows)


def test_versions_have_the_dense_model(ads: Path) -> None:
    train(ads, publish__folder=ads / "served")
    (version,) = published(ads)
    assert {file.name for file in version.files} == {"config.toml", "features.json", "dense.safetensors"}
    assert str(ads) not in (ads / "served" / version.folder / "config.toml").read_text()
    with serving.open(ads / "served") as snapshot:
        clicks = pa.table({"a": ["1", "2"], "b": ["3", "3"]})
        assert Scorer(ads / "served")(snapshot.state, clicks).shape == (2,)


def test_an_exported_checkpoint_has_the_watermark(ads: Path) -> None:
    train(ads, data__shuffle="false")
    export(str(ads / "run"), str(ads / "served"), ExportOptions())
    assert [(v.step, v.event_time) for v in published(ads)] == [(10, 159)]


def test_a_failure_stops_the_run_or_warns(ads: Path) -> None:
    (ads / "served").write_text("")
    options: dict[str, Any] = {"publish__folder": ads / "served", "publish__every_steps": 4}
    message = r"publish\.folder is '.*/served': step 4 cannot be published: .* is a file: choose a new folder\. "
    with pytest.raises(ThermoclineError, match=message + r"Training stopped, saved at step 4"):
        train(ads, **options)
    with pytest.warns(RuntimeWarning, match=r"step 8 cannot be published: .*\. Training continues"):
        resumed, _ = train(ads, resume=True, publish__on_error="warn", **options)
    whole, _ = train(ads, train__run_dir=ads / "whole")
    assert resumed == whole


def test_a_failure_of_the_dense_model_is_one_of_publishing(ads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_files(run: Run) -> Any:
        raise ValueError("no dense model")

    monkeypatch.setattr("thermocline.training.scoring.scoring_files", no_files)
    options: dict[str, Any] = {"publish__folder": ads / "served", "publish__every_steps": 4}
    with pytest.warns(RuntimeWarning, match=r"step 4 cannot be published: no dense model\. Training continues"):
        warned, _ = train(ads, publish__on_error="warn", **options)
    with pytest.raises(ThermoclineError, match=r"no dense model\. Training stopped, saved at step 4"):
        train(ads, train__run_dir=ads / "other", **options)
    monkeypatch.undo()
    assert warned == train(ads, train__run_dir=ads / "whole")[0]


@pytest.mark.parametrize("on_error", ["stop", "warn"])
@pytest.mark.parametrize(
    "lost_in",
    ["thermocline.training.publisher.publish_table", "thermocline.training.rank_coordinator.RankCoordinator.merged"],
)
def test_a_lost_rank_is_no_failure_of_publishing(
    ads: Path, monkeypatch: pytest.MonkeyPatch, lost_in: str, on_error: str
) -> None:
    def lose(*_: Any, **__: Any) -> Any:
        raise RankError("another rank exited")

    monkeypatch.setattr(lost_in, lose)
    monkeypatch.setattr(tc.Trainer, "save", lambda self: pytest.fail("save() is collective"))
    options: dict[str, Any] = {"publish__folder": ads / "served", "publish__every_steps": 4}
    with pytest.raises(RankError, match=r"^another rank exited$"):
        train(ads, publish__on_error=on_error, **options)


def test_settings() -> None:
    with pytest.raises(tc.ConfigError, match=r"publish\.every is '30s': it must be left out unless folder is set"):
        tc.Publish(every="30s")

"""Keys that a resumed run may change."""

from __future__ import annotations

import pytest
from helpers.config import EXAMPLE

from thermocline.config.loader import flatten
from thermocline.config.publish import SERVED
from thermocline.config.resume import MAY_CHANGE, check_resume, differences
from thermocline.config.schema import Config
from thermocline.embedding.admission import Admission
from thermocline.embedding.expiry import Expiry
from thermocline.errors import ConfigError


def test_keys_that_may_change_exist() -> None:
    configs = (Config(), Config(admission=Admission(count=2)), Config(expiry=Expiry(every=1, max_rows=1)))
    names = {name for config in configs for name, _ in flatten(config)}
    assert names >= MAY_CHANGE


def test_resumed_run_may_change_its_admission() -> None:
    old = Config.parse(EXAMPLE).resolve()
    new = Config.parse(EXAMPLE, ["admission.count=3", 'admission.otherwise="zero"']).resolve()
    assert 'admission.count from "none" to 3' in check_resume(old, new, "run")
    newer = Config.parse(EXAMPLE, ["admission.count=4", 'admission.otherwise="zero"']).resolve()
    assert check_resume(new, newer, "run") == ["admission.count from 3 to 4"]


def test_resumed_run_may_change_its_expiry() -> None:
    old = Config.parse(EXAMPLE).resolve()
    new = Config.parse(EXAMPLE, ["expiry.every=3", "expiry.min_norm=0.5"]).resolve()
    assert 'expiry.every from "none" to 3' in check_resume(old, new, "run")
    newer = Config.parse(EXAMPLE, ["expiry.every=3", "expiry.min_norm=0.25"]).resolve()
    assert check_resume(new, newer, "run") == ["expiry.min_norm from 0.5 to 0.25"]
    statistics = Config.parse(EXAMPLE, ['rows.statistics=["show"]']).resolve()
    with pytest.raises(ConfigError, match=r"cannot be resumed with rows.statistics from \[\] to \[\"show\"\]"):
        check_resume(old, statistics, "run")


def test_resumed_run_may_change_what_it_publishes() -> None:
    old, new = (
        Config.parse(EXAMPLE, ['publish.folder="served"', *(f"publish.{name}={value}" for name, value in keys)])
        for keys in ((), [("min_norm", 0.5), ("max_rows", 9), ("min_frequency", 2), ("min_score", 1.5)])
    )
    changed = [line.split()[0] for line in check_resume(old.resolve(), new.resolve(), "run")]
    assert changed == [f"publish.{name}" for name in SERVED]


def test_resumed_run_may_change_some_keys() -> None:
    old = Config.parse(EXAMPLE).resolve()
    assert check_resume(old, old, "run") == []
    sets = ["tiers.mem=1GB", "train.epochs=30", "train.schedule.warmup_steps=5", "train.dense_precision=bf16"]
    new = Config.parse(EXAMPLE, [*sets, "train.compile=true"]).resolve()
    assert check_resume(old, new, "run") == [
        'tiers.mem from "64MB" to "1GB"',
        "train.epochs from 20 to 30",
        "train.schedule.warmup_steps from 0 to 5",
        'train.dense_precision from "fp32" to "bf16"',
        "train.compile from false to true",
    ]


def test_runs_of_earlier_builds_resume_with_the_new_default() -> None:
    """Their saved config has the former default of `exact`."""
    old = Config.parse(EXAMPLE, ["dist.dense_sync.exact=false"]).resolve()
    assert check_resume(old, Config.parse(EXAMPLE).resolve(), "run") == ["dist.dense_sync.exact from false to true"]


@pytest.mark.parametrize(
    "override",
    ["train.lr=0.5", "train.batch_size=7", "train.seed=1", "model.dim=4", "data.train=y", "data.shuffle=false"],
)
def test_resumed_run_may_not_change_other_keys(override: str) -> None:
    old, new = Config.parse(EXAMPLE).resolve(), Config.parse(EXAMPLE, [override, "tiers.mem=1GB"]).resolve()
    name = override.partition("=")[0]
    assert name in differences(old, new)
    with pytest.raises(ConfigError) as raised:
        check_resume(old, new, "runs/a")
    message = str(raised.value)
    assert message.startswith("runs/a was trained with another config: it cannot be resumed with ")
    assert f"{name} from " in message
    assert "tiers.mem from" not in message
    assert "These keys may change: " in message


def test_added_section_is_a_difference() -> None:
    old = Config.parse(EXAMPLE).resolve()
    new = Config.parse(EXAMPLE, ["data.numeric_features.to=keys"]).resolve()
    assert set(differences(old, new)) >= {"data.numeric_features.to", "data.numeric_features.bucket"}

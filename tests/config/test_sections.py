"""Sections as an API: construction with keywords, equality, copies, accepted types, and errors in one line."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import thermocline as tc
from thermocline.config import loader
from thermocline.config.data import Hashing, Synth
from thermocline.config.json_schema import json_schema
from thermocline.utils.text_format import parse_size

OLD_FILE = Path(__file__).with_name("config_before_0_1_0.toml")


def test_sections_are_frozen_dataclasses() -> None:
    config = tc.Config(train=tc.Train(epochs=3))
    assert config == tc.Config(train=tc.Train(epochs=3))
    assert config != tc.Config()
    assert hash(config) == hash(tc.Config(train=tc.Train(epochs=3)))
    for duplicate in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert duplicate == config
    assert dataclasses.replace(config.train, lr=0.5) == tc.Train(epochs=3, lr=0.5)
    assert dataclasses.asdict(config)["train"]["epochs"] == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.epochs = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        tc.Train(3)  # type: ignore[misc]
    assert list(inspect.signature(tc.Train).parameters)[:2] == ["epochs", "steps"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tc.TrainConfig(epochs=0), "train.epochs is 0: it must be at least 1"),
        (lambda: tc.TrainConfig(plateau_factor=0), "train.plateau_factor is 0: it must be above 0 and at most 1"),
        (lambda: tc.TrainConfig(clip_norm=float("nan")), "train.clip_norm is nan: it must be above 0, or none"),
        (lambda: tc.Train(seed=2**63), f"train.seed is {2**63}: it must be 0 to 2**63 - 1"),
        (lambda: tc.Train(epochs="3"), "train.epochs is '3': it must be a whole number, at least 1"),  # type: ignore[arg-type]
        (lambda: tc.Train(epochs=True), "train.epochs is True: it must be a whole number, at least 1"),
        (lambda: tc.ModelConfig(name="dcn2"), "model.name is 'dcn2': it must be one of lr, fm, dnn, widedeep, "),  # type: ignore[arg-type]
        (lambda: tc.ModelConfig(heads=3), "model.attention_dim is 128: it must be a multiple of heads, 3"),
        (lambda: tc.Tiers(mem=1.5), "tiers.mem is 1.5: it must be a size: a number of bytes"),  # type: ignore[arg-type]
        (lambda: tc.DenseSync(bucket=0), "dist.dense_sync.bucket is 0: it must be a size above 0 bytes"),
        (lambda: tc.Data(formt="csv"), '[data] has no key "formt" (did you mean "format"?): it has train, valid'),  # type: ignore[call-arg]
        (lambda: tc.Config(train=3), "train is 3: it must be a section with the keys epochs, steps"),  # type: ignore[arg-type]
    ],
)
def test_error_is_one_line_with_the_key(make: Any, message: str) -> None:
    with pytest.raises(tc.ConfigError) as raised:
        make()
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_numpy_scalars_paths_and_lists_are_accepted() -> None:
    assert Synth(keys=np.int64(7), zipf=np.float32(0.5)) == Synth(keys=7, zipf=0.5)
    assert tc.ModelConfig(hidden=np.array([3, 4])).hidden == (3, 4)  # type: ignore[arg-type]
    assert tc.ModelConfig(hidden=[3, 4]).hidden == (3, 4)  # type: ignore[arg-type]
    assert tc.Data(train=Path("a")).train == tc.Data(train=["a"]).train == ("a",)  # type: ignore[arg-type]
    assert tc.Train(run_dir=Path("a")).run_dir == "a"  # type: ignore[arg-type]
    assert tc.Tiers(mem=np.int64(4096)).mem == 4096  # type: ignore[arg-type]


# ---- sizes

SPELLINGS = st.from_regex(r"\A\s?[0-9]{0,3}(\.[0-9]{0,2})?\s?[KMGTPkmgtpx]?[iI]?[bB]?\s?\Z", fullmatch=True)


@given(st.one_of(SPELLINGS, st.text(max_size=8)))
def test_sizes_are_those_of_parse_size(text: str) -> None:
    """The section, the JSON Schema and `parse_size` accept the same text."""
    try:
        parse_size(text)
    except ValueError:
        with pytest.raises(tc.ConfigError, match="must be a size"):
            tc.Tiers(mem=text)
        valid = False
    else:
        assert tc.Tiers(mem=text).mem == text
        valid = True
    assert (re.search(SIZE_PATTERN, text) is not None) == valid


SIZE_PATTERN = json_schema()["$defs"]["Tiers"]["properties"]["mem"]["anyOf"][1]["pattern"]


# ---- files of the version before


def test_config_of_an_older_run_is_read() -> None:
    config = tc.Config.load(OLD_FILE)
    assert config.data.hashing == Hashing(k=500, fields="per_field")
    assert config.precision == tc.Precision(kind="int8", range=1.0, scale_lr=0.01)
    assert config.train.checkpoint_minutes is None
    assert config.dist.dense_sync == tc.DenseSync(every=20, exact=False)
    assert config == config.resolve()
    older = OLD_FILE.read_text().replace('"apart"', '"together"')
    assert tc.Config.parse(older).data.hashing == Hashing(k=500)
    assert tc.Config.parse(older, ["precision.learn=0.02"]).precision.scale_lr == 0.02


def test_old_and_new_name_together_are_an_error() -> None:
    with pytest.raises(tc.ConfigError, match=r'\[precision\] has no key "learn"'):
        loader.parse(tc.Config, "[precision]\nlearn = 0.0\nscale_lr = 0.0", name="x.toml")

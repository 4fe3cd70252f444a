"""The JSON Schema: it accepts every example, rejects the errors that the loader rejects, and describes every key."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers.cli import done
from helpers.config import EXAMPLE

from thermocline.config.json_schema import json_schema
from thermocline.config.loader import flatten
from thermocline.config.schema import Config
from thermocline.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"
SCHEMA = json_schema()


def keys_with_errors(text: str) -> set[str]:
    errors = jsonschema.Draft202012Validator(SCHEMA).iter_errors(tomllib.loads(text))
    return {".".join(map(str, error.absolute_path)) for error in errors}


def test_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_command_prints_the_schema_shipped_with_the_examples() -> None:
    """`thermocline schema > examples/thermocline.schema.json` updates the file."""
    assert json.loads(done("schema")) == SCHEMA
    assert (EXAMPLES / "thermocline.schema.json").read_text() == done("schema")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("#:schema thermocline.schema.json\n")
    assert keys_with_errors(text) == set()
    config = Config.load(path)
    for written in (config, config.resolve()):
        assert keys_with_errors(written.to_toml()) == set()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[trian]", ""),
        ("epochs = 3", ""),
        ("[train]\nepoch = 3", "train"),
        ("[train.schedule]\nkinds = 1", "train.schedule"),
        ("train = 3", "train"),
        ("[train]\nepochs = 2.5", "train.epochs"),
        ('[train]\nepochs = "3"', "train.epochs"),
        ("[train]\nepochs = 0", "train.epochs"),
        ('[train]\nsteps = "many"', "train.steps"),
        ("[train]\nlr = -1", "train.lr"),
        ("[train]\nseed = -1", "train.seed"),
        ('[train]\noptimizer = "adamw"', "train.optimizer"),
        ("[model]\nhidden = [400, 1.5]", "model.hidden"),
        ("[model]\ndropout = 1", "model.dropout"),
        ("[data]\ntrain = [1]", "data.train"),
        ("[data]\nnumeric_features = true", "data.numeric_features"),
        ("[data.hashing]\nk = 0", "data.hashing"),
        ('[precision]\nkind = "int9"', "precision.kind"),
        ('[tiers]\nmem = "64 potatoes"', "tiers.mem"),
        ("[tiers]\nmem = -1", "tiers.mem"),
        ("[dist]\ntimeout = 0", "dist.timeout"),
        ("[dist.dense_sync]\nevery = 0", "dist.dense_sync.every"),
    ],
)
def test_errors_are_found_at_their_key(text: str, key: str) -> None:
    assert keys_with_errors(text) == {key}
    with pytest.raises(ConfigError):
        Config.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        EXAMPLE,
        '[data]\ntrain = "one.csv"\ncategorical = "c_*"\nnumeric = []',
        '[train]\nsteps = "none"\ncheckpoint_minutes = "none"\nlr = 1',
        '[tiers]\nmem = 4096\nhbm = " 1.5 gib "',
        '[data.numeric_features]\nto = "keys"\nbucket = 2',
        '[data.numeric_features]\nto = "keys"\nbucket = "none"',
        "[model]\nhidden = 64",
    ],
)
def test_accepted_spellings_are_valid(text: str) -> None:
    assert keys_with_errors(text) == set()
    Config.parse(text)


def test_every_key_has_a_description_and_the_default_of_the_config() -> None:
    for name, value in flatten(Config()):
        schema: Any = SCHEMA
        for part in name.split("."):
            schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
            schema = schema["properties"][part]
        assert len(schema["description"]) > 5, name
        if value is not None:
            assert schema["default"] == (list(value) if isinstance(value, tuple) else value), name
        elif name != "data.hashing":
            assert "default" not in schema, name

"""Config files and `--set` flags: accepted values, errors in one line, and files written by `to_toml`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from helpers.config import EXAMPLE
from hypothesis import given, strategies as st

from thermocline.config import loader
from thermocline.config.data import Data, Numeric, Synth
from thermocline.config.lr_schedule import Schedule
from thermocline.config.model import ModelConfig
from thermocline.config.schema import Config, Tiers, Train
from thermocline.config.train import TrainConfig
from thermocline.errors import ConfigError
from thermocline.training.run import gpu_budget


def test_documented_file() -> None:
    config = Config.parse(EXAMPLE)
    assert config.data == Data(train=("train.libsvm",), valid=("valid.libsvm",), test=("test.libsvm",), format="libsvm")
    assert config.model == ModelConfig(name="dcnv2", dim=10, hidden=(400, 400, 400))
    assert config.tiers == Tiers(mem="64MB", ssd="run/store")
    assert config.train == Train(batch_size=4096, epochs=20, optimizer="adam", lr=1e-3, seed=2021, run_dir="run")


def test_train_has_every_field_of_train_config() -> None:
    names = {field.name for field in dataclasses.fields(Train)}
    assert names > {field.name for field in dataclasses.fields(TrainConfig)}
    assert isinstance(Train(), TrainConfig)


WRONG = [
    # sections and keys
    ("[trian]", 'there is no section "trian" (did you mean "train"?): it has data, model, precision, rows, admission'),
    ("epochs = 3", 'there is no section "epochs"'),
    ("[train]\nepoch = 3", '[train] has no key "epoch" (did you mean "epochs"?): it has epochs, steps, schedule'),
    (
        '[tiers]\nhbm = "much"',
        'tiers.hbm is "much": it must be a size: a number of bytes, or a number with one of B, KB',
    ),
    ('[tiers]\ndevice = "tpu"', "tiers.device"),
    ("[train.schedule]\nkinds = 1", '[train.schedule] has no key "kinds" (did you mean "kind"?)'),
    ("train = 3", "train is 3: it must be a section with the keys epochs, steps"),
    # types
    ("[train]\nepochs = 2.5", "train.epochs is 2.5: it must be a whole number"),
    ("[train]\nepochs = true", "train.epochs is true: it must be a whole number"),
    ('[train]\nepochs = "ten"', 'train.epochs is "ten": it must be a whole number'),
    ('[train]\nsteps = "ten"', 'train.steps is "ten": it must be a whole number'),
    ('[train]\nlr = "fast"', 'train.lr is "fast": it must be a finite number, at least 0'),
    ("[train]\nlr = true", "train.lr is true: it must be a finite number, at least 0"),
    ("[train]\nrun_dir = 3", "train.run_dir is 3: it must be the name of a folder"),
    ('[train]\ndisplay = "yes"', 'train.display is "yes": it must be true or false'),
    ("[train]\nschedule = 3", "train.schedule is 3: it must be a section with the keys kind"),
    ("[model]\nhidden = [400, 1.5]", "model.hidden[1] is 1.5: it must be a whole number"),
    ('[model]\nhidden = "400,400"', 'model.hidden[0] is "400,400": it must be a whole number'),
    ("[data]\ntrain = [1]", "data.train[0] is 1: it must be text"),
    ("[data]\nnumeric_features = true", "data.numeric_features is true: it must be a section with the keys to"),
    (
        "[data.numeric_features]\nbucket = true",
        "data.numeric_features.bucket is true: it must be a finite number, above 0, or one of log_square, none",
    ),
    # values
    ('[data]\nformat = "libsvn"', 'data.format is "libsvn": it must be one of libsvm, libffm, criteo, csv, parquet, '),
    ('[data]\nformat = "libsvn"', '(did you mean "libsvm"?)'),
    ('[model]\nname = "dcn2"', 'model.name is "dcn2": it must be one of lr, fm, dnn'),
    (
        '[train]\noptimizer = "adamw"',
        'train.optimizer is "adamw": it must be one of sgd, adagrad, rowwise_adagrad, adam, partial_rowwise_adam',
    ),
    ('[tiers]\npolicy = "fifo"', 'tiers.policy is "fifo": it must be one of lru_lfu, lru, lfu'),
    ('[tiers]\nmem = "64 potatoes"', 'tiers.mem is "64 potatoes": it must be a size: a number of bytes'),
    ("[tiers]\nmem = 1.5", "tiers.mem is 1.5: it must be a size: a number of bytes"),
    ("[tiers]\nmem = -1", "tiers.mem is -1: it must be a size: a number of bytes"),
    ("[tiers]\nthreads = 0", "tiers.threads is 0: it must be at least 1, or none"),
    ("[train]\nepochs = 0", "train.epochs is 0: it must be at least 1"),
    ("[train]\nbatch_size = 0", "train.batch_size is 0: it must be at least 1"),
    ("[train]\nlr = nan", "train.lr is nan: it must be a finite number, at least 0"),
    ("[train]\nseed = -1", "train.seed is -1: it must be 0 to 2**63 - 1"),
    ('[train]\nrun_dir = ""', 'train.run_dir is "": it must be the name of a folder'),
    ('[train.schedule]\nkind = "step"', "train.schedule.decay_steps is 0: kind 'step' needs at least 1"),
    ("[model]\ndropout = 1", "model.dropout is 1: it must be at least 0 and below 1, or none"),
    ("[data]\nshuffle_buffer = 0", "data.shuffle_buffer is 0: it must be at least 1"),
    ("[data.synth]\nkeys = 0", "data.synth.keys is 0: it must be at least 1"),
    (
        '[data.numeric_features]\nto = "dense"\nbucket = 2',
        'data.numeric_features.bucket is 2.0: it must be "none" when to = "dense"',
    ),
    # TOML itself
    ("[train\n", "file.toml is not valid TOML: Expected ']' at the end of a table declaration (at line 1, column 7)"),
    (
        "[train]\nepochs = 1\nepochs = 2\n",
        "file.toml is not valid TOML: Cannot overwrite a value (at line 3, column 11)",
    ),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_error_is_one_line_with_file_and_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Config.parse(text, name="file.toml")
    line = str(raised.value)
    assert message in line
    assert line.startswith("file.toml")
    assert "\n" not in line


SETS = [
    (["train.lr=0.01"], "train.lr", 0.01),
    (["train.lr=1"], "train.lr", 1.0),
    (["train.lr = 1e-2"], "train.lr", 0.01),
    (["train.steps=none"], "train.steps", None),
    (["train.checkpoint_minutes=none"], "train.checkpoint_minutes", None),
    (["train.run_dir=runs/a b"], "train.run_dir", "runs/a b"),
    (["train.run_dir=2026"], "train.run_dir", "2026"),
    (["train.run_dir=true"], "train.run_dir", "true"),
    (["train.run_dir='1 # 2'"], "train.run_dir", "1 # 2"),
    (["train.run_dir=a=b"], "train.run_dir", "a=b"),
    (["tiers.mem=2GB"], "tiers.mem", "2GB"),
    (["tiers.mem=4096"], "tiers.mem", 4096),
    (["tiers.ssd=none"], "tiers.ssd", None),
    (["model.hidden=[64, 32]"], "model.hidden", (64, 32)),
    (["model.hidden=64"], "model.hidden", (64,)),
    (["model.hidden=[]"], "model.hidden", ()),
    (["data.train=x.libsvm"], "data.train", ("x.libsvm",)),
    (['data.train=["x", "y"]'], "data.train", ("x", "y")),
    (["data.synth.keys=100"], "data.synth.keys", 100),
    (["train.schedule.kind=cosine", "train.schedule.decay_steps=9"], "train.schedule.kind", "cosine"),
    (["train.lr=1", "train.lr=2"], "train.lr", 2.0),
]


@pytest.mark.parametrize(("sets", "name", "value"), SETS)
def test_set_overrides_the_file(sets: list[str], name: str, value: Any) -> None:
    actual: Any = Config.parse(EXAMPLE, sets)
    for part in name.split("."):
        actual = getattr(actual, part)
    assert actual == value
    assert type(actual) is type(value)


WRONG_SETS = [
    ("train.lr", '--set is "train.lr": write section.key=value, such as train.lr=0.01'),
    ("lr=3", '--set is "lr=3": write section.key=value'),
    ("train.=3", '--set is "train.=3"'),
    ("train.epoch=3", '--set train.epoch: [train] has no key "epoch" (did you mean "epochs"?)'),
    ("trian.epochs=3", '--set trian.epochs: there is no section "trian" (did you mean "train"?)'),
    ("train.epochs=ten", '--set train.epochs is "ten": it must be a whole number'),
    ("train.epochs=2.5", "--set train.epochs is 2.5: it must be a whole number"),
    ("model.name=dcn2", '--set model.name is "dcn2": it must be one of'),
    ("train.epochs.x=3", "--set train.epochs.x=3: train.epochs is a value, not a section"),
    ("tiers.mem=much", '--set tiers.mem is "much": it must be a size: a number of bytes'),
]


@pytest.mark.parametrize(("override", "message"), WRONG_SETS)
def test_error_names_the_flag(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Config.parse(EXAMPLE, [override])
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_error_of_the_file_is_not_blamed_on_an_override() -> None:
    """Also if the override has a key of the same section."""
    text = '[train.schedule]\nkind = "step"\n'
    with pytest.raises(ConfigError) as raised:
        Config.parse(text, ["train.schedule.warmup_steps=3"], name="file.toml")
    assert str(raised.value).startswith("file.toml: train.schedule.decay_steps is 0")
    with pytest.raises(ConfigError) as raised:
        Config.parse("", ["train.schedule.kind=step"], name="file.toml")
    assert str(raised.value).startswith("--set train.schedule.kind: train.schedule.decay_steps is 0")


def test_toml_dates_are_not_text() -> None:
    with pytest.raises(ConfigError, match=r"file.toml: train\.run_dir is .*2026-11-16.*: it must be the name"):
        Config.parse("[train]\nrun_dir = 2026-11-16", name="file.toml")
    assert Config.parse("", ["train.run_dir=2026-11-16"]).train.run_dir == "2026-11-16"


def test_unreadable_file(tmp_path: Path) -> None:
    for path in (tmp_path / "no.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read: "):
            Config.load(path)
    (tmp_path / "latin.toml").write_bytes(b'a = "\xe9"')
    with pytest.raises(ConfigError, match="cannot be read: "):
        Config.load(tmp_path / "latin.toml")


# ---- resolved, written, read

ROUND_TRIPS = [
    Config(),
    Config.parse(EXAMPLE),
    Config(
        data=Data(
            train=('a "quoted" \\ path', "tab\tand\nline", "unicode é 漢 \x7f \x00"),
            format="csv",
            categorical=(),
            numeric=("x", "y"),
            numeric_features=Numeric(to="keys", bucket=0.25, log=True),
            delimiter="\t",
            synth=Synth(preset="E/1000", nonzeros=3),
        ),
        model=ModelConfig(name="autoint", hidden=(), dropout=0.0, embedding_l2=1e-9),
        tiers=Tiers(mem=12345, ssd="x", threads=3, policy="lfu"),
        train=Train(
            steps=5,
            checkpoint_minutes=None,
            clip_norm=0.1,
            dense_optimizer="sgd",
            dense_lr=1e300,
            schedule=Schedule(kind="step", decay_steps=3, factor=0.3),
        ),
    ),
]


@pytest.mark.parametrize("config", ROUND_TRIPS)
def test_written_config_reads_back_equal(config: Config) -> None:
    for expected in (config, config.resolve()):
        assert Config.parse(expected.to_toml()) == expected
    assert config.resolve().resolve() == config.resolve()


@given(st.text())
def test_any_text_reads_back_equal(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return  # UTF-8 has no lone surrogates
    assert Config.parse(Config(train=Train(run_dir=text or "x")).to_toml()).train.run_dir == (text or "x")


@dataclasses.dataclass
class AnyNumber:
    x: bool | int | float


@given(st.one_of(st.floats(allow_nan=False), st.integers(-(2**63), 2**63 - 1), st.booleans()))
def test_any_number_reads_back_equal(number: float) -> None:
    back = loader.parse(AnyNumber, loader.to_toml(AnyNumber(number)), name="numbers").x
    assert back == number
    assert type(back) is type(number)


def test_resolve_fills_in_dependent_defaults() -> None:
    config = Config.parse('[train]\noptimizer = "rowwise_adagrad"\nlr = 0.5\n[model]\nname = "dcnv2"').resolve()
    assert (config.train.dense_optimizer, config.train.dense_lr) == ("adagrad", 0.5)
    assert config.model == config.model.resolve()
    text = config.to_toml()
    for line in ('dense_optimizer = "adagrad"', "dense_lr = 0.5", "cross_layers = 4"):
        assert line in text


def test_dense_parameters_have_the_whole_adam_of_partial_rowwise_adam() -> None:
    config = Config.parse('[train]\noptimizer = "partial_rowwise_adam"')
    assert config.resolve().train.dense_optimizer == "adam"


# ---- plain dataclasses, with types that the sections do not have


@dataclasses.dataclass(frozen=True, kw_only=True)
class Odd:
    pair: tuple[int, str] = (1, "a")
    choice: int | Literal["auto"] = "auto"
    maybe: Literal["none", "all"] | None = "all"
    needed: str


def test_pairs_unions_and_required_keys() -> None:
    odd = loader.build(Odd, {"pair": [2, "b"], "choice": 3, "maybe": "none", "needed": "x"}, name="odd")
    assert odd == Odd(pair=(2, "b"), choice=3, maybe="none", needed="x")
    wrong = [
        ({"pair": [2]}, "odd: pair[1] is missing: it must be text"),
        ({"pair": ["b", 2]}, 'odd: pair[0] is "b": it must be a whole number'),
        ({"choice": "aut"}, 'odd: choice is "aut": it must be a whole number, or auto (did you mean "auto"?)'),
        ({}, "odd: needed is missing: it must be text"),
    ]
    for values, message in wrong:
        with pytest.raises(ConfigError) as raised:
            loader.build(Odd, {"needed": "x", **values} if values else {}, name="odd")
        assert str(raised.value) == message


def test_missing_gpu_is_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert gpu_budget(Config.parse("").tiers) is None
    with pytest.raises(ConfigError, match=r'tiers\.device is "cuda", but torch sees no GPU'):
        gpu_budget(Config.parse("", ["tiers.device=cuda"]).tiers)

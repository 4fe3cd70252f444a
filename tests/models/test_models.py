"""The models: settings, errors, parameter counts, initialization, accuracy on planted data, odd batches, state."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from helpers.model import SMALL, make_batch, small_model, table_for

import thermocline as tc
from thermocline.config.model import ModelName
from thermocline.models import NAMES, ModelConfig, build, parameter_groups, row_dim
from thermocline.training.trainer import TrainConfig, Trainer

# ---- settings


def test_defaults_are_the_bars_settings() -> None:
    def settings(name: ModelName) -> tuple[Any, ...]:
        config = ModelConfig(name=name).resolve()
        return config.dropout, config.embedding_l2, config.cross_layers

    assert settings("lr")[1] == 1e-5
    assert settings("fm")[1] == 5e-6
    assert settings("dnn")[:2] == settings("deepfm")[:2] == (0.2, 0.05)
    assert settings("dcn") == (0.2, 0.05, 3)
    assert settings("dcnv2") == (0.4, 0.05, 4)
    config = ModelConfig(name="dcnv2", dropout=0.0, embedding_l2=0.0, cross_layers=2)
    assert config.resolve() == config, "explicit settings are kept"
    assert (config.dim, config.hidden, config.batch_norm, config.initial) == (10, (400, 400, 400), True, 1e-4)


def test_row_dim() -> None:
    dims = {name: row_dim(ModelConfig(name=name, dim=8)) for name in NAMES}
    assert dims == {
        "lr": 1, "fm": 9, "dnn": 8, "widedeep": 9, "deepfm": 9, "dcn": 8, "dcnv2": 8, "dlrm": 8, "autoint": 8
    }  # fmt: skip


def test_settings_do_not_import_torch() -> None:
    code = "import sys, thermocline.models as m; m.row_dim(m.ModelConfig(name='fm')); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"name": "gbdt"}, r"name is 'gbdt': it must be one of lr, fm, dnn"),
        ({"dim": 0}, r"dim is 0: it must be at least 1"),
        ({"hidden": (4, 0)}, r"hidden\[1\] is 0: it must be at least 1"),
        ({"dropout": 1.0}, r"dropout is 1\.0: it must be at least 0 and below 1"),
        ({"cross_layers": 0}, r"cross_layers is 0: it must be at least 1"),
        ({"embedding_l2": -1.0}, r"embedding_l2 is -1\.0: it must be a finite number, at least 0"),
        ({"pooling": "max"}, r"pooling is 'max': it must be one of sum, mean"),
        ({"interaction": "sum"}, r"interaction is 'sum': it must be one of dot, cat"),
        ({"attention_dim": 6}, r"attention_dim is 6: it must be a multiple of heads, 4"),
    ],
)
def test_invalid_settings_are_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=r"^model\." + text):
        ModelConfig(**settings)


def test_mismatched_tables_and_batches_are_rejected() -> None:
    config = ModelConfig(name="fm", dim=4)
    with pytest.raises(ValueError, match=r"has dim 4: fm with model.dim 4 needs 5"):
        build(config, tc.Table(4, tc.SGD(), mem="1MB"), 2)
    with pytest.raises(ValueError, match="fields is 0: fm needs at least one field"):
        build(config, table_for(config), 0, 3)
    with pytest.raises(ValueError, match="DLRM needs two vectors"):
        small_model("dlrm", fields=1, dense=0)
    model = small_model("dnn", dense=2)
    with pytest.raises(ValueError, match=r"batch.dense is None, but the model was built for 2 dense"):
        model(make_batch(dense=0))
    with pytest.raises(ValueError, match=r"batch.dense has shape \[6, 3\]: expected \[6, 2\]"):
        model(make_batch(dense=3))


# ---- sizes and initial weights

PARAMETERS = {  # 4 fields, 3 dense features, dim 5: 7 vectors, 35 inputs; hidden (7, 6), each with batch norm
    "lr": 3 * 1 + 1,
    "fm": 3 * 6 + 1,
    "dnn": 3 * 5 + (35 * 7 + 7 + 14) + (7 * 6 + 6 + 12) + (6 + 1),
    "widedeep": 3 * 6 + (35 * 7 + 7 + 14) + (7 * 6 + 6 + 12) + (6 + 1),
    "deepfm": 3 * 6 + (35 * 7 + 7 + 14) + (7 * 6 + 6 + 12) + (6 + 1),
    "dcn": 3 * 5 + 2 * (35 + 35) + (35 * 7 + 7 + 14) + (7 * 6 + 6 + 12) + (35 + 6 + 1),
    "dcnv2": 3 * 5 + 2 * (35 * 35 + 35) + (35 * 7 + 7 + 14) + (7 * 6 + 6 + 12) + (35 + 6 + 1),
    # bottom 3 -> 6 -> 4 -> 5; 5 vectors, 10 pairs and the dense vector: 15 inputs
    "dlrm": (18 + 6 + 12) + (24 + 4 + 8) + (20 + 5) + (15 * 7 + 7 + 14) + (7 * 6 + 6 + 12) + (6 + 1),
    # two layers of three matrices, residual and norm; 7 features of 6 to one
    "autoint": 3 * 5 + 4 * 30 + 12 + 3 * 36 + 12 + (7 * 6 + 1) + (35 * 7 + 7 + 14) + (7 * 6 + 6 + 12) + (6 + 1),
}


@pytest.mark.parametrize("name", NAMES)
def test_parameter_counts_and_l2_groups(name: str) -> None:
    model = small_model(name)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    config = ModelConfig(name=name, embedding_l2=0.5, net_l2=0.25)  # type: ignore[arg-type]
    groups = parameter_groups(config, model)
    assert sum(p.numel() for group in groups for p in group["params"]) == PARAMETERS[name]
    decays = {group["weight_decay"]: sum(p.numel() for p in group["params"]) for group in groups}
    vectors = 0 if name == "dlrm" else 3 * row_dim(model.config)
    assert decays == {k: v for k, v in {0.5: vectors, 0.25: PARAMETERS[name] - vectors}.items() if v}
    torch.optim.Adam(groups)


def test_weights_are_initialized_like_fuxictrs_from_torchs_seed() -> None:
    def weights(seed: int, name: str = "dcn") -> dict[str, torch.Tensor]:
        config = ModelConfig(name=name, dim=64, hidden=(300, 200))  # type: ignore[arg-type]
        torch.manual_seed(seed)
        return dict(build(config, table_for(config), 6, 50).named_parameters())

    one, same, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["net.0.weight"], other["net.0.weight"])
    inputs = 56 * 64
    for name, outputs, into in (("net.0", 300, inputs), ("net.4", 200, 300)):
        assert one[f"{name}.weight"].std().item() == pytest.approx((2 / (outputs + into)) ** 0.5, rel=0.05)
        assert not one[f"{name}.bias"].any()
    assert one["features.numbers"].std().item() == pytest.approx((2 / 65) ** 0.5, rel=0.1)
    numbers = weights(1, "fm")["features.numbers"]
    assert not numbers[:, 0].any()
    assert numbers[:, 1:].std().item() == pytest.approx((2 / 65) ** 0.5, rel=0.1)


# ---- accuracy on planted data


def planted(kind: str, examples: int, seed: int) -> list[tc.Batch]:
    """Two fields of 20 values: the label depends on the sum of two numbers, or on the product of two signs."""
    effects = np.random.default_rng(7).normal(size=(2, 10))
    effects = np.concatenate([effects, -effects], 1)  # both signs equally often: a single value predicts nothing
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 20, (examples, 2))
    a, b = effects[0, values[:, 0]], effects[1, values[:, 1]]
    score = a + b if kind == "sum" else 2 * np.sign(a) * np.sign(b)
    label = (rng.random(examples) < 1 / (1 + np.exp(-2 * score))).astype(np.float32)
    ids = (values + np.array([0, 1000])).astype(np.uint64)
    cuts = range(0, examples, 250)
    return [
        tc.Batch(ids[c : c + 250].reshape(-1), np.arange(501), 2, label=torch.from_numpy(label[c : c + 250]))
        for c in cuts
    ]


def trained_auc(name: ModelName, kind: str) -> float:
    settings = {**SMALL, "dim": 8, "hidden": (32, 16), "embedding_l2": 0.0, "initial": 0.1, "dropout": 0.1}
    config = ModelConfig(name=name, **settings)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = build(config, table_for(config, tc.Adam(lr=0.02)), 2)
    optimizer = torch.optim.Adam(parameter_groups(config, model), lr=0.01)
    trainer = Trainer(model, optimizer, config=TrainConfig(epochs=8, display=False, depth=1))
    result = trainer.fit(planted(kind, 3000, 0), test=planted(kind, 2000, 1))
    assert result.test is not None
    auc = result.test["auc"]
    assert isinstance(auc, float)
    return auc


@pytest.mark.parametrize("name", NAMES)
def test_models_learn_the_planted_data(name: ModelName) -> None:
    assert trained_auc(name, "sum") > 0.8
    products = trained_auc(name, "product")
    if name == "lr":
        assert products < 0.65, "a sum of weights cannot express a product of signs"
    else:
        assert products > 0.9


# ---- odd batches


@pytest.mark.parametrize("name", NAMES)
def test_odd_batches(name: str) -> None:
    model = small_model(name, dense=2)
    empty = tc.Batch(np.empty(0, np.uint64), np.zeros(4 * 3 + 1, np.int64), 4, dense=torch.ones(3, 2))
    one = make_batch(1, dense=2)
    for batch in (empty, one):
        for training in (True, False):
            model.train(training)
            logits = model(batch)
            assert logits.shape == (len(batch),)
            assert torch.isfinite(logits).all()
    model.train()
    model(one).sum().backward()
    assert model.features.bag.table.pending_gradients == 1
    model.features.bag.table.step()
    single = small_model(name, fields=1, dense=1)
    assert single(make_batch(fields=1, dense=1)).shape == (6,)
    if name != "dlrm":
        assert small_model(name, fields=1, dense=0)(make_batch(fields=1, dense=0)).shape == (6,)


def test_one_example_does_not_change_batch_norm() -> None:
    model = small_model("dnn")
    before = {name: value.clone() for name, value in model.named_buffers()}
    trained = model(make_batch(1)).detach()
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    model.eval()
    assert torch.equal(model(make_batch(1)), trained), "same as in evaluation"
    model.train()
    model(make_batch(2))
    assert any(not torch.equal(value, before[name]) for name, value in model.named_buffers())


@pytest.mark.parametrize("name", NAMES)
def test_numpy_dense_features_are_accepted(name: str) -> None:
    model, batch = small_model(name), make_batch()
    expected = model.eval()(batch)
    batch.dense = batch.dense.double().numpy()
    assert torch.equal(model(batch), expected)


# ---- state


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trip(name: str) -> None:
    model, other = small_model(name), small_model(name, seed=1)
    batch = make_batch()
    model(batch)  # updates the statistics of batch norm
    state = model.state_dict()
    assert not torch.equal(model.eval()(batch), other.eval()(batch))
    other.load_state_dict(state)
    assert torch.equal(model.eval()(batch), other.eval()(batch))
    tensors = {*dict(model.named_parameters()), *(n for n, _ in model.named_buffers() if n != "pairs")}
    assert set(state) == {*tensors, "features.bag._extra_state"}

"""FuxiCTR's side of accuracy.py: FuxiCTR's preprocessing, models, training loop and metrics, with our settings."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accuracy_data import DataSet

import thermocline as tc
from thermocline.models import ModelConfig

FOLDERS = {
    "lr": "LR",
    "fm": "FM",
    "dnn": "DNN/DNN_torch",
    "widedeep": "WideDeep/WideDeep_torch",
    "deepfm": "DeepFM/DeepFM_torch",
    "dcn": "DCN/DCN_torch",
    "dcnv2": "DCNv2",
}


def model_class(folder: Path, name: str) -> Any:
    """Import a model class from the model zoo, where the package of every model is named `src`."""
    for module in [module for module in sys.modules if module.split(".")[0] == "src"]:
        del sys.modules[module]
    sys.path.insert(0, str(folder / "model_zoo" / FOLDERS[name]))
    try:
        return getattr(importlib.import_module("src"), Path(FOLDERS[name]).parts[0])
    finally:
        sys.path.pop(0)


def settings_of(config: ModelConfig) -> dict[str, Any]:
    """Convert a config to FuxiCTR's options; FuxiCTR's LR and FM have one regularizer for all parameters."""
    hidden = list(config.hidden)
    if config.name in ("lr", "fm"):
        return {"embedding_dim": config.dim, "regularizer": config.embedding_l2}
    return {
        "embedding_dim": config.dim,
        "embedding_regularizer": config.embedding_l2,
        "net_regularizer": config.net_l2,
        "net_dropout": config.dropout,
        "batch_norm": config.batch_norm,
        "hidden_units": hidden,
        "dnn_hidden_units": hidden,
        "parallel_dnn_hidden_units": hidden,
        "hidden_activations": "relu",
        "dnn_activations": "relu",
        "num_cross_layers": config.cross_layers,
        "model_structure": "parallel",
    }


@dataclasses.dataclass
class Built:
    """FuxiCTR's model with its initial weights, and the encoded data set."""

    model: Any
    feature_map: Any
    params: dict[str, Any]
    vocabulary: dict[str, dict[str, int]]
    """FuxiCTR's ids of the values of each feature."""


def build_fuxictr(
    config: ModelConfig, seed: int, data: DataSet, split: Path, work: Path, *, folder: Path, training: dict[str, Any]
) -> Built:
    """Encode our split and build the model, like FuxiCTR's run_expid.py; FuxiCTR encodes a split only once."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    from fuxictr.features import FeatureMap
    from fuxictr.preprocess import FeatureProcessor, build_dataset
    from fuxictr.pytorch.torch_utils import seed_everything

    logging.disable(logging.WARNING)
    if not hasattr(np, "unicode_"):
        np.unicode_ = np.str_  # keras_preprocessing, which FuxiCTR imports, needs this name, which NumPy 2 removed
    columns: list[dict[str, Any]] = [
        {"name": name, "active": True, "dtype": "str", "type": "categorical"}
        for name in data.features
        if name not in data.several
    ]
    several = {"splitter": "^", "max_len": 8, "padding": "post", "feature_encoder": "layers.MaskedSumPooling()"}
    for name in data.several:
        columns.append({"name": name, "active": True, "dtype": "str", "type": "sequence", **several})
    params: dict[str, Any] = {
        **settings_of(config),
        "dataset_id": data.name,
        "data_root": str(split / "fuxictr"),
        "data_format": "csv",
        **{f"{name}_data": str(split / f"{name}.csv") for name in ("train", "valid", "test")},
        "feature_cols": columns,
        "label_col": {"name": "label", "dtype": "float"},
        "min_categr_count": 1,
        "model_id": config.name,
        "model_root": str(work / "checkpoints"),
        "task": "binary_classification",
        "loss": "binary_crossentropy",
        "metrics": ["logloss", "AUC"],
        "monitor": "AUC",
        "monitor_mode": "max",
        "optimizer": "adam",
        "learning_rate": training["lr"],
        "batch_size": training["batch_size"],
        "epochs": training["epochs"],
        "max_gradient_norm": training["clip_norm"],
        "early_stop_patience": training["patience"],
        "reduce_lr_on_plateau": True,  # by 0.1: TRAINING["plateau_factor"]
        "shuffle": True,
        "num_workers": 0,
        "verbose": 0,
        "gpu": -1,
        "seed": seed,
    }
    (work / "checkpoints" / params["dataset_id"]).mkdir(parents=True)
    seed_everything(seed)
    processor = FeatureProcessor(**params)
    paths = build_dataset(processor, **params)
    params.update(zip(("train_data", "valid_data", "test_data"), paths, strict=True))
    processor = processor.load_pickle()  # also of a split that was encoded by an earlier run
    encoded = split / "fuxictr" / params["dataset_id"]
    feature_map = FeatureMap(params["dataset_id"], str(encoded))
    feature_map.load(str(encoded / "feature_map.json"), params)
    seed_everything(seed)
    model = model_class(folder, config.name)(feature_map, **params)
    vocabulary = {name: processor.processor_dict[f"{name}::tokenizer"].vocab for name in data.features}
    return Built(model, feature_map, params, vocabulary)


_LAYERS = {"crossnet": 0, "mlp": 1, "dnn": 1, "parallel_dnn": 1, "fc": 2}
"""FuxiCTR's dense layers, in the order of ours: cross layers, hidden layers, output layer."""


def copy_start(
    built: Built, data: DataSet, model: torch.nn.Module, table: tc.Table, key_of: Callable[[str, str], int]
) -> None:
    """Copy FuxiCTR's initial weights to our model and table. Biases of linear parts are zero on both sides."""
    theirs = built.model.state_dict()
    dense = [(name.split(".")[0], value) for name, value in theirs.items() if name.split(".")[0] in _LAYERS]
    values = [value for _, value in sorted(dense, key=lambda part: _LAYERS[part[0]])]
    ours = [value for name, value in model.state_dict().items() if name != "bias" and not name.endswith("_extra_state")]
    shapes = [tuple(value.shape) for value in ours]
    assert shapes == [tuple(value.shape) for value in values], "the models do not have the same layers"
    with torch.no_grad():
        for mine, value in zip(ours, values, strict=True):
            mine.copy_(value)
    for field in data.features:
        ids = {value: at for value, at in built.vocabulary[field].items() if not value.startswith("__")}
        rows = [value for name, value in theirs.items() if name.endswith(f".embedding_layers.{field}.weight")]
        rows.sort(key=lambda part: part.shape[1])  # the linear weight, if there is one, then the vector
        keys = np.array([key_of(field, value) for value in ids], np.uint64)
        table.load_rows(keys, torch.cat(rows, 1).numpy()[list(ids.values())])


def train_fuxictr(
    config: ModelConfig, seed: int, data: DataSet, split: Path, work: Path, *, folder: Path, training: dict[str, Any]
) -> dict[str, Any]:
    """Train and evaluate on our split, like FuxiCTR's run_expid.py."""
    built = build_fuxictr(config, seed, data, split, work, folder=folder, training=training)
    from fuxictr.pytorch.dataloaders import RankDataLoader

    model, params = built.model, built.params
    train, valid = RankDataLoader(built.feature_map, stage="train", **params).make_iterator()
    model.fit(train, validation_data=valid, **params)
    valid_result = model.evaluate(valid)
    result = model.evaluate(RankDataLoader(built.feature_map, stage="test", **params).make_iterator())
    return {
        "auc": float(result["AUC"]),
        "logloss": float(result["logloss"]),
        "valid_auc": float(valid_result["AUC"]),
        "epochs": model._epoch_index + 1,
    }

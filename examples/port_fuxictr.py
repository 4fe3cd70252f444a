"""Converts a FuxiCTR experiment, model_config.yaml and dataset_config.yaml, to a config, and trains it.

    python port_fuxictr.py [FOLDER] [EXPERIMENT]        # default: fuxictr DeepFM_shop, on the data of make_data.py

Needs PyYAML. A setting that has no counterpart raises; it is never dropped.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import thermocline as tc

try:
    import yaml
except ModuleNotFoundError:
    sys.exit("port_fuxictr.py reads YAML files, which needs PyYAML: pip install pyyaml")

MODELS = ("LR", "FM", "DNN", "WideDeep", "DeepFM", "DCN", "DCNv2", "DLRM", "AutoInt")
MODEL_KEYS = {
    "embedding_dim": "dim",
    "hidden_units": "hidden",
    "dnn_hidden_units": "hidden",
    "parallel_dnn_hidden_units": "hidden",
    "top_mlp_units": "hidden",
    "bottom_mlp_units": "bottom",
    "net_dropout": "dropout",
    "batch_norm": "batch_norm",
    "embedding_regularizer": "embedding_l2",
    "regularizer": "embedding_l2",
    "net_regularizer": "net_l2",
    "num_cross_layers": "cross_layers",
    "attention_layers": "attention_layers",
    "attention_dim": "attention_dim",
    "num_heads": "heads",
}
TRAIN_KEYS = {
    "batch_size": "batch_size",
    "epochs": "epochs",
    "optimizer": "optimizer",
    "learning_rate": "lr",
    "seed": "seed",
    "early_stop_patience": "patience",
}
FIXED = {
    "task": ("binary_classification",),
    "loss": ("binary_crossentropy",),
    "hidden_activations": ("relu",),
    "dnn_activations": ("relu",),
    "model_structure": ("parallel",),
    "monitor": ("AUC", {"AUC": 1}),
    "monitor_mode": ("max",),
}
"""Settings that are accepted with these values only, because that is what the models compute."""
WITHOUT_EFFECT = {"model", "model_root", "dataset_id", "metrics", "num_workers", "verbose", "gpu", "group_id"} | {
    *("pickle_feature_encoder", "save_best_only", "debug_mode"),
}
"""Settings of files, logs and processes."""
MUST_BE_NULL = {"eval_steps", "use_features", "feature_specs", "feature_config"}


def convert(model: dict[str, Any], dataset: dict[str, Any], run_dir: str) -> tc.Config:
    """Return the config of one experiment."""
    if model["model"] not in MODELS:
        raise ValueError(f"model is {model['model']}: it must be one of {', '.join(MODELS)}")
    sections: dict[str, dict[str, Any]] = {"model": {"name": model["model"].lower()}, "train": {"run_dir": run_dir}}
    # FuxiCTR's own defaults, which its files do not show.
    settings = {"max_gradient_norm": 10.0, "reduce_lr_on_plateau": True, "shuffle": True, **model}
    sections["train"] |= {
        "clip_norm": settings.pop("max_gradient_norm"),
        "plateau_factor": 0.1 if settings.pop("reduce_lr_on_plateau") else 1.0,
    }
    data = data_of(dataset) | {"shuffle": settings.pop("shuffle")}
    for key, value in settings.items():
        if key in MODEL_KEYS:
            sections["model"][MODEL_KEYS[key]] = value
        elif key in TRAIN_KEYS:
            sections["train"][TRAIN_KEYS[key]] = value.lower() if key == "optimizer" else value  # also "Adam"
        elif key in FIXED:
            if value not in FIXED[key]:
                raise ValueError(f"{key} is {value!r}: it must be {FIXED[key][0]!r}")
        elif key not in WITHOUT_EFFECT and not (key in MUST_BE_NULL and value is None):
            raise ValueError(f"{key} is {value!r}: it has no counterpart; remove it")
    return tc.Config(
        data=tc.Data(**data),
        model=tc.ModelConfig(**sections["model"]),
        train=tc.Train(**sections["train"]),
    )


def data_of(dataset: dict[str, Any]) -> dict[str, Any]:
    """Return the section [data]."""
    if dataset.get("min_categr_count", 1) > 1:
        raise ValueError(
            f"min_categr_count is {dataset['min_categr_count']}: every value has a row of its own; set it to 1"
        )
    columns: dict[str, list[str]] = {"categorical": [], "numeric": []}
    scalers = set()
    for column in dataset["feature_cols"]:
        if not column.get("active", True):
            continue
        names = column["name"] if isinstance(column["name"], list) else [column["name"]]
        kind = column["type"]
        unknown = column.keys() - {"name", "active", "dtype", "type", "normalizer"}
        if kind not in columns or unknown:
            raise ValueError(f"column {names[0]!r} has type {kind!r} and {sorted(unknown)}: use categorical or numeric")
        columns[kind] += names
        if kind == "numeric":
            scalers.add(column.get("normalizer"))
    if not scalers <= {None, "StandardScaler"} or len(scalers) > 1:
        raise ValueError(f"normalizers are {scalers}: all must be StandardScaler, or all missing")
    return {
        **{split: [dataset[f"{split}_data"]] for split in ("train", "valid", "test")},
        "format": dataset["data_format"],
        "label": dataset["label_col"]["name"],
        **columns,
        "numeric_features": tc.Numeric(standardize="StandardScaler" in scalers),
    }


def main(folder: Path, experiment: str) -> None:
    """Convert, write the TOML file, and train."""
    experiments = yaml.safe_load((folder / "model_config.yaml").read_text())
    model = experiments.get("Base", {}) | experiments[experiment]
    dataset = yaml.safe_load((folder / "dataset_config.yaml").read_text())[model["dataset_id"]]
    config = convert(model, dataset, f"runs/{experiment}")
    Path("runs").mkdir(exist_ok=True)
    Path(f"runs/{experiment}.toml").write_text(config.to_toml())  # for: thermocline train runs/<experiment>.toml
    with tc.Run(config) as run:
        result = run.fit(resume=True)
    assert result.test is not None
    print(f"test AUC {result.test['auc']:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "fuxictr"), sys.argv[2] if len(sys.argv) > 2 else "DeepFM_shop")

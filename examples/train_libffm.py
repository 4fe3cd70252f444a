"""LibFFM: compare several standard models, each built from a ModelConfig, on the same data."""

from __future__ import annotations

import thermocline as tc  # before torch: idle OpenMP threads then sleep instead of spinning
import torch

from thermocline.models import build, parameter_groups, row_dim

options = {"raw_keys": True, "batch_size": 256}
train = tc.Reader("data/libffm/train.libffm", shuffle=True, **options)
test = tc.Reader("data/libffm/test.libffm", features=train.features, **options)

for name in ("lr", "fm", "dnn", "widedeep", "autoint"):
    torch.manual_seed(0)
    config = tc.ModelConfig(
        name=name, dim=8, hidden=(32, 32), embedding_l2=1e-5, attention_layers=1, attention_dim=16, heads=2
    )
    rows = tc.Adam(lr=0.01, weight_decay=config.resolve().embedding_l2)
    table = tc.Table(row_dim(config), rows, mem="32MB", initial=tc.Normal(scale=config.initial))
    model = build(config, table, train.fields, train.dense)
    dense = torch.optim.Adam(parameter_groups(config, model), lr=3e-3)
    trainer = tc.Trainer(model, dense, config=tc.TrainConfig(epochs=2, display=False))
    result = trainer.fit(train, test=test)
    assert result.test is not None
    print(f"{name:9} test AUC {result.test['auc']:.4f}, {result.examples / result.seconds:,.0f} examples/s")

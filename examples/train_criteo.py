"""Criteo format: load a config, change it in Python, train it, then compute scores with the trained run."""

from __future__ import annotations

import dataclasses

import numpy as np

import thermocline as tc

config = tc.Config.load("criteo.toml", ["train.epochs=1", "train.log_every=20"])
config = dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, name="dcn", cross_layers=2),
    train=dataclasses.replace(config.train, run_dir="runs/criteo_dcn", tensorboard=False),
)

with tc.Run(config) as run:
    result = run.fit(resume=True)
assert result.test is not None
print(f"test AUC {result.test['auc']:.4f}")

with tc.Run.load("runs/criteo_dcn") as run:  # read-only: works while another process trains
    scores = np.concatenate(list(run.scores(run.loader("test"))))
    labels = np.concatenate([batch.label.numpy() for batch in run.loader("test")])
print(f"{len(scores)} scores, mean {scores.mean():.3f}; clicks {labels.mean():.3f}; AUC {tc.auc(scores, labels):.4f}")

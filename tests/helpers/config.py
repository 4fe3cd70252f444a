"""A config file with the common keys."""

from __future__ import annotations

EXAMPLE = """
[data]
train = ["train.libsvm"]
valid = ["valid.libsvm"]
test = ["test.libsvm"]
format = "libsvm"          # libsvm | libffm | criteo | csv | parquet | synth
[model]
name = "dcnv2"
dim = 10
hidden = [400, 400, 400]
[tiers]
mem = "64MB"
ssd = "run/store"          # omit: memory only
[train]
batch_size = 4096
epochs = 20
optimizer = "adam"
lr = 1e-3
seed = 2021
run_dir = "run"
"""

"""Helpers of the model tests: small batches, and a reference of each model in NumPy with double precision.

A reference takes the pooled rows float64[examples, features, row] and the model's parameters, and uses plain loops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import thermocline as tc
from thermocline.models import ModelConfig, build, row_dim
from thermocline.models.layers import Model

Array = npt.NDArray[np.float64]
FIELDS, DENSE = 4, 3
SMALL: dict[str, Any] = {
    "dim": 5, "hidden": (7, 6), "bottom": (6, 4), "dropout": 0.0, "attention_layers": 2, "attention_dim": 6, "heads": 3,
    "cross_layers": 2, "initial": 0.5,
}  # fmt: skip


def table_for(config: ModelConfig, optimizer: Any = None) -> tc.Table:
    optimizer = optimizer or tc.SGD(lr=1.0)
    return tc.Table(row_dim(config), optimizer, mem="4MB", initial=tc.Normal(scale=config.initial), threads=1)


def small_model(
    name: str, *, fields: int = FIELDS, dense: int = DENSE, seed: int = 0, optimizer: Any = None, **settings: Any
) -> Model:
    """Build a small model whose parameters are all different from 0 and 1, so that every term matters."""
    config = ModelConfig(name=name, **{**SMALL, **settings})  # type: ignore[arg-type]
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = build(config, table_for(config, optimizer), fields, dense)
    with torch.no_grad():
        for value in itertools.chain(model.parameters(), model.buffers()):
            if value.is_floating_point():
                value += 0.2 * torch.rand_like(value)
    return model


def make_batch(
    examples: int = 6,
    fields: int = FIELDS,
    dense: int = DENSE,
    *,
    max_ids: int = 3,
    seed: int = 0,
) -> tc.Batch:
    """Build a batch with repeated keys and empty bags; the first bag is always empty."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, max_ids + 1, examples * fields)
    sizes[0] = 0
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    field = np.repeat(np.tile(np.arange(fields), examples), sizes)
    ids = (field * 100 + rng.integers(0, 4, offsets[-1])).astype(np.uint64)
    weights = rng.uniform(0.5, 2, offsets[-1]).astype(np.float32)
    values = torch.from_numpy(rng.normal(size=(examples, dense)).astype(np.float32)) if dense else None
    label = torch.from_numpy(rng.integers(0, 2, examples).astype(np.float32))
    return tc.Batch(ids, offsets, fields, weights, dense=values, label=label)


# ---- references


def rows_of(model: Model, batch: tc.Batch, change: tuple[int, int, float] | None = None) -> Array:
    """Pool rows id by id, then append the rows of dense features. `change` is (key, element, delta)."""
    table, mean = model.features.bag.table, model.config.pooling == "mean"
    numbers = None if model.features.numbers is None else model.features.numbers.detach().double().numpy()
    rows = np.zeros((len(batch), batch.fields + (0 if numbers is None else len(numbers)), table.dim))
    for example, field in np.ndindex(len(batch), batch.fields):
        begin, end = batch.offsets[example * batch.fields + field :][:2].tolist()
        for p in range(begin, end):
            row = table.read(batch.ids[p : p + 1])[0, : table.dim].astype(float)
            if change is not None and int(batch.ids[p]) == change[0]:
                row[change[1]] += change[2]
            weight = 1.0 if batch.weights is None else float(batch.weights[p])
            rows[example, field] += weight * row / (end - begin if mean else 1)
    if numbers is not None:
        for example, number in np.ndindex(len(batch), len(numbers)):
            rows[example, batch.fields + number] = float(batch.dense[example, number]) * numbers[number]
    return rows


def values_of(model: torch.nn.Module, name: str) -> Array:
    parameter = model.get_parameter(name).detach().double().numpy()
    assert isinstance(parameter, np.ndarray)
    return parameter


def layers(net: torch.nn.Sequential, x: Array, training: bool) -> Array:
    """Apply linear, batch norm and ReLU layers by their definitions."""
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            x = x @ values_of(layer, "weight").T + values_of(layer, "bias")
        elif isinstance(layer, torch.nn.BatchNorm1d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            mean, variance = layer.running_mean.double().numpy(), layer.running_var.double().numpy()
            if training:
                mean, variance = x.mean(0), x.var(0)
            x = (x - mean) / np.sqrt(variance + layer.eps) * values_of(layer, "weight") + values_of(layer, "bias")
        else:
            assert isinstance(layer, torch.nn.ReLU), layer
            x = np.maximum(x, 0)
    return x


def flat(rows: Array) -> Array:
    return rows.reshape(len(rows), -1)


def reference_lr(model: Any, batch: tc.Batch, rows: Array, training: bool) -> Array:
    return np.array([sum(row[0] for row in example) for example in rows]) + float(values_of(model, "bias"))


def pairs(vectors: Array) -> list[float]:
    return [float(vectors[i] @ vectors[j]) for i in range(len(vectors)) for j in range(i + 1, len(vectors))]


def reference_fm(model: Any, batch: tc.Batch, rows: Array, training: bool) -> Array:
    return reference_lr(model, batch, rows, training) + np.array([sum(pairs(example[:, 1:])) for example in rows])


def reference_dnn(model: Any, batch: tc.Batch, rows: Array, training: bool) -> Array:
    return layers(model.net, flat(rows), training)[:, 0]


def reference_widedeep(model: Any, batch: tc.Batch, rows: Array, training: bool) -> Array:
    return rows[:, :, 0].sum(1) + layers(model.net, flat(rows[:, :, 1:]), training)[:, 0]


def reference_deepfm(model: Any, batch: tc.Batch, rows: Array, training: bool) -> Array:
    products = np.array([sum(pairs(example[:, 1:])) for example in rows])
    return products + reference_widedeep(model, batch, rows, training)


def reference_dcn(model: Any, batch: tc.Batch, rows: Array, training: bool) -> Array:
    x0 = x = flat(rows)
    for layer in model.cross:
        if model.config.name == "dcn":
            w, b = values_of(layer, "weight.weight")[0], values_of(layer, "bias")
            x = np.stack([x0[n] * float(w @ x[n]) + b + x[n] for n in range(len(x))])
        else:
            matrix, b = values_of(layer, "weight.weight"), values_of(layer, "weight.bias")
            x = np.stack([x0[n] * (matrix @ x[n] + b) + x[n] for n in range(len(x))])
    both = x if model.net is None else np.concatenate([x, layers(model.net, x0, training)], 1)
    return both @ values_of(model, "out.weight")[0] + values_of(model, "out.bias")


def reference_dlrm(model: Any, batch: tc.Batch, rows: Array, training: bool) -> Array:
    inputs: Any = rows
    if model.bottom is not None:
        vector = np.maximum(layers(model.bottom[0], batch.dense.double().numpy(), training), 0)
        inputs = np.concatenate([rows, vector[:, None]], 1)
    if model.config.interaction == "dot":
        products = np.array([pairs(example) for example in inputs])
        inputs = products if model.bottom is None else np.concatenate([products, vector], 1)
    return layers(model.net, flat(inputs), training)[:, 0]


def reference_autoint(model: Any, batch: tc.Batch, rows: Array, training: bool) -> Array:
    x = rows
    for layer in model.attention:
        q, k, v = (x @ values_of(layer, f"{part}.weight").T for part in ("query", "key", "value"))
        size = q.shape[2] // layer.heads
        out = np.zeros_like(q)
        for n, head, field in np.ndindex(len(x), layer.heads, x.shape[1]):
            part = slice(head * size, (head + 1) * size)
            scores = [np.exp(q[n, field, part] @ k[n, other, part] / size**0.5) for other in range(x.shape[1])]
            out[n, field, part] = sum(s * v[n, other, part] for other, s in enumerate(scores)) / sum(scores)
        same = isinstance(layer.residual, torch.nn.Identity)
        out += x if same else x @ values_of(layer, "residual.weight").T
        mean, variance = out.mean(2, keepdims=True), out.var(2, keepdims=True)
        scaled = (out - mean) / np.sqrt(variance + layer.norm.eps)
        x = np.maximum(scaled * values_of(layer, "norm.weight") + values_of(layer, "norm.bias"), 0)
    logits = flat(x) @ values_of(model, "out.weight")[0] + values_of(model, "out.bias")
    return logits if model.net is None else logits + layers(model.net, flat(rows), training)[:, 0]


REFERENCES: dict[str, Callable[[Any, tc.Batch, Array, bool], Array]] = {
    "lr": reference_lr,
    "fm": reference_fm,
    "dnn": reference_dnn,
    "widedeep": reference_widedeep,
    "deepfm": reference_deepfm,
    "dcn": reference_dcn,
    "dcnv2": reference_dcn,
    "dlrm": reference_dlrm,
    "autoint": reference_autoint,
}


def reference(model: Model, batch: tc.Batch, *, training: bool, change: tuple[int, int, float] | None = None) -> Array:
    return REFERENCES[model.config.name](model, batch, rows_of(model, batch, change), training)

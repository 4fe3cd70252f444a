"""`EmbeddingBagCollection` and `EmbeddingCollection`: parameters, optimizers, state, devices, refusals, pipelines."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.embedding_collections import bags, config, features, fill
from helpers.ssd import SMALL

import thermocline as tc
from thermocline.torchrec import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
    TrainPipelineSparseDist,
    apply_optimizer_in_backward,
    prefetch,
)
from thermocline.torchrec.in_backward import rows_optimizer

# ---- names, shapes, initial rows


def test_outputs_are_named_by_feature_and_table() -> None:
    ebc = bags(config("t1", feature_names=["a", "b"]), config("t2", feature_names=["b"], embedding_dim=3), config("t3"))
    out = ebc(features("b", "t3", "a", "unused"))
    assert out.keys() == ["a", "b@t1", "b@t2", "t3"]
    assert out.length_per_key() == [4, 4, 3, 4]
    assert out.values().dtype == torch.float32
    assert [name for name, _ in ebc.named_parameters()] == [f"embedding_bags.t{i}.weight" for i in (1, 2, 3)]
    ec = EmbeddingCollection(
        [EmbeddingConfig(50, 4, "t1", feature_names=["a"]), EmbeddingConfig(50, 4, "t2", feature_names=["a", "b"])],
        need_indices=True,
        optimizer=tc.SGD(),
    )
    kjt = features("a", "b")
    vectors = ec(kjt)
    assert ec.embedding_names_by_table() == [["a@t1"], ["a@t2", "b"]]
    assert list(vectors) == ["a@t1", "a@t2", "b"]
    assert torch.equal(vectors["b"].weights(), kjt["b"].values())
    assert vectors["b"].values().shape == (len(kjt["b"].values()), 4)
    assert [name for name, _ in ec.named_parameters()] == ["embeddings.t1.weight", "embeddings.t2.weight"]


def test_empty_bags_and_batches_give_zeros() -> None:
    ebc = bags(config("t", pooling=PoolingType.MEAN))
    nothing = KeyedJaggedTensor(["t"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(2, dtype=torch.int64))
    assert ebc(nothing).values().tolist() == [[0.0] * 4] * 2
    none = KeyedJaggedTensor(["t"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(0, dtype=torch.int64))
    assert ebc(none).values().shape == (0, 4)


def test_initial_rows_are_uniform_as_in_torchrec() -> None:
    ebc = bags(config("t", num_embeddings=400, embedding_dim=64))
    weights = ebc.tables["t"].read_rows(np.arange(400))[0]
    bound = math.sqrt(1 / 400)
    assert abs(weights).max() <= bound
    assert weights.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    other = bags(config("t", weight_init_min=-2.0, weight_init_max=2.0)).tables["t"]
    assert other.spec.initial == tc.Uniform(scale=2.0)
    assert bags(config("t", init_fn=torch.nn.init.zeros_)).tables["t"].spec.initial == tc.Constant(value=0.0)


def test_any_init_fn_fills_the_rows() -> None:
    ebc = bags(config("t", init_fn=functools.partial(torch.nn.init.uniform_, a=1.0, b=2.0)))
    weights = ebc.tables["t"].read_rows(np.arange(50))[0]
    assert weights.min() >= 1
    assert weights.max() <= 2
    large = bags(config("t", num_embeddings=1 << 30, weight_init_min=0.0), table_options={"mem": "1MB"})
    with pytest.raises(ValueError, match="more than 1024 MiB: use torch"):
        _ = large.tables


def test_init_fn_fills_the_rows_of_each_table_once(tmp_path: Path) -> None:
    def opened(names: str, first: float) -> dict[str, list[float]]:
        configs = [config(n, init_fn=functools.partial(fill, first + i)) for i, n in enumerate(names)]
        ebc = bags(*configs, mem="4MB", ssd=tmp_path / "rows", table_options={"ssd_options": SMALL})
        values = {name: np.unique(table.read_rows(np.arange(50))[0]).tolist() for name, table in ebc.tables.items()}
        assert len(ebc.tiers.row_tables) == 1
        ebc.tiers.commit()
        ebc.tiers.close()
        return values

    assert opened("ab", 1) == {"a": [1], "b": [2]}
    assert opened("abc", 5) == {"a": [1], "b": [2], "c": [7]}  # those of the folder, and a new table


def test_default_memory_holds_num_embeddings_rows() -> None:
    for size, dim in ((50, 4), (30_000, 1), (20_000, 64)):
        ebc = bags(config("t", num_embeddings=size, embedding_dim=dim))
        table = ebc.tables["t"]
        table.load_rows(np.arange(size), np.zeros((size, dim), np.float32))
        assert table.dram.stats().resident == size


def test_budgets_are_divided_by_size(tmp_path: Path) -> None:
    ebc = bags(
        config("small", num_embeddings=100),
        config("other", num_embeddings=200),
        config("large", num_embeddings=1_000_000, embedding_dim=8),
        mem="4MB",
        ssd=tmp_path,
        table_options={"ssd_options": SMALL},
    )
    ebc(features("small", "large", "other")).values().sum().backward()
    small, other, large = (table.spec.mem for table in ebc.tables.values())
    assert 500_000 <= small < 600_000
    assert small == other
    assert 3_999_990 <= small + large <= 4_000_000
    assert [table.spec.mem for table in ebc.tiers.row_tables] == [small, large]
    for table in ebc.tables.values():
        assert table.spec.ssd == tmp_path / table.storage.name
        table.commit()


# ---- ids


@dataclasses.dataclass
class Foreign:
    """The methods of TorchRec's class that a collection uses."""

    kjt: KeyedJaggedTensor
    vbe: bool = False
    inverse: Any = None

    def keys(self) -> Any:
        return self.kjt.keys()

    def values(self) -> Any:
        return self.kjt.values()

    def lengths(self) -> Any:
        return self.kjt.lengths()

    def stride(self) -> Any:
        return self.kjt.stride()

    def weights_or_none(self) -> Any:
        return self.kjt.weights_or_none()

    def to_dict(self) -> Any:
        return self.kjt.to_dict()

    def variable_stride_per_key(self) -> bool:
        return self.vbe

    def inverse_indices_or_none(self) -> Any:
        return self.inverse

    def __hash__(self) -> int:
        return id(self)


def test_a_foreign_keyed_jagged_tensor_is_read_by_its_methods() -> None:
    kjt, ebc = features(), bags().eval()
    assert torch.equal(ebc(Foreign(kjt)).values(), ebc(kjt).values())
    with pytest.raises(ValueError, match="has stride_per_key_per_rank: a batch size per feature is not supported"):
        ebc(Foreign(kjt, vbe=True))
    with pytest.raises(ValueError, match="has inverse_indices: a batch size per feature is not supported"):
        ebc(Foreign(kjt, inverse=(["t"], torch.zeros(1))))
    with pytest.raises(TypeError, match="features are a dict: expected a KeyedJaggedTensor"):
        ebc({})


def test_int32_ids_have_the_keys_of_int64_ids() -> None:
    kjt, ebc = features(), bags().eval()
    small = KeyedJaggedTensor(["t"], kjt.values().int(), lengths=kjt.lengths().int())
    assert torch.equal(ebc(small).values(), ebc(kjt).values())
    with pytest.raises(TypeError, match=r"ids have dtype torch\.float32: they must be int32 or int64"):
        ebc(KeyedJaggedTensor(["t"], kjt.values().float(), lengths=kjt.lengths()))


@pytest.mark.parametrize("value", [50, -1])
def test_ids_outside_num_embeddings(value: int) -> None:
    kjt = KeyedJaggedTensor(["t"], torch.tensor([1, value]), lengths=torch.tensor([2]))
    if value >= 0:
        assert bags()(kjt).values().isfinite().all()
    else:
        with pytest.raises(IndexError, match=f"'t' has id {value}: .* are 0 to 2\\^48 - 1"):
            bags()(kjt)
    with pytest.raises(IndexError, match=f"'t' has id {value}: table 't' has ids from 0 to 49"):
        bags(check_ids=True)(kjt)


# ---- optimizers


def trained(ebc: EmbeddingBagCollection, steps: int = 3) -> torch.Tensor:
    for seed in range(steps):
        ebc(features(seed=seed)).values().square().sum().backward()
    return torch.from_numpy(ebc.tables["t"].read(np.arange(50)))


def test_rows_change_in_backward() -> None:
    ebc = bags()
    before = ebc.tables["t"].read_rows([1])[0]
    out = ebc(KeyedJaggedTensor(["t"], torch.tensor([1]), lengths=torch.tensor([1]))).values()
    out.sum().backward()
    assert ebc.tables["t"].step_count == 1
    assert np.array_equal(ebc.tables["t"].read_rows([1])[0], before - 0.5)


@pytest.mark.parametrize("apply", ["thermocline", "torch"])
def test_apply_optimizer_in_backward(apply: str) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    ebc = EmbeddingBagCollection([config()])
    function: Any = apply_optimizer_in_backward if apply == "thermocline" else _apply_optimizer_in_backward
    function(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1, "eps": 1e-6})
    assert ebc.tables["t"].optimizer == tc.Adagrad(lr=0.1, eps=1e-6)
    assert torch.equal(trained(ebc), trained(bags(optimizer=tc.Adagrad(lr=0.1, eps=1e-6))))


def test_dense_parameters_get_the_optimizer_of_torch() -> None:
    layer = torch.nn.Linear(2, 1, bias=False)
    model = torch.nn.ModuleDict({"rows": EmbeddingBagCollection([config()]), "dense": layer})
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    before = layer.weight.detach().clone()
    layer(torch.ones(1, 2)).sum().backward()
    assert torch.equal(layer.weight, before - 1)


class PartialRowWiseAdam(torch.optim.Optimizer):
    """TorchRec's class of this name has no defaults and no step."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, kwargs)


@pytest.mark.parametrize(
    ("kind", "options", "wanted"),
    [
        (torch.optim.SGD, {"lr": 0.1, "foreach": False}, tc.SGD(lr=0.1)),
        (torch.optim.SGD, {}, tc.SGD(lr=0.001)),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}, tc.Adagrad(lr=0.01, initial_accumulator=0.5)),
        (
            torch.optim.Adam,
            {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.01},
            tc.Adam(lr=0.1, beta1=0.8, beta2=0.9, weight_decay=0.01),
        ),
        (tc.RowWiseAdagrad, {"lr": 0.2}, tc.RowWiseAdagrad(lr=0.2)),
        (PartialRowWiseAdam, {"lr": 0.1}, tc.PartialRowWiseAdam(lr=0.1)),
        (
            PartialRowWiseAdam,
            {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6},
            tc.PartialRowWiseAdam(lr=0.1, beta1=0.8, beta2=0.9, eps=1e-6),
        ),
    ],
)
def test_translated_optimizers(kind: Any, options: dict[str, Any], wanted: Any) -> None:
    assert rows_optimizer("t", kind, options) == wanted


def test_partial_row_wise_adam_in_backward() -> None:
    ebc = EmbeddingBagCollection([config()])
    apply_optimizer_in_backward(PartialRowWiseAdam, ebc.parameters(), {"lr": 0.3})
    assert torch.equal(trained(ebc), trained(bags(optimizer=tc.PartialRowWiseAdam(lr=0.3))))
    assert not torch.equal(trained(bags(optimizer=tc.Adam(lr=0.3))), trained(bags()))


@pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="torchrec is not installed")
def test_optimizers_of_torchrec() -> None:
    import torchrec

    ebc = EmbeddingBagCollection([config()])
    with warnings.catch_warnings(action="ignore"):
        torchrec.optim.apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, ebc.parameters(), {"lr": 0.3})
    assert ebc.tables["t"].optimizer == tc.RowWiseAdagrad(lr=0.3, eps=1e-10)
    assert torch.equal(trained(ebc), trained(bags(optimizer=tc.RowWiseAdagrad(lr=0.3, eps=1e-10))))
    kind = torchrec.optim.optimizers.PartialRowWiseAdam
    wanted = tc.PartialRowWiseAdam(lr=0.1, beta1=0.8, beta2=0.9)
    assert rows_optimizer("t", kind, {"lr": 0.1, "betas": (0.8, 0.9)}) == wanted
    assert rows_optimizer("t", torchrec.optim.optimizers.Adagrad, {"lr": 0.1}) == tc.Adagrad(lr=0.1, eps=1e-8)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "SGD has momentum 0.9: rows support 0 only"),
        (torch.optim.Adagrad, {"lr_decay": 0.1}, "Adagrad has lr_decay 0.1: rows support 0 only"),
        (torch.optim.Adam, {"amsgrad": True}, "Adam has amsgrad True: rows support False only"),
        (torch.optim.AdamW, {"lr": 0.1}, "its optimizer is AdamW: rows have SGD, Adagrad, RowWiseAdagrad, Adam or"),
        (
            PartialRowWiseAdam,
            {"lr": 0.1, "weight_decay": 0.1},
            "PartialRowWiseAdam has weight_decay 0.1, which TorchRec",
        ),
        (torch.optim.SGD, {"lr": 0.1, "lars": 1}, r"SGD has arguments \['lars'\], which rows do not support"),
    ],
)
def test_refused_optimizers(kind: Any, options: dict[str, Any], message: str) -> None:
    ebc = EmbeddingBagCollection([config()])
    with pytest.raises(ValueError, match=f"table 't': {message}"):
        apply_optimizer_in_backward(kind, ebc.parameters(), options)


def test_a_missing_second_or_late_optimizer_is_refused() -> None:
    ebc = EmbeddingBagCollection([config()])
    with pytest.raises(RuntimeError, match=r"table 't' has no optimizer, and an optimizer over model.parameters\(\)"):
        ebc(features())
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
    ebc(features())
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
    with pytest.raises(RuntimeError, match="apply_optimizer_in_backward was called after the first use"):
        ebc(features())
    twice = EmbeddingBagCollection([config()])
    for _ in range(2):
        apply_optimizer_in_backward(torch.optim.SGD, twice.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match="'t' has 2 optimizers in backward"):
        twice(features())


@pytest.mark.parametrize("apply", ["thermocline", "torch"])
def test_schedulers_reach_the_rows(apply: str) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers

    ebc = EmbeddingBagCollection([config()])
    function: Any = apply_optimizer_in_backward if apply == "thermocline" else _apply_optimizer_in_backward
    function(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
    (optimizer,) = _get_in_backward_optimizers(ebc)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    row = KeyedJaggedTensor(["t"], torch.tensor([1]), lengths=torch.tensor([1]))
    values = [ebc.tables["t"].read_rows([1])[0][0, 0]]
    with warnings.catch_warnings(action="error"):  # torch warns if a scheduler comes before the optimizer
        for _ in range(3):
            ebc(row).values().sum().backward()
            schedule.step()
            values.append(ebc.tables["t"].read_rows([1])[0][0, 0])
    assert np.diff(values).tolist() == pytest.approx([-1.0, -0.5, -0.25])


def test_an_optimizer_over_all_parameters_leaves_rows_to_backward() -> None:
    ebc = bags()
    dense = torch.optim.Adagrad([*ebc.parameters(), torch.nn.Parameter(torch.ones(1))], lr=0.1)
    wanted = trained(bags())
    for seed in range(3):
        dense.zero_grad()
        ebc(features(seed=seed)).values().square().sum().backward()
        dense.step()
    assert np.array_equal(ebc.tables["t"].read(np.arange(50)), wanted.numpy())


def test_requires_grad_of_the_parameter_freezes_rows() -> None:
    model = torch.nn.Sequential(bags())
    before = model[0].tables["t"].read(np.arange(50))
    model.requires_grad_(False)
    assert not model(features()).values().requires_grad
    model.requires_grad_(True)
    model(features()).values().sum().backward()
    assert not np.array_equal(model[0].tables["t"].read(np.arange(50)), before)


def test_evaluation_inserts_nothing() -> None:
    ebc = bags().eval()
    ebc(features())
    assert not list(ebc.tables["t"].rows())


@pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="torchrec is not installed")
def test_configs_and_features_of_torchrec() -> None:
    import torchrec

    foreign = torchrec.EmbeddingBagConfig(
        num_embeddings=50, embedding_dim=4, name="t", pooling=torchrec.PoolingType.MEAN
    )
    kjt = features()
    lengths = kjt.lengths()
    theirs = torchrec.KeyedJaggedTensor.from_lengths_sync(["t"], kjt.values(), lengths)
    ebc, own = bags(foreign), bags(config(pooling=PoolingType.MEAN))
    assert ebc.tables["t"].layout == own.tables["t"].layout
    assert torch.equal(ebc(theirs).values(), own(kjt).values())
    groups = [["t"], ["t", "t"]]
    for theirs_group, own_group in zip(
        torchrec.KeyedTensor.regroup([own(kjt)], groups), KeyedTensor.regroup([own(kjt)], groups), strict=True
    ):
        assert torch.equal(theirs_group, own_group)
    variable = torchrec.KeyedJaggedTensor(
        ["t"], kjt.values(), lengths=lengths, stride_per_key_per_rank=[[len(lengths)]]
    )
    with pytest.raises(ValueError, match="has stride_per_key_per_rank: a batch size per feature is not supported"):
        ebc(variable)


# ---- state


def test_state_dict_keeps_names_and_names_the_rows() -> None:
    ebc = bags()
    state = ebc.state_dict()
    assert list(state) == ["embedding_bags.t.weight", "embedding_bags.t.bags.0._extra_state"]
    assert state["embedding_bags.t.weight"].shape == (0, 4)
    ebc.load_state_dict(state)
    trained(ebc)
    with pytest.raises(tc.FormatError, match="belongs to the rows of table 't' untrained, but the table is at step 3"):
        ebc.load_state_dict(state)
    rows = tc.state_dict(ebc, rows=True)
    again = bags()
    assert again.tables
    tc.load_state_dict(again, rows)
    assert torch.equal(trained(again), trained(ebc))


def test_a_state_dict_of_torchrec_loads_its_rows() -> None:
    weight = torch.randn(50, 4)
    ebc = bags()
    ebc.load_state_dict({"embedding_bags.t.weight": weight})
    assert np.array_equal(ebc.tables["t"].read_rows(np.arange(50))[0], weight.numpy())
    with pytest.raises(RuntimeError, match=r"size mismatch for embedding_bags\.t\.weight"):
        ebc.load_state_dict({"embedding_bags.t.weight": weight[:7]}, strict=False)


def test_checkpoints_of_a_collection(tmp_path: Path) -> None:
    ebc = bags()
    model = torch.nn.Sequential(ebc)
    checkpoints = tc.Checkpoints(tmp_path, list(ebc.tables.values()), model)
    wanted = trained(ebc)
    checkpoints.save(3)
    trained(ebc)
    checkpoints.restore()
    assert np.array_equal(ebc.tables["t"].read(np.arange(50)), wanted.numpy())


def test_meta_device() -> None:
    ebc = bags(config("t", num_embeddings=1 << 40), device="meta", mem="1MB")
    assert ebc.device.type == "meta"
    ebc.reset_parameters()
    with pytest.raises(RuntimeError, match=re.escape("'t' is on device meta, which has no rows: call to_empty(device")):
        ebc(features())
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.25})
    ebc.to_empty(device="cpu")
    assert ebc.tables["t"].lr == 0.25
    assert ebc(features()).values().device.type == "cpu"


def test_half_and_deepcopy_give_a_reason() -> None:
    ebc = bags()
    with pytest.raises(TypeError, match="table 't' cannot change its dtype: outputs are float32"):
        ebc.half()
    copy.deepcopy(ebc)  # before the first use there are no rows
    for unusable in (bags(optimizer=None, mem="1MB"), bags(config(init_fn=lambda weights: 1 / 0), mem="1MB")):
        with pytest.raises((RuntimeError, ZeroDivisionError)):
            unusable(features())
        copy.deepcopy(unusable)  # nor after one that failed
    trained(ebc)
    with pytest.raises(TypeError, match="table 't' cannot be copied"):
        copy.deepcopy(ebc)
    with pytest.raises(tc.ThermoclineError, match=r"reset_parameters\(\) after the first use"):
        ebc.reset_parameters()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bags(config(), config()), "Duplicate table name t"),
        (lambda: bags(config(pooling=PoolingType.NONE)), "pooling is NONE: it must be SUM or MEAN"),
        (lambda: bags(config(embedding_dim=0)), "both must be at least 1"),
        (
            lambda: EmbeddingCollection([EmbeddingConfig(9, 4, "a"), EmbeddingConfig(9, 8, "b")]),
            r"\{'a': 4, 'b': 8\}: all tables of the collection must have the same",
        ),
        (lambda: bags(is_weighted=True)(features()), "the KeyedJaggedTensor has no weights"),
        (lambda: bags(config("t", feature_names=["x"]))(features()), "'x' missing"),
    ],
)
def test_mistakes_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---- pipelines


@dataclasses.dataclass
class Data:
    sparse: KeyedJaggedTensor
    label: torch.Tensor


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = bags(config("t", feature_names=["a", "b"]), config("u", pooling=PoolingType.MEAN))
        torch.manual_seed(0)
        self.dense = torch.nn.Linear(12, 1)

    def forward(self, data: Data) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.dense(self.rows(data.sparse).values())[:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(out, data.label)
        return loss[None], out.detach()


def batches(count: int = 8) -> list[Data]:
    return [Data(features("a", "b", "u", seed=seed), torch.rand(3)) for seed in range(count)]


def state_of(model: Net) -> list[bytes]:
    rows = [table.read(np.arange(50)).tobytes() for table in model.rows.tables.values()]
    return [*rows, *(parameter.detach().numpy().tobytes() for parameter in model.dense.parameters())]


def test_pipeline_trains_as_a_plain_loop() -> None:
    data = batches()
    models = [Net() for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    pipeline, outputs, iterator = TrainPipelineSparseDist(models[0], optimizers[0], "cpu"), [], iter(data)
    while True:
        try:
            outputs.append(pipeline.progress(iterator))
        except StopIteration:
            break
    for batch in data:
        optimizers[1].zero_grad()
        models[1](batch)[0].sum().backward()
        optimizers[1].step()
    prefetched = 0
    for batch in prefetch(data, models[2], depth=2):
        prepared = models[2].rows.batch_of(batch.sparse).prepared
        prefetched += all(table in prepared for table in models[2].rows.tiers.row_tables)
        optimizers[2].zero_grad()
        models[2](batch)[0].sum().backward()
        optimizers[2].step()
    assert len(outputs) == prefetched == len(data)
    assert state_of(models[0]) == state_of(models[1]) == state_of(models[2])
    models[0].eval()
    evaluated = pipeline.progress(iter(data))
    assert torch.equal(evaluated, models[0](data[0])[1])
    pipeline.close()
    assert models[0].rows.tables["t"].step_count == len(data)


def test_ids_changed_after_prefetch_are_read_again() -> None:
    model = Net()
    for batch in prefetch(batches(2), model):
        batch.sparse.values().add_(1)
        assert not model.rows.batch_of(batch.sparse).prepared
        assert (model.rows.batch_of(batch.sparse).ids.max()) == batch.sparse.values().max()


def test_prefetch_needs_one_keyed_jagged_tensor() -> None:
    model = Net()
    with pytest.raises(ValueError, match="a batch of type list has 2 KeyedJaggedTensors: prefetch needs one"):
        next(iter(prefetch([[features(), features()]], model)))
    with pytest.raises(ValueError, match="the model has no EmbeddingBagCollection"):
        prefetch([], model.dense)


def test_outputs_of_sequences_keep_lengths() -> None:
    ec = EmbeddingCollection([EmbeddingConfig(50, 4, "t")], optimizer=tc.SGD(lr=0.5))
    out = ec(features())["t"]
    assert isinstance(out, JaggedTensor)
    out.to_padded_dense().sum().backward()
    assert ec.tables["t"].step_count == 1
    assert (ec.embedding_dim(), ec.need_indices(), ec.device.type) == (4, False, "cpu")


def test_a_second_backward_through_one_pass_is_refused() -> None:
    ebc = bags()
    out = ebc(features()).values().sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"rows of table 'shared\.4\.sgd\.\w+' that were released"):
        out.backward()
    assert ebc.tables["t"].step_count == 1

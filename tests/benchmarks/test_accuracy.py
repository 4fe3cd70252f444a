"""benchmarks/accuracy.py: differences of paired seeds, and trainings that begin with the weights of FuxiCTR's model."""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import thermocline as tc
from thermocline.models import ModelConfig, build, row_dim

FIELDS = {"user": 5, "item": 7}


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("accuracy")


def test_seeds_of_the_same_start_are_pairs(accuracy: Any) -> None:
    theirs = {2021: 0.70, 2022: 0.80, 2023: 0.90}
    ours = {2022: 0.801, 2021: 0.699}  # in another order, and one seed less
    runs = [{"model": "fm", "side": "fuxictr", "seed": seed, "auc": auc} for seed, auc in theirs.items()]
    for side in ("catch_up", "same_start"):
        runs += [{"model": "fm", "side": side, "seed": seed, "auc": auc} for seed, auc in ours.items()]
    catch_up, same_start = accuracy.claims_of(runs)
    assert catch_up.value == pytest.approx(0.05)
    assert same_start.value == pytest.approx(0)
    assert "standard error 0.0010, 2 and 2 seeds" in same_start.detail
    independent = math.hypot(0.051, 0.1 / math.sqrt(3))
    assert f"standard error {independent:.4f}, 2 and 3 seeds" in catch_up.detail


def paired(seeds: dict[int, tuple[float, float]], **setup: str) -> dict[str, Any]:
    sides = ("same_start", "fuxictr")
    runs = [
        {"model": "fm", "side": side, "seed": seed, "auc": auc, "epochs": 4}
        for seed, pair in seeds.items()
        for side, auc in zip(sides, pair, strict=True)
    ]
    return {"setup": setup, "runs": runs}


def test_table_of_pairs_has_seeds_of_both_sides(accuracy: Any, tmp_path: Path) -> None:
    table = importlib.import_module("accuracy_table")
    five = {2021 + n: (0.7 + 0.001 * n, 0.7025 + 0.001 * n) for n in range(5)}
    movielens = paired(five)
    frappe = paired({2025: (0.8, 0.801), 2021: (0.8, 0.79)}, data="frappe")
    del frappe["runs"][3]  # FuxiCTR's run of seed 2021: ours then does not count
    frappe["runs"][0]["epochs"] = 5
    lines = table.table_of([frappe, movielens])
    assert len(lines) == 2 + 2 * 6
    assert "| MovieLens-100k | LR | 0 | | | | not measured | | |" in lines
    behind = (
        "| | FM | 5 | .70200 | .70450 | 0.002500 +- 0.000000 | missed | 25.0 25.0 25.0 25.0 25.0 | 4 4 4 4 4, equal |"
    )
    assert behind in lines
    missing = "within so far, seeds missing: 2021 2022 2023 2024"
    assert f"| | FM | 1 | .80000 | .80100 | 0.001000 one seed | {missing} | 10.0 | 5, 4 |" in lines
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{lines[0]}\n|---|\n| old |\n\nafter\n| another |\n")
    table.write_table(page, lines)
    assert page.read_text() == "\n".join(["before", "", *lines, "", "after", "| another |", ""])


def test_page_has_the_table_of_the_records(accuracy: Any) -> None:
    table = importlib.import_module("accuracy_table")
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs/benchmarks/accuracy.md").read_text()
    links = re.findall(r"benchmarks/results/(accuracy-paired-[a-z]+-[0-9-]+[.]json)", page)
    records = [json.loads((root / "benchmarks/results" / name).read_text()) for name in links]
    assert len(records) == 2
    lines = table.table_of(records)
    assert "\n".join(lines) in page, (
        "run: python benchmarks/accuracy_table.py FILES --write docs/benchmarks/accuracy.md"
    )


def test_examples_are_drawn_from_the_generator_of_torch(accuracy: Any, tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("label,user,item\n" + "".join(f"{n % 2},{n % 5},{n % 7}\n" for n in range(20)))
    data = SimpleNamespace(features=tuple(FIELDS), several=())
    examples = accuracy.DrawnExamples(data, path, 8)
    for examples.seed in (None, 1):  # validation, which also takes numbers from the generator, and training
        torch.manual_seed(3)
        batches = [batch.label for batch in examples]
        state = torch.get_rng_state()
        torch.manual_seed(3)
        loader = torch.utils.data.DataLoader(range(20), 8, shuffle=examples.seed is not None)
        assert all(torch.equal(a, b % 2) for a, b in zip(batches, loader, strict=True))
        assert torch.equal(state, torch.get_rng_state())


class TheirDcn(nn.Module):
    """DCN with FuxiCTR's names and order of layers."""

    embedding_layer: Any
    dnn: Any
    crossnet: Any

    def __init__(self) -> None:
        super().__init__()
        self.embedding_layer = nn.Module()
        self.embedding_layer.embedding_layer = nn.Module()
        layers = nn.ModuleDict({name: nn.Embedding(size + 1, 4) for name, size in FIELDS.items()})
        self.embedding_layer.embedding_layer.embedding_layers = layers
        self.dnn = nn.Module()
        self.dnn.mlp = nn.Sequential(nn.Linear(8, 3), nn.ReLU())
        self.crossnet = nn.Module()
        self.crossnet.cross_net = nn.ModuleList(Cross(8) for _ in range(2))
        self.fc = nn.Linear(8 + 3, 1)

    def forward(self, ids: Tensor) -> Tensor:
        layers = self.embedding_layer.embedding_layer.embedding_layers
        x0 = x = torch.cat([layers[name](ids[:, n]) for n, name in enumerate(FIELDS)], 1)
        for cross in self.crossnet.cross_net:
            x = x + cross.weight(x) * x0 + cross.bias
        logits: Tensor = self.fc(torch.cat([x, self.dnn.mlp(x0)], 1)).squeeze(1)
        return logits


class Cross(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.randn(width))


def test_weights_of_the_start_are_those_of_the_other_model(accuracy: Any) -> None:
    copy_start = importlib.import_module("accuracy_fuxictr").copy_start
    torch.manual_seed(0)
    theirs = TheirDcn()
    vocabulary = {name: {"__PAD__": 0, **{str(n): size - n for n in range(size)}} for name, size in FIELDS.items()}
    config = ModelConfig(name="dcn", dim=4, hidden=(3,), batch_norm=False, dropout=0.0, cross_layers=2).resolve()
    table = tc.Table(row_dim(config), tc.Adam(lr=1e-3, lazy="catch_up"), mem="1MB")
    model = build(config, table, len(FIELDS))
    data = SimpleNamespace(features=tuple(FIELDS))
    copy_start(SimpleNamespace(model=theirs, vocabulary=vocabulary), data, model, table, accuracy.key_of)
    values = np.random.default_rng(0).integers(0, list(FIELDS.values()), (30, 2))
    keys = [accuracy.key_of(name, str(n)) for row in values for name, n in zip(FIELDS, row, strict=True)]
    ids = torch.tensor([[vocabulary[name][str(n)] for name, n in zip(FIELDS, row, strict=True)] for row in values])
    with torch.no_grad():
        logits = model(tc.Batch(np.array(keys, np.uint64), np.arange(len(keys) + 1), len(FIELDS)))
        assert torch.allclose(logits, theirs(ids), atol=1e-6)
    table.close()

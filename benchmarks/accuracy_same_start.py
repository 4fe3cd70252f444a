"""FuxiCTR and Thermocline from the same start: equal initial weights, order of examples and dropout masks.

    python benchmarks/accuracy_same_start.py FOLDER --fuxictr REPOSITORY --models dcnv2 --epochs 5

`accuracy.py --sides same_start,fuxictr` compares whole trainings from the same start; this script compares the loss of
each step. Both sides begin with the weights of FuxiCTR's model, read the same batches, and draw the same dropout masks
(torch's generator is seeded before each step). The arithmetic remains: clipping before or after L2, sums in another
order. Our side updates all rows (lazy = "catch_up"), as FuxiCTR does. Options of accuracy.py that are not here have its
defaults.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from accuracy import MODELS, TRAINING, Examples, key_of
from accuracy_data import DATA_SETS, SPLITS, DataSet, write_split
from accuracy_fuxictr import Built, build_fuxictr, copy_start
from common import console, environment, write_json

import thermocline as tc
from thermocline.models import ModelConfig, build, parameter_groups, row_dim


class Losses(tc.Callback):
    """Records the loss of each step, and seeds torch's generator for the next one."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step(self, trainer: tc.Trainer, loss: torch.Tensor) -> None:
        self.values.append(float(loss.detach()))
        torch.manual_seed(len(self.values))


def train_ours(
    config: ModelConfig, data: DataSet, parts: dict[str, Examples], built: Built, work: Path, epochs: int
) -> tuple[list[float], float]:
    """Return the loss of each step and the test AUC."""
    adam = tc.Adam(lr=TRAINING["lr"], weight_decay=config.embedding_l2 or 0.0, lazy="catch_up")
    table = tc.Table(row_dim(config), adam, mem="64MB")
    model = build(config, table, len(data.features))
    copy_start(built, data, model, table, key_of)
    settings = tc.TrainConfig(
        epochs=epochs, clip_norm=TRAINING["clip_norm"], checkpoint_minutes=None, tensorboard=False, display=False
    )
    optimizer = torch.optim.Adam(parameter_groups(config, model), lr=TRAINING["lr"])
    losses = Losses()
    trainer = tc.Trainer(model, optimizer, run_dir=work / "run", config=settings, callbacks=[losses])
    torch.manual_seed(0)
    result = trainer.fit(parts["train"], None, parts["test"])
    table.close()
    assert result.test is not None
    return losses.values, float(result.test["auc"])


def train_theirs(data: DataSet, split: Path, built: Built, parts: dict[str, Examples], epochs: int) -> Any:
    """FuxiCTR's training step over our batches; return the loss of each step without L2, and the test AUC."""
    from sklearn.metrics import roc_auc_score

    model = built.model
    tensors = {name: encode(data, split / f"{name}.csv", built) for name in ("train", "test")}
    losses: list[float] = []
    for epoch in range(epochs):
        parts["train"].set_epoch(epoch)
        model.train()
        for part in parts["train"].parts():
            torch.manual_seed(len(losses))
            batch = {name: value[torch.from_numpy(part)] for name, value in tensors["train"].items()}
            model.optimizer.zero_grad()
            output = model.forward(batch)
            label = model.get_labels(batch)
            losses.append(float(model.add_loss(output, label).detach()))
            model.compute_loss(output, label).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), TRAINING["clip_norm"])
            model.optimizer.step()
    model.eval()
    with torch.no_grad():
        scores = model.forward(tensors["test"])["y_pred"].squeeze(1).numpy()
    return losses, float(roc_auc_score(tensors["test"]["label"].numpy(), scores))


def encode(data: DataSet, path: Path, built: Built) -> dict[str, torch.Tensor]:
    """Return a CSV file as FuxiCTR's ids."""
    import csv

    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    tensors = {"label": torch.tensor([float(row["label"]) for row in rows])}
    for name in data.features:
        known = built.vocabulary[name]
        ids = [[known.get(value, known["__OOV__"]) for value in row[name].split("^")] for row in rows]
        if name in data.several:
            ids = [(one + [0] * 8)[:8] for one in ids]
            tensors[name] = torch.tensor(ids)
        else:
            tensors[name] = torch.tensor([one[0] for one in ids])
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of the data set")
    parser.add_argument("--data", choices=tuple(DATA_SETS), default="movielens")
    parser.add_argument("--fuxictr", metavar="REPOSITORY", type=Path, required=True)
    parser.add_argument("--models", default="dcnv2", help=f"of {','.join(MODELS)}; default: dcnv2")
    parser.add_argument("--seeds", default="2021")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    data = DATA_SETS[args.data]
    with tempfile.TemporaryDirectory(prefix="thermocline-accuracy-") as name:
        folder = Path(name)
        write_split(data, args.folder, folder, 2021)
        for model in args.models.split(","):
            for seed in map(int, args.seeds.split(",")):
                config = ModelConfig(name=model).resolve()
                parts = {part: Examples(data, folder / f"{part}.csv", TRAINING["batch_size"]) for part in SPLITS}
                parts["train"].seed = seed
                with tempfile.TemporaryDirectory(dir=folder) as work:
                    options = {"folder": args.fuxictr.resolve(), "training": TRAINING}
                    built = build_fuxictr(config, seed, data, folder, Path(work), **options)
                    ours, our_auc = train_ours(config, data, parts, built, Path(work), args.epochs)
                    theirs, their_auc = train_theirs(data, folder, built, parts, args.epochs)
                gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
                run = {"model": model, "seed": seed, "steps": len(ours), "loss_last": theirs[-1]}
                run |= {"gap_first": gaps[0], "gap_median": statistics.median(gaps), "gap_largest": max(gaps)}
                runs.append({**run, "auc": our_auc, "auc_fuxictr": their_auc})
                assert all(math.isfinite(gap) for gap in gaps)
                console.print(runs[-1])
                if args.json:
                    setup = {"training": TRAINING, "data": args.data, "epochs": args.epochs}
                    write_json(args.json, {"environment": environment(["torch"]), "setup": setup, "runs": runs}, [])


if __name__ == "__main__":
    main()

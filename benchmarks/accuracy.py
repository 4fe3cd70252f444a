"""Accuracy compared with FuxiCTR: same split, same settings (BARS x1), mean test AUC over seeds.

    python benchmarks/accuracy.py FOLDER --fuxictr REPOSITORY --json FILE
    python benchmarks/accuracy.py FOLDER --data frappe --seeds 2021,2022,2023,2024,2025 --fuxictr REPOSITORY --json FILE
    python benchmarks/accuracy.py FOLDER --models lr,fm --seeds 1 --sides ours
    python benchmarks/accuracy.py FOLDER --fuxictr REPOSITORY --sides ours,catch_up,fuxictr --json FILE
    python benchmarks/accuracy.py FOLDER --fuxictr REPOSITORY --sides same_start,fuxictr --json FILE
    python benchmarks/accuracy.py FOLDER --models dnn,dcnv2 --sides ours,tf32,bf16,compile --device cuda --json FILE

The sides tf32, bf16 and compile are ours with train.dense_precision or train.compile, compared with ours in fp32. The
side catch_up is ours with lazy = "catch_up", compared with FuxiCTR; served_auc is its test AUC with rows as they are
stored and published: as of the last batch that trained them. The side same_start is catch_up with FuxiCTR's initial
weights, and torch's generator draws the order of examples and dropout masks as in FuxiCTR's training with that seed:
seeds are then pairs, and the standard error is that of their differences.
FOLDER has the files of the data set (`accuracy_data.py`), whose random 8:1:1 split is written as CSV files that both
sides read. FuxiCTR needs a copy of its repository (the models are not in its package) and these packages: polars<2
pandas<3 scikit-learn h5py tqdm pyyaml keras_preprocessing. Runs that FILE already has are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accuracy_data import DATA_SETS, SPLITS, DataSet, write_split
from common import Claim, console, environment, print_claims, write_json
from rich.table import Table as Grid
from torch.utils.data import DataLoader

import thermocline as tc
from thermocline.embedding.optimizers import Lazy
from thermocline.models import ModelConfig, build, parameter_groups, row_dim

MODELS = ("lr", "fm", "dnn", "deepfm", "dcn", "dcnv2")
TRAINING: dict[str, Any] = {
    "batch_size": 4096, "lr": 1e-3, "epochs": 100, "clip_norm": 10.0, "patience": 2, "plateau_factor": 0.1
}  # fmt: skip
"""FuxiCTR's defaults. Clipping matters: with batch norm the first gradients of rows near zero are large (148 for the
DNN), and Adam's second moment would keep them for a thousand steps."""
TOLERANCE = 0.002
VARIANTS: dict[str, dict[str, Any]] = {
    "ours": {}, "catch_up": {"lazy": "catch_up"},
    "tf32": {"dense_precision": "tf32"}, "bf16": {"dense_precision": "bf16"}, "compile": {"compile": True}
}  # fmt: skip
SAME_START = "same_start"
Run = dict[str, Any]

# ---- our side


class Examples:
    """Batches of a CSV file held in memory; reshuffled in each epoch if `seed` is set."""

    def __init__(self, data: DataSet, path: Path, batch_size: int, seed: int | None = None) -> None:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        bags = [row[name].split("^") if name in data.several else [row[name]] for row in rows for name in data.features]
        self.fields = len(data.features)
        lengths = np.array([len(bag) for bag in bags]).reshape(len(rows), self.fields, 1)
        self.used = np.arange(lengths.max()) < lengths
        self.keys = np.zeros(self.used.shape, np.uint64)
        names = itertools.cycle(data.features)
        self.keys[self.used] = [key_of(name, value) for name, bag in zip(names, bags, strict=False) for value in bag]
        self.label = torch.tensor([float(row["label"]) for row in rows])
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.keys) // self.batch_size)

    def parts(self) -> Iterator[npt.NDArray[Any]]:
        """Yield the examples of each batch of the epoch."""
        order: npt.NDArray[Any] = np.arange(len(self.keys))
        if self.seed is not None:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.keys))
        for begin in range(0, len(order), self.batch_size):
            yield order[begin : begin + self.batch_size]

    def __iter__(self) -> Iterator[tc.Batch]:
        for part in self.parts():
            used = self.used[part]
            offsets = np.concatenate([[0], np.cumsum(used.sum(2).reshape(-1))])
            yield tc.Batch(self.keys[part][used], offsets, self.fields, label=self.label[torch.from_numpy(part)])


class DrawnExamples(Examples):
    """Batches in the order that torch's DataLoader draws from torch's generator, as FuxiCTR's loader does."""

    def parts(self) -> Iterator[npt.NDArray[Any]]:
        positions: Any = range(len(self.keys))
        yield from DataLoader(positions, self.batch_size, shuffle=self.seed is not None, collate_fn=np.array)


@functools.cache
def key_of(field: str, value: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{field}={value}".encode(), digest_size=8).digest(), "little")


def train_ours(
    config: ModelConfig,
    seed: int,
    data: DataSet,
    folder: Path,
    work: Path,
    *,
    device: str = "cpu",
    lazy: Lazy = "touched",
    start: Callable[..., Any] | None = None,
    **dense: Any,
) -> Run:
    """Train on `device`; `dense` are settings of the dense part.

    With `start`, which is `build_fuxictr`, weights begin as FuxiCTR's, and torch's generator draws as in its training.
    """
    examples = Examples if start is None else DrawnExamples
    parts = {name: examples(data, folder / f"{name}.csv", TRAINING["batch_size"]) for name in SPLITS}
    parts["train"].seed = seed
    torch.manual_seed(seed)
    built = start and start(config, seed, data, folder, work)
    lr, l2 = TRAINING["lr"], config.embedding_l2 or 0.0
    initial = tc.Normal(scale=config.initial)
    tiers = {"mem": "64MB"} if device == "cpu" else {"mem": "64MB", "hbm": "64MB", "device": device}
    adam = tc.Adam(lr=lr, weight_decay=l2, lazy=lazy)
    table = tc.Table(row_dim(config), adam, seed=seed, initial=initial, **tiers)
    with torch.random.fork_rng(devices=[], enabled=built is not None):
        model = build(config, table, len(data.features)).to(device)
    if built is not None:
        from accuracy_fuxictr import copy_start

        copy_start(built, data, model, table, key_of)
    settings = tc.TrainConfig(
        **{name: TRAINING[name] for name in ("epochs", "clip_norm", "patience", "plateau_factor")},
        checkpoint_minutes=None,
        tensorboard=False,
        display=False,
        **dense,
    )
    optimizer = torch.optim.Adam(parameter_groups(config, model), lr=lr)
    trainer = tc.Trainer(model, optimizer, run_dir=work / "run", config=settings)
    result = trainer.fit(parts["train"], parts["valid"], parts["test"])
    assert result.test is not None
    served = {}
    if lazy == "catch_up":
        table.backend.rates = None  # evaluation then reads rows as they are stored
        served["served_auc"] = trainer.evaluate(parts["test"])["auc"]
    table.close()
    return {
        **served,
        "auc": result.test["auc"],
        "logloss": result.test["logloss"],
        "valid_auc": result.progress.best_auc,
        "epochs": result.progress.epoch,
    }


# ---- results


def claims_of(runs: Sequence[Run]) -> list[Claim]:
    """Our AUC against FuxiCTR's, and that of every variant against ours."""
    claims = []
    for model in dict.fromkeys(run["model"] for run in runs):
        pairs = [(side, "fuxictr", "FuxiCTR") for side in ("ours", "catch_up", SAME_START)]
        pairs += [(side, "ours", "fp32") for side in VARIANTS if side not in ("ours", "catch_up")]
        for side, other, name in pairs:
            used = runs
            if side == SAME_START:
                both = set.intersection(*({run["seed"] for run in select(runs, model, one)} for one in (side, other)))
                used = [run for run in runs if run["seed"] in both]
            mean, reference = mean_of(used, model, side, "auc"), mean_of(used, model, other, "auc")
            if mean is not None and reference is not None:
                error = error_of_difference(used, model, side, other)
                seeds = f"{len(select(used, model, side))} and {len(select(used, model, other))} seeds"
                detail = f"{side} {mean:.4f}, {name} {reference:.4f}, standard error {error:.4f}, {seeds}"
                label = f"{model.upper()} behind {name}" if side == "ours" else f"{model.upper()}, {side} behind {name}"
                claims.append(Claim(label, reference - mean, TOLERANCE, "AUC", at_most=True, detail=detail))
    return claims


def select(runs: Sequence[Run], model: str, side: str) -> list[Run]:
    """Return the runs of a model and side in the order of seeds."""
    return sorted((run for run in runs if (run["model"], run["side"]) == (model, side)), key=lambda run: run["seed"])


def mean_of(runs: Sequence[Run], model: str, side: str, figure: str) -> float | None:
    values = [run[figure] for run in select(runs, model, side)]
    return statistics.mean(values) if values else None


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def error_of_difference(runs: Sequence[Run], model: str, side: str, other: str) -> float:
    """Standard error of the difference of two sides' mean AUC; seeds are pairs if one side has the other's start."""
    ours, theirs = ([run["auc"] for run in select(runs, model, one)] for one in (side, other))
    if side == SAME_START:
        return standard_error([a - b for a, b in zip(ours, theirs, strict=True)])
    return math.hypot(standard_error(ours), standard_error(theirs))


def print_runs(runs: Sequence[Run]) -> None:
    grid = Grid(title="test AUC, its standard error, and logloss, mean over seeds; AUC of each seed; epochs")
    for column in ("model", "side", "AUC", "error", "served", "logloss", "each", "epochs"):
        grid.add_column(column)
    for model in dict.fromkeys(run["model"] for run in runs):
        for side in (*VARIANTS, SAME_START, "fuxictr"):
            selected = select(runs, model, side)
            if selected:
                auc, logloss = (mean_of(runs, model, side, figure) for figure in ("auc", "logloss"))
                served = f"{mean_of(runs, model, side, 'served_auc'):.4f}" if "served_auc" in selected[0] else ""
                error = f"{standard_error([run['auc'] for run in selected]):.4f}"
                each = " ".join(f"{run['auc']:.4f}" for run in selected)
                epochs = " ".join(str(run["epochs"]) for run in selected)
                grid.add_row(model, side, f"{auc:.4f}", error, served, f"{logloss:.4f}", each, epochs)
    console.print(grid)


def save(args: argparse.Namespace, setup: dict[str, Any], runs: list[Run]) -> None:
    if args.json:
        where = environment(["thermocline", "torch", "numpy"])
        if args.fuxictr is not None:  # its package has __version__="..."
            where["versions"]["fuxictr"] = (args.fuxictr / "fuxictr" / "version.py").read_text().split('"')[1]
        write_json(args.json, {"environment": where, "setup": setup, "runs": runs}, claims_of(runs))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of the data set")
    parser.add_argument("--data", choices=tuple(DATA_SETS), default="movielens", help="default: movielens")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write results to this file; runs that it has are kept"
    )
    parser.add_argument("--models", default=",".join(MODELS), help=f"default: {','.join(MODELS)}")
    parser.add_argument("--seeds", default="2021,2022,2023", help="default: 2021,2022,2023")
    parser.add_argument("--sides", default="ours,fuxictr", help=f"of {', '.join([*VARIANTS, SAME_START])} and fuxictr")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where our sides train")
    parser.add_argument("--fuxictr", metavar="REPOSITORY", type=Path, help="folder of FuxiCTR's repository")
    parser.add_argument("--split-seed", type=int, default=2021)
    parser.add_argument("--torch-threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.torch_threads)
    sides: dict[str, Callable[[ModelConfig, int, DataSet, Path, Path], Run]] = {
        name: functools.partial(train_ours, device=args.device, **dense) for name, dense in VARIANTS.items()
    }
    if args.fuxictr is None and "fuxictr" in args.sides:
        console.print("[yellow]only our side runs: set --fuxictr to compare with FuxiCTR[/]")
    elif args.fuxictr is not None:
        from accuracy_fuxictr import build_fuxictr, train_fuxictr

        theirs = {"folder": args.fuxictr.resolve(), "training": TRAINING}
        sides["fuxictr"] = functools.partial(train_fuxictr, **theirs)
        start = functools.partial(build_fuxictr, **theirs)
        sides[SAME_START] = functools.partial(train_ours, device=args.device, lazy="catch_up", start=start)
    runs: list[Run] = []
    setup = {"training": TRAINING, "split_seed": args.split_seed, "torch_threads": args.torch_threads}
    setup |= {} if args.data == "movielens" else {"data": args.data}
    setup |= {} if args.device == "cpu" else {"device": torch.cuda.get_device_name()}
    if args.json and args.json.exists():
        old = json.loads(args.json.read_text())
        runs = old["runs"] if old["setup"] == setup else []
    with tempfile.TemporaryDirectory(prefix="thermocline-accuracy-") as folder:
        data = DATA_SETS[args.data]
        sizes = write_split(data, args.folder, Path(folder), args.split_seed)
        console.print(f"{args.data}: {sizes}; {TRAINING}")
        for model in args.models.split(","):
            for seed in map(int, args.seeds.split(",")):
                for side in (side for side in args.sides.split(",") if side in sides):
                    name = {"model": model, "seed": seed, "side": side}
                    if any(name.items() <= run.items() for run in runs):
                        continue
                    config, start, cpu = ModelConfig(name=model).resolve(), time.perf_counter(), time.process_time()
                    with tempfile.TemporaryDirectory(dir=folder) as work:
                        run = sides[side](config, seed, data, Path(folder), Path(work))
                    spent = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
                    runs.append({**name, **run, **{unit: round(value, 1) for unit, value in spent.items()}})
                    console.print(runs[-1])
                    save(args, setup, runs)
    save(args, setup, runs)
    print_runs(runs)
    print_claims(f"accuracy on {args.data}", claims_of(runs))


if __name__ == "__main__":
    main()

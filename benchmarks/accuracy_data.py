"""Public data sets of accuracy.py: examples of categorical fields, and their random 8:1:1 split as CSV files.

movielens  MovieLens-100k in RecBole's format: ml-100k.inter, ml-100k.user, ml-100k.item. A rating of 4 or more is
           positive. Features: user id, age, gender, occupation and zip code; movie id, year and genres (several).
frappe     Frappe in the format of LibFM, as He and Chua published it: all files frappe.*.libfm of the folder. The
           repository of their paper has the files of validation and test; with only these, a third of Frappe is used.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

Example = dict[str, str]
SPLITS = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True)
class DataSet:
    """One data set. Values of the fields in `several` are lists, joined by "^"; their vectors are summed."""

    name: str
    features: tuple[str, ...]
    several: tuple[str, ...]
    read: Callable[[Path], list[Example]]
    """Returns the examples of a folder: their `label`, "0" or "1", and features."""


def write_split(data: DataSet, source: Path, folder: Path, seed: int) -> dict[str, int]:
    """Write a random 8:1:1 split as train.csv, valid.csv and test.csv; return their sizes."""
    examples = data.read(source)
    order = np.random.default_rng(seed).permutation(len(examples))
    cuts = [len(order) * 8 // 10, len(order) * 9 // 10]
    sizes = {}
    for name, part in zip(SPLITS, np.split(order, cuts), strict=True):
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ["label", *data.features])
            writer.writeheader()
            writer.writerows(examples[n] for n in part)
        sizes[name] = len(part)
    return sizes


# ---- MovieLens-100k

_MOVIE_FEATURES = ("user_id", "age", "gender", "occupation", "zip_code", "item_id", "release_year", "class")


def _read_movielens(source: Path) -> list[Example]:
    users = {row["user_id"]: row for row in _recbole_rows(source / "ml-100k.user")}
    items = {row["item_id"]: row for row in _recbole_rows(source / "ml-100k.item")}
    examples = []
    for rating in _recbole_rows(source / "ml-100k.inter"):
        row = {**items[rating["item_id"]], **users[rating["user_id"]]}
        row["class"] = "^".join(row["class"].split())
        label = str(int(float(rating["rating"]) >= 4))
        examples.append({"label": label, **{name: row[name] for name in _MOVIE_FEATURES}})
    return examples


def _recbole_rows(path: Path) -> list[Example]:
    """Read a file of RecBole: tab-separated, with a header of `name:type`."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = [line.rstrip("\r\n").split("\t") for line in file]
    names = [name.split(":")[0] for name in lines[0]]
    return [dict(zip(names, line, strict=True)) for line in lines[1:]]


# ---- Frappe

_FRAPPE_FEATURES = (
    "user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city"
)  # fmt: skip


def _read_frappe(source: Path) -> list[Example]:
    paths = sorted(source.glob("frappe.*.libfm"))
    if not paths:
        raise FileNotFoundError(f"{source} has no files frappe.*.libfm")
    examples = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            label, *ids = line.split()
            values = zip(_FRAPPE_FEATURES, (value.removesuffix(":1") for value in ids), strict=True)
            examples.append({"label": str(int(float(label) > 0)), **dict(values)})
    return examples


DATA_SETS = {
    "movielens": DataSet("movielens", _MOVIE_FEATURES, ("class",), _read_movielens),
    "frappe": DataSet("frappe", _FRAPPE_FEATURES, (), _read_frappe),
}

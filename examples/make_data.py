"""Generate clicks on ads in every format but Arrow, as data/<format>/{train,valid,test}.*. Options: `--help`."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

import thermocline as tc

SPLITS = {"train": 1.0, "valid": 0.1, "test": 0.1}


def click_log(rows: int, seed: int) -> pa.Table:
    """Generate a click log of a shop: user, item, country, hour, price, age, tags, and the label `click`."""
    rng = np.random.default_rng(seed)
    user = rng.zipf(1.3, rows) % 5000
    item = rng.zipf(1.2, rows) % 2000
    country = rng.choice(["de", "fr", "it", "pl", ""], rows, p=[0.4, 0.3, 0.15, 0.1, 0.05])
    hour = rng.integers(0, 24, rows)
    price = np.round(rng.lognormal(3, 1, rows), 2)
    age = rng.integers(16, 90, rows)
    tags = [rng.choice(["new", "sale", "eco", "luxury"], n, replace=False).tolist() for n in rng.integers(0, 4, rows)]
    taste = np.sin(user * 0.7) * np.cos(item * 1.3) * 2.5 + (country == "de") * 0.5 - np.log(price) * 0.3 + age * 0.01
    click = rng.random(rows) < 1 / (1 + np.exp(-(taste - 0.7)))
    missing = rng.random(rows) < 0.05
    columns = {
        "click": pa.array(click.astype(np.int64)),
        "user": pa.array([f"u{n}" for n in user]),
        "item": pa.array([f"item, no. {n}" for n in item]),  # with a comma, which CSV must quote
        "country": pa.array(country),
        "hour": pa.array(hour),
        "price": pa.array(price, mask=missing),
        "age": pa.array(age),
        "tags": pa.array(tags, pa.list_(pa.string())),
    }
    return pa.table(columns)


def criteo_lines(rows: int, seed: int) -> str:
    """Generate lines in the Criteo format: label, 13 integers, 26 hexadecimal values, some of them empty."""
    rng = np.random.default_rng(seed)
    numbers = np.floor(rng.lognormal(2, 1.5, (rows, 13))).astype(int)
    values = rng.zipf(1.2, (rows, 26)) % (10 * 2 ** np.arange(26) % 100_003 + 3)
    logits = np.sin(values[:, 0] * values[:, 1] * 0.1) + np.cos(values[:, 2]) + np.log1p(numbers[:, 0]) * 0.5 - 2
    labels = rng.random(rows) < 1 / (1 + np.exp(-2 * logits))
    empty = rng.random((rows, 39)) < 0.1
    lines = []
    for label, integers, categories, missing in zip(labels, numbers, values, empty, strict=True):
        texts = [*(str(n) for n in integers), *(f"{v * 2654435761 % 2**32:08x}" for v in categories)]
        columns = ("" if is_missing else text for text, is_missing in zip(texts, missing, strict=True))
        lines.append("\t".join([str(int(label)), *columns]))
    return "\n".join(lines) + "\n"


def main(rows: int, folder: Path) -> None:
    ads = tc.SyntheticAds(keys=20_000, fields=8, examples=rows, signal=4.0)
    for number, (split, share) in enumerate(SPLITS.items()):
        count = max(100, int(rows * share))
        for format in ("libsvm", "libffm", "criteo", "csv", "parquet"):
            (folder / format).mkdir(parents=True, exist_ok=True)
        for format in ("libsvm", "libffm"):
            ads.split(split, examples=count).write(folder / format / f"{split}.{format}", format)
        log = click_log(count, number)
        csv.write_csv(log.drop_columns(["tags"]), folder / "csv" / f"{split}.csv")
        pq.write_table(log, folder / "parquet" / f"{split}.parquet", row_group_size=max(1, count // 4))
        (folder / "criteo" / f"{split}.tsv").write_text(criteo_lines(count, 10 + number))
    print(f"wrote {rows} training examples in every format to {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", type=int, default=20_000, help="training examples; validation and test have a tenth each"
    )
    parser.add_argument("--folder", type=Path, default=Path("data"))
    main(**vars(parser.parse_args()))

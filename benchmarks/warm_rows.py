"""Simulation: would rows that return, kept in a run of their own, cut the page reads of the SSD store by half?

Claim    At the density of 1e9 keys, rows that recent merges rewrote in their own run need half of the page reads.
Method   Traces are cut into horizons, each read as one sorted set of rows. Rows missing in DRAM are read from the log
         or from base pages of 4 KiB. Layout "hash": all base rows in hash order, as the store has them. Layout "warm":
         the rows that one of the last merges rewrote are in their own run of pages, in hash order; a row that no later
         merge rewrites goes back. Layout "by visits": one run per power of two of the visits, which the store does not
         know, as a bound of what a better choice of rows could save. DRAM keeps the rows of the last horizon, then the
         most visited; all rows that leave it were changed and go to the log, in hash order; a merge empties the log
         when it has a fifth of all rows. Counted are distinct pages per horizon, after the third merge. Zipf:
         `tc.SyntheticAds` with the fields and exponents of model E; ids per horizon are a share of the keys: 0.13 is
         1e9 keys with 256 batches of 1,024 x 500 ids, 0.65 is 2e8 keys (E/1000). MovieLens: ratings in the order of
         their time, repeated, with user, movie and crossed features.
Command  python benchmarks/warm_rows.py --json FILE
         python benchmarks/warm_rows.py --movielens FOLDER --json FILE     FOLDER has ml-100k.inter (RecBole's format)
         python benchmarks/warm_rows.py --quick                             seconds, few keys
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import Claim, console, environment, print_claims, write_json
from rich.table import Table as TextTable

import thermocline as tc
from thermocline.embedding.key_hash import hash_keys

PAGE = 4096
LOG_RATIO = 0.2
"""Share of all rows in the log at which it is merged."""
TARGET = 2.0
"""Factor by which page reads must fall."""
Rows = npt.NDArray[np.int64]


HASH, CLASSES = 0, -1
"""Layouts without a warm run: hash order, and runs of rows with equal log2 of their visits so far. Other numbers are
the merges after which a row that was not rewritten leaves the warm run."""


@dataclasses.dataclass(slots=True)
class Counts:
    """Sums over the horizons that are counted."""

    horizons: int = 0
    missing: int = 0
    log_pages: int = 0
    base_pages: dict[int, int] = dataclasses.field(default_factory=dict)
    """By layout."""
    warm_missing: dict[int, int] = dataclasses.field(default_factory=dict)
    warm_rows: dict[int, float] = dataclasses.field(default_factory=dict)
    """Rows of the warm run, summed over horizons."""


class Store:
    """Base rows of one layout, numbered in hash order."""

    def __init__(self, rows: int, rows_per_page: int, keep: int) -> None:
        """Place all rows in hash order; `keep` is the layout after merges."""
        self.keep, self._per_page = keep, rows_per_page
        self._stamp = np.full(rows, -(10**9))  # merge that last rewrote the row
        self._merges = 0
        self._place()

    def _place(self, classes: Rows | None = None) -> None:
        """Assign pages: one run per class, by default cold and warm rows, in hash order inside."""
        self.warm = self._stamp > self._merges - max(0, self.keep)
        order = np.argsort(self.warm if classes is None else classes, kind="stable")
        self._page = np.empty(len(order), np.int64)
        self._page[order] = np.arange(len(order)) // self._per_page

    def merge(self, rows: Rows, visits: npt.NDArray[np.float64]) -> None:
        """Rewrite rows from the log."""
        self._merges += 1
        if self.keep:
            self._stamp[rows] = self._merges
            self._place(np.log2(visits + 1).astype(np.int64) if self.keep == CLASSES else None)

    def pages(self, rows: Rows) -> int:
        return len(np.unique(self._page[rows]))


def simulate(
    horizons: Iterator[Rows], rows: int, rows_per_page: int, dram: float, keeps: Sequence[int], most: int
) -> Counts:
    """Run a trace through DRAM, log and base; count at most `most` horizons after the third merge."""
    capacity = int(dram * rows)
    resident, in_log = np.zeros(rows, bool), np.zeros(rows, bool)
    visits, log_place = np.zeros(rows), np.zeros(rows, np.int64)
    stores = {keep: Store(rows, rows_per_page, keep) for keep in keeps}
    counts, merges, log_end = Counts(base_pages=dict.fromkeys(keeps, 0)), 0, 0
    counts.warm_missing, counts.warm_rows = dict.fromkeys(keeps, 0), dict.fromkeys(keeps, 0.0)
    for wanted in horizons:
        missing = wanted[~resident[wanted]]
        logged, base = missing[in_log[missing]], missing[~in_log[missing]]
        if merges >= 3:
            counts.horizons += 1
            counts.missing += len(missing)
            counts.log_pages += len(np.unique(log_place[logged] // rows_per_page))
            for keep, store in stores.items():
                counts.base_pages[keep] += store.pages(base)
                counts.warm_missing[keep] += int(store.warm[base].sum())
                counts.warm_rows[keep] += float(store.warm.mean())
            if counts.horizons == most:
                break
        visits[wanted] += 1
        resident[wanted] = True
        if (over := int(resident.sum()) - capacity) > 0:
            held = np.flatnonzero(resident)
            score = visits[held]
            score[np.searchsorted(held, wanted)] += 1e9  # the last horizon is kept
            victims = np.sort(held[np.argpartition(score, over - 1)[:over]])
            resident[victims] = False
            in_log[victims] = True
            log_place[victims] = log_end + np.arange(len(victims))
            log_end += len(victims)
        if in_log.sum() > LOG_RATIO * rows:
            merges += 1
            merged = np.flatnonzero(in_log)
            for store in stores.values():
                store.merge(merged, visits)
            in_log[:] = False
    return counts


# ---- traces


def zipf_trace(keys: int, share: float) -> tuple[Iterator[Rows], int]:
    """Horizons of `share` ids per key, from the distribution of model E; and the number of rows."""
    ads = tc.SyntheticAds.preset("E/1000", keys=keys, batch_size=max(1, int(share * keys / 500)))
    order = np.sort(hash_keys(ads.some_keys(0, sum(ads.keys))))
    return (np.unique(np.searchsorted(order, hash_keys(batch.ids))) for batch in ads), len(order)


def movielens_trace(folder: Path, share: float) -> tuple[Iterator[Rows], int]:
    """Horizons of `share` ids per key of the ratings in time order, repeated, with crossed features."""
    with (folder / "ml-100k.inter").open() as file:
        lines = sorted(csv.reader(file, delimiter="\t"), key=lambda line: line[3] if line[3][0].isdigit() else "")[1:]
    values = []
    for user, item, rating, moment in lines:
        week = int(float(moment)) // (7 * 86400)
        hour = int(float(moment)) // 3600 % 24
        values.append(
            (
                f"u{user}", f"i{item}", f"uw{user}/{week}", f"iw{item}/{week}", f"uh{user}/{hour}", f"ih{item}/{hour}",
                f"ir{item}/{rating}", f"ur{user}/{rating}", f"ui{user}/{item}",
            )
        )  # fmt: skip
    text = np.array(values)
    names, index = np.unique(text, return_inverse=True)
    digests = b"".join(hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    rank = np.empty(len(names), np.int64)
    rank[np.argsort(np.frombuffer(digests, np.uint64))] = np.arange(len(names))
    ids = rank[index.reshape(-1)]
    step = max(1, int(share * len(names)))

    def horizons() -> Iterator[Rows]:
        for _ in range(20):
            for first in range(0, len(ids), step):
                yield np.unique(ids[first : first + step])

    return horizons(), len(names)


# ---- the table of results


def figures(counts: Counts, keep: int) -> dict[str, Any]:
    """Return page reads per horizon of the store's layout and another one, and their ratio."""
    n = max(1, counts.horizons)
    today, warm = (counts.base_pages[k] + counts.log_pages for k in (HASH, keep))
    return {
        "horizons": counts.horizons,
        "missing": counts.missing / n,
        "log_pages": counts.log_pages / n,
        "pages_hash": today / n,
        "pages_warm": warm / n,
        "factor": today / max(1, warm),
        "warm_rows": counts.warm_rows[keep] / n,
        "warm_missing": counts.warm_missing[keep] / max(1, counts.missing),
    }


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few keys")
    parser.add_argument("--keys", type=float, default=3e6, help="keys of the Zipf traces")
    parser.add_argument("--row-bytes", type=int, default=60, help="bytes of a row and its key on SSD")
    parser.add_argument("--movielens", metavar="FOLDER", help="also simulate MovieLens-100k")
    parser.add_argument("--json", help="write all figures to FILE")
    options = parser.parse_args(words)
    keys = 100_000 if options.quick else int(options.keys)
    keeps, most = (HASH, 1, 2, 4, CLASSES), 4 if options.quick else 12
    cases: list[tuple[str, float, float]] = [
        ("zipf", share, dram) for share in (0.13, 0.65) for dram in (0.02, 0.1, 0.4)
    ]
    if options.movielens:
        cases += [("movielens", share, dram) for share in (0.03, 0.13) for dram in (0.02, 0.1, 0.4)]
    results = []
    table = TextTable(title="Page reads per horizon, rows in hash order against a run of warm rows")
    for column in (
        "trace",
        "ids per key",
        "DRAM",
        "merges",
        "missing",
        "hash",
        "warm",
        "factor",
        "warm rows",
        "of missing",
    ):
        table.add_column(column, justify="left" if column == "trace" else "right")
    for trace, share, dram in cases:
        made = zipf_trace(keys, share) if trace == "zipf" else movielens_trace(Path(options.movielens), share)
        counts = simulate(*made, PAGE // options.row_bytes, dram, keeps, most)
        if counts.horizons == 0:
            console.print(f"{trace}, {share} ids per key, DRAM {dram:.0%}: the log was not merged three times")
            continue
        for keep in keeps[1:]:
            found = figures(counts, keep)
            results.append({"trace": trace, "ids_per_key": share, "dram": dram, "keep": keep, **found})
            table.add_row(
                trace, f"{share:g}", f"{dram:.0%}", "by visits" if keep == CLASSES else f"warm, {keep}",
                f"{found['missing']:,.0f}",
                f"{found['pages_hash']:,.0f}", f"{found['pages_warm']:,.0f}", f"{found['factor']:.2f}",
                f"{found['warm_rows']:.0%}", f"{found['warm_missing']:.0%}",
            )  # fmt: skip
    console.print(table)
    claims = claims_of(results)
    print_claims("Warm rows together", claims)
    if options.json:
        sizes = {"keys": keys, "row_bytes": options.row_bytes, "horizons": most}
        write_json(options.json, {**environment(["numpy"]), "sizes": sizes, "results": results}, claims)
    return results


def claims_of(results: Sequence[dict[str, Any]]) -> list[Claim]:
    """Compare the best warm run of each trace and size of DRAM with the target."""
    claims = []
    for trace in dict.fromkeys(result["trace"] for result in results):
        for dram in dict.fromkeys(result["dram"] for result in results):
            of_case = [r for r in results if r["trace"] == trace and r["dram"] == dram and r["keep"] != CLASSES]
            best = max(of_case, key=lambda r: float(r["factor"]))
            pages = f"{best['pages_hash']:,.0f} pages against {best['pages_warm']:,.0f}"
            detail = f"{pages}; {best['ids_per_key']:g} ids per key, warm for {best['keep']} merges"
            claims.append(Claim(f"{trace}, DRAM {dram:.0%}: page reads", best["factor"], TARGET, detail=detail))
    return claims


if __name__ == "__main__":
    main()

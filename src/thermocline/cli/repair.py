"""Repair of one store, or of all stores of a run, after damage of its files. The C++ core does it (csrc/ssd/repair.h).

`repair` returns plain values, `describe` formats them as lines, `summary` as one line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import SupportsIndex

from thermocline.cli.inspect import Report, inspect, inspect_store_of, read_checkpoint, stores_of
from thermocline.core import core
from thermocline.errors import BudgetError, ConfigError, StoreError
from thermocline.utils.text_format import parse_size, plural


def repair(
    path: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    keep_older: bool = False,
    mem: str | SupportsIndex = "256MB",
) -> Report:
    """Repair a store or the stores of a run; report what was rebuilt, what is lost, and what remains damaged.

    dry_run      change no file
    keep_older   keep older versions of rows whose newest version, or deletion, is lost
    mem          DRAM for each store
    """
    target = Path(path)
    budget = parse_size(mem, "mem")
    if not target.exists():
        raise ConfigError(f"{path}: there is no such file or folder")
    is_run = (target / "checkpoints").is_dir()
    if not is_run and not _is_store(target):
        raise ConfigError(f"{path} is neither a store (a folder with the file STORE) nor a run (one with checkpoints)")
    report: Report = {"path": str(path), "dry_run": dry_run, "keep_older": keep_older, "stores": [], "problems": []}
    folders, outside = (_run_stores(target), _damage_outside(target, budget)) if is_run else ([target], [])
    # The folder of a run is not trusted to name the stores of others.
    report["problems"] += [f"not repaired, because it is outside of {path}: {problem}" for problem in outside]
    for folder in folders:
        try:
            store = core.repair_store(os.fsencode(folder), dry_run, keep_older, budget)
        except StoreError as error:
            report["problems"].append(str(error))
            continue
        report["stores"].append({"path": str(folder), **store})
    if not dry_run and (is_run or report["stores"]):
        report["problems"] += [problem for problem in _remaining_damage(target, budget) if problem not in outside]
    if is_run:
        report["problems"] += _missing_commits(target, report)
        report["problems"] += [
            f"rows of {name} were not repaired: the run does not name their ssd folder; run thermocline repair FOLDER"
            for name in inspect(target).get("unnamed", ())
        ]
    return report


def is_lossless(report: Report) -> bool:
    """Return whether nothing is lost and nothing remains damaged."""
    lost = any(store["losses"] or store["lost_commits"] for store in report["stores"])
    return not lost and not report["problems"]


def _is_store(path: Path) -> bool:
    return (path / "STORE").exists() or any(path.glob("MANIFEST-*"))


def _run_stores(run_dir: Path) -> list[Path]:
    """Return the folders of all stores in the run."""
    folders = [run_dir / "stores", *(run_dir / "stores").glob("*"), *(run_dir / "stores").glob("*/*")]
    found = {folder for folder in folders if folder.is_dir() and _is_store(folder)}
    for _, checkpoint in _checkpoints(run_dir):
        found |= {folder for _, folder, _ in stores_of(run_dir, checkpoint)}
    return sorted(folder for folder in found if _is_inside(run_dir, folder))


def _damage_outside(run_dir: Path, mem: int) -> list[str]:
    """Return the damage of the stores outside of the run's folder that its checkpoints name."""
    stores = {
        folder: checkpoint
        for _, checkpoint in _checkpoints(run_dir)
        for _, folder, _ in stores_of(run_dir, checkpoint)
        if not _is_inside(run_dir, folder)
    }
    problems = []
    for folder, checkpoint in stores.items():
        try:
            problems += inspect_store_of(run_dir, checkpoint, folder, True, mem)["problems"]
        except BudgetError as error:
            problems.append(f"not verified: {error} (--mem)")
    return problems


def _is_inside(run_dir: Path, folder: Path) -> bool:
    return folder.resolve().is_relative_to(run_dir.resolve())


def _remaining_damage(target: Path, mem: int) -> list[str]:
    """Return the damage after the repair. The report of the repair must not be lost if the index exceeds `mem`."""
    try:
        problems: list[str] = inspect(target, check=True, mem=mem)["problems"]
    except BudgetError as error:
        return [f"not verified: {error} (--mem)"]
    return problems


def _checkpoints(run_dir: Path) -> Iterator[tuple[Path, Report]]:
    for path in sorted((run_dir / "checkpoints").glob("[0-9]*.json")):
        try:
            yield path, read_checkpoint(path)
        except StoreError:
            continue  # `inspect` reports it


def _missing_commits(run_dir: Path, report: Report) -> list[str]:
    lost = {store["path"]: {commit["epoch"] for commit in store["lost_commits"]} for store in report["stores"]}
    return [
        f"{path} needs commit {epoch} of {folder}, which is lost: move {path.name} out of the folder to continue from "
        "an older checkpoint"
        for path, checkpoint in _checkpoints(run_dir)
        for _, folder, epoch in stores_of(run_dir, checkpoint)
        if epoch in lost.get(str(folder), ())
    ]


# ---- text


def describe(report: Report) -> Iterator[str]:
    """Format the changes and losses of each store, then the summary."""
    for store in report["stores"]:
        yield f"store {store['path']}: newest commit {store['epoch']}"
        for file in store["rebuilt"]:
            yield f"  rebuilt  {file['file']}: {file['cause']}"
        for loss in store["losses"]:
            last = loss["first_page"] + loss["pages"] - 1
            pages = f"page {last}" if loss["pages"] == 1 else f"pages {loss['first_page']} to {last}"
            share = (loss["hi"] - loss["lo"] + 1) / 2**64
            yield (
                f"  lost     {loss['file']} {pages}: {loss['cause']}: {plural(loss['rows'], 'row')} with hash "
                f"{loss['lo']:#018x} to {loss['hi']:#018x} ({share:.2%} of all hashes), "
                f"in commits {', '.join(map(str, sorted(loss['epochs'])))}"
            )
        for commit in store["lost_commits"]:
            yield f"  lost     commit {commit['epoch']}: {commit['cause']}"
        for name in store["set_aside"]:
            yield f"  kept     damaged/{name}"
    hidden = sum(store["rows_hidden"] for store in report["stores"])
    if report["dry_run"] and hidden:
        yield (
            f"  note     the repair also removes {plural(hidden, 'row')} in these hash ranges, over all commits, whose "
            "newest version may be lost; --keep-older keeps them"
        )
    for problem in report["problems"]:
        yield f"  PROBLEM  {problem}"
    yield summary(report)


def summary(report: Report) -> str:
    """Return the result in one line."""
    stores = report["stores"]
    count = {name: sum(len(store[name]) for store in stores) for name in ("rebuilt", "losses", "lost_commits")}
    problems = f"; remaining problems: {len(report['problems'])}" if report["problems"] else ""
    if not stores and report["problems"]:
        return f"{report['path']} cannot be repaired; problems: {len(report['problems'])}"
    if not any(count.values()):
        return f"{report['path']}: nothing to repair in {plural(len(stores), 'store')}{problems}"
    rows = sum(loss["rows"] for store in stores for loss in store["losses"])
    hidden = sum(store["rows_hidden"] for store in stores)
    parts = [f"{plural(count['rebuilt'], 'file')} rebuilt"]
    if count["losses"]:
        older = f", {plural(hidden, 'other row')} in these ranges removed, which may be out of date" if hidden else ""
        parts.append(f"{plural(rows, 'row')} lost in {plural(count['losses'], 'hash range')}{older}")
    if count["lost_commits"]:
        parts.append(f"{plural(count['lost_commits'], 'commit')} lost")
    if len(parts) == 1:
        parts.append("nothing lost")
    verb = "would be repaired" if report["dry_run"] else "repaired"
    kept = "" if report["dry_run"] else "; the replaced files are in damaged/ of each store"
    return f"{report['path']} {verb}: {', '.join(parts)}{kept}{problems}"

"""What a folder holds, without changing it: a store, a run, or one checkpoint of a run.

Works while another process trains: stores are opened on their newest commit, read only. Figures come as plain values
(`inspect`), or as lines to read (`describe`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, SupportsIndex

from thermocline.errors import ConfigError, IoError, NotFoundError, StoreError, ThermoclineError
from thermocline.tiers.ssd import SsdStore
from thermocline.utils import atomic_file
from thermocline.utils.text_format import format_size, plural

Report = dict[str, Any]
_TRIES = 5


def inspect(path: str | os.PathLike[str], *, check: bool = False, mem: str | SupportsIndex = "256MB") -> Report:
    """Figures of a store, a run's folder or a checkpoint's manifest; "problems" is empty if all is well.

    check   verifies every byte of every store and file it names
    mem     DRAM that opening a store may use
    """
    place = Path(path)
    if (place / "STORE").exists():
        return _store(place, check, mem)
    if (place / "checkpoints").is_dir():
        return _run(place, check, mem)
    if place.suffix == ".json" and place.parent.name == "checkpoints" and place.exists():
        return _checkpoint(place, check, mem)
    if not place.exists():
        raise ConfigError(f"{path}: there is no such file or folder")
    raise ConfigError(
        f"{path} is neither a store (a folder with a file STORE), nor a run (a folder with checkpoints), nor a "
        "checkpoint (checkpoints/<number>.json of a run)"
    )


# ---- a store


def _store(path: Path, check: bool, mem: str | SupportsIndex, epoch: int | None = None) -> Report:
    """Looks again when a writer has committed meanwhile: what was open may have been released by it."""
    for _ in range(_TRIES):
        before = _commits(path)
        try:
            return _look_at_store(path, check, mem, epoch)
        except (IoError, NotFoundError) as error:
            if _commits(path) == before:  # no writer's doing
                return {"kind": "store", "path": str(path), "problems": [str(error)]}
    raise ThermoclineError(f"{path} is committed to faster than it can be read: try again, or stop the run")


def _commits(path: Path) -> set[str]:
    return {file.name for file in path.glob("MANIFEST-*")}


def _look_at_store(path: Path, check: bool, mem: str | SupportsIndex, epoch: int | None) -> Report:
    report: Report = {"kind": "store", "path": str(path), "problems": []}
    try:
        with SsdStore.open(path, read_only=True, mem_budget=mem, epoch=epoch) as store:
            stats = store.stats()
            report |= {
                "row_bytes": store.row_bytes,
                "epoch": store.epoch,
                "epochs": list(store.epochs),
                "note": store.note.decode(errors="replace"),
                "disk_bytes": stats.disk_bytes,
                "base_bytes": stats.base_bytes,
                "log_bytes": stats.log_bytes,
                "files": stats.live_files,
                "partitions": stats.partitions,
                "index_bytes": stats.mem_index,
            }
            report["keys"] = len(store)
            if check:
                store.check()
                report["checked"] = True
    except (IoError, NotFoundError):
        raise
    except StoreError as error:
        report["problems"].append(str(error))
    return report


# ---- a run


def _run(path: Path, check: bool, mem: str | SupportsIndex) -> Report:
    config = path / "config.toml"
    report: Report = {"kind": "run", "path": str(path), "config": str(config) if config.exists() else None}
    report |= {"problems": [], "checkpoints": [], "stores": []}
    for manifest in sorted((path / "checkpoints").glob("[0-9]*.json")):
        try:
            report["checkpoints"].append(_manifest(manifest))
        except FileNotFoundError:
            continue  # replaced by a newer one while we looked
        except StoreError as error:
            report["problems"].append(str(error))
    for checkpoint in report["checkpoints"] if check else ():
        report["problems"] += _files_of(Path(checkpoint["path"]), checkpoint)
    newest = report["checkpoints"][-1] if report["checkpoints"] else None
    for name, place, _ in _stores_of(path, newest):
        found = _store(place, check, mem)
        report["stores"].append({"table": name, **found})
        report["problems"] += found["problems"]
    report["last"] = _last_line(path / "metrics.jsonl")
    return report


def _stores_of(run_dir: Path, checkpoint: Report | None) -> Iterator[tuple[str, Path, int]]:
    """The folders of the tables' rows, inside the run or where its config says, and the checkpoint's epoch in each."""
    for name, table in (checkpoint or {"tables": {}})["tables"].items():
        place = run_dir / "stores" / name
        if table["ssd"]:
            if not (run_dir / "config.toml").exists():
                continue
            from thermocline.config.schema import Config

            ssd = Config.load(run_dir / "config.toml").relocated(run_dir).tiers.ssd
            if ssd is None:
                continue
            place = Path(ssd)
        assert checkpoint is not None
        if checkpoint["ranks"] is None:
            yield name, place, table["epoch"]
        for rank in checkpoint["ranks"] or ():
            yield name, place / rank["stores"][name]["folder"], rank["stores"][name]["epoch"]


def _last_line(path: Path) -> Report | None:
    """The newest whole line of metrics.jsonl."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            row: Report = json.loads(line)
        except ValueError:
            continue  # being written
        return row
    return None


# ---- a checkpoint


def _manifest(path: Path) -> Report:
    manifest = atomic_file.decode_manifest(path.read_bytes(), str(path))
    names = ("step", "tag", "time", "begin", "versions", "torch_threads", "position", "tables", "files", "ranks")
    return {"kind": "checkpoint", "path": str(path), **{name: manifest.get(name) for name in names}, "problems": []}


def _files_of(path: Path, checkpoint: Report) -> list[str]:
    """What is wrong with the files that a manifest names."""
    problems = []
    for name, expected in checkpoint["files"].items():
        try:
            data = (path.parent / name).read_bytes()
        except FileNotFoundError:
            if path.exists():  # else both were replaced while we looked
                problems.append(
                    f"{path.parent / name} is missing: the checkpoint of step {checkpoint['step']} needs it"
                )
            continue
        if len(data) != expected["bytes"] or atomic_file.digest(data) != expected["sha256"]:
            problems.append(f"{path.parent / name} is damaged: its checksum is not the one its manifest has")
    return problems


def _checkpoint(path: Path, check: bool, mem: str | SupportsIndex) -> Report:
    try:
        report = _manifest(path)
    except StoreError as error:
        return {"kind": "checkpoint", "path": str(path), "problems": [str(error)], "stores": []}
    report["problems"] += _files_of(path, report)
    report["stores"] = []
    for name, place, epoch in _stores_of(path.parent.parent, report):
        found = _store(place, check, mem, epoch=epoch)
        report["stores"].append({"table": name, **found})
        report["problems"] += found["problems"]
    return report


# ---- in words


def describe(report: Report) -> Iterator[str]:
    """Lines for a person."""
    kind = report["kind"]
    yield f"{kind} {report['path']}"
    if kind == "store":
        yield from _describe_store(report, "  ")
    elif kind == "run":
        yield from _describe_run(report)
    elif "step" in report:
        yield from _describe_checkpoint(report, "  ")
    for store in report.get("stores", ()):
        yield f"  rows of {store['table']}: {store['path']}"
        yield from _describe_store(store, "    ")
    for problem in report["problems"]:
        yield f"  PROBLEM  {problem}"
    if not report["problems"]:
        checked = report.get("checked") or any(store.get("checked") for store in report.get("stores", ()))
        yield "  healthy: every byte verified" if checked else "  no problem met (--check verifies every byte)"


def _describe_store(store: Report, indent: str) -> Iterator[str]:
    if "epoch" not in store:
        return
    if "keys" in store:
        yield f"{indent}{plural(store['keys'], 'key')}, {store['row_bytes']} bytes a row"
    base, log = format_size(store["base_bytes"]), format_size(store["log_bytes"])
    disk, files = format_size(store["disk_bytes"]), plural(store["files"], "file")
    yield f"{indent}{disk} on disk in {files}: base {base}, log {log}; index {format_size(store['index_bytes'])}"
    epochs = ", ".join(map(str, store["epochs"]))
    yield f"{indent}commit {store['epoch']}; retained: {epochs or 'none'}"


def _describe_run(run: Report) -> Iterator[str]:
    yield f"  config {run['config'] or 'none: not trained by `thermocline train`'}"
    for checkpoint in run["checkpoints"]:
        yield from _describe_checkpoint(checkpoint, "  ")
    if not run["checkpoints"]:
        yield "  no checkpoints"
    if last := run["last"]:
        figures = [f"{name} {last[name]:.4f}" for name in ("loss", "auc", "logloss") if last.get(name) is not None]
        speed = [f"{last['examples_per_s']:,.0f} examples/s"] if last.get("examples_per_s") else []
        yield f"  last line of metrics.jsonl: {last.get('event')} at step {last.get('step')}, " + ", ".join(
            figures + speed
        )


def _describe_checkpoint(checkpoint: Report, indent: str) -> Iterator[str]:
    what = "the run's beginning" if checkpoint["begin"] else f"step {checkpoint['step']}"
    tag = f" ({checkpoint['tag']})" if checkpoint["tag"] else ""
    size = sum(file["bytes"] for file in checkpoint["files"].values())
    name = Path(checkpoint["path"]).name
    yield f"{indent}checkpoint {name}: {what}{tag}, {checkpoint['time']}, dense {format_size(size)}"
    for name, table in checkpoint["tables"].items():
        layout = table["layout"]
        yield (
            f"{indent}  table {name}: dim {layout['dim']}, {layout['optimizer']['kind']}, commit {table['epoch']}, "
            f"{plural(table['step_count'], 'step')}"
            + (f", {plural(len(checkpoint['ranks']), 'rank')}" if checkpoint["ranks"] else "")
        )

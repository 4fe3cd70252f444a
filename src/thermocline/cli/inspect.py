"""Contents and damage of a store, a run, or one checkpoint of a run. Read-only.

It works while another process trains: stores are opened read-only at their newest commit. `inspect` returns plain
values, `describe` formats them as lines.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, SupportsIndex

from thermocline.checkpoint.manifest import read_manifest, run_of_note, sha256_hex
from thermocline.core import core
from thermocline.errors import ConfigError, IoError, NotFoundError, StoreError, ThermoclineError
from thermocline.tiers.ssd import SsdStore
from thermocline.utils.text_format import format_size, parse_size, plural
from thermocline.utils.untrusted_files import confined_path, read_limited

Report = dict[str, Any]
_ATTEMPTS = 5


def inspect(path: str | os.PathLike[str], *, check: bool = False, mem: str | SupportsIndex | None = None) -> Report:
    """Report on a store, the folder of a run or the manifest of a checkpoint; "problems" lists all damage.

    check   verify every byte of the stores and files
    mem     DRAM for opening a store; default: that of `SsdStore.open`
    """
    target = Path(path)
    if (target / "STORE").exists():
        return _inspect_store(target, check, mem)
    if (target / "checkpoints").is_dir():
        return _inspect_run(target, check, mem)
    if target.suffix == ".json" and target.parent.name == "checkpoints" and target.exists():
        return _inspect_checkpoint(target, check, mem)
    if not target.exists():
        raise ConfigError(f"{path}: there is no such file or folder")
    raise ConfigError(
        f"{path} is neither a store (a folder with a file STORE), nor a run (a folder with checkpoints), nor a "
        "checkpoint (checkpoints/<number>.json of a run)"
    )


# ---- stores


def _inspect_store(path: Path, check: bool, mem: str | SupportsIndex | None, epoch: int | None = None) -> Report:
    """Retry after a commit of a concurrent writer, which may have removed files of the open epoch."""
    for _ in range(_ATTEMPTS):
        before = _commits(path)
        try:
            return _read_store(path, check, mem, epoch)
        except (IoError, NotFoundError) as error:
            if _commits(path) == before:  # no concurrent commit: the store is damaged
                more = _damage_of_closed(path, mem, str(error)) if check else []
                return {"kind": "store", "path": str(path), "problems": [str(error), *more]}
    raise ThermoclineError(f"{path} cannot be read between two commits of its writer: try again, or stop the run")


def _commits(path: Path) -> set[str]:
    return {file.name for file in path.glob("MANIFEST-*")}


def _read_store(path: Path, check: bool, mem: str | SupportsIndex | None, epoch: int | None) -> Report:
    report: Report = {"kind": "store", "path": str(path), "problems": []}
    try:
        with warnings.catch_warnings(record=True, action="always") as caught:  # damage that does not prevent opening
            opened = SsdStore.open(path, read_only=True, mem_budget=mem, epoch=epoch)
        report["problems"] += [str(warning.message) for warning in caught]
        with opened as store:
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
            if check:
                found = store.find_damage()
                report["problems"] += [text for text in found if not _is_known(text, report["problems"])]
                report["checked"] = True
            report["keys"] = len(store)
    except (IoError, NotFoundError):
        raise
    except StoreError as error:
        if not _is_known(str(error), report["problems"]):
            report["problems"].append(str(error))
        if check and "checked" not in report:
            report["problems"] += _damage_of_closed(path, mem, str(error))
    return report


def _is_known(text: str, problems: list[str]) -> bool:
    return any(text in problem for problem in problems)


def _damage_of_closed(path: Path, mem: str | SupportsIndex | None, known: str) -> list[str]:
    """Return the damage of a store that cannot be opened, without that of the message `known`; [] if it is in use."""
    try:
        found = core.repair_store(os.fsencode(path), True, True, parse_size("256MB" if mem is None else mem, "mem"))
    except ThermoclineError:
        return []
    texts = [f"{path / file['file']}: {file['cause']}" for file in found["rebuilt"]]
    for loss in found["losses"]:
        texts.append(
            f"{path / loss['file']}: page {loss['first_page']}: {loss['cause']} ({plural(loss['rows'], 'row')})"
        )
    texts += [commit["cause"] for commit in found["lost_commits"]]
    return [text for text in texts if text not in known]


# ---- runs


def _inspect_run(path: Path, check: bool, mem: str | SupportsIndex | None) -> Report:
    config = path / "config.toml"
    report: Report = {"kind": "run", "path": str(path), "config": str(config) if config.exists() else None}
    report |= {"problems": [], "checkpoints": [], "stores": []}
    for manifest in sorted((path / "checkpoints").glob("[0-9]*.json")):
        try:
            report["checkpoints"].append(read_checkpoint(manifest))
        except FileNotFoundError:
            continue  # replaced by a newer checkpoint meanwhile
        except StoreError as error:
            report["problems"].append(str(error))
    for checkpoint in report["checkpoints"] if check else ():
        report["problems"] += _files_of(Path(checkpoint["path"]), checkpoint)
    for checkpoint in report["checkpoints"][-1:]:
        for name, folder, _ in stores_of(path, checkpoint):
            store = inspect_store_of(path, checkpoint, folder, check, mem)
            report["stores"].append({"table": name, **store})
            report["problems"] += store["problems"]
        named = {store["table"] for store in report["stores"]}
        report["unnamed"] = [name for name in checkpoint["tables"] if name not in named]
    report["last"] = _last_line(path / "metrics.jsonl")
    return report


def stores_of(run_dir: Path, checkpoint: Report) -> Iterator[tuple[str, Path, int]]:
    """Yield table name, store folder (in the run or from its config) and epoch for each store of a checkpoint."""
    for name, table in checkpoint["tables"].items():
        folder = run_dir / "stores" / name
        if table["ssd"]:
            if not (run_dir / "config.toml").exists():
                continue
            from thermocline.training.run_dir import config_of

            ssd = config_of(run_dir).tiers.ssd
            if ssd is None:
                continue
            folder = Path(ssd)
        if checkpoint["ranks"] is None:
            yield name, folder, table["epoch"]
        for rank in checkpoint["ranks"] or ():
            yield name, folder / rank["stores"][name]["folder"], rank["stores"][name]["epoch"]


def inspect_store_of(
    run_dir: Path,
    checkpoint: Report,
    folder: Path,
    check: bool,
    mem: str | SupportsIndex | None,
    epoch: int | None = None,
) -> Report:
    """Report on a store that a checkpoint names. One outside of the run's folder must have a commit of this run."""
    refused: Report = {"kind": "store", "path": str(folder), "problems": []}
    try:
        if checkpoint["ranks"] is not None:
            confined_path(folder.parent, folder.name, checkpoint["path"])
    except StoreError as error:
        return {**refused, "problems": [str(error)]}
    outside = not folder.resolve().is_relative_to(run_dir.resolve())
    store = _inspect_store(folder, check and not outside, mem, epoch)
    if not outside or "note" not in store:
        return store
    if run_of_note(store["note"]) != checkpoint["run"]:
        cause = f"{folder} is outside of {run_dir} and is not a store of this run: inspect it by its own path"
        return {**refused, "problems": [cause]}
    return _inspect_store(folder, check, mem, epoch) if check else store


def _last_line(path: Path) -> Report | None:
    """Return the newest complete line of metrics.jsonl, or None."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            row: Report = json.loads(line)
        except ValueError:
            continue  # incomplete: the run is writing it
        return row
    return None


# ---- checkpoints


def read_checkpoint(path: Path) -> Report:
    """Return the manifest of a checkpoint. Raises `CorruptionError`."""
    manifest = read_manifest(path)
    names = ("run", "step", "tag", "time", "begin", "versions", "torch_threads", "tables", "files", "ranks")
    return {"kind": "checkpoint", "path": str(path), **{name: manifest.get(name) for name in names}, "problems": []}


def _files_of(path: Path, checkpoint: Report) -> list[str]:
    """Return the damage of the files that a manifest lists."""
    problems = []
    for name, expected in checkpoint["files"].items():
        try:
            data = read_limited(confined_path(path.parent, name, str(path)), expected["bytes"])
        except StoreError as error:
            problems.append(str(error))
            continue
        except FileNotFoundError:
            if path.exists():  # else a newer checkpoint has replaced both
                problems.append(
                    f"{path.parent / name} is missing: the checkpoint of step {checkpoint['step']} needs it"
                )
            continue
        if len(data) != expected["bytes"] or sha256_hex(data) != expected["sha256"]:
            problems.append(f"{path.parent / name} is damaged: its checksum differs from the manifest")
    return problems


def _inspect_checkpoint(path: Path, check: bool, mem: str | SupportsIndex | None) -> Report:
    try:
        report = read_checkpoint(path)
    except StoreError as error:
        return {"kind": "checkpoint", "path": str(path), "problems": [str(error)], "stores": []}
    report["problems"] += _files_of(path, report)
    report["stores"] = []
    for name, folder, epoch in stores_of(path.parent.parent, report):
        store = inspect_store_of(path.parent.parent, report, folder, check, mem, epoch=epoch)
        report["stores"].append({"table": name, **store})
        report["problems"] += store["problems"]
    return report


# ---- text


def describe(report: Report) -> Iterator[str]:
    """Format a report as lines."""
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
    for name in report.get("unnamed", ()):
        yield f"  rows of {name}: not inspected; the run does not name their ssd folder: inspect that folder"
    for problem in report["problems"]:
        yield f"  PROBLEM  {problem}"
    if not report["problems"]:
        checked = report.get("checked") or any(store.get("checked") for store in report.get("stores", ()))
        yield "  healthy: every byte verified" if checked else "  no problems found (--check verifies every byte)"


def _describe_store(store: Report, indent: str) -> Iterator[str]:
    if "epoch" not in store:
        return
    if "keys" in store:
        yield f"{indent}{plural(store['keys'], 'key')}, {store['row_bytes']} bytes per row"
    base, log = format_size(store["base_bytes"]), format_size(store["log_bytes"])
    disk, files = format_size(store["disk_bytes"]), plural(store["files"], "file")
    yield f"{indent}{disk} on disk in {files}: base {base}, log {log}; index {format_size(store['index_bytes'])}"
    epochs = ", ".join(map(str, store["epochs"]))
    yield f"{indent}commit {store['epoch']}; retained: {epochs or 'none'}"


def _describe_run(run: Report) -> Iterator[str]:
    yield f"  config {run['config'] or 'not found: the run was not started by `thermocline train`'}"
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
    step = "start of the run" if checkpoint["begin"] else f"step {checkpoint['step']}"
    tag = f" ({checkpoint['tag']})" if checkpoint["tag"] else ""
    size = sum(file["bytes"] for file in checkpoint["files"].values())
    name = Path(checkpoint["path"]).name
    yield f"{indent}checkpoint {name}: {step}{tag}, {checkpoint['time']}, dense {format_size(size)}"
    for name, table in checkpoint["tables"].items():
        layout = table["layout"]
        yield (
            f"{indent}  table {name}: dim {layout['dim']}, {layout['optimizer']['kind']}, commit {table['epoch']}, "
            f"{plural(table['step_count'], 'step')}"
            + (f", statistics {', '.join(kept)}" if (kept := layout.get("statistics")) else "")
            + (f", {plural(len(checkpoint['ranks']), 'rank')}" if checkpoint["ranks"] else "")
        )

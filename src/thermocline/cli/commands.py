"""What the commands do, one function each: config and names in, figures out. Progress is on stderr."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from thermocline.batch import Batch
from thermocline.cli.progress_bar import counted, watched
from thermocline.config.data import Data, Split, Synth
from thermocline.config.loader import toml_value
from thermocline.config.schema import Config
from thermocline.data.open import check_paths, open_data
from thermocline.distributed.launch import leads
from thermocline.errors import ConfigError
from thermocline.training.callbacks import Callback, Row
from thermocline.utils.text_format import plural

_PART = re.compile(r"part-\d{5,}\.(parquet|libsvm|libffm)")
"""As `SyntheticAds.write` names the files of a folder."""


class FirstStep(Callback):
    """Says how long the process took to get there."""

    def on_step(self, trainer: Any, loss: object) -> None:
        if self.seconds is None:
            self.seconds = _age_of_process()
            print(f"first step after {self.seconds:.1f} s", flush=True)

    seconds: float | None = None


def _age_of_process() -> float:
    """Seconds since it began, by the kernel's books."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def train(config: Config, *, resume: bool) -> list[str]:
    """Trains in the config's run_dir; returns what else there is to say."""
    from thermocline.training.run import Run

    splits: tuple[Split, ...] = ("train", "valid", "test")
    with Run(config) as run:
        if leads():
            print(f"training on {run.place}", flush=True)
        run.fit(resume=resume, callbacks=[FirstStep()] if leads() else [])
        return [f"{split} data: {text}" for split in splits if (text := skipped(run.loader(split)))]


# ---- what was trained


def evaluate(run_dir: str, files: Sequence[str], sets: Sequence[str], checkpoint: str | None) -> Row:
    """Exact metrics of a trained run, on its own test data or on other files."""
    with _loaded(run_dir, files, sets, checkpoint) as run:
        batches = run.loader("test")
        with watched("evaluating", _examples(batches, run.config)) as advance:
            return {"step": run.step, **run.evaluate(counted(batches, advance)), "skipped": skipped(batches)}


def predict(run_dir: str, files: Sequence[str], out: str, sets: Sequence[str], checkpoint: str | None) -> Row:
    """One score per example into the file `out`, in the order of the files: one left out would shift all others."""
    from thermocline.training.prediction_writer import write_scores, writer_of

    writer_of(out)  # before the work
    with _loaded(run_dir, files, sets, checkpoint, labelled=False, strict=True) as run:
        batches = run.loader("test")
        with watched("predicting", _examples(batches, run.config)) as advance:
            count = write_scores(out, run.scores(counted(batches, advance)))
        return {"step": run.step, "scores": count, "out": out, "skipped": skipped(batches)}


def _loaded(
    run_dir: str,
    files: Sequence[str],
    sets: Sequence[str],
    checkpoint: str | None,
    *,
    labelled: bool = True,
    strict: bool = False,
) -> Any:
    """strict: a malformed line is an error whatever the run's own setting, unless `sets` has another."""
    from thermocline.training.run import Run
    from thermocline.training.run_dir import config_of

    config = config_of(run_dir, sets)
    if strict and not any(override.partition("=")[0].strip() == "data.on_error" for override in sets):
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, on_error="raise"))
    if files:
        if config.data.format == "synth":
            raise ConfigError(f"{run_dir} was trained on generated data: files have no place in it; leave them out")
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, test=tuple(files)))
    elif config.data.format != "synth" and not config.data.test:
        raise ConfigError(f"{run_dir} has no data.test: name the files")
    which = int(checkpoint) if checkpoint is not None and checkpoint.isdigit() else checkpoint
    return Run.load(run_dir, checkpoint=which, config=config, labelled=labelled)


def _examples(batches: Any, config: Config) -> int | None:
    """Roughly how many there will be."""
    try:
        return len(batches) * config.train.batch_size
    except TypeError:
        estimate = getattr(batches, "estimated_batches", None)
        return None if estimate is None else estimate() * config.train.batch_size


def skipped(batches: Any) -> str | None:
    """What on_error = "skip" left out of the latest pass, in words; none: nothing."""
    found = getattr(batches, "skipped", None)
    if found is None or not found.count:
        return None
    were = plural(found.count, "malformed line was", "malformed lines were")
    return f"{were} skipped; the first: {found.malformed[0]}"  # counts lines of one only


# ---- before training


def hardware(path: Path | None, into: Path | None) -> Any:
    """A node's figures: a file's, the source's, or measured now, which `into` then keeps."""
    from thermocline.planner.hardware import Hardware, paper_node
    from thermocline.utils import atomic_file

    kind, _, name = ("", "", "") if path is None else str(path).partition(":")
    if kind == "paper" and name:
        return paper_node(Hardware.load(name).cpu, f"of {name}")
    if path is not None and kind != "paper":
        return Hardware.load(path)
    from thermocline.planner.calibrate import PARTS, measure

    keeping = "--measure FILE keeps the figures, --hardware FILE reads them" if into is None else f"kept in {into}"
    print(f"measuring this machine, which takes minutes ({keeping})", file=sys.stderr, flush=True)
    with watched("measuring this machine", PARTS, "parts") as advance:
        found = measure(None if into is None else into.absolute().parent, lambda: advance(1))
    if into is not None:
        atomic_file.atomic_write(into, found.to_toml().encode())
        print(f"measured into {into}: --hardware {into} reads it", file=sys.stderr, flush=True)
    return found if path is None else paper_node(found.cpu, "measured on this machine now")


def plan(config: Config, path: Path | None, into: Path | None, *, nodes: int, ranks: int | None) -> Row:
    """What a step of the config takes on nodes of `hardware(path, into)`: what is wrong shows before any measuring."""
    from thermocline.planner.cost_model import predict
    from thermocline.planner.workload import cluster_of, workload_of

    measured = path is None or str(path) == "paper"
    node = None if measured else hardware(path, into)
    work = workload_of(config)
    node = hardware(path, into) if node is None else node
    cluster = cluster_of(config, work, node, nodes=nodes, ranks=ranks)
    return {
        "hardware": {"name": node.name, "source": node.source},
        "cluster": dataclasses.asdict(cluster),
        "workload": work.figures(),
        **predict(work, cluster, node).to_json(),
    }


def print_plan(report: Row) -> None:
    """As tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    cluster, work, node = report["cluster"], report["workload"], report["hardware"]
    kinds = ("GPU", "GPUs") if cluster["gpu"] else ("rank on cores", "ranks on cores")
    console.print(
        f"{work['name']}: {work['keys']:,.0f} keys of {work['row_bytes']} bytes, {work['nonzeros']:.4g} per example, "
        f"{work['dense_parameters']:,} dense parameters, {work['batch']:,} examples per rank and step"
    )
    console.print(f"{cluster['nodes']} x {plural(cluster['ranks'], *kinds)}; {node['name']}: {node['source']}")
    table = Table(title=f"a step: {report['step_seconds'] * 1e3:.3g} ms, {report['examples_per_s']:,.0f} examples/s")
    for column in ("stage", "resource", "ms", "what"):
        table.add_column(column, justify="right" if column == "ms" else "left")
    for term in report["terms"]:
        table.add_row(term["stage"], term["resource"], f"{term['seconds'] * 1e3:.3f}", term["what"])
    console.print(table)
    for what in ("stages", "resources"):
        parts = sorted(report[what].items(), key=lambda item: -item[1])
        console.print(f"{what}: " + ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in parts))
    figures = report["figures"]
    console.print(
        f"unique keys: {figures['rank_unique']:,.0f} of a rank, {figures['node_unique']:,.0f} of a node, "
        f"{figures['world_unique']:,.0f} of all; {figures['hits']:.1%} of the rows pulled are found above SSD"
    )
    console.print(f"slowest stage: {report['slowest_stage']}; slowest resource: {report['slowest_resource']}")


# ---- data


def stats(config: Config, split: Split, examples: int | None) -> Row:
    """Keys, skew and sizes of a split's data, for the config's model; of its first `examples` only, if given."""
    from thermocline.data import key_stats as figures
    from thermocline.models import row_dim
    from thermocline.training.run import row_optimizer

    config = config.resolve()
    check_paths(config.data, ["train", split])
    size = config.train.batch_size
    batches = open_data(config.data, split, batch_size=size, shuffle=False, labelled=None, tensors=False)
    total = _examples(batches, config)
    read: Iterable[Batch] = batches
    if examples is not None:
        total = examples if total is None else min(total, examples)
        read = itertools.islice(batches, -(-examples // config.train.batch_size))
    with watched("counting", total) as advance:
        report, counts = figures.count(read, advance)
    for field, name in zip(report["per_field"], getattr(batches, "field_names", ()), strict=False):
        field["name"] = name
    optimizer = row_optimizer(config)
    pinned = config.train.depth * config.train.pull_window
    sizes = figures.suggest(counts, report["batches"], row_dim(config.model), optimizer, pinned, config.precision)
    report["model"] = {"name": config.model.name, "optimizer": config.train.optimizer, **sizes}
    return {**report, "batch_size": config.train.batch_size, "skipped": skipped(batches)}


def write_synth(
    synth: Synth, folder: str, format: Any, examples_per_file: int | None, *, force: bool = False
) -> tuple[list[Path], str]:
    """Writes train, valid and test files; returns them, and the [data] section that reads them.

    force   replaces what is there under the same names; otherwise that is an error
    """
    if synth.dense and format != "parquet":
        raise ConfigError(f"--dense is {synth.dense}, but {format} files hold ids only: write --format parquet")
    target = Path(folder)
    data = Data(format="synth", synth=synth)
    sizes: dict[Split, int] = {"train": synth.examples, "valid": synth.valid_examples, "test": synth.test_examples}
    paths = {split: target / (split if examples_per_file else f"{split}.{format}") for split in sizes if sizes[split]}
    parts: dict[Split, Any] = {split: open_data(data, split, batch_size=4096, tensors=False) for split in paths}
    _clear(list(paths.values()), force, split_up=examples_per_file is not None)
    target.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    lines = ["[data]"]
    with watched("writing", sum(sizes.values())) as advance:
        for split, path in paths.items():
            written += parts[split].write(path, format, examples_per_file=examples_per_file, progress=advance)
            lines.append(f"{split} = {toml_value([str(path)])}")
    lines += [f"format = {toml_value(format)}", "raw_keys = true"]
    if synth.dense:
        lines.append('numeric = ["dense_*"]')
    return written, "\n".join(lines)


def _clear(paths: Sequence[Path], force: bool, split_up: bool) -> None:
    """Raises if there are files already; with `force`, those of folders go, so that none is read among the new ones.

    Only what an earlier call may have written goes: other files in its place are an error, whatever is allowed.
    """
    parts = [file for path in paths if split_up and path.is_dir() for file in sorted(path.iterdir()) if file.is_file()]
    parts = [file for file in parts if not file.name.startswith((".", "_"))]  # which readers of the folder pass over
    strange = [path for path in paths if path.exists() and path.is_dir() != split_up]
    strange += [file for file in parts if not _PART.fullmatch(file.name)]
    if strange:
        raise ConfigError(f"{strange[0]} is in the way, and not of `data synth`: choose another folder")
    found = parts if split_up else [path for path in paths if path.exists()]
    if found and not force:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise ConfigError(f"{found[0]}{more} would be replaced: --force allows it; or choose another folder")
    for file in parts:
        file.unlink()


def lines_of(rows: Iterable[tuple[str, Any]]) -> str:
    """`name value` pairs in one line."""
    rows = [(name, value) for name, value in rows if isinstance(value, (int, float))]
    return "  ".join(f"{name} {value:.6f}" if isinstance(value, float) else f"{name} {value:,}" for name, value in rows)

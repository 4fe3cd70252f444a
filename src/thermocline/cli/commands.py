"""Implementation of the commands, one function each. They return results; progress is printed on stderr."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import tomli_w

from thermocline.batch import Batch
from thermocline.cli.progress_bar import count_examples, progress
from thermocline.cli.startup_progress import startup_progress
from thermocline.config.data import Data, Split, Synth
from thermocline.config.schema import Config
from thermocline.data.files import without_secrets
from thermocline.data.open_data import check_paths, open_data
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.distributed.launch import is_rank0
from thermocline.errors import ConfigError
from thermocline.training.callbacks import Callback, Row
from thermocline.utils import atomic_file
from thermocline.utils.startup import report_phase
from thermocline.utils.text_format import format_size, plural

if TYPE_CHECKING:
    from thermocline.training.run import Run

_PART = re.compile(r"part-\d{5,}\.(parquet|libsvm|libffm)")
"""File names of `SyntheticAds.write`."""


class FirstStep(Callback):
    """Prints the time from the start of the process to the end of the first step."""

    seconds: float | None = None

    def on_step(self, trainer: Any, loss: object) -> None:
        if self.seconds is None:
            self.seconds = _process_age()
            print(f"first step after {self.seconds:.1f} s", flush=True)


def _process_age() -> float:
    """Return the seconds since the kernel started this process."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def train(config: Config, *, resume: bool) -> list[str]:
    """Train in the config's run_dir; return one note per split with malformed lines."""
    splits: tuple[Split, ...] = ("train", "valid", "test")
    if config.data.follow and is_rank0():  # opening the data waits for the first file
        print(f"following {without_secrets(config.data.train[0])}", flush=True)
    with startup_progress() if is_rank0() else nullcontext():
        report_phase("loading torch")
        from thermocline.training.run import Run

        with Run(config, resume=resume) as run:
            rank0: dict[str, Any] = {"callbacks": [FirstStep()], "on_locked": lambda: _print_start(run, resume)}
            run.fit(resume=resume, **(rank0 if is_rank0() else {}))
            return [f"{split} data: {text}" for split in splits if (text := skipped(run.loader(split), run.runner))]


def _print_start(run: Run, resume: bool) -> None:
    if resume and not run.folder.has_run:
        print(f"{run.config.train.run_dir} has nothing saved to resume: starting a new run")
    for change in run.changes:
        print(f"changed {change}")
    print(f"training on {run.device_text}", flush=True)


# ---- trained runs


def evaluate(
    run_dir: str, files: Sequence[str], sets: Sequence[str], checkpoint: str | None, *, allow_remote_data: bool = False
) -> Row:
    """Compute exact metrics of a trained run, on its test data or on other files. Under torchrun, over all ranks."""
    with _load_run(run_dir, files, sets, checkpoint, allow_remote_data=allow_remote_data) as run:
        batches = run.loader("test")
        with _progress("evaluating", batches, run.config) as advance:
            figures = run.evaluate(count_examples(batches, advance))
        return {"step": run.step, **figures, "skipped": skipped(batches, run.runner)}


def predict(
    run_dir: str,
    files: Sequence[str],
    out: str,
    sets: Sequence[str],
    checkpoint: str | None,
    *,
    ids: Sequence[str] = (),
    overwrite: bool = False,
    allow_remote_data: bool = False,
) -> Row:
    """Write one score per example to the file `out`, in the order of the files. Under torchrun, over all ranks.

    ids   columns of the data that are written beside the score
    """
    from thermocline.training.prediction_writer import write_scores, writer_of

    writer_of(out)  # raises before any work is done
    if ids and out.endswith(".npy"):
        raise ConfigError(f"--id needs columns, which {out!r} cannot have: write .csv or .parquet")
    if "score" in ids:
        raise ConfigError('--id is "score", the name of the column of scores: rename the column of the data')
    if not overwrite and Path(out).exists():
        raise ConfigError(f"--out is {out!r}, which exists: choose another file, or replace it with --overwrite")
    options: dict[str, Any] = {"scores": True, "allow_remote_data": allow_remote_data, "carry": ids}
    with _load_run(run_dir, files, sets, checkpoint, **options) as run:
        batches = run.loader("test")
        carried: collections.deque[dict[str, Any]] = collections.deque()
        with _progress("predicting", batches, run.config) as advance:
            read = count_examples(_keep_carried(batches, carried) if ids else batches, advance)
            scores = ({**(carried.popleft() if ids else {}), "score": part} for part in run.scores(read))
            count = write_scores(out, scores, run.runner)
        return {"step": run.step, "scores": count, "out": out, "skipped": skipped(batches, run.runner)}


def _keep_carried(batches: Any, carried: collections.deque[dict[str, Any]]) -> Iterator[Batch]:
    """Yield the batches, read ahead by a pipeline; append the carried columns of each."""
    for batch in batches:
        carried.append(batches.carried)
        yield batch


def _progress(title: str, batches: Any, config: Config) -> AbstractContextManager[Callable[[int], None]]:
    """Show progress on rank 0, of its part of the data."""
    return progress(title, _examples(batches, config)) if is_rank0() else nullcontext(lambda count: None)


def step_or_tag(checkpoint: str | None) -> int | str | None:
    """Parse --checkpoint: a step, or a tag such as "best"."""
    return int(checkpoint) if checkpoint is not None and checkpoint.isdigit() else checkpoint


def _load_run(
    run_dir: str,
    files: Sequence[str],
    sets: Sequence[str],
    checkpoint: str | None,
    *,
    scores: bool = False,
    allow_remote_data: bool,
    carry: Sequence[str] = (),
) -> Any:
    """Load a run to evaluate it on `files`.

    scores   for one score per example, in the order of the files: labels are not read; over ranks, each reads a
             consecutive part; malformed lines are errors, because a missing score would shift all later ones, unless
             `sets` changes it
    carry    columns of the data that are kept for each batch
    """
    from thermocline.training.run import Run
    from thermocline.training.run_dir import config_of

    config = config_of(run_dir, sets)
    given = {override.partition("=")[0].strip() for override in sets} | ({"data.test"} if files else set())
    if scores and "data.on_error" not in given:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, on_error="raise"))
    if files:
        if config.data.format == "synth":
            raise ConfigError(f"{run_dir} was trained on generated data: it cannot read files; leave them out")
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, test=tuple(files)))
    elif config.data.format != "synth" and not config.data.test:
        raise ConfigError(f"{run_dir} has no data.test: give data files on the command line")
    recorded = [split for split in get_args(Split) if f"data.{split}" not in given]
    return Run.load(
        run_dir, checkpoint=step_or_tag(checkpoint), config=config, labelled=not scores, contiguous=scores,
        recorded=recorded, allow_remote_data=allow_remote_data, carry=carry,
    )  # fmt: skip


def _examples(batches: Any, config: Config) -> int | None:
    """Estimate the number of examples, or return None."""
    try:
        return len(batches) * config.train.batch_size
    except TypeError:
        estimate = getattr(batches, "estimated_batches", None)
        return None if estimate is None else estimate() * config.train.batch_size


def skipped(batches: Any, runner: CollectiveRunner | None = None) -> str | None:
    """Describe the lines that on_error = "skip" skipped in the latest pass; None if there were none.

    runner   of a run over ranks: counts the lines of all ranks, which all call it
    """
    lines: Any = getattr(batches, "skipped", None)
    own = (lines.count, str(lines.malformed[0])) if lines is not None and lines.count else (0, "")
    counts, first = zip(*(runner or CollectiveRunner()).gather("counting skipped lines", lambda: own), strict=True)
    if not sum(counts):
        return None
    were = plural(sum(counts), "malformed line was", "malformed lines were")
    return f"{were} skipped; the first: {next(filter(None, first))}"


# ---- before training


def hardware(path: Path | None, into: Path | None) -> Any:
    """Return the measurements of a node: from a file, of the node of Zhao et al. (2020), or measured now.

    into   write the measurement to this file; with `path` "paper", its costs of a core are used
    """
    from thermocline.planner.hardware import Hardware, paper_node

    kind, _, name = ("", "", "") if path is None else str(path).partition(":")
    if kind == "paper" and (name or into is None):
        return paper_node(Hardware.load(name).cpu, f"of {name}") if name else paper_node()
    if path is not None and kind != "paper":
        return Hardware.load(path)
    if into is not None:  # before a minute of measuring
        atomic_file.make_writable(into.absolute().parent, "the folder of --measure")
    from thermocline.planner.calibrate import PARTS, measure

    target = "--measure FILE saves the result, --hardware FILE reads it" if into is None else f"saved to {into}"
    print(f"measuring this machine, which takes about a minute ({target})", file=sys.stderr, flush=True)
    with progress("measuring this machine", PARTS, "parts") as advance:
        measured = measure(None if into is None else into.absolute().parent, lambda: advance(1))
    if into is not None:
        atomic_file.atomic_write(into, measured.to_toml().encode())
        print(f"saved to {into}: use it with --hardware {into}", file=sys.stderr, flush=True)
    return measured if path is None else paper_node(measured.cpu, "measured on this machine now")


def plan(config: Config, path: Path | None, into: Path | None, *, nodes: int, ranks: int | None) -> Row:
    """Predict a step of the config on nodes of `hardware(path, into)`. The config is checked before measuring."""
    from thermocline.planner.cost_model import predict
    from thermocline.planner.workload import cluster_of, workload_of

    measures = path is None or (str(path) == "paper" and into is not None)
    node = None if measures else hardware(path, into)
    work = workload_of(config)
    node = hardware(path, into) if node is None else node
    cluster = cluster_of(config, work, node, nodes=nodes, ranks=ranks)
    predicted = predict(work, cluster, node).to_json()
    if predicted["lookahead"] is not None:
        off = dataclasses.replace(config, tiers=dataclasses.replace(config.tiers, lookahead=0))
        without = predict(work, cluster_of(off, work, node, nodes=nodes, ranks=ranks), node)
        predicted["lookahead"]["step_seconds_without"] = without.seconds
    return {
        "hardware": {"name": node.name, "source": node.source},
        "cluster": dataclasses.asdict(cluster),
        "workload": work.figures(),
        **predicted,
    }


_BOUNDS = {
    "bytes": "limited by its bytes",
    "rows": "limited by the rows that DRAM can pin",
    "batches": "limited by tiers.lookahead",
}


def print_plan(report: Row) -> None:
    """Print a prediction as tables."""
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
    for column in ("stage", "resource", "ms", "work"):
        table.add_column(column, justify="right" if column == "ms" else "left")
    for term in report["terms"]:
        table.add_row(term["stage"], term["resource"], f"{term['seconds'] * 1e3:.3f}", term["description"])
    console.print(table)
    for group in ("stages", "resources"):
        parts = sorted(report[group].items(), key=lambda item: -item[1])
        console.print(f"{group}: " + ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in parts))
    figures = report["figures"]
    console.print(
        f"unique keys: {figures['rank_unique']:,.0f} per rank, {figures['node_unique']:,.0f} per node, "
        f"{figures['world_unique']:,.0f} in total; {figures['hits']:.1%} of the pulled rows are in memory"
    )
    if (ahead := report["lookahead"]) is not None:
        console.print(
            f"look-ahead: {plural(ahead['batches'], 'batch', 'batches')} of a rank "
            f"({_BOUNDS[ahead['bounded_by']]}), {format_size(int(ahead['bytes']))} of "
            f"{format_size(ahead['limit_bytes'])} of tiers.mem; per batch {ahead['missing_rows']:,.0f} rows from SSD "
            f"in {ahead['reads']:,.0f} reads, {format_size(ahead['read_bytes'])}; a step without it: "
            f"{ahead['step_seconds_without'] * 1e3:.3g} ms"
        )
    console.print(f"slowest stage: {report['slowest_stage']}; slowest resource: {report['slowest_resource']}")


# ---- data


def stats(config: Config, split: Split, examples: int | None) -> Row:
    """Count keys, skew and sizes of a split for the config's model; `examples` limits it to the first ones."""
    from thermocline.data import key_stats
    from thermocline.embedding.row_statistics import RowStatistics
    from thermocline.models import row_dim
    from thermocline.planner.tier_sizing import suggest_sizes
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
    with progress("counting", total) as advance:
        report, counts = key_stats.count_keys(read, advance)
    for field, name in zip(report["per_field"], getattr(batches, "field_names", ()), strict=False):
        field["name"] = name
    optimizer = row_optimizer(config)
    pinned = config.train.depth * config.train.pull_window
    statistics = RowStatistics.of(config.rows.statistics)
    dim = row_dim(config.model)
    sizes = suggest_sizes(counts, report["batches"], dim, optimizer, pinned, config.precision, statistics)
    report["model"] = {"name": config.model.name, "optimizer": config.train.optimizer, **sizes}
    return {**report, "batch_size": config.train.batch_size, "skipped": skipped(batches)}


def write_synth(
    synth: Synth, folder: str, format: Any, examples_per_file: int | None, *, force: bool = False
) -> tuple[list[Path], str]:
    """Write train, valid and test files; return them, and the [data] section that reads them.

    force   replaces existing files; without it they are an error
    """
    if synth.dense and format != "parquet":
        raise ConfigError(f"--dense is {synth.dense}, but {format} files contain keys only: use --format parquet")
    target = Path(folder)
    data = Data(format="synth", synth=synth)
    sizes: dict[Split, int] = {"train": synth.examples, "valid": synth.valid_examples, "test": synth.test_examples}
    paths = {split: target / (split if examples_per_file else f"{split}.{format}") for split in sizes if sizes[split]}
    parts: dict[Split, Any] = {split: open_data(data, split, batch_size=4096, tensors=False) for split in paths}
    _remove_existing(list(paths.values()), force, folders=examples_per_file is not None)
    atomic_file.make_writable(target, "the output folder")
    written: list[Path] = []
    section: dict[str, Any] = {}
    with progress("writing", sum(sizes.values())) as advance:
        for split, path in paths.items():
            written += parts[split].write(path, format, examples_per_file=examples_per_file, progress=advance)
            section[split] = str(path)
    section |= {"format": format, "raw_keys": True}
    if synth.dense:
        section["numeric"] = "dense_*"
    return written, tomli_w.dumps({"data": section}).removesuffix("\n")


def _remove_existing(paths: Sequence[Path], force: bool, folders: bool) -> None:
    """Raise if output files exist; with `force`, remove the files of output folders, so that only new ones are read.

    Only files with names of `SyntheticAds.write` are removed. Other files are an error, also with `force`.
    """
    parts = [file for path in paths if folders and path.is_dir() for file in sorted(path.iterdir()) if file.is_file()]
    parts = [file for file in parts if not file.name.startswith((".", "_"))]  # readers skip these
    foreign = [path for path in paths if path.exists() and path.is_dir() != folders]
    foreign += [file for file in parts if not _PART.fullmatch(file.name)]
    if foreign:
        raise ConfigError(f"{foreign[0]} exists and was not written by `data synth`: choose another folder")
    existing = parts if folders else [path for path in paths if path.exists()]
    if existing and not force:
        more = f" and {len(existing) - 1} more" if len(existing) > 1 else ""
        raise ConfigError(f"{existing[0]}{more} would be replaced: add --force, or choose another folder")
    for file in parts:
        file.unlink()


def metrics_line(row: Row) -> str:
    """Format the numbers of a row as `name value` pairs in one line."""
    numbers = [(name, value) for name, value in row.items() if isinstance(value, (int, float))]
    return "  ".join(f"{name} {n:.6f}" if isinstance(n, float) else f"{name} {n:,}" for name, n in numbers)

"""Arguments of the commands that train a run, use it, and inspect and repair its files: see `commands.py`.

Large modules are imported where they are used, so that --help stays fast.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thermocline.cli.options import AllowRemoteData, Checkpoint, Debug, Files, Json, RunDir, Sets
from thermocline.cli.output import one_line, print_error, print_json, print_skipped

if TYPE_CHECKING:
    from thermocline.config.schema import Config

_GPU = Path("/dev/nvidiactl")
"""Exists where NVIDIA's driver is loaded."""


def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.toml", help="Config file; `thermocline schema` describes it.")
    ],
    sets: Sets = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in train.run_dir.")] = False,
    debug: Debug = False,
) -> None:
    """Train a model; write config.toml, metrics.jsonl, tensorboard and checkpoints to train.run_dir.

    Ctrl-C saves and exits; --resume continues, with the same bits as a run without interruption. Several GPUs or
    machines: torchrun --nproc-per-node G --nnodes N -m thermocline train CONFIG.toml; restarts resume automatically.
    """
    with one_line(debug):
        from thermocline.utils.preload import preload_torch

        preload_torch()
        from thermocline.config.schema import Config

        settings = Config.load(config, sets or ())
        _start_compile_workers(settings)
        from thermocline.cli import commands
        from thermocline.distributed.launch import is_rank0, is_single_rank, may_be_restart

        try:
            notes = commands.train(settings, resume=resume or may_be_restart())
        except (KeyboardInterrupt, SystemExit) as stopped:  # SIGTERM is the latter
            words = ["thermocline", "train", str(config), *(w for s in sets or () for w in ("--set", s)), "--resume"]
            print_error(f"interrupted; resume with: {shlex.join(words) if is_single_rank() else '--resume'}")
            raise typer.Exit(130 if isinstance(stopped, KeyboardInterrupt) else 143) from None
        for note in notes if is_rank0() else ():
            typer.echo(note, err=True)


def _start_compile_workers(settings: Config) -> None:
    """Start the processes that compile kernels for the GPU, if there is one and Triton's cache may lack kernels."""
    from thermocline.utils.compile_workers import is_used, workers

    if settings.tiers.device != "cpu" and is_used() and _GPU.exists():
        rows = (settings.model, settings.precision, settings.rows, settings.tiers.hbm)
        workers.start_early(repr((*rows, settings.train.optimizer, settings.train.lazy)))


def evaluate(
    run_dir: RunDir,
    files: Files = None,
    sets: Sets = None,
    checkpoint: Checkpoint = None,
    allow_remote_data: AllowRemoteData = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compute AUC, logloss, normalized entropy and calibration of a run. Read-only; works while the run trains.

    torchrun --nproc-per-node G -m thermocline eval RUN_DIR divides the data over ranks and prints one result.
    """
    with one_line(debug):
        from thermocline.cli import commands
        from thermocline.distributed.launch import is_rank0

        report = commands.evaluate(run_dir, files or (), sets or (), checkpoint, allow_remote_data=allow_remote_data)
        if not is_rank0():
            return
        if as_json:
            print_json(report)
        else:
            typer.echo(commands.metrics_line(report))
            print_skipped(report)


def predict(
    run_dir: RunDir,
    files: Files = None,
    out: Annotated[
        str,
        typer.Option(help="Output file: .csv, .parquet or .npy. Its folder is created."),
    ] = "scores.csv",
    ids: Annotated[
        list[str] | None,
        typer.Option("--id", metavar="COLUMN", help="Write this column of the data beside the score; repeatable."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False,
    sets: Sets = None,
    checkpoint: Checkpoint = None,
    allow_remote_data: AllowRemoteData = False,
    debug: Debug = False,
) -> None:
    """Write one score per example, in the order of the files. Read-only; works while the run trains.

    torchrun --nproc-per-node G -m thermocline predict RUN_DIR divides the data over ranks and writes the same one file,
    in the same order; its folder must be visible to all ranks.
    """
    with one_line(debug):
        from thermocline.cli import commands
        from thermocline.distributed.launch import is_rank0
        from thermocline.utils.text_format import plural

        report = commands.predict(
            run_dir, files or (), out, sets or (), checkpoint, ids=ids or (), overwrite=overwrite,
            allow_remote_data=allow_remote_data,
        )  # fmt: skip
        if not is_rank0():
            return
        typer.echo(f"{plural(report['scores'], 'score')} of step {report['step']} in {out}")
        print_skipped(report)


def inspect(
    path: Annotated[str, typer.Argument(help="A store, a run_dir, or a checkpoint's .json file.")],
    check: Annotated[bool, typer.Option("--check", help="Verify every byte.")] = False,
    mem: Annotated[str | None, typer.Option(help="DRAM for opening a store; default: an eighth of all.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show keys, sizes and damage of a store, a run or a checkpoint. Read-only; exit code 1 if something is damaged."""
    with one_line(debug):
        from thermocline.cli.inspect import describe, inspect as inspect_path
        from thermocline.errors import ConfigError
        from thermocline.utils.text_format import parse_size

        try:
            budget = None if mem is None else parse_size(mem, "--mem")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        report = inspect_path(path, check=check, mem=budget)
        if as_json:
            print_json(report)
        else:
            for line in describe(report):
                typer.echo(line)
    if report["problems"]:
        raise typer.Exit(1)


def repair(
    path: Annotated[str, typer.Argument(help="A store or a run_dir that no process has open.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report only; change no file.")] = False,
    keep_older: Annotated[
        bool,
        typer.Option("--keep-older", help="Keep older versions of rows whose newest version or deletion is lost."),
    ] = False,
    mem: Annotated[str, typer.Option(help="DRAM for each store.")] = "256MB",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Repair damaged files of a store or of the stores of a run. Exit code 1 if something is lost or remains damaged.

    Headers, fences, filters and key columns are rebuilt from the rows. Damaged rows are removed and listed by hash
    range; the replaced files are kept in the folder damaged/ of the store.
    """
    with one_line(debug):
        from thermocline.cli.repair import describe, is_lossless, repair as repair_path
        from thermocline.errors import ConfigError
        from thermocline.utils.text_format import parse_size

        try:
            budget = parse_size(mem, "--mem")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        report = repair_path(path, dry_run=dry_run, keep_older=keep_older, mem=budget)
        if as_json:
            print_json(report)
        else:
            for line in describe(report):
                typer.echo(line)
    if not is_lossless(report):
        raise typer.Exit(1)

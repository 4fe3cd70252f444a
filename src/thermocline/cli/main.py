"""The command line `thermocline`: options, output and exit codes. commands.py implements the commands.

Exit codes: 0 success; 1 runtime failure (data, budget, disk, checkpoints); 2 usage error (`ConfigError`: config, flags,
and the files and folders that they name); 130 Ctrl-C; 143 SIGTERM. Large modules are imported where they are used, so
that --help stays fast.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import warnings
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="thermocline",
    help=(
        "Train CTR models whose embedding tables exceed memory: rows in HBM, DRAM and on SSD, with exact results. "
        "Exit codes: 0 success; 1 runtime failure; 2 usage error; 130 Ctrl-C; 143 SIGTERM."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(no_args_is_help=True, help="Generate data files; measure keys and skew of data.")
app.add_typer(data_app, name="data")

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a key of the config, such as train.lr=0.01; repeatable."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunDir = Annotated[str, typer.Argument(metavar="RUN_DIR", help="Folder of a run (train.run_dir).")]
Files = Annotated[
    list[str] | None, typer.Argument(metavar="[FILE]...", help="Data files; default: data.test of the run.")
]
Checkpoint = Annotated[
    str | None, typer.Option(help="best, last, or a step; default: best if there is one, else last.")
]
AllowRemoteData = Annotated[
    bool,
    typer.Option("--allow-remote-data", help="Contact URLs that only the run's own config names, such as s3://."),
]


class Split(StrEnum):
    train = "train"
    valid = "valid"
    test = "test"


class ServedPrecision(StrEnum):
    fp32 = "fp32"
    fp16 = "fp16"
    int8 = "int8"


class ServedFormat(StrEnum):
    parquet = "parquet"
    safetensors = "safetensors"


class Format(StrEnum):
    parquet = "parquet"
    libsvm = "libsvm"
    libffm = "libffm"


def _version(requested: bool) -> None:
    if requested:
        from thermocline import __version__

        typer.echo(f"thermocline {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@contextlib.contextmanager
def _one_line(debug: bool) -> Iterator[None]:
    """Print errors that a user can fix as one line on stderr and exit; other errors keep their traceback."""
    from thermocline.errors import ConfigError, ThermoclineError

    show = warnings.showwarning
    try:
        if not debug:
            warnings.showwarning = _show_warning
        yield
    except (ThermoclineError, ValueError, OSError, FloatingPointError) as error:
        if debug:
            raise
        _print_error(re.sub(r"^\[Errno \d+\] ", "", " ".join(str(error).split())))
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except ModuleNotFoundError as error:
        extra = {"torch": "torch", "tensorboard": "torch", "prometheus_client": "serve"}.get(error.name or "")
        if debug or extra is None:
            raise
        _print_error(f"{error}: install it with `pip install thermocline[{extra}]`")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        if debug:
            raise
        _print_error("interrupted")
        raise typer.Exit(130) from None
    finally:
        warnings.showwarning = show


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """Print a warning as one line, like an error; one of another package with the name of the package."""
    package = re.search(r"(?:site|dist)-packages/(\w+)", filename)
    origin = "" if package is None or package[1] == "thermocline" else f"{package[1]}: "
    _print_error(f"warning: {origin}{' '.join(str(message).split())}")


def _print_error(message: str) -> None:
    """Print a message on stderr; if several ranks of a machine have the same message, only one prints it."""
    from thermocline.distributed.launch import is_first_report

    if is_first_report(message):
        typer.echo(f"thermocline: {message}", err=True)


def _print_skipped(report: Any) -> None:
    if report["skipped"]:
        typer.echo(report["skipped"], err=True)


def _print_json(report: Any) -> None:
    from thermocline.training.callbacks import finite

    typer.echo(json.dumps(finite(report), indent=1))


# ---- training


@app.command()
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
    with _one_line(debug):
        from thermocline.config.schema import Config

        settings = Config.load(config, sets or ())
        from thermocline.cli import commands
        from thermocline.distributed.launch import is_rank0, is_single_rank, may_be_restart

        try:
            notes = commands.train(settings, resume=resume or may_be_restart())
        except (KeyboardInterrupt, SystemExit) as stopped:  # SIGTERM is the latter
            words = ["thermocline", "train", str(config), *(w for s in sets or () for w in ("--set", s)), "--resume"]
            _print_error(f"interrupted; resume with: {shlex.join(words) if is_single_rank() else '--resume'}")
            raise typer.Exit(130 if isinstance(stopped, KeyboardInterrupt) else 143) from None
        for note in notes if is_rank0() else ():
            typer.echo(note, err=True)


# ---- trained runs


@app.command("eval")
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
    with _one_line(debug):
        from thermocline.cli import commands
        from thermocline.distributed.launch import is_rank0

        report = commands.evaluate(run_dir, files or (), sets or (), checkpoint, allow_remote_data=allow_remote_data)
        if not is_rank0():
            return
        if as_json:
            _print_json(report)
        else:
            typer.echo(commands.metrics_line(report))
            _print_skipped(report)


@app.command()
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
    with _one_line(debug):
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
        _print_skipped(report)


@app.command()
def export(
    run_dir: RunDir,
    out: Annotated[str, typer.Option(help="Folder of the publication: a new one, or one that has versions already.")],
    delta: Annotated[
        bool, typer.Option("--delta", help="Publish only rows that changed since the version before, and deleted keys.")
    ] = False,
    precision: Annotated[
        ServedPrecision | None,
        typer.Option(help="Stored form of a weight; default: that of the version before, fp32 for the first."),
    ] = None,
    min_norm: Annotated[
        float | None, typer.Option(help="Serve only rows whose weights have at least this L2 norm.")
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(help="Serve at most this number of rows, those with the largest norms.")
    ] = None,
    min_frequency: Annotated[
        int | None, typer.Option(help="Serve only rows with at least this frequency, a statistic of rows.")
    ] = None,
    min_score: Annotated[
        float | None,
        typer.Option(help="Serve only rows with at least this score: 0.1 * (show - click) + click, decayed."),
    ] = None,
    format: Annotated[
        list[ServedFormat] | None,
        typer.Option(help="Also write rows in this format; repeatable; default: as the version before."),
    ] = None,
    consumer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --delta: publish what changed since the version that this consumer has."
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Publish the rows of a run for serving (`thermocline.serving.open`). Read-only; works while the run trains."""
    with _one_line(debug):
        from thermocline.cli import serving
        from thermocline.utils.text_format import format_size, plural

        options = serving.ExportOptions(
            delta=delta, precision=None if precision is None else precision.value, checkpoint=checkpoint,
            min_norm=min_norm, max_rows=max_rows, min_frequency=min_frequency, min_score=min_score,
            formats=[f.value for f in format] if format else None, consumer=consumer,
        )  # fmt: skip
        report = serving.export(run_dir, out, options)
        if as_json:
            _print_json(report)
        else:
            since = f" since version {report['previous']}" if consumer and report["previous"] else ""
            typer.echo(
                f"version {report['version']} ({report['kind']}{since}) of step {report['step']} in {out}: "
                f"{plural(report['rows'], 'row')}, {report['deleted']} deleted, {format_size(report['bytes'])}"
            )


@app.command()
def versions(
    folder: Annotated[str, typer.Argument(help="Folder that `thermocline export` publishes to.")],
    compact: Annotated[
        bool, typer.Option("--compact", help="Publish the current version again as a base, which needs no deltas.")
    ] = False,
    roll_back: Annotated[
        int | None,
        typer.Option(metavar="VERSION", help="Make an earlier version the current one; the next must be a base."),
    ] = None,
    retire: Annotated[
        int | None,
        typer.Option(metavar="BASES", help="Delete versions older than this number of last bases; after the others."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the versions of a publication and its consumers; compact, roll back, or delete old versions.

    Exit code 1 if a version is damaged. The list needs no lock and changes nothing.
    """
    with _one_line(debug):
        from thermocline.cli import versions as published

        report = published.versions(folder, compact=compact, roll_back=roll_back, retire=retire)
        if as_json:
            _print_json(report)
        else:
            for line in published.describe(report):
                typer.echo(line)
    if report["problems"]:
        raise typer.Exit(1)


@app.command()
def serve(
    folder: Annotated[str, typer.Argument(help="Folder that `thermocline export` publishes to.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the Flight (gRPC) service; 0: a free one.")] = 8815,
    metrics_port: Annotated[int | None, typer.Option(help="Port of Prometheus metrics over HTTP, without TLS.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with a token that clients must send: authorization: Bearer TOKEN.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM; with --tls-key.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key, PEM.")] = None,
    poll: Annotated[float, typer.Option(help="Seconds between looks for a new version.")] = 0.2,
    consumer: Annotated[str | None, typer.Option(help="Name under which the version in use is recorded.")] = None,
    direct: Annotated[
        bool, typer.Option("--direct", help="Read rows past the page cache: for publications larger than memory.")
    ] = False,
    score: Annotated[
        bool, typer.Option("--score", help="Also score whole examples with the dense model; loads torch.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow other machines to connect without token or TLS.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Serve published rows over Arrow Flight until Ctrl-C or SIGTERM; new versions are read as they appear."""
    with _one_line(debug):
        from thermocline.cli import serving

        serving.serve(
            folder, host=host, port=port, metrics_port=metrics_port, token_file=token_file, tls_cert=tls_cert,
            tls_key=tls_key, poll=poll, consumer=consumer, insecure=insecure, score=score, direct=direct,
        )  # fmt: skip


@app.command()
def watch(
    run_dir: Annotated[
        str, typer.Argument(metavar="RUN", help="Folder of a run (train.run_dir); it need not exist yet.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: a free one.")] = 8816,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow other machines to connect.")] = False,
    debug: Debug = False,
) -> None:
    """Show a run in the browser, live: speed, AUC, rows by tier, look-ahead, disk, ranks. Read-only; Ctrl-C ends it."""
    with _one_line(debug):
        from thermocline.cli.watch import watch as serve_page

        serve_page(run_dir, host=host, port=port, insecure=insecure)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A store, a run_dir, or a checkpoint's .json file.")],
    check: Annotated[bool, typer.Option("--check", help="Verify every byte.")] = False,
    mem: Annotated[str | None, typer.Option(help="DRAM for opening a store; default: an eighth of all.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show keys, sizes and damage of a store, a run or a checkpoint. Read-only; exit code 1 if something is damaged."""
    with _one_line(debug):
        from thermocline.cli.inspect import describe, inspect as inspect_path
        from thermocline.errors import ConfigError
        from thermocline.utils.text_format import parse_size

        try:
            budget = None if mem is None else parse_size(mem, "--mem")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        report = inspect_path(path, check=check, mem=budget)
        if as_json:
            _print_json(report)
        else:
            for line in describe(report):
                typer.echo(line)
    if report["problems"]:
        raise typer.Exit(1)


@app.command()
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
    with _one_line(debug):
        from thermocline.cli.repair import describe, is_lossless, repair as repair_path
        from thermocline.errors import ConfigError
        from thermocline.utils.text_format import parse_size

        try:
            budget = parse_size(mem, "--mem")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        report = repair_path(path, dry_run=dry_run, keep_older=keep_older, mem=budget)
        if as_json:
            _print_json(report)
        else:
            for line in describe(report):
                typer.echo(line)
    if not is_lossless(report):
        raise typer.Exit(1)


# ---- before training


@app.command()
def plan(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Config file.")] = None,
    preset: Annotated[
        str | None, typer.Option(help='Instead of a config: a model of Zhao et al. (2020), such as "E".')
    ] = None,
    sets: Sets = None,
    hardware: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|paper[:FILE]",
            help="Measurements of a node; paper: that of Zhao et al. (2020), with core costs of FILE or stored ones. "
            "Default: measure now.",
        ),
    ] = None,
    measure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure this machine and write FILE, for --hardware FILE.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks per node; default: its GPUs, or 1 without GPUs.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict the time of a step by stage, and the limiting resource, for this machine or a cluster.

    Other settings are those of the config, [dist] included. --set changes them, also for a preset: --set
    train.pull_window=30, --set dist.hops=flat, --set dist.dense_sync.every=20, --set tiers.device=cpu.
    """
    with _one_line(debug):
        from thermocline.config.schema import Config
        from thermocline.errors import ConfigError

        if (config is None) == (preset is None) and (measure is None or config is not None):
            raise ConfigError("plan needs either CONFIG.toml or --preset; or only --measure FILE")
        settings = None if config is None else Config.load(config, sets or ())
        from thermocline.cli import commands

        if preset is not None:
            from thermocline.planner.workload import preset_config

            settings = preset_config(preset, sets or ())
        if settings is None:
            commands.hardware(hardware, measure)
            return
        report = commands.plan(settings, hardware, measure, nodes=nodes, ranks=ranks)
        if as_json:
            _print_json(report)
        else:
            commands.print_plan(report)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a config file, which editors use to complete and check keys.

    Write it to a file: thermocline schema > thermocline.schema.json. Then make "#:schema thermocline.schema.json" the
    first line of the config; Taplo and Even Better TOML (VS Code) read it.
    """
    from thermocline.config.json_schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))


# ---- data


@data_app.command()
def synth(
    out: Annotated[str, typer.Argument(help="Folder for train, valid and test files.")],
    format: Annotated[Format, typer.Option(help="Format of the files.")] = Format.parquet,
    preset: Annotated[
        str | None, typer.Option(help='Model of Zhao et al. (2020) and a divisor of its size, such as "E/1000".')
    ] = None,
    keys: Annotated[int, typer.Option(min=1, help="Number of distinct keys.")] = 1_000_000,
    fields: Annotated[int, typer.Option(min=1, help="Number of fields.")] = 26,
    nonzeros: Annotated[int | None, typer.Option(min=1, help="Keys per example; default: one per field.")] = None,
    zipf: Annotated[float, typer.Option(min=0, help="Exponent of the Zipf distribution of keys.")] = 1.05,
    dense: Annotated[int, typer.Option(min=0, help="Number of dense features (parquet only).")] = 0,
    examples: Annotated[int, typer.Option(min=1, help="Training examples.")] = 1_000_000,
    valid_examples: Annotated[int, typer.Option(min=0, help="Validation examples; 0 writes no file.")] = 100_000,
    test_examples: Annotated[int, typer.Option(min=0, help="Test examples; 0 writes no file.")] = 100_000,
    examples_per_file: Annotated[
        int | None, typer.Option(min=1, help="Write folders of files with this many examples each.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    debug: Debug = False,
) -> None:
    """Write synthetic ads data with planted labels, and print the config section that reads it.

    The folder is created if it does not exist. Existing files are replaced only with --force.
    """
    with _one_line(debug):
        from thermocline.cli import commands
        from thermocline.config.data import Synth

        settings = Synth(
            preset=preset, keys=keys, fields=fields, nonzeros=nonzeros, zipf=zipf, dense=dense, seed=seed,
            examples=examples, valid_examples=valid_examples, test_examples=test_examples,
        )  # fmt: skip
        _, section = commands.write_synth(settings, out, format.value, examples_per_file, force=force)
        typer.echo(section)


@data_app.command()
def stats(
    source: Annotated[list[str], typer.Argument(metavar="CONFIG.toml|FILE...", help="A config, or data files.")],
    sets: Sets = None,
    split: Annotated[Split, typer.Option(help="Split of a config.")] = Split.train,
    examples: Annotated[int | None, typer.Option(min=1, help="Read only this many examples, in whole batches.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show keys, skew and nonzeros of data, and suggest tier sizes with hit rates. One pass, bounded memory."""
    with _one_line(debug):
        from thermocline.config import loader
        from thermocline.config.schema import Config

        if len(source) == 1 and source[0].endswith(".toml"):
            config = Config.load(source[0], sets or ())
        else:
            config = loader.build(Config, {"data": {"train": source}}, sets or (), name="data files")
        from thermocline.cli import commands
        from thermocline.planner.tier_sizing import describe
        from thermocline.utils.machine import memory_bytes

        report = commands.stats(config, split.value, examples)
        if as_json:
            _print_json(report)
        else:
            for line in describe(report, memory_bytes()):
                typer.echo(line)
            _print_skipped(report)


def main() -> None:
    """Entry point of `thermocline` and `python -m thermocline`."""
    try:
        app(prog_name="thermocline")
    finally:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C while Python exits

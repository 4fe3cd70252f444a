"""`thermocline`: parses the command line, and says what came of it. The work is in commands.py and what it calls.

Exit codes: 0 done; 1 what was found is not as needed: data, budget, disk, checkpoints; 2 what was asked for is wrong:
config, flags, and the files and folders they name (`ConfigError`); 130 Ctrl-C; 143 SIGTERM. Nothing heavy is imported
before its use.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="thermocline",
    help="Trains CTR models whose embedding tables exceed memory: rows in DRAM and on SSD, exact to the bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(no_args_is_help=True, help="Generates data files; says what data asks of a machine.")
app.add_typer(data_app, name="data")

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Overrides a key of the config, such as train.lr=0.01; repeatable."),
]
Debug = Annotated[bool, typer.Option("--debug", help="An error shows its traceback.")]
Json = Annotated[bool, typer.Option("--json", help="Prints JSON.")]
RunDir = Annotated[str, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")]
Files = Annotated[list[str] | None, typer.Argument(metavar="[FILE]...", help="Instead of the config's test data.")]
Checkpoint = Annotated[
    str | None, typer.Option(help="best, last, or a step; default: the best if there is one, else the last.")
]


class Split(StrEnum):
    train = "train"
    valid = "valid"
    test = "test"


class Format(StrEnum):
    parquet = "parquet"
    libsvm = "libsvm"
    libffm = "libffm"


def _version(wanted: bool) -> None:
    if wanted:
        from thermocline import __version__

        typer.echo(f"thermocline {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Prints the version.")
    ] = False,
) -> None:
    pass


@contextlib.contextmanager
def _one_line(debug: bool) -> Iterator[None]:
    """Errors that are the user's to mend are one line on stderr; a bug of ours keeps its traceback."""
    from thermocline.errors import ConfigError, ThermoclineError

    try:
        yield
    except (ThermoclineError, ValueError, OSError, FloatingPointError) as error:
        if debug:
            raise
        _say(" ".join(str(error).split()))
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except ModuleNotFoundError as error:
        if debug or error.name not in ("torch", "tensorboard"):
            raise
        _say(f"{error}: `pip install thermocline[torch]` brings it")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        if debug:
            raise
        _say("interrupted")
        raise typer.Exit(130) from None


def _say(words: str) -> None:
    """On stderr; what all ranks of a machine have to say, once."""
    from thermocline.distributed.launch import first_to_say

    if first_to_say(words):
        typer.echo(f"thermocline: {words}", err=True)


def _tell_skipped(report: Any) -> None:
    if report["skipped"]:
        typer.echo(report["skipped"], err=True)


def _dump(report: Any) -> None:
    from thermocline.training.callbacks import finite

    typer.echo(json.dumps(finite(report), indent=1))


# ---- training


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="What to train, on what, where.")],
    sets: Sets = None,
    resume: Annotated[bool, typer.Option("--resume", help="Goes on with the run in train.run_dir.")] = False,
    debug: Debug = False,
) -> None:
    """Trains a model as a config file says; its folder gets config.toml, metrics.jsonl, tensorboard and checkpoints.

    Ctrl-C saves and ends; --resume goes on with the bits of a run never stopped. Several GPUs or machines:
    torchrun --nproc-per-node G --nnodes N -m thermocline train CONFIG.toml; its restarts resume by themselves.
    """
    with _one_line(debug):
        from thermocline.config.schema import Config

        settings = Config.load(config, sets or ())
        from thermocline.distributed.launch import alone, leads, restarted
        from thermocline.training.run_dir import check_folder, has_run

        resume = resume or restarted()
        if resume and leads() and not has_run(settings.train.run_dir):
            typer.echo(f"{settings.train.run_dir} has nothing saved to resume: a new run begins")
        for change in check_folder(settings, resume=resume):
            if leads():
                typer.echo(f"changed {change}")
        from thermocline.cli import commands

        try:
            notes = commands.train(settings, resume=resume)
        except (KeyboardInterrupt, SystemExit) as stopped:  # SIGTERM is the latter
            words = ["thermocline", "train", str(config), *(w for s in sets or () for w in ("--set", s)), "--resume"]
            _say(f"interrupted; to go on: {shlex.join(words)}" if alone() else "interrupted; to go on: add --resume")
            raise typer.Exit(130 if isinstance(stopped, KeyboardInterrupt) else 143) from None
        for note in notes:
            typer.echo(note, err=True)


# ---- what was trained


@app.command("eval")
def evaluate(
    run_dir: RunDir,
    files: Files = None,
    sets: Sets = None,
    checkpoint: Checkpoint = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """AUC, logloss, normalised entropy and calibration of a trained run. Changes nothing; works while it trains on."""
    with _one_line(debug):
        from thermocline.cli import commands

        report = commands.evaluate(run_dir, files or (), sets or (), checkpoint)
        if as_json:
            _dump(report)
        else:
            typer.echo(commands.lines_of(report.items()))
            _tell_skipped(report)


@app.command()
def predict(
    run_dir: RunDir,
    files: Files = None,
    out: Annotated[
        str,
        typer.Option(
            help="File of the scores: .csv, .parquet or .npy; replaced if it is there, and its folder made if not."
        ),
    ] = "scores.csv",
    sets: Sets = None,
    checkpoint: Checkpoint = None,
    debug: Debug = False,
) -> None:
    """Writes one score per example, in the order of the files. Changes nothing; works while the run trains on."""
    with _one_line(debug):
        from thermocline.cli import commands
        from thermocline.utils.text_format import plural

        report = commands.predict(run_dir, files or (), out, sets or (), checkpoint)
        typer.echo(f"{plural(report['scores'], 'score')} of step {report['step']} in {out}")
        _tell_skipped(report)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A store, a run_dir, or a checkpoint's .json.")],
    check: Annotated[bool, typer.Option("--check", help="Verifies every byte.")] = False,
    mem: Annotated[str, typer.Option(help="DRAM that opening a store may use.")] = "256MB",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Keys, sizes and health of a store, a run or a checkpoint. Changes nothing; exit code 1: something is damaged."""
    with _one_line(debug):
        from thermocline.cli.inspect import describe, inspect as look
        from thermocline.errors import ConfigError
        from thermocline.utils.text_format import parse_size

        try:
            budget = parse_size(mem, "--mem")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        report = look(path, check=check, mem=budget)
        if as_json:
            _dump(report)
        else:
            for line in describe(report):
                typer.echo(line)
    if report["problems"]:
        raise typer.Exit(1)


# ---- before training


@app.command()
def plan(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]", help="What would be trained.")] = None,
    preset: Annotated[str | None, typer.Option(help='Instead of a config: a model of the source, such as "E".')] = None,
    sets: Sets = None,
    hardware: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|paper[:FILE]",
            help="A node's figures; paper: the source's node, with the costs of a core of FILE. Default: measured now.",
        ),
    ] = None,
    measure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measures this machine into FILE: --hardware FILE reads it.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    ranks: Annotated[int | None, typer.Option(min=1, help="Per node; default: its GPUs, or 1 without.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predicts a step's time, stage by stage, and the resource that bounds it, for this machine or a cluster.

    All else is as the config says, [dist] too; --set changes it, for a preset as well: --set train.pull_window=30,
    --set dist.hops=flat, --set dist.dense_sync.every=20, --set tiers.device=cpu.
    """
    with _one_line(debug):
        from thermocline.config.schema import Config
        from thermocline.errors import ConfigError

        if (config is None) == (preset is None) and (measure is None or config is not None):
            raise ConfigError("plan takes a CONFIG.toml or --preset, one of them; or --measure FILE alone")
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
            _dump(report)
        else:
            commands.print_plan(report)


# ---- data


@data_app.command()
def synth(
    out: Annotated[str, typer.Argument(help="Folder for train, valid and test files.")],
    format: Annotated[Format, typer.Option(help="Of the files.")] = Format.parquet,
    preset: Annotated[str | None, typer.Option(help='Model of the source at a scale, such as "E/1000".')] = None,
    keys: Annotated[int, typer.Option(min=1, help="How many there are.")] = 1_000_000,
    fields: Annotated[int, typer.Option(min=1, help="How many.")] = 26,
    nonzeros: Annotated[int | None, typer.Option(min=1, help="Ids per example; default: one per field.")] = None,
    zipf: Annotated[float, typer.Option(min=0, help="Exponent of popularity.")] = 1.05,
    dense: Annotated[int, typer.Option(min=0, help="Dense features (parquet only).")] = 0,
    examples: Annotated[int, typer.Option(min=1, help="For training.")] = 1_000_000,
    valid_examples: Annotated[int, typer.Option(min=0, help="For validation; 0: none.")] = 100_000,
    test_examples: Annotated[int, typer.Option(min=0, help="For the test; 0: none.")] = 100_000,
    examples_per_file: Annotated[int | None, typer.Option(min=1, help="Makes folders of files.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the data.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replaces files that are there already.")] = False,
    debug: Debug = False,
) -> None:
    """Writes synthetic ads data with planted labels, and prints the config section that reads it.

    The folder is made if it is not there; files of the same names are replaced with --force only.
    """
    with _one_line(debug):
        from thermocline.cli import commands
        from thermocline.config.data import Synth
        from thermocline.errors import ConfigError

        try:
            settings = Synth(
                preset=preset, keys=keys, fields=fields, nonzeros=nonzeros, zipf=zipf, dense=dense, seed=seed,
                examples=examples, valid_examples=valid_examples, test_examples=test_examples,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(str(error)) from None
        _, section = commands.write_synth(settings, out, format.value, examples_per_file, force=force)
        typer.echo(section)


@data_app.command()
def stats(
    source: Annotated[list[str], typer.Argument(metavar="CONFIG.toml|FILE...", help="A config, or data files.")],
    sets: Sets = None,
    split: Annotated[Split, typer.Option(help="Of a config.")] = Split.train,
    examples: Annotated[int | None, typer.Option(min=1, help="Reads only so many, whole batches.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Keys, skew, nonzeros; bytes of the model's rows, suggested tier sizes and hit rates. One pass, bounded memory."""
    with _one_line(debug):
        from thermocline.config.loader import toml_value
        from thermocline.config.schema import Config

        if len(source) == 1 and source[0].endswith(".toml"):
            config = Config.load(source[0], sets or ())
        else:
            config = Config.parse(f"[data]\ntrain = {toml_value(source)}", sets or (), name="data files")
        from thermocline.cli import commands
        from thermocline.data.key_stats import describe, memory_of_machine

        report = commands.stats(config, split.value, examples)
        if as_json:
            _dump(report)
        else:
            for line in describe(report, memory_of_machine()):
                typer.echo(line)
            _tell_skipped(report)


def main() -> None:
    """The entry point of `thermocline` and `python -m thermocline`."""
    try:
        app(prog_name="thermocline")
    finally:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is said: Ctrl-C while Python ends has no traceback

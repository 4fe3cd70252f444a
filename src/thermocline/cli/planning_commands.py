"""Arguments of the commands used before training: predictions, the schema of configs, and data: see `commands.py`.

Large modules are imported where they are used, so that --help stays fast.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from thermocline.cli.options import Debug, Json, Sets
from thermocline.cli.output import one_line, print_json, print_skipped


class Split(StrEnum):
    train = "train"
    valid = "valid"
    test = "test"


class Format(StrEnum):
    parquet = "parquet"
    libsvm = "libsvm"
    libffm = "libffm"


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

    Other settings, those of dist too, are those of the config. --set changes them, also for a preset: --set
    train.pull_window=30, --set dist.hops=flat, --set dist.dense_sync.every=20, --set tiers.device=cpu.
    """
    with one_line(debug):
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
            print_json(report)
        else:
            commands.print_plan(report)


def schema() -> None:
    """Print the JSON Schema of a config file, which editors use to complete and check keys.

    Write it to a file: thermocline schema > thermocline.schema.json. Then make "#:schema thermocline.schema.json" the
    first line of the config; Taplo and Even Better TOML (VS Code) read it.
    """
    from thermocline.config.json_schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))


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
    with one_line(debug):
        from thermocline.cli import commands
        from thermocline.config.data import Synth

        settings = Synth(
            preset=preset, keys=keys, fields=fields, nonzeros=nonzeros, zipf=zipf, dense=dense, seed=seed,
            examples=examples, valid_examples=valid_examples, test_examples=test_examples,
        )  # fmt: skip
        _, section = commands.write_synth(settings, out, format.value, examples_per_file, force=force)
        typer.echo(section)


def stats(
    source: Annotated[list[str], typer.Argument(metavar="CONFIG.toml|FILE...", help="A config, or data files.")],
    sets: Sets = None,
    split: Annotated[Split, typer.Option(help="Split of a config.")] = Split.train,
    examples: Annotated[int | None, typer.Option(min=1, help="Read only this many examples, in whole batches.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show keys, skew and nonzeros of data, and suggest tier sizes with hit rates. One pass, bounded memory."""
    with one_line(debug):
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
            print_json(report)
        else:
            for line in describe(report, memory_bytes()):
                typer.echo(line)
            print_skipped(report)

"""The command line `thermocline`: the list of commands, and exit codes.

Exit codes: 0 success; 1 runtime failure (data, budget, disk, checkpoints); 2 usage error (`ConfigError`: config, flags,
and the files and folders that they name); 130 Ctrl-C; 143 SIGTERM.
"""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from thermocline.cli.planning_commands import plan, schema, stats, synth
from thermocline.cli.publication_commands import export, serve, versions, watch
from thermocline.cli.run_commands import evaluate, inspect, predict, repair, train

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
app.command()(train)
app.command("eval")(evaluate)
for command in (predict, export, versions, serve, watch, inspect, repair, plan, schema):
    app.command()(command)
for data_command in (synth, stats):
    data_app.command()(data_command)


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


def main() -> None:
    """Entry point of `thermocline` and `python -m thermocline`."""
    try:
        app(prog_name="thermocline")
    finally:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C while Python exits

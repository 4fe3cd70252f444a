"""`python -m experiments`: runs the experiments of Zhao et al., or rebuilds the report of an earlier run.

Exit codes: 0 success; 1 a claim does not hold in the full run, or the run failed; 2 wrong options; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from experiments.runner import Outcome

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

OUT = Path("build/experiments")
CACHE = Path(".cache/experiments")


@contextlib.contextmanager
def _one_line_errors(debug: bool) -> Iterator[None]:
    """Print a user's error as one line and exit with its code; other errors keep their traceback."""
    from thermocline.errors import ConfigError, ThermoclineError

    try:
        yield
    except (ThermoclineError, ValueError, OSError, FloatingPointError) as error:
        if debug:
            raise
        typer.echo(f"experiments: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        if debug:
            raise
        typer.echo("experiments: interrupted; finished steps are kept, run the same command to continue", err=True)
        raise typer.Exit(130) from None


@app.command()
def run(
    out: Annotated[
        Path | None,
        typer.Option(help=f"Folder of the report. Default: {OUT}; with --from, the folder that is rebuilt."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few minutes on two cores. Judges no claim and measures no speed.")
    ] = False,
    scale: Annotated[
        str | None, typer.Option(metavar="1/N", help="Size of models A to E; default 1/1000, quick 1/100000.")
    ] = None,
    effort: Annotated[float | None, typer.Option(help="Share of the training, up to 1; quick 0.1.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:STEP],...", help="Run only these experiments, or these steps of them; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of data and training.")] = 0,
    device: Annotated[
        str,
        typer.Option(
            help="cpu or cuda: run everything on this device. auto: use the GPU if there is one, and keep results "
            "in --out that another machine has completed."
        ),
    ] = "auto",
    lookahead: Annotated[
        str,
        typer.Option(help='Look-ahead from SSD in `steady`: "auto", a number of batches, or a size such as "1400MB".'),
    ] = "auto",
    cache: Annotated[Path, typer.Option(help="Folder of finished steps.")] = CACHE,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="Rebuild the report in FOLDER from its results.")
    ] = None,
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="Without a page, only files of results are written.")
    ] = True,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Run the experiments of Zhao et al. on this machine and write one page with their tables and figures.

    Finished steps are cached: the same command continues an interrupted run, also on another machine with a copy of
    the two folders. Only the full run judges claims; --quick and --effort below 1 are too small.
    """
    with _one_line_errors(debug):
        from experiments import registry, runner
        from experiments.experiment import Setup

        if source is not None:
            ignored = quick or scale or effort or only or seed or device != "auto" or lookahead != "auto"
            if ignored:
                from thermocline.errors import ConfigError

                raise ConfigError("--from rebuilds a report and runs nothing: combine it with --out only")
            report_outcome(runner.rebuild(source, out))
            failed = False
        else:
            setup = Setup.from_options(
                quick=quick, scale=scale, effort=effort, seed=seed, device=device, lookahead=lookahead
            )
            names = [name for words in only or () for name in words.split(",")]
            command = command_line(quick=quick, scale=scale, effort=effort, seed=seed, names=names, lookahead=lookahead)
            experiments, this_machine = registry.choose(names), device != "auto"
            outcome = runner.run(
                out or OUT, experiments, setup, command, cache=cache, this_machine=this_machine, page=page
            )
            failed = report_outcome(outcome)
    if failed:
        raise typer.Exit(1)


def command_line(
    *, quick: bool, scale: str | None, effort: float | None, seed: int, names: list[str], lookahead: str = "auto"
) -> str:
    """Return the command that repeats a run, without the options that name folders or the device."""
    words = ["python", "-m", "experiments", *(["--quick"] if quick else [])]
    options = {"--scale": scale, "--effort": effort, "--seed": seed or None, "--only": ",".join(names) or None}
    options["--lookahead"] = None if lookahead == "auto" else lookahead
    return shlex.join([*words, *(word for flag, value in options.items() if value for word in (flag, str(value)))])


def report_outcome(outcome: Outcome) -> bool:
    """Print the claims and the path of the page; return whether an asserted claim fails in a full run."""
    from experiments.experiment import TOO_SMALL
    from thermocline.utils.text_format import plural

    for claim, setup in outcome.claims:
        print(f"{claim.verdict(setup)}: {claim.text}: {claim.detail}")
    if any(not setup.judges_claims for _, setup in outcome.claims):
        print(TOO_SMALL)
    print(f"{plural(outcome.steps, 'step')} run; the report is {outcome.page}")
    return any(setup.judges_claims and claim.asserted and not claim.holds for claim, setup in outcome.claims)


if __name__ == "__main__":
    app(prog_name="python -m experiments")

"""Errors and warnings in one line, and reports. Large modules are imported where they are used: --help stays fast."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

import typer


@contextlib.contextmanager
def one_line(debug: bool) -> Iterator[None]:
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
        print_error(re.sub(r"^\[Errno \d+\] ", "", " ".join(str(error).split())))
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except ModuleNotFoundError as error:
        extra = {"torch": "torch", "tensorboard": "torch", "prometheus_client": "serve"}.get(error.name or "")
        if debug or extra is None:
            raise
        print_error(f"{error}: install it with `pip install thermocline[{extra}]`")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        if debug:
            raise
        print_error("interrupted")
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
    print_error(f"warning: {origin}{' '.join(str(message).split())}")


def print_error(message: str) -> None:
    """Print a message on stderr; if several ranks of a machine have the same message, only one prints it."""
    from thermocline.distributed.launch import is_first_report

    if is_first_report(message):
        typer.echo(f"thermocline: {message}", err=True)


def print_skipped(report: Any) -> None:
    """Print how many lines were skipped, on stderr."""
    if report["skipped"]:
        typer.echo(report["skipped"], err=True)


def print_json(report: Any) -> None:
    """Print a report; numbers that JSON lacks as null."""
    from thermocline.training.callbacks import finite

    typer.echo(json.dumps(finite(report), indent=1))

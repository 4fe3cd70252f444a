"""Arguments of the commands that publish and serve the rows of a run, and show it: see `serving.py`.

Large modules are imported where they are used, so that --help stays fast.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from thermocline.cli.options import Checkpoint, Debug, Json, RunDir
from thermocline.cli.output import one_line, print_json


class ServedPrecision(StrEnum):
    fp32 = "fp32"
    fp16 = "fp16"
    int8 = "int8"


class ServedFormat(StrEnum):
    parquet = "parquet"
    safetensors = "safetensors"


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
    with one_line(debug):
        from thermocline.cli import serving
        from thermocline.utils.text_format import format_size, plural

        options = serving.ExportOptions(
            delta=delta, precision=None if precision is None else precision.value, checkpoint=checkpoint,
            min_norm=min_norm, max_rows=max_rows, min_frequency=min_frequency, min_score=min_score,
            formats=[f.value for f in format] if format else None, consumer=consumer,
        )  # fmt: skip
        report = serving.export(run_dir, out, options)
        if as_json:
            print_json(report)
        else:
            since = f" since version {report['previous']}" if consumer and report["previous"] else ""
            typer.echo(
                f"version {report['version']} ({report['kind']}{since}) of step {report['step']} in {out}: "
                f"{plural(report['rows'], 'row')}, {report['deleted']} deleted, {format_size(report['bytes'])}"
            )


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
    with one_line(debug):
        from thermocline.cli import versions as published

        report = published.versions(folder, compact=compact, roll_back=roll_back, retire=retire)
        if as_json:
            print_json(report)
        else:
            for line in published.describe(report):
                typer.echo(line)
    if report["problems"]:
        raise typer.Exit(1)


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
    with one_line(debug):
        from thermocline.cli import serving

        serving.serve(
            folder, host=host, port=port, metrics_port=metrics_port, token_file=token_file, tls_cert=tls_cert,
            tls_key=tls_key, poll=poll, consumer=consumer, insecure=insecure, score=score, direct=direct,
        )  # fmt: skip


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
    with one_line(debug):
        from thermocline.cli.watch import watch as serve_page

        serve_page(run_dir, host=host, port=port, insecure=insecure)

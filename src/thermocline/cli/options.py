"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

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

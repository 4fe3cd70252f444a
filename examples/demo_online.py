"""Train on a stream of clicks whose labels drift, publish every second, serve, and look rows up meanwhile.

`make demo-online` runs this program; it takes about a minute. A generator writes a file of clicks per second. Another
process, `thermocline train online.toml`, follows the files and publishes; a third one, `thermocline serve`, follows the
versions. This process is a client of the server. It scores each file before training can read it, with the rows that
the server returns, and with those of the version that was served when the stream began. Freshness is the time from a
click, when its file appears, until the server has a version that was trained on it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table as Grid

import thermocline as tc
from thermocline import serving
from thermocline.serving.client import Client
from thermocline.serving.snapshot import StoredRows
from thermocline.training.metrics import auc

HERE = Path(__file__).parent
USERS, SITES, ADS, NEW_ADS = 5000, 40, 1500, 25
"""Users and sites; ads that run at a time, and ads that begin, and end, per second."""
PERIOD = 60.0
"""Seconds after which the taste of a group of ads for each group of sites has turned once."""
GROUPS = 8


# ---- the stream


class Clicks:
    """Generates the clicks of any second. Ads come and go, and the attraction of ads to sites turns with time."""

    def __init__(self, examples: int, seed: int = 0) -> None:
        self.examples = examples
        self._seed = seed
        rng = np.random.default_rng(seed)
        self._user, self._site = rng.normal(0, 0.5, USERS), rng.normal(0, 0.3, SITES)
        self._phase = rng.uniform(0, 2 * np.pi, (GROUPS, GROUPS))

    def second(self, second: int) -> list[str]:
        """Return the lines of one second: click, event time, user, site, ad."""
        rng = np.random.default_rng([self._seed, second])
        user = (USERS * rng.random(self.examples) ** 2).astype(int)
        site = rng.integers(0, SITES, self.examples)
        ad = NEW_ADS * second + (ADS * rng.random(self.examples)).astype(int)
        turn = self._phase[ad % GROUPS, site % GROUPS] + 2 * np.pi * second / PERIOD
        quality = ((ad * 2654435761) % 1000) / 1000 - 0.5
        logit = -0.5 + self._user[user] + self._site[site] + 1.5 * quality + 1.5 * np.cos(turn)
        click = rng.random(self.examples) < 1 / (1 + np.exp(-logit))
        return [f"{int(c)},{second},u{u},s{s},a{a}" for c, u, s, a in zip(click, user, site, ad, strict=True)]

    def write(self, folder: Path, second: int) -> Path:
        """Write the file of one second; it appears, complete, by a rename."""
        temporary = folder / f".{second:06}.csv"
        temporary.write_text("\n".join(["click,at,user,site,ad", *self.second(second), ""]))
        return temporary.rename(folder / f"{second:06}.csv")


# ---- serving


def scores(source: serving.Snapshot | Client, batch: tc.Batch) -> Any:
    """Return the logits of a factorization machine from served rows, up to its bias, which the AUC does not need."""
    rows = source.lookup(batch.ids).reshape(batch.examples, batch.fields, -1)
    vectors = rows[..., 1:]
    return rows[..., 0].sum(1) + (vectors.sum(1) ** 2 - (vectors**2).sum(1)).sum(1) / 2


def rows_alive(folder: Path) -> int:
    """Count the rows of the newest version."""
    snapshot = serving.open(folder)
    return sum(len(piece.keys) for view in snapshot.state.views.values() for piece in StoredRows(view))


@dataclasses.dataclass(slots=True)
class Window:
    """One second of the stream."""

    second: int
    at: float
    """When its clicks happened."""
    newest_auc: float
    """AUC by the newest version served at that time."""
    frozen_auc: float
    """AUC by the version that was served when the stream began."""
    lag: float
    """Seconds of event time that the newest version was behind."""
    rows: int
    fresh: float | None = None
    """Seconds until a version with its clicks was served; None: none is yet."""


class Server:
    """`thermocline serve` as a process, and a client of it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "thermocline", "serve", str(folder), "--port", "0", "--poll", "0.1"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        location = re.search(r"grpc://\S+", self._process.stdout.readline())
        if location is None:
            raise RuntimeError(f"the server ended early, with exit code {self._process.wait()}")
        self.client: Client = serving.connect(location[0])

    def version(self) -> dict[str, Any]:
        """Return the manifest of the version that the server has."""
        manifest: dict[str, Any] = json.loads(self.client.action("version"))
        return manifest

    def close(self) -> None:
        self.client.close()
        self._process.terminate()
        self._process.wait()


class Observer:
    """Looks rows up in the server and measures."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], first: float) -> None:
        """Start the server, and wait until it has a version with the event time `first`."""
        self._process = process
        self._folder = folder
        while not (folder / "CURRENT").exists():
            self._check()
            time.sleep(0.05)
        self._server = Server(folder)
        self.version = self._server.version()
        while (self.version["event_time"] or 0) < first:
            self._check()
            time.sleep(0.02)
            self.version = self._server.version()
        self.frozen = serving.open(folder)
        self.windows: list[Window] = []
        self.versions = 1
        self.rows = 0
        """Rows of the last version, after `close`."""

    def close(self) -> None:
        """Count the rows and end the server."""
        self.rows = rows_alive(self._folder)
        self._server.close()

    def _check(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"training ended early, with exit code {self._process.returncode}")

    def score(self, second: int, batch: tc.Batch) -> None:
        """Score a file that training has not seen."""
        figures = [auc(scores(source, batch), batch.label) for source in (self._server.client, self.frozen)]
        lag = second - (self.version["event_time"] or 0)
        self.windows.append(Window(second, time.time(), figures[0], figures[1], lag, rows_alive(self._folder)))

    def watch(self, seconds: float) -> None:
        """Follow the versions for some seconds. Raises if training has ended."""
        self._check()
        end = time.monotonic() + seconds
        while True:
            version = self._server.version()
            if version["number"] != self.version["number"]:
                self.version = version
                self.versions += 1
                now, seen = time.time(), version["event_time"] or 0
                for window in self.windows:
                    if window.fresh is None and window.second <= seen:
                        window.fresh = now - window.at
            if time.monotonic() >= end:
                return
            time.sleep(0.02)


# ---- the demo


def run(folder: Path, *, seconds: int, before: int, examples: int) -> Observer:
    """Run the stream for some seconds, after `before` seconds that exist when training begins."""
    stream, served = folder / "stream", folder / "served"
    stream.mkdir()
    clicks = Clicks(examples)
    for second in range(before):
        clicks.write(stream, second)
    sets = [
        f"data.train={stream}",
        "data.follow_idle=60s",
        f"train.run_dir={folder / 'run'}",
        f"tiers.ssd={folder / 'run' / 'store'}",
        f"publish.folder={served}",
    ]
    command = [sys.executable, "-m", "thermocline", "train", str(HERE / "online.toml")]
    command += [part for each in sets for part in ("--set", each)]
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        observer = None
        try:
            observer = Observer(served, process, before - 1)
            start = time.monotonic()
            for second in range(before, before + seconds):
                path = clicks.write(folder, second)  # scored before it appears in the stream
                observer.score(second, next(iter(_read(path, examples))))
                observer.windows[-1].at = time.time()
                path.rename(stream / path.name)
                observer.watch(start + second - before + 1 - time.monotonic())
            while any(window.fresh is None for window in observer.windows):
                observer.watch(0.05)
            process.send_signal(signal.SIGINT)  # training saves and ends
            process.wait()
        except BaseException:
            process.terminate()
            raise
        finally:
            if observer is not None:
                observer.close()
    if process.returncode != 130:  # as a shell reports Ctrl-C
        raise RuntimeError(f"training failed, with exit code {process.returncode}")
    return observer


def _read(path: Path, examples: int) -> Iterator[tc.Batch]:
    return iter(tc.Reader(path, label="click", time="at", batch_size=examples, tensors=False))


def print_report(console: Console, observer: Observer) -> None:
    """Print freshness, AUC with and without updates, and rows."""
    windows = observer.windows
    fresh = np.array([window.fresh for window in windows])
    half = windows[len(windows) // 2 :]
    means = [(np.mean([w.newest_auc for w in part]), np.mean([w.frozen_auc for w in part])) for part in (windows, half)]
    grid = Grid(show_header=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(style="dim")
    line = grid.add_row
    line("freshness, median", f"{np.median(fresh):.2f} s", f"click to served, over {len(fresh)} files")
    line("freshness, largest", f"{fresh.max():.2f} s", f"{observer.versions} versions were served")
    line("AUC, newest version", f"{means[0][0]:.4f}", f"second half {means[1][0]:.4f}")
    line("AUC, first version", f"{means[0][1]:.4f}", f"second half {means[1][1]:.4f}; same clicks, not updated")
    rows = [window.rows for window in windows]
    line("rows alive, last", f"{observer.rows:,}", f"{min(rows):,} to {max(rows):,}; {rows[0]:,} when the stream began")
    console.print(grid)


def draw(observer: Observer, path: Path) -> None:
    """Draw AUC, freshness and rows of each second."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    windows = observer.windows
    seconds = [window.second for window in windows]
    figure = Figure(figsize=(7, 5.2), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=[2, 1, 1])
    top.plot(seconds, [w.newest_auc for w in windows], label="newest version served")
    top.plot(seconds, [w.frozen_auc for w in windows], label="version when the stream began")
    top.set_ylabel("AUC of the next second")
    top.legend(loc="lower left")
    middle.bar(seconds, [window.fresh for window in windows], color="tab:gray")
    middle.set_ylabel("click to served, s")
    bottom.step(seconds, [window.rows for window in windows], where="mid", color="tab:green")
    bottom.set_ylabel("rows alive")
    bottom.set_xlabel("event time, s")
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "online"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(
    seconds: Annotated[int, typer.Option(help="Seconds of the stream.", min=2)] = 35,
    before: Annotated[int, typer.Option(help="Seconds of clicks that exist when training begins.", min=1)] = 20,
    examples: Annotated[int, typer.Option(help="Clicks per second.", min=10)] = 4000,
    picture: Annotated[Path | None, typer.Option(help="Draw AUC and freshness to this SVG or PNG file.")] = None,
    folder: Annotated[Path, typer.Option(help="Parent of the temporary folder.")] = Path("."),
) -> None:
    """Train on a stream, publish, serve, and measure."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix=".demo-online-", dir=folder) as work:
        observer = run(Path(work), seconds=seconds, before=before, examples=examples)
        print_report(console, observer)
        if picture is not None:
            draw(observer, picture)
            console.print(f"wrote {picture}")


if __name__ == "__main__":
    typer.run(main)

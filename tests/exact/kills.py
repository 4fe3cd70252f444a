"""Train, kill with SIGKILL at random times and resume until the training ends. Run by test_kill_resume.py.

    python kills.py FOLDER OPTIMIZER DRAM DEPTH WINDOW THREADS KILLS SEED

Prints one JSON line: the number of kills, the steps that runs resumed from, and digests of the results. Each attempt is
a fork of this process, which has imported everything but runs no threads: an attempt costs milliseconds, and kills hit
every phase, from opening the stores to the last save.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from exact.run import DIMS, RunOptions, batches, keys_of, make_model, make_table, probe
from helpers.train import bits, loss_of, one_torch_thread, weights_of

import thermocline as tc


def digests(rows: dict[str, bytes], dense: bytes) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in {**rows, "dense": dense}.items()}


PROGRESS = mmap.mmap(-1, 8)  # shared with the forks: the last step of the current attempt


def attempt(folder: Path, optimizer: str, options: RunOptions, every: int) -> None:
    """Train from the last checkpoint to the end."""
    one_torch_thread()
    tables = {name: make_table(name, optimizer, options, folder) for name in DIMS}
    model = make_model(tables)
    for table in tables.values():
        if table.hbm is not None:
            model.to(table.hbm.device)
    dense = torch.optim.Adam(model.dense.parameters(), lr=0.01)
    checkpoints = tc.Checkpoints(folder / "run", list(tables.values()), model, dense)
    saved = checkpoints.restore() if checkpoints.exists else None
    step = 0 if saved is None else saved.step
    assert saved is None or saved.position == {"batch": step}
    with open(folder / "attempts", "a") as log:
        log.write(f"{step}\n")
    remaining = tc.prefetch(batches()[step:], *tables.values(), depth=options.depth, pull_window=options.pull_window)
    for batch in remaining:
        loss_of(model, batch).backward()
        for table in tables.values():
            table.step()
        dense.step()
        dense.zero_grad()
        step += 1
        PROGRESS[:] = step.to_bytes(8, "little")
        if step % every == 0:  # while the pipeline is ahead
            checkpoints.save(step, batch.position)
    for table in tables.values():
        table.dram.check()
        if table.hbm is not None:
            table.hbm.check()
    result = digests({name: bits(table.read(probe())) for name, table in tables.items()}, weights_of(model))
    (folder / "result.tmp").write_text(json.dumps(result))
    os.rename(folder / "result.tmp", folder / "result")


def fork(run: Callable[..., None], *arguments: Any) -> int:
    """Call `run` in a new process; return its id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run(*arguments)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def kill_at(pid: int, step: int, seconds: float) -> bool:
    """Kill the process `seconds` after it trained `step`; return False if it ended before."""
    due = None
    while due is None or time.monotonic() < due:
        if due is None and int.from_bytes(PROGRESS[:], "little") >= step:
            due = time.monotonic() + seconds
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if status != 0:
                raise SystemExit(f"an attempt ended with status {status}")
            return False
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def main() -> None:
    folder, optimizer, dram, depth, window, threads, ahead, kills, seed = sys.argv[1:]
    share = None if dram == "None" else float(dram)
    options = RunOptions(share, int(depth), int(window), int(threads), lookahead=int(ahead))
    rng = random.Random(int(seed))
    for name in DIMS:  # before the forks, once
        keys_of(name)
    torch.zeros(1)
    killed, resumed, results = 0, [], []
    while killed < int(kills) or not results:
        run_dir = Path(folder) / str(len(results))
        run_dir.mkdir(parents=True)
        every = rng.randint(2, 30)
        while not (run_dir / "result").exists():
            PROGRESS[:] = bytes(8)
            pid = fork(attempt, run_dir, optimizer, options, every)
            if killed == int(kills):
                kill_at(pid, sys.maxsize, 0.0)
            elif rng.random() < 0.3:
                killed += kill_at(pid, 0, rng.uniform(0.0, 0.3))  # may hit opening and restoring
            else:
                killed += kill_at(pid, rng.randint(1, len(batches())), rng.uniform(0.0, 0.03))
        resumed += [int(line) for line in (run_dir / "attempts").read_text().split()]
        results.append(json.loads((run_dir / "result").read_text()))
    print(json.dumps({"killed": killed, "resumed": resumed, "results": results}))


if __name__ == "__main__":
    main()

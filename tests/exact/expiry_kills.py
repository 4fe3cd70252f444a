"""Train with statistics, expiry and admission, kill with SIGKILL at random times, resume. Run by test_kill_expiry.py.

    python expiry_kills.py FOLDER CASE KILLS SEED

Prints one JSON line: the number of kills, the steps that runs resumed from, and the states at the end. See `kills.py`.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from exact.kills import PROGRESS, fork, kill_at
from helpers.online import fit, make_table, state_of, stream, train
from helpers.train import one_torch_thread

import thermocline as tc

STEPS = 120
EXPIRY = tc.Expiry(every=10, spread=7, unused_steps=6, unused_seconds=900, min_score=0.2, decay=0.9, max_rows=80)
ADMISSION = tc.Admission(count=2, otherwise="zero")
CASES: dict[str, dict[str, Any]] = {
    "ssd": {"tiers": "ssd", "lookahead": 6, "depth": 3},
    "mem": {"tiers": "mem", "lookahead": 0, "depth": 4},
    "catch_up": {"tiers": "ssd", "lookahead": 0, "depth": 2,
                 "optimizer": tc.Adam(lr=0.05, weight_decay=0.01, lazy="catch_up", catch_up_steps=9)},
}  # fmt: skip


def options_of(case: str) -> dict[str, Any]:
    """Return the options of the table of a case, without those that change no result."""
    return {"expiry": EXPIRY, "admission": ADMISSION} | {
        name: value for name, value in CASES[case].items() if name == "optimizer"
    }


def counted(table: tc.Table) -> dict[str, Any]:
    """Return the state, and the counters of admission as of the last step; without those of one process."""
    state: dict[str, Any] = table.rank_state()["admission"]
    counts = sorted(zip(state["keys"].tolist(), state["counts"].tolist(), strict=True))
    return {
        **state_of(table),
        "expired": None,
        "rows": state_of(table)["rows"].hex(),
        "counts": list(map(list, counts)),
    }


def expected(case: str) -> dict[str, Any]:
    """Return the state of an uninterrupted training in a dict of rows."""
    table = make_table("reference", "", **options_of(case))
    fit(table, stream(STEPS))
    assert table.expired.rows > 200
    return counted(table)


def attempt(folder: Path, case: str, every: int) -> None:
    """Train from the last checkpoint to the end."""
    one_torch_thread()
    where = CASES[case]
    table = make_table(where["tiers"], folder, lookahead=where["lookahead"], **options_of(case))
    model = torch.nn.Sequential(tc.EmbeddingBag(table, 2, pooling=["sum", "mean"]))
    checkpoints = tc.Checkpoints(folder / "run", [table], model)
    saved = checkpoints.restore() if checkpoints.exists else None
    step = 0 if saved is None else saved.step
    with open(folder / "attempts", "a") as log:
        log.write(f"{step}\n")
    with tc.prefetch(stream(STEPS)[step:], table, depth=where["depth"]) as batches:
        for batch in batches:
            train(table, model[0], [batch])
            step += 1
            PROGRESS[:] = step.to_bytes(8, "little")
            if step % every == 0:  # while the pipeline is ahead, and in the middle of an expiry
                checkpoints.save(step)
    table.dram.check()
    (folder / "result.tmp").write_text(json.dumps(counted(table)))
    os.rename(folder / "result.tmp", folder / "result")


def main() -> None:
    folder, case, kills, seed = sys.argv[1:]
    rng = random.Random(int(seed))
    stream(STEPS)
    torch.zeros(1)
    killed, resumed, results = 0, [], []
    while killed < int(kills) or not results:
        run_dir = Path(folder) / str(len(results))
        run_dir.mkdir(parents=True)
        every = rng.randint(2, 13)
        while not (run_dir / "result").exists():
            PROGRESS[:] = bytes(8)
            pid = fork(attempt, run_dir, case, every)
            if killed == int(kills):
                kill_at(pid, sys.maxsize, 0.0)
            else:
                killed += kill_at(pid, rng.randint(1, STEPS), rng.uniform(0.0, 0.01))
        resumed += [int(line) for line in (run_dir / "attempts").read_text().split()]
        results.append(json.loads((run_dir / "result").read_text()))
    print(json.dumps({"killed": killed, "resumed": resumed, "results": results}))


if __name__ == "__main__":
    main()

"""One rank of the tests: `mpirun -n N python ranks.py CONFIG...` trains each config and saves rows and weights.

A config whose name begins with "prepared" is trained on PREPARED batches that exist before the training.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from baselines.mpi_ps.job import Job
from thermocline.config.schema import Config

PREPARED = 3


def main() -> None:
    for name in sys.argv[1:]:
        job = Job(Config.load(name), prepared=PREPARED if Path(name).name.startswith("prepared") else 0)
        row = job.fit()
        pieces = list(job.table.rows())
        keys = np.concatenate([piece[0].copy() for piece in pieces])
        rows = np.concatenate([piece[1].copy() for piece in pieces])
        dense = np.concatenate([p.detach().numpy().reshape(-1) for p in job.model.parameters()])
        job.table.dram.check()  # no row is pinned
        np.savez(Path(name).with_suffix(f".{job.rank}.npz"), keys=keys, rows=rows, dense=dense)
        if row is not None:
            Path(name).with_suffix(".json").write_text(json.dumps(row))


try:
    main()
except BaseException as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    MPI.COMM_WORLD.Abort(3)

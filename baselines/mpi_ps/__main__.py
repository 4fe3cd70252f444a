"""`mpirun -n N python -m baselines.mpi_ps config.toml`: train a config of `thermocline train` with N ranks."""

from __future__ import annotations

import argparse
import json
import sys
import traceback

from mpi4py import MPI

from baselines.mpi_ps.job import Job
from thermocline.config.schema import Config
from thermocline.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m baselines.mpi_ps", description=__doc__)
    parser.add_argument("config", help="config of `thermocline train`; tiers.mem is per rank, tiers.ssd is ignored")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="such as train.lr=0.01")
    parser.add_argument("--seconds", type=float, help="stop training after about this many seconds")
    parser.add_argument(
        "--prepared",
        type=int,
        default=0,
        metavar="N",
        help="for generated data: create the rows of all keys and N mini-batches before training, then repeat these",
    )
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    config = Config.load(args.config, args.set)
    job = Job(config, seconds=args.seconds, prepared=args.prepared)
    if comm.rank == 0:
        note = "; tiers.ssd is ignored: all rows must fit tiers.mem" if config.tiers.ssd is not None else ""
        print(f"{comm.size} ranks with {job.threads} threads each, {config.tiers.mem} for rows{note}", flush=True)
    row = job.fit()
    if row is not None:
        print(json.dumps(row))


if __name__ == "__main__":
    # An error of one rank aborts all ranks: the others would wait for it in a collective.
    try:
        main()
    except SystemExit:
        raise
    except BaseException as error:
        if isinstance(error, ConfigError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
            sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)

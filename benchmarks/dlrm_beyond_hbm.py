"""DLRM with more rows than HBM: 160M rows of dim 128 in DRAM and HBM, 19 % of them in HBM, no SSD.

Claim    At least 3M samples/s in the steady state. Published: 0.768M on an A100 with host memory (HBM : model = 0.19).
Method   26 one-hot features, 13 dense features, dim 128, DLRM's network in bf16 with Adam; rows in fp32 with row-wise
         Adagrad, 83 GB, HBM budget 15.7 GB, DRAM budget 96 GB. Generated ids, power law 1.05 per feature. All rows are
         in DRAM and the most frequent ones in HBM before the clock, as after a long training. Every batch is used
         once; batches are prepared in page-locked memory. Planning, rows in both directions, training, loss and
         metrics are timed, through `tc.Trainer`.
Command  python benchmarks/dlrm_beyond_hbm.py --json FILE     an H200, 128 GB of DRAM, three minutes
         TRITON_INTERPRET=1 python benchmarks/dlrm_beyond_hbm.py --tiny
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from common import Claim, console, environment, print_claims, write_json
from dlrm_workload import DIM, ONE_HOT, TOP, Dlrm, interpreted_or_gpu, keys_of_rows, make_batch, rows_per_feature, train

import thermocline as tc
from thermocline.embedding.bulk_load import fill_top

TARGET = 3.0


def filled(rows: list[int], dim: int, hbm: str | int, mem: str | int) -> tc.Table:
    """Return a table with all rows in DRAM, and in HBM as many of the most frequent ones as nearly fill it."""
    table = tc.Table(dim, tc.RowWiseAdagrad(lr=0.01), hbm=hbm, mem=mem, device=interpreted_or_gpu())
    for keys in keys_of_rows(rows):
        table.dram.unpin(table.dram.pull(keys))
    assert table.hbm is not None
    fill_top(table, keys_of_rows(rows, 0.0, 0.97 * table.hbm.capacity / sum(rows)))
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write all figures to FILE")
    parser.add_argument("--rows", type=int, default=160_000_000)
    parser.add_argument("--hbm", default="15.7GB")
    parser.add_argument("--mem", default="96GB")
    parser.add_argument("--batch", type=int, default=65536)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--no-compile", action="store_true", help="dense part without torch.compile")
    parser.add_argument("--tiny", action="store_true", help="a few rows and examples, for a dry run")
    args = parser.parse_args(arguments)
    dim, top = DIM, TOP
    if args.tiny:
        args.rows, args.batch, args.steps, args.no_compile = 1200, 8, 4, True
        args.hbm, args.mem, dim, top = "40KB", "1MB", 8, (16, 1)
    begin = time.perf_counter()
    rows = rows_per_feature(args.rows)
    table = filled(rows, dim, args.hbm, args.mem)
    record: dict[str, Any] = {**environment(["torch", "triton"]), "rows": rows, "fill_s": time.perf_counter() - begin}
    record["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    assert table.hbm is not None
    resident = table.hbm.stats().resident
    record |= {"hbm": args.hbm, "mem": args.mem, "resident": resident, "dram": table.dram.stats().resident}
    console.print(f"filled {record['dram']:,} rows, {resident:,} in HBM, in {record['fill_s']:.1f} s")
    batches = [make_batch(rows, ONE_HOT, args.batch, seed) for seed in range(args.steps)]
    torch.manual_seed(0)
    model = Dlrm(table, bottom=(*(() if args.tiny else (512, 256)), dim), top=top)
    figures = train(
        model, batches, args.steps, args.steps // 3, depth=args.depth, dense_precision=args.precision,
        compile=not args.no_compile,
    )  # fmt: skip
    record["training"] = figures
    console.print(f"{figures}")
    detail = (
        f"{figures['ms']:.2f} ms; {figures['unique_rows']:,.0f} rows a step, {figures['hit_rate']:.1%} of them in HBM, "
        f"{figures['rows_in']:,.0f} moved in, {figures['rows_out']:,.0f} out"
    )
    claims = [Claim("DLRM beyond HBM", figures["samples_per_second"] / 1e6, TARGET, "M/s", detail=detail)]
    print_claims("DLRM with more rows than HBM, one GPU", claims)
    if args.json:
        write_json(args.json, record, claims)
    table.close()


if __name__ == "__main__":
    main()

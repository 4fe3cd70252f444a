"""MLPerf's DLRM-DCNv2 on one GPU, all rows in HBM: samples per second through `tc.Trainer`.

Claims   At least 1.9M samples/s with batches of 55,296 examples, which is the share of one GPU of MLPerf's record (8
         H200, HugeCTR: 15.1M), and 1.2M with 6,912.
Method   MLPerf's shape: 26 multi-hot features, 214 ids per example, 13 dense features, dim 128, three low-rank cross
         layers. Generated ids, power law 1.05 per feature; rows per feature as MLPerf's with the five largest lowered
         to fit one GPU: 104M rows. Rows in fp32 with row-wise Adagrad, dense layers in bf16 with Adam. Batches are
         prepared in page-locked memory; planning, training, loss and metrics are timed.
Command  python benchmarks/mlperf_dcnv2.py --json FILE     an H200, two minutes
         TRITON_INTERPRET=1 python benchmarks/mlperf_dcnv2.py --tiny
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from common import Claim, console, environment, print_claims, write_json
from dlrm_workload import DIM, MULTI_HOT, DcnV2, interpreted_or_gpu, keys_of_rows, make_batch, rows_per_feature, train

import thermocline as tc
from thermocline.embedding.bulk_load import fill_top
from thermocline.tiers.hbm import bytes_for

TARGETS = {55296: 1.9e6, 6912: 1.2e6}


def filled(rows: list[int], dim: int) -> tc.Table:
    """Return a table with a row in HBM for every key."""
    total = sum(rows)
    table = tc.Table(
        dim, tc.RowWiseAdagrad(lr=0.01), hbm=bytes_for(total + total // 1000 + 64, dim + 1), mem="1GB",
        device=interpreted_or_gpu(),
    )  # fmt: skip
    fill_top(table, keys_of_rows(rows))
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write all figures to FILE")
    parser.add_argument("--rows", type=int, default=104_200_000)
    parser.add_argument("--batches", default="55296,6912", help="batch sizes")
    parser.add_argument("--prepared", type=int, default=8, help="different batches")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--no-compile", action="store_true", help="dense part without torch.compile")
    parser.add_argument("--tiny", action="store_true", help="a few rows and examples, for a dry run")
    args = parser.parse_args(arguments)
    dim, top = DIM, (1024, 1024, 512, 256, 1)
    if args.tiny:
        args.rows, args.batches, args.prepared, args.steps, args.no_compile = 300, "3,2", 1, 3, True
        dim, top = 8, (16, 1)
    begin = time.perf_counter()
    rows = rows_per_feature(args.rows)
    table = filled(rows, dim)
    record: dict[str, Any] = {**environment(["torch", "triton"]), "rows": rows, "fill_s": time.perf_counter() - begin}
    record["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    console.print(f"filled {table.hbm.stats().resident:,} rows in {record['fill_s']:.1f} s")  # type: ignore[union-attr]
    claims = []
    for examples in map(int, args.batches.split(",")):
        batches = [make_batch(rows, MULTI_HOT, examples, seed) for seed in range(args.prepared)]
        torch.manual_seed(0)
        model = DcnV2(table, bottom=(*(() if args.tiny else (512, 256)), dim), top=top)
        figures = train(
            model, batches, args.steps, args.steps // 3, depth=args.depth, dense_precision=args.precision,
            compile=not args.no_compile,
        )  # fmt: skip
        record[str(examples)] = figures
        console.print(f"batch {examples}: {figures}")
        detail = f"{figures['ms']:.2f} ms, {figures['ids']:,} ids, {figures['unique_rows']:,.0f} rows"
        target = TARGETS.get(examples, 0.0) / 1e6
        claims.append(Claim(f"batch {examples:,}", figures["samples_per_second"] / 1e6, target, "M/s", detail=detail))
        del model, batches
    print_claims("MLPerf DLRM-DCNv2, one GPU", claims)
    if args.json:
        write_json(args.json, record, claims)
    table.close()


if __name__ == "__main__":
    main()

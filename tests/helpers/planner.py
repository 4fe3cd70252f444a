"""Hardware with round figures, for tests of the planner."""

from __future__ import annotations

from thermocline.planner.hardware import Cpu, Disk, Gpu, Hardware, LinkSpeeds

CPU = Cpu(
    cores=4,
    memory=10**10,
    dedup_id_ns=10.0,
    pull_row_ns=50.0,
    plan_id_ns=5.0,
    pool_id_ns=2.0,
    pool_float_ns=0.5,
    pool_tail_ns=0.25,
    sum_id_ns=2.0,
    sum_float_ns=0.5,
    sum_tail_ns=0.25,
    apply_row_ns=4.0,
    apply_float_ns=1.0,
    apply_tail_ns=0.5,
    dense_reference_ms=0.1,
    example_ns=50.0,
    step_us=1000.0,
    prefetch_us=400.0,
    route_key_ns=20.0,
    route_us=100.0,
    exchange_key_ns=30.0,
    exchange_float_ns=4.0,
    exchange_us=200.0,
    allreduce_float_ns=3.0,
    allreduce_us=50.0,
)
DISK = Disk(
    read_us=4.0, page_us=1.0, page_bytes=4096, write_gbs=0.5, write_amplification=5.0, miss_row_ns=5000.0,
    miss_read_ns=3000.0, miss_write_ns=1000.0, miss_thread_share=0.5,
)  # fmt: skip
LINKS = LinkSpeeds(node_gbs=10.0, node_us=10.0, network_gbs=1.0, network_us=50.0, data_gbs=1.0)
GPU = Gpu(count=2, memory=10**10, hbm_gbs=1000.0, random_gbs=500.0, tflops=10.0, step_us=1000.0, host_gbs=10.0)
NODE = Hardware(name="round", source="test figures", cpu=CPU, disk=DISK, links=LINKS, gpu=GPU)

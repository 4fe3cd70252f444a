"""A PyTorch training loop over several ranks: rows are sharded, and each rank reads its shard of the data.

    torchrun --nproc-per-node 2 own_loop_ranks.py          # or `python own_loop_ranks.py` for one rank

After a kill, start it again: it resumes from the last checkpoint, bit for bit. It can also resume with another number
of ranks; the data is then sharded differently, so the epoch restarts.
"""

from __future__ import annotations

import os

import thermocline as tc  # before torch: idle OpenMP threads then sleep instead of spinning
import torch

STEPS = int(os.environ.get("STEPS", 200))
FIELDS, DIM, BATCH = 20, 16, 512

groups = tc.join_ranks()  # reads torchrun's environment
rank, world = groups.topology.rank, groups.topology.world
shard = (rank, world)
ads = tc.SyntheticAds(keys=200_000, fields=FIELDS, batch_size=BATCH, examples=BATCH * world * STEPS, shard=shard)
test = ads.split("test", examples=10_000)

torch.manual_seed(0)
os.makedirs("runs/own_loop_ranks", exist_ok=True)
table = tc.ShardedTable(DIM, tc.Adagrad(lr=0.1), groups=groups, mem="8MB", ssd="runs/own_loop_ranks/rows")
bag = tc.EmbeddingBag(table, fields=FIELDS)
mlp = torch.nn.Sequential(torch.nn.Linear(FIELDS * DIM, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
adam = torch.optim.Adam(mlp.parameters(), lr=1e-3)
dense = tc.DenseParameters.make(mlp.parameters(), adam, groups)  # gradients averaged every step

checkpoints = tc.Checkpoints("runs/own_loop_ranks", [table], mlp, adam, dense_sync=dense)
saved = checkpoints.restore()
step = 0 if saved is None else saved.step
if saved is not None and saved.position is not None:
    ads.seek(saved.position)
dense.begin()  # broadcasts rank 0's weights; after a restore it sends nothing


def logits_of(batch: tc.Batch) -> torch.Tensor:
    return mlp(bag(batch).flatten(1)).squeeze(1)


with tc.prefetch(ads, table, depth=4) as batches:
    for batch in batches:
        if batch.examples:  # 0 if only other ranks still have data
            torch.nn.functional.binary_cross_entropy_with_logits(logits_of(batch), batch.label).backward()
        table.step()  # on every rank, in every step, before dense gradients change
        dense.after_backward()
        adam.step()
        adam.zero_grad()
        step += 1
        dense.after_step(step)
        if step % 50 == 0:
            checkpoints.save(step, batch.position)  # every rank's own dense state
            if rank == 0:
                print(f"step {step}: saved by {world} ranks", flush=True)

bag.eval()
metrics = tc.ExactMetrics()
with dense.merged(), torch.no_grad(), tc.prefetch(test, table, training=False) as batches:  # the mean of the ranks
    for batch in batches:
        if batch.examples:
            metrics.update(logits_of(batch), batch.label)
figures = metrics.joined(groups).compute()  # over the examples of all ranks
if rank == 0:
    print(f"done at step {step}: test AUC {figures['auc']:.4f} on {figures['examples']:,} examples")
table.close()
groups.close()

"""Your own PyTorch loop over several ranks: one model, its rows spread over all, each with its part of the data.

    torchrun --nproc-per-node 2 own_loop_ranks.py          # or plain `python own_loop_ranks.py`: one rank

Kill it, run it again: it goes on from the last checkpoint, with the same bits. With another number of ranks it goes
on, too, but the ranks then have other parts of the data, so the epoch begins anew.
"""

from __future__ import annotations

import os

import torch

import thermocline as tc

STEPS = int(os.environ.get("STEPS", 200))
FIELDS, DIM, BATCH = 20, 16, 512

groups = tc.join_ranks()  # as torchrun says who is there
rank, world = groups.topology.rank, groups.topology.world
mine = (rank, world)  # this rank's part of any data
ads = tc.SyntheticAds(keys=200_000, fields=FIELDS, batch_size=BATCH, examples=BATCH * world * STEPS, shard=mine)
unseen = ads.split("test", examples=10_000)

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
dense.begin()  # rank 0's weights to all


def logits_of(batch: tc.Batch) -> torch.Tensor:
    return mlp(bag(batch).flatten(1)).squeeze(1)


with tc.prefetch(ads, table, depth=4) as batches:
    for batch in batches:
        if batch.examples:  # none: this rank's data has run out, others' has not
            torch.nn.functional.binary_cross_entropy_with_logits(logits_of(batch), batch.label).backward()
        table.step()  # every rank, every step; before dense gradients are changed
        dense.after_backward()
        adam.step()
        adam.zero_grad()
        step += 1
        dense.after_step(step)
        if step % 50 == 0:
            dense.merge_now()  # nothing to do here; needed with DenseSync(every=k)
            checkpoints.save(step, batch.position)
            if rank == 0:
                print(f"step {step}: saved by {world} ranks", flush=True)

dense.merge_now()
bag.eval()
metrics = tc.ExactMetrics()
with torch.no_grad(), tc.prefetch(unseen, table, training=False) as batches:
    for batch in batches:
        if batch.examples:
            metrics.update(logits_of(batch), batch.label)
figures = metrics.joined(groups).compute()  # of all ranks' examples
if rank == 0:
    print(f"done at step {step}: test AUC {figures['auc']:.4f} on {figures['examples']:,} examples")
table.close()
groups.close()

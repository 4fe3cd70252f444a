"""Generated ads with your own PyTorch training loop: rows in DRAM and on SSD, prefetching, crash-safe checkpoints.

Run it, kill it and run it again: it resumes from the last checkpoint, bit for bit.
"""

from __future__ import annotations

import os

import thermocline as tc  # before torch: idle OpenMP threads then sleep instead of spinning
import torch

STEPS = int(os.environ.get("STEPS", 200))

torch.manual_seed(0)
os.makedirs("runs/own_loop", exist_ok=True)
ads = tc.SyntheticAds(keys=200_000, fields=20, batch_size=512, examples=512 * STEPS)
table = tc.Table(16, tc.Adagrad(lr=0.1), mem="8MB", ssd="runs/own_loop/rows", ssd_mem="16MB")
bag = tc.EmbeddingBag(table, fields=20)
mlp = torch.nn.Sequential(torch.nn.Linear(20 * 16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
adam = torch.optim.Adam(mlp.parameters(), lr=1e-3)

checkpoints = tc.Checkpoints("runs/own_loop", [table], mlp, adam)
saved = checkpoints.restore()
step = 0 if saved is None else saved.step
if saved is not None:
    ads.seek(saved.position)

metrics = tc.StreamingMetrics()
with tc.prefetch(ads, table, depth=4) as batches:
    for batch in batches:
        logits = mlp(bag(batch).flatten(1)).squeeze(1)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
        table.step()
        adam.step()
        adam.zero_grad()
        metrics.update(logits.detach(), batch.label)  # logits from before the update: a progressive validation
        step += 1
        if step % 50 == 0:
            checkpoints.save(step, batch.position)
            figures = metrics.compute()
            hits = table.dram.stats().hit_rate
            print(f"step {step}: AUC {figures['auc']:.4f}, logloss {figures['logloss']:.4f}, memory hits {hits:.1%}")
table.close()
print(f"done at step {step}")

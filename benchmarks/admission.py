"""Admission: processor time that it adds to a training step.

Claim    Admission by count costs at most 5 % of the processor time of a training step (26 fields x 4,096 examples).
Method   Batches of `tc.SyntheticAds`, 2e6 keys. The step: a table in DRAM and the network of the default config, three
         hidden layers of 400, on one torch thread; processor time of the whole process. The filter and the split of a
         batch: processor time of their thread, over the batches after the first --warm, most of whose keys are new.
         Beside it: the same against a network with one hidden layer of 64, in which the table is half of the step, and
         the processor time of whole steps with and without admission, turn by turn.
Command  python benchmarks/admission.py --json FILE
         python benchmarks/admission.py --quick       seconds, few steps
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import Claim, console, environment, print_claims, spread, write_json

import thermocline as tc

FIELDS, EXAMPLES, DIM = 26, 4096, 16
TARGET = 0.05
DEFAULT, SMALL = (400, 400, 400), (64,)
"""Widths of the hidden layers."""


class Side:
    """A table and a network, trained on the batches of one loader."""

    def __init__(self, admission: tc.Admission | None, batches: Sequence[tc.Batch], hidden: Sequence[int]) -> None:
        self.table = tc.Table(
            DIM, tc.Adagrad(lr=0.05), name="t", mem="1GB", admission=admission, device="cpu", mem_overcommit=True
        )
        self.bag = tc.EmbeddingBag(self.table, FIELDS)
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for width, more in itertools.pairwise([FIELDS * DIM, *hidden]):
            layers += [torch.nn.Linear(width, more), torch.nn.ReLU()]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(hidden[-1], 1))
        self.dense = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        self.source = tc.prefetch(batches, self.table, depth=1)
        self.seconds: list[float] = []

    def close(self) -> None:
        self.source.close()
        self.table.close()

    def train(self, steps: int) -> None:
        """Train `steps` steps and record the processor time of each."""
        for _ in range(steps):
            start = time.process_time()
            batch = next(self.source)
            logits = self.net(self.bag(batch).flatten(1)).squeeze(1)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
            self.table.step()
            self.dense.step()
            self.dense.zero_grad()
            self.seconds.append(time.process_time() - start)


def filter_seconds(setting: tc.Admission, batches: Sequence[tc.Batch], warm: int) -> dict[str, float]:
    """Processor time of the filter and of the split of a batch, on this thread: medians after the first `warm`."""
    side = Side(setting, batches, SMALL)
    side.source.close()
    backend: Any = side.table.backend
    times: dict[str, list[float]] = {"filter": [], "split": [], "refused": []}
    for batch in batches:
        inputs = side.table.inputs(batch)
        start = time.thread_time()
        decision = backend.decide(inputs)
        middle = time.thread_time()
        backend.split(inputs, decision)
        times["split"].append(time.thread_time() - middle)
        times["filter"].append(middle - start)
        times["refused"].append(0.0 if decision.refused is None else float(decision.refused.mean()))
        backend._filter.train(backend._filter.planned, True)
    side.table.close()
    return {name: statistics.median(values[warm:]) for name, values in times.items()}


def step_seconds(settings: Sequence[tc.Admission | None], batches: Sequence[tc.Batch], options: Any) -> list[Any]:
    """Processor time of steps with the default network, one side after the other."""
    sides = [Side(setting, batches, DEFAULT) for setting in settings]
    for side in sides:
        side.train(options.warm_steps)
        side.seconds.clear()
    for _ in range(options.steps):
        for side in sides:
            side.train(1)
    for side in sides:
        side.close()
    return [spread(side.seconds) for side in sides]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keys", type=int, default=2_000_000)
    parser.add_argument("--batches", type=int, default=160)
    parser.add_argument("--warm", type=int, default=120, help="batches before the filter is measured")
    parser.add_argument("--steps", type=int, default=20, help="steps that are measured, of each side")
    parser.add_argument("--warm-steps", type=int, default=5)
    options = parser.parse_args()
    if options.quick:
        options.batches, options.warm, options.steps = 20, 10, 3
    torch.set_num_threads(1)
    ads = tc.SyntheticAds(keys=options.keys, fields=FIELDS, batch_size=EXAMPLES, examples=EXAMPLES * options.batches)
    batches = list(ads)
    settings = {
        "initial": tc.Admission(count=3),
        "zero": tc.Admission(count=3, otherwise="zero"),
        "shared": tc.Admission(count=3, otherwise="shared"),
        "shared, sketch": tc.Admission(count=3, sketch=True, otherwise="shared"),
    }
    without, with_admission = step_seconds([None, settings["initial"]], batches, options)
    small = Side(None, batches, SMALL)
    small.train(options.warm_steps + options.steps)
    table_step = statistics.median(small.seconds[options.warm_steps :])
    small.close()
    step = without["median"]
    record: dict[str, Any] = {"environment": environment(["torch", "numpy"]), "options": vars(options) | {"json": None}}
    record |= {"without": without, "with, initial": with_admission, "small_step": table_step}
    claims = []
    for name, setting in settings.items():
        parts = record[name] = filter_seconds(setting, batches, options.warm)
        added = parts["filter"] + parts["split"]
        detail = (
            f"{1e3 * parts['filter']:.2f} + {1e3 * parts['split']:.2f} ms of {1e3 * step:.0f} ms; "
            f"{added / table_step:.1%} of the small step, {1e3 * table_step:.0f} ms; {parts['refused']:.0%} refused"
        )
        claims.append(Claim(f"filter + split, {name}", added / step, TARGET, "of a step", at_most=True, detail=detail))
    print_claims("Admission by count", claims)
    console.print(
        f"whole step, initial: {with_admission['median'] / step - 1:+.1%} (steps {options.warm_steps} and later)"
    )
    if options.json is not None:
        write_json(options.json, record, claims)


if __name__ == "__main__":
    main()

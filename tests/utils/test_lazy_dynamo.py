"""A run of the command line does not import torch._dynamo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from thermocline.utils.lazy_dynamo import optimizer_step

CONFIG = """
[data]
format = "synth"
[data.synth]
keys = 1000
examples = 64
valid_examples = 16
test_examples = 16
[model]
name = "dnn"
dim = 4
hidden = [8]
[tiers]
device = "cpu"
mem = "4MB"
[train]
batch_size = 8
log_every = 1
tensorboard = false
torch_threads = 1
"""
PROGRAM = """
import sys
from thermocline.cli.main import app
app(["train", "config.toml", *sys.argv[1:]], standalone_mode=False)
import torch
from thermocline.training import dense_optimizers
dense_optimizers._GPU = "cpu"  # as on a GPU: the first call tries the fused kernel
assert dense_optimizers._fused_on_gpu(torch.optim.Adam)
print("dynamo" if "torch._dynamo" in sys.modules else "no dynamo", torch.optim.Adam.step.__wrapped__.__name__)
"""


def test_training_saving_and_resuming_do_not_import_dynamo(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    for args in (["--set", "train.steps=3"], ["--resume"]):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *args], cwd=tmp_path, capture_output=True, text=True, env=os.environ
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "no dynamo step"


class Own(torch.optim.SGD):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, Own])
def test_step_without_decorators_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, kind: Any, hooked: bool) -> None:
    results = []
    for step in (lambda optimizer: optimizer.step(), optimizer_step):
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2)
        optimizer: Any = kind(layer.parameters(), lr=0.1)
        seen: list[int] = []
        if hooked:
            optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append(1))
        for _ in range(3):
            layer(torch.ones(1, 3)).sum().backward()
            with monkeypatch.context() as patch:
                if step is optimizer_step and not hooked and kind is not Own:  # the others need the module
                    patch.delitem(sys.modules, "torch._dynamo")
                step(optimizer)
        assert len(seen) >= 3 * hooked
        assert getattr(optimizer, "calls", 3) == 3
        results.append(layer.weight.detach())
    assert torch.equal(*results)

"""Draw docs/display.svg: the live display near the end of a short training. `python tools/picture.py`.

rich draws a terminal window with fixed colours, which is readable on light and dark pages.
"""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.terminal_theme import MONOKAI

import thermocline as tc
from thermocline.training.callbacks import Callback
from thermocline.training.display import Display

TARGET = Path(__file__).parent.parent / "docs" / "display.svg"
CONFIG = """
[data]
format = "synth"
[data.synth]
keys = 2_000_000
examples = 491_520
valid_examples = 20_480
test_examples = 0
[model]
name = "dcnv2"
dim = 16
hidden = [64, 32]
embedding_l2 = 0.0
initial = 0.01
[tiers]
mem = "24MB"
ssd_mem = "24MB"
[train]
batch_size = 2048
optimizer = "adagrad"
lr = 0.1
dense_optimizer = "adam"
dense_lr = 1e-3
log_every = 20
valid_every = 100
checkpoint_every = 100
torch_threads = 1
tensorboard = false
display = false
"""


class Picture(Callback):
    """Exports the display as SVG at one step."""

    def __init__(self, display: Display, console: Console, step: int) -> None:
        self.display, self.console, self.step = display, console, step
        self.svg = ""

    def on_step(self, trainer: Any, loss: torch.Tensor) -> None:
        if trainer.progress.step == self.step:
            self.console.print(self.display.render())
            svg = self.console.export_svg(title="thermocline train ads.toml", theme=MONOKAI, unique_id="display")
            self.svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # remove references to web fonts


def main() -> None:
    # Both consoles pretend to be terminals and write nowhere; the first records its lines.
    console = Console(file=io.StringIO(), force_terminal=True, width=104, record=True)
    quiet = Console(file=io.StringIO(), force_terminal=True, width=104)
    display = _Recorded(quiet, console)
    picture = Picture(display, console, 225)
    with tempfile.TemporaryDirectory() as folder:
        config = tc.Config.parse(CONFIG, [f"train.run_dir={folder}/run", f"tiers.ssd={folder}/store"])
        with tc.Run(config) as run:
            run.fit(callbacks=[display, picture])
    TARGET.write_text(picture.svg)
    print(f"wrote {TARGET}")


class _Recorded(Display):
    """A display that repeats its lines on a second console, whose record has no overdrawn frames."""

    def __init__(self, console: Console, record: Console) -> None:
        super().__init__(console)
        self._record = record

    def _print(self, line: str) -> None:
        super()._print(line)
        self._record.print(line, soft_wrap=True, highlight=False, markup=False)


if __name__ == "__main__":
    main()

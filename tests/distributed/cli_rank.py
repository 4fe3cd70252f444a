"""`python -m thermocline` for torchrun; rank 1 is killed after step 12 of the first attempt."""

from __future__ import annotations

import os
import signal
from typing import Any

if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    from thermocline.training.trainer import Trainer

    original = Trainer._after_step

    def after_step(self: Trainer, *args: Any) -> None:
        original(self, *args)
        if self.progress.step == 12:
            os.kill(os.getpid(), signal.SIGKILL)

    Trainer._after_step = after_step  # type: ignore[method-assign]

from thermocline.cli.main import main

main()

"""`TrainConfig`: settings of `tc.Trainer`, all of them also in the section [train]. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from annotated_types import Gt, Le
from pydantic import model_validator

from thermocline.config.fields import Count, Duration, Maybe, Positive
from thermocline.config.lr_schedule import Schedule
from thermocline.config.messages import reject
from thermocline.config.section import section
from thermocline.utils.text_format import parse_duration

DensePrecision = Literal["fp32", "tf32", "bf16"]
Graphs = Literal["auto", "on", "off"]


@section("train")
class TrainConfig:
    """Settings of the training loop. The defaults train one epoch and save at its end."""

    epochs: Count = 1
    """Passes over the training data."""
    steps: Maybe[Count] = None
    """End the run after this number of steps, also within an epoch. Required for endless data."""
    schedule: Schedule = Schedule()
    """Factor of the learning rates of dense parameters and tables, step by step."""
    clip_norm: Maybe[Positive] = None
    """Largest norm of the gradients of dense parameters and tables together; larger gradients are scaled down."""
    accumulate: Count = 1
    """Number of batches whose mean gradient makes one step. The last step of an epoch may have fewer."""
    valid_every: Maybe[Count] = None
    """Steps between validations. By default after each epoch."""
    progressive_steps: Maybe[Count] = None
    """Steps of a window of progressive validation: its metrics are of predictions before each example was trained."""
    progressive_time: Maybe[Duration] = None
    """Event time of a window of progressive validation, such as "1h", instead of steps. Needs `data.time`."""
    max_time_jump: Maybe[Duration] = None
    """Most event time by which one batch advances the watermark, such as "1d": an example with a wrong event time, far
    in the future, then expires no more rows than that. By default without limit. Needs `data.time`."""
    patience: Maybe[Count] = None
    """End the run after this number of validations without a better AUC, and restore the best validated state."""
    plateau_factor: Annotated[float, Gt(0), Le(1)] = 1.0
    """Multiply the learning rates by this after each validation without a better AUC."""
    checkpoint_every: Maybe[Count] = None
    """Steps between checkpoints."""
    checkpoint_minutes: Maybe[Positive] = 10.0
    """Minutes between checkpoints. The end of a run is always saved."""
    keep: Count = 2
    """Number of checkpoints kept, in addition to the best."""
    depth: Count = 4
    """Depth of the pipeline; see `tc.prefetch`."""
    pull_window: Count = 1
    """Batches whose rows are pulled together; see `tc.prefetch`."""
    log_every: Count = 100
    """Steps between lines of training metrics."""
    dense_precision: DensePrecision = "fp32"
    """Arithmetic of dense layers in training: fp32; tf32, matrix products in TF32 on a GPU; bf16, torch's autocast.
    Parameters, gradients and rows stay fp32, and evaluation computes in fp32."""
    compile: bool = False
    """Compile the dense part with torch.compile: faster steps after a first step that takes seconds to minutes."""
    graphs: Graphs = "auto"
    """Run training steps on a GPU as CUDA graphs: "auto", where the model allows it, else with a warning that gives the
    reason; "on", or raise an error; "off". Python code in a model's forward runs only while a step is recorded."""
    torch_threads: Maybe[Count] = None
    """Threads of torch, which its results depend on bit by bit. By default torch's own number; a resumed run uses the
    number that it was saved with."""
    tensorboard: bool = True
    """Write scalars to run_dir/tensorboard."""
    display: bool = True
    """Show a live display on a terminal, or else print lines."""

    @model_validator(mode="after")
    def _check_progressive(self) -> Self:
        if self.progressive_steps is not None and self.progressive_time is not None:
            reject("progressive_time", self.progressive_time, "left out if progressive_steps is set")
        return self

    @property
    def max_jump(self) -> int | None:
        """`max_time_jump` in whole seconds."""
        return None if self.max_time_jump is None else int(parse_duration(self.max_time_jump))

    @property
    def needs_validation(self) -> str | None:
        """Name of the first setting that requires validation data, or None."""
        if self.patience is not None:
            return "patience"
        return "plateau_factor" if self.plateau_factor < 1 else None

    @property
    def expects_validation(self) -> str | None:
        """Name of the first setting that has no effect without validation data, or None."""
        return self.needs_validation or (None if self.valid_every is None else "valid_every")

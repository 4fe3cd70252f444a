"""The choice between the backends of one process: rows trained in GPU memory or in DRAM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.embedding.backend import ShardBackend
from thermocline.embedding.table_spec import TableSpec
from thermocline.utils.compile_workers import workers
from thermocline.utils.compiler_hash import start_hashing

if TYPE_CHECKING:
    import torch


def make_local_backend(spec: TableSpec, device: str, epoch: int | None = None) -> ShardBackend:
    """Make the backend of one process: HBM where the table has `hbm` and there is a GPU, else DRAM."""
    target = training_device(device, spec.hbm)
    if target is None:
        from thermocline.tiers.dram_backend import DramBackend

        workers.stop_unused()  # started for a GPU that torch does not see
        return DramBackend(spec, epoch=epoch)
    from thermocline.tiers.hbm_backend import HbmBackend

    return HbmBackend(spec, target, epoch=epoch)


def training_device(device: str, hbm: int | None) -> torch.device | None:
    """Return the GPU that trains rows; None: they are trained in DRAM."""
    if device not in ("auto", "cpu", "cuda", "interpreter"):  # the last: kernels interpreted on a CPU, for tests
        raise ValueError(f"device is {device!r}: it must be one of auto, cpu, cuda")
    if hbm is None:
        if device == "cuda":
            raise ValueError("device is 'cuda', but there is no hbm: set the bytes of GPU memory that rows may use")
        return None
    if device == "cpu":
        return None
    import torch

    if device == "interpreter":
        return torch.device("cpu")
    if torch.cuda.is_available():
        start_hashing()  # meanwhile torch makes the CUDA context, and the table its memory
        return torch.device("cuda", torch.cuda.current_device())
    if device == "cuda":
        raise ValueError("device is 'cuda', but torch sees no GPU: use device='auto', or 'cpu'")
    return None

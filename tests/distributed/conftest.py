import pytest
import torch.distributed as dist


@pytest.fixture
def no_process_group() -> None:
    """Destroy the process group that a test of a table of one rank, in any file, may leave in this process."""
    if dist.is_initialized():
        dist.destroy_process_group()

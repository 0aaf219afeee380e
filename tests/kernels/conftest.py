"""What every test of the kernels gets."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty is filled with NaN or the largest integer, so an output that nobody wrote fails
    loudly."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def sharded():
    """sharded(tensor) -> a DTensor over a mesh of one process."""
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda tensor: DTensor.from_local(tensor, mesh, [Shard(0)])
    dist.destroy_process_group()

"""Torch's own DDP and FSDP2 around a backbone: two gloo ranks give the gradients of one process in
every context mode, since head, loss, context pass and draws all go through Backbone.forward."""

import dataclasses
import itertools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# Before the process group exists, which would else outlive its end (bwsft/training/distributed.py).
import torch.distributed.nn  # noqa: F401
from tiny_modes import PLACE, batch, mode_of, model
from tiny_modes import gradients as gradients_of

WORLD = 2
KINDS, MODES = ("ddp", "fsdp2"), ("cached", "block_causal", "frozen copies")


def mode_around(net, name):
    if name != "frozen copies":
        return mode_of(name, net, draws=2)
    copies = mode_of("block_causal", net, draws=2, pairs=True)
    return dataclasses.replace(copies, context_grad=False)


def rank_main(rank, port, folder):
    """One rank: the gradients of all kinds and modes; rank 0 writes them."""
    from safetensors.torch import save_file

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    for kind, mode in itertools.product(KINDS, MODES):
        grads = step(rank, kind, mode)
        if rank == 0:
            save_file(grads, Path(folder) / f"{kind}-{mode}.safetensors")
    dist.barrier()
    time.sleep(0.1)  # gloo's threads let go of their last tensors (World.leave says why)
    dist.destroy_process_group()


def step(rank, kind, mode_name):
    net = model()
    names = [n for n, _ in net.named_parameters()]
    if kind == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(net)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in net.base_model.model.transformer["blocks"]:
            fully_shard(block)
        wrapped = fully_shard(net)
    part = batch().select([0, 1] if rank == 0 else [2])
    for total, *_ in mode_around(wrapped, mode_name).losses(part, PLACE):
        (total * WORLD).backward()  # both average gradients over the ranks
    grads = {}
    for name, p in zip(names, net.parameters(), strict=True):
        g = p.grad
        grads[name] = (g.full_tensor() if hasattr(g, "full_tensor") else g).clone()
    return grads


pytestmark = pytest.mark.slow  # test_distributed.py trains so by commands


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """Folder of the two ranks' gradients."""
    folder = tmp_path_factory.mktemp("gradients")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, __file__]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen([*command, str(rank), str(port), str(folder)], env=environment)
        for rank in range(WORLD)
    ]
    assert [rank.wait(timeout=280) for rank in ranks] == [0] * WORLD
    return folder


@pytest.mark.parametrize("mode_name", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_gradients_of_one_process(gradients, kind, mode_name):
    from safetensors.torch import load_file

    found = load_file(gradients / f"{kind}-{mode_name}.safetensors")
    net = model()
    _, expected = gradients_of(mode_around(net, mode_name), batch())
    for (name, _), grad in zip(net.named_parameters(), expected, strict=True):
        torch.testing.assert_close(found[name], grad, rtol=1e-6, atol=1e-9, msg=name)


if __name__ == "__main__":  # one rank
    rank_main(int(sys.argv[1]), *sys.argv[2:])

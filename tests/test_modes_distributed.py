"""Two gloo ranks, DDP and FSDP2, give the gradients of one process (cached mode, k = 2)."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

WORLD = 2


def helpers():
    spec = importlib.util.spec_from_file_location("modes", Path(__file__).parent / "test_modes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rank_main(rank, port, kind, mode_name, out):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        grads = step(rank, kind, mode_name)
        if rank == 0:
            from safetensors.torch import save_file

            save_file(grads, out)
    finally:
        dist.destroy_process_group()


def step(rank, kind, mode_name):
    t = helpers()
    from bwsft.modes import Mode

    mode = Mode(mode_name, draws=2 if mode_name == "cached" else 1)
    net = t.model()
    names = [n for n, _ in net.named_parameters()]
    if kind == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(net)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in net.base_model.model.transformer["blocks"]:
            fully_shard(block)
        wrapped = fully_shard(net)
    run = t.run_of(mode, wrapped)
    part = t.batch(((5, 9), (3, 12))) if rank == 0 else one_more(t)
    for total, *_ in mode.losses(run, part):
        (total * WORLD).backward()  # both average gradients over the ranks
    grads = {}
    for name, p in zip(names, net.parameters(), strict=True):
        g = p.grad
        grads[name] = (g.full_tensor() if hasattr(g, "full_tensor") else g).clone()
    return grads


def one_more(t):
    """The third sequence of the joint batch, on the other rank."""
    import dataclasses

    b = t.batch(((5, 9), (3, 12), (4, 6)))
    a = int(b.cu_seqlens[2])
    n = len(b.ids) - a
    return dataclasses.replace(
        b,
        ids=b.ids[a:],
        cu_seqlens=torch.tensor([0, n], dtype=torch.int32),
        position_ids=b.position_ids[a:],
        prompt_lengths=b.prompt_lengths[2:],
        response_lengths=b.response_lengths[2:],
        sample_ids=b.sample_ids[2:],
        visits=b.visits[2:],
        max_length=n,
    )


@pytest.mark.parametrize("mode_name", ["cached", "block_causal"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_give_the_gradients_of_one_process(kind, mode_name, tmp_path):
    from safetensors.torch import load_file

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = tmp_path / "grads.safetensors"
    command = [sys.executable, __file__]
    ranks = [
        subprocess.Popen([*command, str(rank), str(port), kind, mode_name, str(out)])
        for rank in range(WORLD)
    ]
    assert [rank.wait(timeout=200) for rank in ranks] == [0] * WORLD
    found = load_file(out)

    t = helpers()
    from bwsft.modes import Mode

    mode = Mode(mode_name, draws=2 if mode_name == "cached" else 1)
    run = t.run_of(mode)
    _, expected = t.gradients(run, t.batch(((5, 9), (3, 12), (4, 6))))
    for (name, _), grad in zip(run.backbone.named_parameters(), expected, strict=True):
        torch.testing.assert_close(found[name], grad, rtol=1e-6, atol=1e-9, msg=name)


if __name__ == "__main__":  # one rank
    rank_main(int(sys.argv[1]), *sys.argv[2:])

"""Several processes as one training: who does which sequences, sums over ranks, one gradient.

Hugging Face accelerate opens the process group under torchrun or `accelerate launch`; torch's DDP
or FSDP2 (`fully_shard`) moves the gradients. A step's sequences are a function of (seed, step) and
each rank takes its share of them, so any number of processes trains on the same updates.

DDP: every backward of an update stays local, whatever their number, none included; one last
backward of a zero that touches every trainable parameter makes DDP average the gradients, and
`share_of` makes up for the average.

FSDP2: every forward and backward is a collective, so all ranks must run the same sequence of them.
Before each forward of the whole model a rank announces it on a gloo group; a rank that has nothing
left runs the same passes with weight 0 until all are done. That works because all micro-batches of
a run repeat one pattern (a context pass and k draws, say), whatever its number of repeats.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bwsft.models.backbone import trainable

# A rank may wait for another that reads a large model. One that dies ends the others sooner: gloo
# and NCCL notice the lost connection, and torchrun ends the rest.
PATIENCE = datetime.timedelta(hours=1)
# While rank 0 works alone (it tokenizes, or writes a large checkpoint to a slow disk) it says so
# this often, so that no patience ends, however long it takes.
BEAT = 60.0  # seconds
DONE, FAILED, BUSY = 0, 1, 2  # what rank 0 says meanwhile
# Engines that an `accelerate config` may ask for.
ENGINES = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
FORWARD, BACKWARD = 1, 2  # what a rank announces: a forward alone, or with its backward


class PeerFailed(Exception):
    """Another process of the run has failed and says why."""


class World:
    """This process and the others of its run."""

    def __init__(
        self, rank: int = 0, size: int = 1, kind: str = "ddp", device: torch.device | None = None,
        host: dist.ProcessGroup | None = None,
    ):  # fmt: skip
        """device: what the launcher gave this process; host: the gloo group for numbers."""
        self.rank, self.size, self.device, self._host = rank, size, device, host
        self.sharded = size > 1 and kind == "fsdp"
        self._idle = False
        self._sharded: nn.Module | None = None
        self._averaging: nn.Module | None = None

    def share_of(self, count: int) -> float:
        """What a rank divides a loss by, so that an update's gradient is the sum over ranks divided
        by `count`."""
        return count if self._averaging is None else count / self.size

    @property
    def main(self) -> bool:
        """This process writes files and speaks."""
        return self.rank == 0

    def _reduce(self, values: Iterable[float], op: dist.ReduceOp) -> list[float]:
        numbers = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(numbers, op, group=self._host)
        return numbers.tolist()

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all ranks, the same on each."""
        return values if self.size == 1 else self._reduce(values, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        """The largest value of all ranks."""
        return value if self.size == 1 else self._reduce([value], dist.ReduceOp.MAX)[0]

    def from_main(self, value: float) -> float:
        """Rank 0's value, on every rank."""
        return self.sum([value if self.main else 0])[0]

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Rank 0 runs the block, then the others do: they find its files, and end if it failed."""
        if not self.main:
            self._wait_for_main()
            yield
            return
        try:
            with self._heartbeat():
                yield
        except BaseException:
            self._fail()
            raise
        self.max(DONE)

    def on_main(self, act: Callable, *arguments: Any) -> Any:
        """act(*arguments) on rank 0, while the others wait, who get None; all end if it fails."""
        if not self.main:
            return self._wait_for_main()
        try:
            with self._heartbeat():
                result = act(*arguments)
        except Exception:
            self._fail()
            raise
        self.max(DONE)
        return result

    def _fail(self) -> None:
        with contextlib.suppress(RuntimeError):  # a peer that is gone hides no error of our own
            self.max(FAILED)

    def _wait_for_main(self) -> None:
        """Until rank 0 has done what it does alone. PeerFailed if that failed."""
        while (said := self.max(DONE)) == BUSY:
            pass
        if said == FAILED:
            raise PeerFailed

    @contextlib.contextmanager
    def _heartbeat(self) -> Iterator[None]:
        """Rank 0 says that it is busy while the block runs, which must not speak to the others."""
        done = threading.Event()

        def beat() -> None:
            # A lost peer is noticed by what rank 0 says next.
            with contextlib.suppress(RuntimeError):
                while not done.wait(BEAT):
                    self.max(BUSY)

        thread = threading.Thread(target=beat, daemon=True)
        if self.size > 1:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if self.size > 1:
                thread.join()

    def agree(self, facts: dict[str, Any]) -> None:
        """ValueError on rank 0, PeerFailed on the others, unless these JSON values are the same on
        all ranks: it names the first that differs, its rank and both values."""
        if self.size == 1:
            return
        said = [json.loads(text) for text in self._texts(json.dumps(facts, default=str))]
        for rank, theirs in enumerate(said):
            for name, ours in said[0].items():
                if theirs.get(name) == ours:
                    continue
                if not self.main:
                    raise PeerFailed
                raise ValueError(
                    f"process {rank} of {self.size} has {name} {theirs.get(name)!r}, process 0 has "
                    f"{ours!r}: start all with the same command, on the same files and versions"
                )

    def _texts(self, text: str) -> list[str]:
        """The text of every rank."""
        content = text.encode()
        longest = int(self.max(len(content)))
        ours = torch.zeros(longest, dtype=torch.uint8)
        ours[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
        every = [torch.empty_like(ours) for _ in range(self.size)]
        dist.all_gather(every, ours, group=self._host)
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in every]

    def wrap(self, backbone: nn.Module) -> None:
        """Make the ranks train one model: from here on every forward of `backbone` with gradients
        belongs to an update that :meth:`finish` ends."""
        if self.sharded:
            shard(backbone, self.size)
            self._sharded = backbone
            # Before FSDP's own hook, which waits for the other ranks.
            backbone.register_forward_pre_hook(self._announce, prepend=True)
        elif self.size > 1:
            self._averaging = averaging(backbone)

    def finish(self, idle: Callable[[], Tensor]) -> None:
        """After a rank's last pass of an update or evaluation: the gradients become those of all
        ranks. idle() is a forward whose loss counts for nothing."""
        if self._averaging is not None and torch.is_grad_enabled():
            self._averaging().backward()
        if not self.sharded:
            return
        self._idle = True
        while (seen := self.max(0)) > 0:
            with torch.set_grad_enabled(seen == BACKWARD):
                loss = idle()
            if seen == BACKWARD:
                (loss * 0).backward()
        self._idle = False
        # Without a backward the parameters that are in no layer would stay whole, and others than
        # those the optimizer knows.
        self._sharded.reshard()

    def _announce(self, module: nn.Module, arguments: tuple) -> None:
        if not self._idle:
            self.max(BACKWARD if torch.is_grad_enabled() else FORWARD)

    def leave(self) -> None:
        """Let go of what would keep the process group alive once it is destroyed.

        A gloo thread drops the tensors of its last work a moment after that is done, and needs
        Python's lock to do so. DDP's reducer, if it is the group's last owner, would wait for that
        thread with the lock in its hand; and a thread that asks for the lock when the interpreter
        has ended aborts the process (both seen with torch 2.13).
        """
        time.sleep(0.1)
        self._averaging = self._sharded = None
        gc.collect()

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What may be sharded, whole and on the host, for rank 0 ({} for the others). One tensor
        after the other, so that a device holds one whole tensor at a time."""
        whole = {}
        for name, value in tensors.items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            if self.main:
                whole[name] = full.detach().cpu()
        return whole


def averaging(backbone: nn.Module) -> nn.Module:
    """A DDP module whose backward averages the gradients that the ranks have gathered."""
    device = next(backbone.parameters()).device
    return nn.parallel.DistributedDataParallel(
        Touch(list(trainable(backbone).values())),
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )


class Touch(nn.Module):
    """A zero with a gradient, 0, for every one of these parameters."""

    def __init__(self, weights: list[nn.Parameter]):
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self) -> Tensor:
        return torch.cat([p.flatten()[:1].float() for p in self.weights]).sum() * 0


def shard(backbone: nn.Module, size: int) -> None:
    """Every rank keeps 1/size of each tensor; each layer is whole while it runs (FSDP2).

    The layers are those that transformers names in `_no_split_modules`. Gradients are summed, not
    averaged.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = backbone.base_model._no_split_modules or ()
    layers = [m for m in backbone.modules() if type(m).__name__ in names]
    mesh = init_device_mesh(next(backbone.parameters()).device.type, (size,))
    for module in (*layers, backbone):
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum


@contextlib.contextmanager
def join(kind: str, device: str) -> Iterator[World]:
    """The run's processes, as the launcher's environment tells; a world of one without a launcher.

    kind: "ddp" or "fsdp"; device: "auto", "cpu" or "cuda". ValueError for what can't work.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World()
        return
    cpu = device == "cpu" or not torch.cuda.is_available()
    check_launch(device, cpu)
    # Imported before the group exists: its functions take the group as a default argument, and
    # would keep it alive (see World.leave).
    importlib.import_module("torch.distributed.nn")
    from accelerate import PartialState

    state = PartialState(cpu=cpu, timeout=PATIENCE)
    # Numbers of the host travel on gloo, and never wait for a device.
    host = None if state.backend == "gloo" else dist.new_group(timeout=PATIENCE, backend="gloo")
    place = torch.device("cpu") if cpu else state.device
    world = World(state.process_index, size, kind, place, host)
    try:
        yield world
    finally:
        world.leave()
        state.destroy_process_group()
        PartialState._reset_state()


def lost(error: Exception) -> bool:
    """Whether a collective failed because another process went away."""
    return dist.is_available() and (isinstance(error, dist.DistError) or "gloo" in str(error))


def check_launch(device: str, cpu: bool) -> None:
    """ValueError if the launcher and the options contradict each other."""
    for engine in ENGINES:
        if os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() in ("true", "1"):
            raise ValueError(
                f"accelerate's config asks for {engine}: choose with --parallel ddp or fsdp, and "
                "launch with torchrun or `accelerate launch --multi_gpu`"
            )
    if device.startswith("cuda:"):
        raise ValueError(
            f"--device {device}: with several processes each takes a device of its own; leave it "
            "out, and choose devices with CUDA_VISIBLE_DEVICES"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if not cpu and local > torch.cuda.device_count():
        raise ValueError(
            f"{local} processes on a machine with {torch.cuda.device_count()} CUDA devices: start "
            "at most one per device, or give --device cpu"
        )


def shares(count: int, micro: int, size: int) -> list[list[range]]:
    """The micro-batches of every one of `size` ranks, as ranges of an update's `count` sequences.

    A rank takes a contiguous share, as even as possible, in pieces of at most `micro`; the last
    ranks of a world larger than `count` get none.
    """
    found, start = [], 0
    for rank in range(size):
        stop = start + count // size + (rank < count % size)
        found.append([range(i, min(i + micro, stop)) for i in range(start, stop, micro)])
        start = stop
    return found

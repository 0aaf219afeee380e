"""AdamW's state of a run in a safetensors file: written as named tensors, put back on resume."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from bwsft.models.backbone import trainable
from bwsft.models.weight_files import read_tensors

OPTIMIZER = "optimizer.safetensors"
_KINDS = {"step", "exp_avg", "exp_avg_sq"}


def moments(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """AdamW's state as flat tensors, `name.exp_avg` and so on: safetensors can hold it."""
    return {
        f"{name}.{key}": value
        for name, p in trainable(model).items()
        for key, value in optimizer.state[p].items()
    }


def load_optimizer(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Put the moments in a checkpoint folder into a fresh optimizer of the same run. ValueError
    if they are damaged or those of another model."""
    path = Path(folder) / OPTIMIZER
    restore_moments(model, optimizer, read_tensors(path), path)


def restore_moments(
    model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor],
    where: str | Path = "the optimizer's state",
) -> None:  # fmt: skip
    """Undo `moments`. ValueError, naming `where`, if it is not the state of these parameters."""
    parameters = trainable(model)
    grouped: dict[str, dict[str, Tensor]] = {}
    for full, value in tensors.items():
        name, _, key = full.rpartition(".")
        grouped.setdefault(name, {})[key] = value
    if odd := sorted(set(grouped) ^ set(parameters)):
        raise ValueError(f"{where} is of another model: {odd[0]:.200} does not match")
    for name, state in grouped.items():
        p = parameters[name]
        if state.keys() != _KINDS:
            raise ValueError(f"{where} does not hold AdamW's state of {name:.200}: {sorted(state)}")
        if state["exp_avg"].shape != p.shape:
            raise ValueError(
                f"{where} has shape {tuple(state['exp_avg'].shape)} for {name}, the model has "
                f"{tuple(p.shape)}"
            )
        optimizer.state[p] = {k: _placed(v, p) for k, v in state.items()}


def _placed(value: Tensor, p: nn.Parameter) -> Tensor:
    """A whole saved tensor on p's device, and of this rank its shard if p is sharded.

    Copied: what safetensors reads is a view of the file, which would stay on the disk. (The step
    counter belongs on the parameter's device too, as fused AdamW on CUDA has it.)
    """
    value = value.to(p.device, copy=True)
    if value.dim() == 0 or not hasattr(p, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor  # a second to import

    # Without a source rank nothing is sent: every rank has read the file.
    return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)

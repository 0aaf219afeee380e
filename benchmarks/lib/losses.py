"""The losses that bench_loss.py compares: x [T, D], head weight [V, D], target [T] -> their mean.

Two things make a loss faster than full logits: ignored rows are dropped before the matmul, which
takes two lines (`compact`), and what is done with the rows that are left.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from bwsft_kernels import linear_cross_entropy
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
# Variant -> package, its module, the function, its options, and whether it needs Triton kernels.
PEERS = {
    "liger": ("liger-kernel", "liger_kernel.transformers.functional",
              "liger_fused_linear_cross_entropy", {}, True),
    "cce": ("cut-cross-entropy", "cut_cross_entropy", "linear_cross_entropy", {}, True),
    "cce_compile": ("cut-cross-entropy", "cut_cross_entropy", "linear_cross_entropy",
                    {"impl": "torch_compile"}, False),
}  # fmt: skip
COMPILED = ("compiled", "cce_compile")  # what torch.compile fuses is counted as it runs without


def naive(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Full logits, as the paper's code."""
    return F.cross_entropy(F.linear(x, weight).float(), target)


@functools.cache
def _compiled_naive() -> Loss:
    return torch.compile(naive)


def compiled(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _compiled_naive()(x, weight, target)


def compact(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Ignored rows dropped, then as naive: what anybody can write."""
    kept = (target != -100).nonzero()[:, 0]
    return naive(x[kept], weight, target[kept])


def chunked_nll(x: Tensor, weight: Tensor, target: Tensor, chunk: int = 256) -> Tensor:
    """Ignored rows dropped, then checkpointed chunks of 256 rows, as TRL's loss of this name."""
    kept = (target != -100).nonzero()[:, 0]
    x, target = x[kept], target[kept]
    total = 0
    for start in range(0, len(target), chunk):
        rows = slice(start, start + chunk)
        total = total + checkpoint(_chunk_sum, x[rows], weight, target[rows], use_reentrant=False)
    return total / len(target)


def _chunk_sum(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target, reduction="sum")


def losses(device: torch.device, brief: bool = False) -> dict[str, Loss | str]:
    """Name -> loss function, or the reason why it isn't run here. brief: without what only repeats
    another's cost or takes a minute a step."""
    found = {"naive": naive, "compiled": compiled, "compact": compact, "chunked_nll": chunked_nll}
    if not hasattr(F, "linear_cross_entropy"):
        reason = f"torch {torch.__version__} has no linear_cross_entropy (2.13 has)"
        found["torch_lce"] = found["torch_lce_chunked"] = reason
    elif brief and device.type == "cpu":
        found["torch_lce"] = "only with --variants: the same full logits as naive"
        found["torch_lce_chunked"] = "only with --variants: a minute a step on a CPU"
    else:
        chunked = torch.nn.LinearCrossEntropyOptions()
        found["torch_lce"] = F.linear_cross_entropy
        found["torch_lce_chunked"] = functools.partial(F.linear_cross_entropy, options=chunked)
    found |= {name: peer(name, device) for name in PEERS}
    if device.type == "cuda":
        found["fused_torch"] = functools.partial(linear_cross_entropy, impl="torch")
    found["fused"] = linear_cross_entropy
    return found


def peer(name: str, device: torch.device) -> Loss | str:
    """The loss of an installed package, or why it can't run here."""
    package, module, function, options, triton = PEERS[name]
    gpu = f"its Triton kernels need a CUDA device, this is {device.type}"
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        hint = f"; {gpu}" if triton and device.type != "cuda" else ""
        return f"not installed (pip install {package}){hint}"
    if triton and device.type != "cuda":
        return f"{package} is installed, but {gpu}"
    try:
        loss = getattr(importlib.import_module(module), function)
    except ImportError as error:
        return f"{package} is installed, but can't be imported: {error}"
    return functools.partial(loss, **options)

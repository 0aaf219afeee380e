"""Which implementation each public function takes on a device, and why."""

from collections.abc import Callable

import torch
from torch._ops import OpOverload

from ._dispatch import import_triton, obstacle
from ._linear_cross_entropy_args import GPU_BYTES as GPU_BYTES
from ._operator import BODIES

# Function -> the file of its Triton kernels.
KERNELS = {
    "linear_cross_entropy": "_linear_cross_entropy_bwd_triton",
    "linear_argmax": "_linear_argmax_triton",
    "block_mask": "_block_mask_triton",
    "range_attention": "_range_attention_bwd_triton",
    "rms_norm": "_rms_norm_triton",
    "rotary": "_rotary_triton",
    "swiglu": "_swiglu_triton",
    "philox_uniform": "_philox_triton",
}


def implementations(device: torch.device, dtype: torch.dtype) -> dict[str, tuple[str, str]]:
    """Function -> ("Triton" or "torch", why), for impl="auto" and tensors of this kind."""
    tensor, found = torch.empty(0, device=device, dtype=dtype), {}
    for function, name in KERNELS.items():
        if not tensor.is_cuda:
            found[function] = "torch", f"Triton kernels are for CUDA, this is {device.type}"
        elif (reason := obstacle(tensor) or import_triton(name)[1]) is not None:
            found[function] = "torch", reason
        else:
            found[function] = "Triton", f"{device.type} and triton are there"
    return found


def body_of(operator: OpOverload) -> Callable | None:
    """What an operator of the package runs, for who looks into it; None for one of torch."""
    return BODIES.get(operator)

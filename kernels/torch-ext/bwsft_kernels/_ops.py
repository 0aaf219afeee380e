"""The namespace of the package's operators, `torch.ops.bwsft_kernels`.

A package loaded under another name has a namespace of its own, so that two copies can live in one
process. The Hub's builder puts its own file of this name in the place of this one.
"""

import torch

_NAMESPACE = __package__.replace(".", "_")
ops = getattr(torch.ops, _NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{_NAMESPACE}::{op_name}"

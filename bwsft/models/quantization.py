"""QLoRA (Dettmers et al. 2023, arXiv:2305.14314): the frozen base in 4 bits, adapters on top.

bitsandbytes does the work, and is imported only when asked for. Untested on a GPU: the tests have
a stand-in for it and, where it is installed, its CPU code.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import nn

from bwsft.models.backbone import Backbone
from bwsft.models.support import STACKED


def require_bitsandbytes() -> ModuleType:
    """The module; ``ValueError`` where it or a CUDA device is missing."""
    needs = "--lora.quantize needs a CUDA device and bitsandbytes"
    try:
        found = importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ValueError(f"{needs}: pip install bitsandbytes ({error})") from error
    if not torch.cuda.is_available():
        raise ValueError(f"{needs}: no CUDA device is available, leave the option out")
    return found


def quantize(backbone: Backbone, device: torch.device) -> None:
    """Put a model that is on the CPU on ``device``, in place, its matrices as nf4 with doubly
    quantized scales, one at a time: the device never holds the whole in its own dtype.

    Embedding, norms, biases and the LM head keep their dtype: ``linear_cross_entropy`` reads the
    head as it is. Before adapters are added; the base must stay frozen.
    """
    library, head = require_bitsandbytes(), backbone.head()[0]
    model = backbone.model
    if backbone.base_model.config.model_type in STACKED:
        raise ValueError(
            "--lora.quantize packs matrices, and the experts of this model are one tensor a layer: "
            "leave the option out"
        )
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module.weight is not head:
            model.set_submodule(name, _in_four_bits(library, module).to(device))
    model.to(device)
    model.is_loaded_in_4bit = True  # by which peft knows that its own 4-bit layers are called for


def _in_four_bits(library: ModuleType, linear: nn.Linear) -> nn.Module:
    """A matrix that is quantized when it moves to a CUDA device."""
    options = {"compress_statistics": True, "quant_type": "nf4"}
    weight, sizes = linear.weight, (linear.in_features, linear.out_features)
    quantized = library.nn.Linear4bit(
        *sizes, bias=False, compute_dtype=weight.dtype, device="meta", **options
    )
    quantized.weight = library.nn.Params4bit(
        weight.data, requires_grad=False, module=quantized, **options
    )
    quantized.bias = linear.bias
    return quantized.train(linear.training)

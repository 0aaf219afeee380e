"""Models whose weights have shapes and no values: a step of a large one can be counted on any
machine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from functools import partial
from types import ModuleType
from typing import Any

import bwsft_kernels
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from transformers.configuration_utils import PreTrainedConfig

from bwsft.config import LoraConfig
from bwsft.models.backbone import Backbone
from bwsft.models.diffusion_gemma_config import with_text_layers
from bwsft.models.experts import SigmoidRouter, SoftmaxRouter
from bwsft.models.families import family_of, model_class, wrap
from bwsft.models.lora import add_lora
from bwsft.models.support import DIFFUSION_GEMMA, MIXTURES

# nf4 with doubly quantized scales: half a byte a number, a byte for each 64 of them, and four for
# each 256 of those.
NF4_BYTES = 1 / 2 + (1 + 4 / 256) / 64


def meta_backbone(config: PreTrainedConfig, dtype: torch.dtype) -> Backbone:
    """The model of a complete config (families.read_config) on the meta device."""
    with torch.device("meta"):
        model = model_class(config)(config).to(dtype)
        return wrap(model, family_of(config))


def hollow_backbone(
    config: PreTrainedConfig, dtype: torch.dtype = torch.float32, lora: LoraConfig | None = None
) -> Backbone:
    """The model in training mode, with adapters if asked for. A pass of 8 billion parameters takes
    a second, and every operation in it can be watched. Ids, masks and row lists stay real, and so
    are experts: the tokens take them in turn."""
    backbone = meta_backbone(config, dtype)
    if lora is not None and lora.rank:
        with torch.device("meta"):
            add_lora(backbone, lora, seed=0)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    made = {  # one for each, however many modules share it
        id(p): nn.Parameter(like(p, fake), p.requires_grad) for p in backbone.parameters()
    }
    for module in backbone.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = like(buffer, fake)
        of = getattr(module, "per_expert_scale", None)  # of DiffusionGemma's router
        of = module.weight if isinstance(module, SoftmaxRouter | SigmoidRouter) else of
        if of is not None:
            module.forward = partial(in_turn, module.forward, len(of))
    return backbone.train()


def in_turn(
    router: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], experts: int, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What a router computes of x, but each expert takes as many tokens as the others."""
    logits, weights, _ = router(x)
    return logits, weights, torch.arange(weights.numel()).remainder(experts).view(weights.shape)


def as_on_a_card(backbone: Backbone, fused: bool, nf4: bool) -> None:
    """Let a hollow model take the memory that it takes on a CUDA device: small operations in one
    kernel each (LLaDA's, if fused), adapters that cast no input (models.lora), and frozen matrices
    in nf4 (models.quantization). Its tensors stay on the CPU."""
    kernels = ModuleType("kernels")
    for name in ("rms_norm", "rotary", "swiglu"):  # which "auto" takes apart on a CPU
        setattr(kernels, name, partial(getattr(bwsft_kernels, name), impl="triton"))
    head = backbone.head()[0]
    for module in backbone.modules():
        if fused and hasattr(module, "fused_ops"):
            module.fused_ops = kernels
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
        frozen = type(module) is nn.Linear and not module.weight.requires_grad
        if nf4 and frozen and module.weight is not head:
            quantize_hollow(module)


def quantize_hollow(linear: nn.Linear) -> None:
    """A matrix that takes the bytes of nf4, and is widened in each forward and each backward."""
    weight, bias = linear.weight, linear.bias
    size = torch.empty(round(weight.numel() * NF4_BYTES), dtype=torch.uint8, device="meta")
    linear.weight = nn.Parameter(like(size, weight.fake_mode), requires_grad=False)
    options = {"size": weight.shape, "dtype": weight.dtype}
    linear.forward = lambda x: Widened.apply(x, linear.weight, bias, options)


class Widened(torch.autograd.Function):
    """x times a matrix that is made of its packed bytes, and made again in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.options = options
        matrix = packed.new_empty(**options)
        return torch.nn.functional.linear(x.to(matrix.dtype), matrix, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return grad @ packed.new_empty(**ctx.options), None, None, None


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """What distinguishes each layer of the model, "" where all are alike."""
    config = config.get_text_config()
    layers = range(config.num_hidden_layers)
    if config.model_type in MIXTURES:
        every, dense = getattr(config, "decoder_sparse_step", 1), _dense_layers(config)
        return ["dense" if i in dense or (i + 1) % every else "experts" for i in layers]
    return list(getattr(config, "layer_types", None) or ["" for _ in layers])


def _dense_layers(config: PreTrainedConfig) -> Collection[int]:
    """Layers of a mixture that have no experts, by its config."""
    first = getattr(config, "first_k_dense_replace", None)
    return config.mlp_only_layers if first is None else range(first)


def with_layers(config: PreTrainedConfig, kinds: list[str]) -> PreTrainedConfig:
    """The config of a model with layers of these kinds."""
    config = copy.deepcopy(config)
    if config.model_type == DIFFUSION_GEMMA:
        config.text_config = with_text_layers(config.text_config, kinds)
        return config
    config.num_hidden_layers = len(kinds)
    if config.model_type in MIXTURES:
        dense = [i for i, kind in enumerate(kinds) if kind == "dense"]
        config.first_k_dense_replace = len(dense)
        config.mlp_only_layers, config.decoder_sparse_step = dense, 1
    elif getattr(config, "layer_types", None):
        config.layer_types = kinds
    return config


def like(x: Tensor, fake: FakeTensorMode) -> Tensor:
    """A tensor of this shape and dtype on the CPU, without values."""
    with fake:
        return torch.empty(x.shape, dtype=x.dtype)

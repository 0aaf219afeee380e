"""The fused loss in the forward(labels=...) of a Hugging Face model.

The model's own code runs, shift, ignored labels and number of items included; only its head returns
logits that aren't made, from which cross_entropy makes the fused loss. So no family is named here,
and nothing is imported from transformers. Model and head change their class, as in torch's
fully_shard: copies, replicas, peft and direct calls of forward keep it.
"""

import functools
import inspect

from torch import Tensor, nn

from ._deferred_logits import DeferredLogits

SUPPORTED = (
    "bwsft_kernels.patch takes Hugging Face models with a linear head over the vocabulary and a "
    "forward that takes labels: causal ones such as Llama, Qwen and Gemma, masked ones such as "
    "BERT, ModernBERT, RoBERTa and DistilBERT")


def patch(model: nn.Module) -> nn.Module:
    """Make model(..., labels=...) compute its loss with `linear_cross_entropy`; returns the model.

    Loss and gradients are the model's own, in fp32, at the cost of the labeled rows alone. With
    labels the output's `logits` is None (left out of a tuple); without, forward is as it was. A
    batch without any label has loss 0 and zero gradients, where torch's mean is NaN. The model may
    be under peft, before or after; patch it before it goes under DDP, FSDP or accelerate.
    ValueError for a model that has no plain linear head, or one with an adapter or quantized.
    """
    base = _base(model)
    for head in _heads(base):
        head.__class__ = DeferringLinear
    if not isinstance(base, _Patched):
        base.__class__ = _patched(type(base))
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Undo `patch`; returns the model."""
    patched = [m for m in model.modules() if isinstance(m, _Patched)]
    for module in patched:
        if "unpatched" not in vars(type(module)):  # a subclass
            raise ValueError("unpatch the model before fully_shard shards it")
    for module in patched:
        module.__class__ = module.unpatched
    return model


class _Patched:
    """Mark of a patched module's class, whose attribute `unpatched` is the class it was."""

    unpatched: type[nn.Module]


class DeferringLinear(_Patched, nn.Linear):
    """A head whose logits are deferred while its model computes a loss."""

    unpatched = nn.Linear
    deferring = False

    def forward(self, input: Tensor) -> Tensor | DeferredLogits:  # [..., D] -> [..., V]
        if self.deferring:
            return DeferredLogits(input, self.weight, self.bias)
        return super().forward(input)


@functools.cache
def _patched(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a model's class that defers logits, under the same name."""
    position = list(inspect.signature(cls.forward).parameters).index("labels") - 1  # without self

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        labels = args[position] if len(args) > position else kwargs.get("labels")
        if labels is None:
            return cls.forward(self, *args, **kwargs)
        head = self.get_output_embeddings()
        heads = [m for m in head.modules() if isinstance(m, DeferringLinear)]  # peft's has two
        for head in heads:
            if type(head) is not DeferringLinear:
                raise ValueError("the head is sharded on its own, so its weight is gone when the "
                                 "loss needs it: let fully_shard shard it with the model's root")
            head.deferring = True
        try:
            output = cls.forward(self, *args, **kwargs)
        finally:
            for head in heads:
                head.deferring = False
        return _without_logits(output)

    def reduce(self: nn.Module, protocol: int) -> tuple:
        return _empty, (cls,), self.__dict__  # pickle finds a class by its name, which is cls's

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    made = {"forward": forward, "__reduce_ex__": reduce, "unpatched": cls}
    return type(cls.__name__, (_Patched, cls), names | made)


def _empty(cls: type[nn.Module]) -> nn.Module:
    made = _patched(cls)
    return made.__new__(made)


def _without_logits(output: object) -> object:
    """A ModelOutput whose logits are None, or a tuple without them."""
    fields = output if isinstance(output, tuple) else list(output.values())
    kept = [field for field in fields if not isinstance(field, DeferredLogits)]
    if len(kept) == len(fields):
        raise ValueError("the model's loss was not fused, for its head was replaced or hooked "
                         "after bwsft_kernels.patch(model): patch it again, or unpatch it")
    if isinstance(output, tuple):
        return tuple(kept)
    return type(output)(
        **{n: None if isinstance(f, DeferredLogits) else f for n, f in output.items()})


def _base(model: nn.Module) -> nn.Module:
    """The model under peft's wrapper, if there is one."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "labels" not in inspect.signature(base.forward).parameters or _head(base) is None:
        raise ValueError(f"{SUPPORTED}; not {type(base).__name__}")
    if "forward" in vars(base):
        raise ValueError(f"the forward of this {type(base).__name__} was replaced, by accelerate "
                         "or another patch: apply bwsft_kernels.patch before that")
    return base


def _head(model: nn.Module) -> nn.Module | None:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def _heads(model: nn.Module) -> list[nn.Module]:
    """The linear layer that is the model's head; where peft trains a copy of it, both."""
    head = _head(model)
    copies = getattr(head, "modules_to_save", None)  # of peft
    heads = [head] if copies is None else [head.original_module, *copies.values()]
    for head in heads:
        if type(head) not in (nn.Linear, DeferringLinear):
            kind = f"{type(head).__module__}.{type(head).__name__}"
            raise ValueError(
                f"the head is a {kind}, not a plain nn.Linear: leave the head out of adapters and "
                "of quantization (peft's modules_to_save may have it)")
        if "forward" in vars(head):
            raise ValueError("the head's forward was replaced, as device_map does to spread a "
                             "model over devices; load the model on one device")
    return heads

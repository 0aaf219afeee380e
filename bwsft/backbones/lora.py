"""LoRA through peft, on the block matrices of a backbone and never on its head."""

from __future__ import annotations

import warnings

import torch

# Anchored on `blocks.N.`: LLaDA's head is called ff_out too, and a suffix list would adapt it.
# `released` is what the paper's released list of Llama names hits in LLaDA: four of the seven.
LLADA_TARGETS = {
    "all": r".*\.blocks\.\d+\.(q_proj|k_proj|v_proj|attn_out|ff_proj|up_proj|ff_out)",
    "released": r".*\.blocks\.\d+\.(q_proj|k_proj|v_proj|up_proj)",
}


def add_lora(backbone, config, seed: int) -> None:
    """Wrap `backbone.model` with adapters in place (fp32 parameters, frozen base).

    config has rank, alpha, dropout and targets as in bwsft.config.LoraConfig. A is drawn from
    `seed`, B is zero.
    """
    import peft

    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=LLADA_TARGETS[config.targets],
        bias="none",
    )
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        # peft asks transformers for a property by its old name.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        backbone.model = peft.get_peft_model(backbone.model, lora)
    prepare_adapters(backbone)


def prepare_adapters(backbone) -> None:
    """Adapters keep fp32 parameters, but their matmuls run in the autocast dtype on CUDA.

    peft would cast every adapter input to fp32 first: up to a quarter more activation memory.
    """
    from peft.tuners.lora import LoraLayer

    for module in backbone.model.modules():
        if isinstance(module, LoraLayer) and next(module.parameters()).is_cuda:
            module.cast_input_dtype_enabled = False


def load_adapter(backbone, folder, trainable: bool) -> None:
    """Put the adapter saved in `folder` on the backbone."""
    import peft

    backbone.model = peft.PeftModel.from_pretrained(
        backbone.model, str(folder), is_trainable=trainable
    )
    prepare_adapters(backbone)

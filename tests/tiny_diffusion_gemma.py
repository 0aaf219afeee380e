"""A random DiffusionGemma small enough for a test, with sliding windows and experts."""

import torch
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    EntropyBoundSamplerConfig,
)

from bwsft.config import Config
from bwsft.objectives.config import ObjectiveConfig, UniformConfig
from bwsft.objectives.uniform import Uniform
from bwsft.training.context_modes import make_mode

CANVAS, WINDOW, VOCABULARY = 4, 6, 61


def tiny_diffusion_gemma(std=0.25, **changes) -> DiffusionGemmaForBlockDiffusion:
    """Weights of a size at which every part matters, and buffers in which encoder and decoder
    differ, as those of the published model may. `changes` are fields of text_config."""
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=12,
        num_global_key_value_heads=1, num_experts=4, top_k_experts=2, moe_intermediate_size=16,
        sliding_window=WINDOW, max_position_embeddings=256, pad_token_id=0, eos_token_id=1,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ) | changes  # fmt: skip
    vision = dict(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, patch_size=4,
    )  # fmt: skip
    config = DiffusionGemmaConfig(
        text_config=sizes, vision_config={"model_type": "gemma4_vision"} | vision,
        canvas_length=CANVAS, image_token_id=sizes["vocab_size"] - 1,
    )  # fmt: skip
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # which knows float64
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "vision" not in name:
                parameter.normal_(std=std)
        for number, layer in enumerate(model.model.encoder.language_model.layers):
            layer.layer_scalar.fill_(0.9 - 0.1 * number)
    return model


def tiny_folder(folder, tokenizer_folder):
    """A folder of a random model as published, for the tokenizer of conftest: 256 ends a text, 258
    a turn."""
    ids = dict(vocab_size=320, eos_token_id=256, pad_token_id=259, max_position_embeddings=128)
    model = tiny_diffusion_gemma(**ids)
    sampler = model.generation_config
    sampler.sampler_config = EntropyBoundSamplerConfig(entropy_bound=0.2)
    sampler.max_denoising_steps, sampler.t_min, sampler.t_max = 5, 0.3, 0.7
    model.save_pretrained(folder)
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def canvas_mode(backbone, *, low=1e-3, high=1.0, ar_weight=0.0, seed=0, **uniform):
    """The context mode of a run on this model; `uniform`: fields of UniformConfig."""
    uniform = UniformConfig(**uniform)
    objective = ObjectiveConfig(name="uniform", low=low, high=high, uniform=uniform)
    config = Config(
        seed=seed, block_size=CANVAS, context="block_causal", clean_attention="causal",
        ar_weight=ar_weight, objective=objective,
    )  # fmt: skip
    family = backbone.family
    made = Uniform.of(config, family)
    return make_mode(config, family, backbone, made, torch.device("cpu"))

"""Where SDAR's repository has its model; written for the tests, not SDAR's code."""

from transformers import Qwen3ForCausalLM

from .configuration_sdar import SDARConfig
from .fused_linear_diffusion_cross_entropy import fused_loss


class SDARForCausalLM(Qwen3ForCausalLM):
    config_class = SDARConfig
    loss = staticmethod(fused_loss)

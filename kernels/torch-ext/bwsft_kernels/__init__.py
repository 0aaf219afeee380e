"""Masks, loss, head statistics and the small operations of masked-diffusion language models, in
torch and Triton."""

from .block_mask import block_mask
from .linear_argmax import linear_argmax
from .linear_cross_entropy import linear_cross_entropy
from .philox import philox_uniform
from .rms_norm import rms_norm
from .rotary import rotary
from .swiglu import swiglu

__all__ = [
    "block_mask", "linear_argmax", "linear_cross_entropy", "philox_uniform", "rms_norm", "rotary",
    "swiglu",
]

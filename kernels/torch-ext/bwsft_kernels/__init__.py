"""Masks, loss and head statistics for masked-diffusion language models, in torch and Triton."""

from .block_mask import block_mask
from .linear_argmax import linear_argmax
from .linear_cross_entropy import linear_cross_entropy
from .philox import philox_uniform

__all__ = ["block_mask", "linear_argmax", "linear_cross_entropy", "philox_uniform"]

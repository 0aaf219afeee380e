"""Masks, loss, head statistics and the small operations of masked-diffusion language models, in
torch and Triton.

A name is either a function of this package or a module of it, never both: the files of the
public functions begin with an underscore.
"""

from ._block_mask import block_mask
from ._block_mask_types import MaskedBatch, MaskSpec
from ._linear_argmax import GumbelKey, LinearArgmax, linear_argmax
from ._linear_cross_entropy import linear_cross_entropy
from ._rms_norm import rms_norm
from ._rotary import rotary
from ._swiglu import swiglu
from .philox import Stream, philox_uniform

__all__ = [
    "GumbelKey", "LinearArgmax", "MaskSpec", "MaskedBatch", "Stream",
    "block_mask", "linear_argmax", "linear_cross_entropy", "philox_uniform", "rms_norm", "rotary",
    "swiglu",
]

"""Masks, loss, head statistics, attention and the small operations of masked-diffusion language
models, in torch and Triton.

A name is either a function of this package or a module of it, never both: the files of the
public functions begin with an underscore.
"""

from . import layers
from ._block_mask import block_mask
from ._block_mask_types import MaskedBatch, MaskSpec
from ._linear_argmax import GumbelKey, LinearArgmax, linear_argmax
from ._linear_cross_entropy import linear_cross_entropy
from ._patch import patch, unpatch
from ._range_attention import range_attention
from ._range_plan import OnePassRows, RangePlan, cache_plan, range_plan
from ._rms_norm import rms_norm
from ._rotary import rotary
from ._swiglu import swiglu
from .philox import Stream, philox_uniform

__version__ = "0.1.0"
__all__ = [
    "GumbelKey", "LinearArgmax", "MaskSpec", "MaskedBatch", "OnePassRows", "RangePlan", "Stream",
    "block_mask", "cache_plan", "layers", "linear_argmax", "linear_cross_entropy", "patch",
    "philox_uniform", "range_attention", "range_plan", "rms_norm", "rotary", "swiglu", "unpatch",
]

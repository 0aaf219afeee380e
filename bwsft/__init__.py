"""Blockwise SFT of masked-diffusion language models."""

from bwsft.models.registration import register_with_transformers
from bwsft.version import __version__

__all__ = ["__version__"]

register_with_transformers()

"""Blockwise SFT of masked-diffusion language models."""

from .backbones.registration import register_with_transformers

__version__ = "0.1.0"

register_with_transformers()

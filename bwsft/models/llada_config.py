"""Configuration of LLaDA (Nie et al. 2025) in the fields of the official config.json.

Source of the fields and their meaning: the model card GSAI-ML/LLaDA-8B-Instruct. Defaults are the
8B model's values, not those of its remote code (whose dropouts default to 0.1).
"""

from __future__ import annotations

from typing import Any, get_type_hints

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

# Options that change the numbers, with the only values implemented here.
_IMPLEMENTED: dict[str, tuple] = {
    "block_type": ("llama",),
    "block_group_size": (1,),
    "activation_type": ("silu",),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "bias_for_layer_norm": (False, None),
    "attention_layer_norm": (False,),
    "multi_query_attention": (False, None),
    "alibi": (False,),
    "rope": (True,),
    "rope_full_precision": (True,),
    "include_bias": (False,),
    "include_qkv_bias": (False, None),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
    "attention_dropout": (0,),
    "residual_dropout": (0,),
    "embedding_dropout": (0,),
    "init_fn": ("mitchell", "normal"),
}
_LARGEST_SIZE = 2**28  # the product of two, in bytes, still fits in 64 bits


class LladaConfig(PreTrainedConfig):
    """LLaDA's architecture; every field keeps its official name.

    ``n_kv_heads``, ``embedding_size`` and ``mlp_hidden_size`` may be None: they then follow
    ``n_heads``, ``vocab_size`` and ``mlp_ratio * d_model``. An option that is not implemented, or
    sizes that do not fit together, raise ``ValueError`` naming the field. ``alibi_bias_max``,
    ``attention_layer_norm_with_affine``, ``flash_attention``, ``init_cutoff_factor``,
    ``init_device``, ``precision`` and ``use_cache`` change no result here; they are kept so that
    a saved config.json is read by the official code too.
    """

    model_type = "llada"
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_sequence_length",
        "tie_word_embeddings": "weight_tying",
    }

    d_model: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None
    mlp_hidden_size: int | None = 12288
    mlp_ratio: int | float = 4
    vocab_size: int = 126464
    embedding_size: int | None = None
    max_sequence_length: int = 4096
    weight_tying: bool = False
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    mask_token_id: int | None = 126336
    eos_token_id: int | None = 126081
    pad_token_id: int | None = 126081
    init_fn: str = "mitchell"
    init_std: float = 0.02
    init_cutoff_factor: float | None = None
    init_device: str | None = None
    block_type: str = "llama"
    block_group_size: int = 1
    activation_type: str = "silu"
    layer_norm_type: str = "rms"
    layer_norm_with_affine: bool = True
    bias_for_layer_norm: bool | None = False
    attention_layer_norm: bool = False
    attention_layer_norm_with_affine: bool = True
    multi_query_attention: bool | None = None
    alibi: bool = False
    alibi_bias_max: float = 8.0
    rope: bool = True
    rope_full_precision: bool = True
    flash_attention: bool = False
    include_bias: bool = False
    include_qkv_bias: bool | None = False
    input_emb_norm: bool = False
    scale_logits: bool = False
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    embedding_dropout: float = 0.0
    precision: str | None = None
    use_cache: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("rope_scaling", "rope_parameters"):
            if kwargs.get(name):
                raise ValueError(
                    f"LLaDA config option {name} is not implemented: remove it, or load this "
                    "checkpoint with its own modeling code"
                )
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Raise ``ValueError`` for an option or a size that this implementation cannot honour."""
        for name, values in _IMPLEMENTED.items():
            value = getattr(self, name)
            if value not in values:
                raise ValueError(
                    f"LLaDA config option {name}={value!r} is not implemented (only {values[0]!r} "
                    "is): load this checkpoint with its own modeling code"
                )
        for name in ("d_model", "n_layers", "n_heads", "vocab_size", "max_sequence_length"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) <= 0:
                raise ValueError(f"config field {name} must be a positive whole number")
        for name in ("rms_norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"config field {name} must be positive")
        if self.d_model % self.n_heads or self.head_dim % 2:
            raise ValueError(
                f"d_model={self.d_model} must split into n_heads={self.n_heads} heads of even width"
            )
        if self.num_kv_heads <= 0 or self.n_heads % self.num_kv_heads:
            raise ValueError(
                f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}"
            )
        if self.embedding_rows < self.vocab_size:
            raise ValueError(
                f"embedding_size={self.embedding_size} must not be below "
                f"vocab_size={self.vocab_size}"
            )
        if self.mlp_width <= 0:
            raise ValueError("mlp_hidden_size (or mlp_ratio) must be positive")
        if max(self.d_model, self.embedding_rows, self.mlp_width) > _LARGEST_SIZE:
            raise ValueError(f"no size of a model may exceed {_LARGEST_SIZE:,}")

    @property
    def num_kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def mlp_width(self) -> int:
        if self.mlp_hidden_size is not None:
            return self.mlp_hidden_size
        return int(self.mlp_ratio * self.d_model)

    @property
    def embedding_rows(self) -> int:
        return self.vocab_size if self.embedding_size is None else self.embedding_size

    def to_diff_dict(self) -> dict[str, Any]:
        """What config.json holds: transformers' new spellings turned back into the official ones,
        since the official code runs on releases that know only ``torch_dtype``."""
        out = super().to_diff_dict()
        out["architectures"] = ["LLaDAModelLM"]
        if (dtype := out.pop("dtype", None)) is not None:
            out["torch_dtype"] = dtype
        return out


# Of LladaConfig's own fields: its base's annotations name what only type checkers import.
_own = {"__annotations__": LladaConfig.__annotations__, "__module__": __name__}
FIELD_TYPES = get_type_hints(type("Own", (), _own))


AutoConfig.register(LladaConfig.model_type, LladaConfig, exist_ok=True)

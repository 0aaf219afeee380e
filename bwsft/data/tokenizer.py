"""The [MASK] of a tokenizer: which token it is, or becomes."""

from __future__ import annotations

from typing import Any

from bwsft.data.chat_template import special_tokens

MASK_NAMES = ("<|mdm_mask|>", "<|mask|>", "<|MASK|>", "[MASK]", "<mask>")


def mask_id_for(tokenizer: Any, model_mask_id: int | None = None) -> int:
    """The id of [MASK]: the model's if it has one, else the tokenizer's, else len(tokenizer).

    Raises ValueError if model and tokenizer each have one and they differ.
    """
    own = own_mask_id(tokenizer)
    if model_mask_id is None:
        return len(tokenizer) if own is None else own
    if own is not None and own != model_mask_id:
        raise ValueError(
            f"the model's mask id is {model_mask_id}, the tokenizer's is {own}: they don't belong"
            " together"
        )
    return model_mask_id


def own_mask_id(tokenizer: Any) -> int | None:
    """The id of the tokenizer's [MASK], of a well-known one of its special tokens, or None."""
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    special = special_tokens(tokenizer)
    return next((special[name][0] for name in MASK_NAMES if name in special), None)


def add_mask_token(tokenizer: Any, text: str) -> int:
    """Make special token `text`, a reserved one or a new one, the tokenizer's [MASK], in place; its
    id. ValueError for an ordinary token, or where [MASK] is another one already."""
    special = special_tokens(tokenizer)
    if not text or text in tokenizer.get_vocab() and text not in special:
        raise ValueError(f"mask token {text!r} is text of its own: name a special or a new token")
    if text == tokenizer.eos_token:
        raise ValueError(f"mask token {text!r} ends a text already: name another one")
    own = own_mask_id(tokenizer)
    if own is not None and own != special.get(text, (None,))[0]:
        raise ValueError(
            f"the tokenizer's [MASK] is {tokenizer.convert_ids_to_tokens(own)!r}, not {text!r}: "
            "leave --mask-token out"
        )
    tokenizer.add_special_tokens({"mask_token": text})
    return tokenizer.convert_tokens_to_ids(text)

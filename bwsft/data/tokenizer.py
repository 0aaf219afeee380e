"""Loads tokenizers, and says which token is [MASK] or becomes it."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bwsft.utils import hub, identity
from bwsft.utils.strict_json import check_regular

T = TypeVar("T")
CHUNK = 256  # texts, and characters
CHARACTERS = 1 << 20  # of them together, in one call: a token takes some 200 bytes there
CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (
    "tokenizer.json", CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
BESIDE = ("config.json", "additional_chat_templates/*")
MASK_NAMES = ("<|mdm_mask|>", "<|mask|>", "<|MASK|>", "[MASK]", "<mask>")
# Tokenizers that are Qwen's, whatever their class is called (and whatever code comes with it).
QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast", "DreamTokenizer")
EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[EOS]", "[SEP]")


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer in a folder that holds tokenizer.json (of Qwen's kind: or vocab.json and
    merges.txt), or of a Hub id. No remote code is run.

    Raises ValueError where there is none. A tokenizer that names no EOS token gets the first
    well-known one of its special tokens, with a warning.
    """
    folder = Path(path).expanduser()
    files = ("tokenizer.json",), ("vocab.json", "merges.txt")
    if folder.is_dir():
        if not any(all((folder / f).exists() for f in some) for some in files):
            raise ValueError(f"{path} holds no tokenizer.json; give a folder with one, or a Hub id")
        check_regular(folder)
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+)?", str(path)):
        raise ValueError(f"tokenizer folder {path} doesn't exist")
    elif folder.is_file():
        raise ValueError(f"{path} is a file; give the folder that holds tokenizer.json")
    else:
        try:
            folder = hub.snapshot(str(path), (*TOKENIZER_FILES, *BESIDE))
        except FileNotFoundError as error:
            raise ValueError(f"tokenizer {error}") from error
    try:
        tokenizer = _read_tokenizer(str(folder))
    except Exception as error:  # tokenizers raises bare Exception
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"can't load a tokenizer from {path}: {reason}") from error
    if not isinstance(tokenizer.model_max_length, int | float):
        raise ValueError(f"tokenizer {path}: model_max_length is no number; fix its config")
    if tokenizer.eos_token_id is None:
        special = special_tokens(tokenizer)
        eos = next((name for name in EOS_NAMES if name in special), None)
        if eos is None:
            raise ValueError(f"tokenizer {path} has no EOS token; set it in tokenizer_config.json")
        warnings.warn(f"tokenizer {path} names no EOS token, using {eos!r}", stacklevel=2)
        tokenizer.eos_token = eos
    return tokenizer


def _read_tokenizer(name: str) -> Any:
    """A tokenizer of any kind from its tokenizer.json; Qwen's also from what Dream publishes."""
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(name)
    except Exception:
        # These import torch, which a process that only tokenizes does without.
        from transformers import Qwen2Tokenizer
        from transformers.models.auto.tokenization_auto import get_tokenizer_config

        if get_tokenizer_config(name).get("tokenizer_class") not in QWEN_CLASSES:
            raise
    tokenizer = Qwen2Tokenizer.from_pretrained(name)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    # Each merge makes one token of several characters; without it the text falls to pieces.
    made = sum(len(token) > 1 for token in model["vocab"]) - len(tokenizer.added_tokens_decoder)
    if len(model["merges"]) < made:
        raise ValueError(f"merges.txt has {len(model['merges']):,} merges, too few: copy it again")
    return tokenizer


def tokenizer_content(tokenizer: Any) -> identity.Content:
    """The files that a tokenizer was loaded from; of one that came from none, its digest."""
    folder = Path(tokenizer.name_or_path or "-")
    if (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file():
        return identity.content_of(folder, TOKENIZER_FILES)
    return {"files": {"tokenizer": tokenizer_digest(tokenizer)}}


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of all that decides token ids: the backend, the roles of specials, the template."""
    roles = json.dumps([tokenizer.special_tokens_map, tokenizer.chat_template], default=str)
    content = tokenizer.backend_tokenizer.to_str() + roles
    return hashlib.sha256(content.encode()).hexdigest()


def special_tokens(tokenizer: Any) -> dict[str, tuple[int, bool, bool]]:
    """Special token string -> (id, swallows blanks before it, after it)."""
    added = tokenizer.added_tokens_decoder.items()
    return {t.content: (i, t.lstrip, t.rstrip) for i, t in added if t.special}


def chunks(items: Iterable[T], characters: Callable[[T], int]) -> Iterator[list[T]]:
    """Items in lists as one call of a tokenizer takes them; one that is longer comes alone."""
    chunk: list[T] = []
    held = 0
    for item in items:
        size = characters(item)
        if chunk and (len(chunk) >= CHUNK or held + size > CHARACTERS):
            yield chunk
            chunk, held = [], 0
        chunk.append(item)
        held += size
    if chunk:
        yield chunk


def encode(backend: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts, whole and without what a tokenizer adds to them; names of special tokens
    are those tokens."""
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    found = []
    for some in chunks(texts, len):
        # The fast one keeps no places of tokens in the text, which nobody asks for here.
        found += [e.ids for e in backend.encode_batch_fast(some, add_special_tokens=False)]
    return found


def first_ids(tokenizer: Any) -> list[int]:
    """The ids that a tokenizer sets before every text, such as BOS."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    fits = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return list(whole[: next(fits, 0)])


def parts_texts(tokenizer: Any, name: str) -> bool:
    """Whether any text that has this special token is tokenized as its part before it and its part
    from it on: the token is found in the text as it stands, whatever is around it."""
    tokens = {t.content: t for t in tokenizer.added_tokens_decoder.values()}
    token = tokens[name]
    if token.normalized or token.lstrip or token.single_word or not re.match(r"[^\w\s]", name):
        return False
    # Of two that overlap the first is taken.
    return not any(
        name in other[1:] or any(name.startswith(other[i:]) for i in range(1, len(other)))
        for other in tokens
    )


def with_renamed_specials(tokenizer: Any, mark: str) -> Any:
    """The backend of a tokenizer in which special token i is called `mark`i`mark`: the names that
    it had are text like any other. Ids stay. ValueError for a backend that cannot be rebuilt."""
    from tokenizers import Tokenizer

    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    # Characters, and the bytes of a tokenizer that falls back to them, are pieces of any text,
    # whatever they are called.
    byte = r"<0x[0-9A-F]{2}>" if spec["model"].get("byte_fallback") else r"(?!)"
    piece = re.compile(rf"(?s:.)|{byte}")
    spec["added_tokens"] = [t for t in spec["added_tokens"] if not piece.fullmatch(t["content"])]
    names = {}
    for token in spec["added_tokens"]:
        if token["special"]:
            names[token["content"]] = f"{mark}{token['id']}{mark}"
            token["content"] = names[token["content"]]
    vocab = spec["model"]["vocab"]
    if isinstance(vocab, dict):
        spec["model"]["vocab"] = {names.get(piece, piece): i for piece, i in vocab.items()}
    else:  # Unigram: pieces with scores
        spec["model"]["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if (unknown := spec["model"].get("unk_token")) in names:
        spec["model"]["unk_token"] = names[unknown]
    spec |= {"post_processor": None, "truncation": None, "padding": None}
    backend = Tokenizer.from_str(json.dumps(spec))
    if any(backend.token_to_id(name) != int(name.strip(mark)) for name in names.values()):
        raise ValueError("this tokenizer's special tokens can't be told from text that spells them")
    return backend


def fast_tokenizer(backend: Any, **options: Any) -> Any:
    """A transformers tokenizer around one of the tokenizers package; options: special tokens and
    chat_template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def template_environment(tokenizer: Any, source: str, given: Iterable[str]) -> Any:
    """jinja's environment of chat template `source`, None if it is broken, or if
    apply_chat_template does more, with arguments of the names `given`, than render it there."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    usual = PreTrainedTokenizerBase.apply_chat_template
    compiled = getattr(chat_template_utils, "_compile_jinja_template", None)
    own = inspect.signature(usual).parameters.keys() & set(given)
    if compiled is None or own or type(tokenizer).apply_chat_template is not usual:
        return None
    try:
        return compiled(source).environment
    except Exception:  # rendering says what is wrong
        return None


def merged_end_ids(*groups: Iterable[int]) -> tuple[int, ...]:
    """The token ids at any of which decoding ends, each once: those of the template (its own comes
    first), of the model's config and of its generation_config.json."""
    return tuple(dict.fromkeys(itertools.chain(*groups)))


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

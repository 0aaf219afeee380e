"""Turns a data source into token ids, cached on disk by content.

A cached set holds every well-formed record, so that tokenizing once serves every max_length.
"""

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bwsft.data import chat_template, file_formats, records, sources, token_cache
from bwsft.data import tokenizer as tokenizer_module
from bwsft.data.chat_template import Template
from bwsft.data.packing import CanvasLayout, Example
from bwsft.utils import lines, strict_json

LISTED = 20  # malformed records that a report names; the rest are only counted
CHUNK = 1024  # records per call of the tokenizer
# No example of so much text fits any context, and tokenizing takes some 100 bytes a character.
MOST_CHARACTERS = 1_000_000
ARRAYS = {
    "tokens": np.int32,
    "prompt_lengths": np.int64,
    "response_lengths": np.int64,
    "sample_ids": np.int64,
}


@dataclass(frozen=True)
class DataOptions:
    """How records become examples.

    `max_length` bounds prompt + response with its end token; longer examples are dropped.
    `gen_length` only serves the report. `on_bad` is "stop" or "skip". Records whose `type`
    contains `exclude_type` are dropped. `subset` and `split` choose a part of the source. With
    `mask_id` or `vocab_size` given, every id is checked against them.
    """

    template: str = "metamath"
    max_length: int = 256
    gen_length: int = 128
    on_bad: str = "stop"
    exclude_type: str | None = None
    subset: str | None = None
    split: str | None = None
    mask_id: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.on_bad not in ("stop", "skip"):
            raise ValueError(f"on_bad is {self.on_bad!r}, not 'stop' or 'skip'")
        if self.max_length < 2:
            raise ValueError(f"max_length must be at least 2, not {self.max_length}")


@dataclass(frozen=True)
class TokenizedSet:
    """Examples as token ids. `fingerprint` changes with any token id and with max_length; `report`
    says what was kept, dropped and skipped, in plain JSON values."""

    tokens: np.ndarray  # [all tokens] int32, memory-mapped where cached
    starts: np.ndarray  # [n] int64, where each example's prompt begins in `tokens`
    prompt_lengths: np.ndarray  # [n] int64
    response_lengths: np.ndarray  # [n] int64, end token included
    sample_ids: np.ndarray  # [n] int64, record numbers in the source
    end_ids: tuple[int, ...]
    fingerprint: str
    report: dict[str, Any]

    def __len__(self) -> int:
        return len(self.starts)

    def prompt(self, i: int) -> np.ndarray:
        return self.tokens[self.starts[i] :][: self.prompt_lengths[i]]

    def response(self, i: int) -> np.ndarray:
        return self.tokens[self.starts[i] + self.prompt_lengths[i] :][: self.response_lengths[i]]

    def lengths(self, i: int) -> tuple[int, int]:
        """(prompt, response) tokens of example i."""
        return int(self.prompt_lengths[i]), int(self.response_lengths[i])

    def example(self, i: int, visit: int = 0) -> Example:
        return Example(self.prompt(i), self.response(i), int(self.sample_ids[i]), visit)

    def select(self, indices: np.ndarray) -> "TokenizedSet":
        """The examples at `indices`; tokens, fingerprint and report stay those of the whole set."""
        arrays = ("starts", "prompt_lengths", "response_lengths", "sample_ids")
        return replace(self, **{name: getattr(self, name)[indices] for name in arrays})

    def longest_row(self, layout: CanvasLayout) -> int:
        """Tokens of the longest canvas, to compare with the model's maximum."""
        pairs = set(zip(self.prompt_lengths.tolist(), self.response_lengths.tolist(), strict=True))
        return max(layout.lengths(*pair)[1] for pair in pairs)

    def summary(self) -> str:
        """The report as a few lines of text."""
        r = self.report
        head = f"kept {r['kept']:,} of {r['records']:,} records ({r['kept'] / r['records']:.2%})"
        dropped = [f"  dropped {count:,}: {reason}" for reason, count in r["dropped"].items()]
        skipped = [f"    {entry['where']} {entry['reason']}" for entry in r["skipped"]]
        lengths = [
            f"  {part} tokens: median {q['50%']}, 90% up to {q['90%']}, longest {q['max']}"
            for part, q in r["lengths"].items()
        ]
        share = f"{r['longer_than_gen_length']:.1%} of responses"
        share = f"  {share} exceed gen_length {r['gen_length']}"
        return "\n".join([head, *dropped, *skipped, *lengths, share])


def load_set(
    source: Any, tokenizer: Any, options: DataOptions | None = None,
    cache_dir: str | Path | None = None,
) -> TokenizedSet:  # fmt: skip
    """Reads, tokenizes and filters a data set (`sources.open_source` says what it can be).

    Raises ValueError for an unreadable source, a malformed record (place and reason; not with
    on_bad "skip"), a forbidden token id, or if nothing is left. The cache folder is `cache_dir`,
    else $BWSFT_CACHE, else ~/.cache/bwsft; records given as a list aren't cached.
    """
    options = options or DataOptions()
    opened = sources.open_source(source, options.subset, options.split)
    template = Template(tokenizer, options.template)
    path = None
    if opened.digest is not None:
        folder = cache_dir or os.environ.get("BWSFT_CACHE") or Path.home() / ".cache" / "bwsft"
        key = _cache_key(opened.digest, tokenizer_module.tokenizer_digest(tokenizer), options)
        path = Path(folder).expanduser() / f"{key}.safetensors"
    whole = token_cache.load(path) if path else None
    if whole is None:
        whole = _tokenize(opened, template, options)
        if path:
            token_cache.save(path, *whole)
    kept = _filter(*whole, options, template.end_ids, opened.name)
    _check_ids(kept, opened.name, options)
    return kept


def _cache_key(source: str, tokenizer: str, options: DataOptions) -> str:
    """The code that makes the ids is part of the key, so that an edit never serves stale ids."""
    modules = (file_formats, lines, records, strict_json, chat_template, tokenizer_module)
    code = [Path(file).read_bytes() for file in (*(m.__file__ for m in modules), __file__)]
    parts = [source, tokenizer, options.template, options.on_bad, options.exclude_type]
    parts += [hashlib.sha256(text).hexdigest() for text in code]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _tokenize(
    source: sources.Source, template: Template, options: DataOptions
) -> tuple[dict, dict]:
    """(arrays of all well-formed records, what became of the others)."""
    dropped: Counter[str] = Counter()
    skipped: list[dict[str, str]] = []
    chunks, count = [], 0
    rows = enumerate(source.rows())
    with tqdm(total=source.total, desc="tokenizing", unit=" records", disable=None) as bar:
        while chunk := list(islice(rows, CHUNK)):
            prepared, sample_ids = [], []
            for number, (where, raw) in chunk:
                try:
                    ready = _prepare(raw, template, options.exclude_type)
                except ValueError as error:
                    if options.on_bad == "stop":
                        hint = "fix it, or leave bad records out with on_bad 'skip'"
                        raise ValueError(f"{where} {error}; {hint}") from error
                    dropped["malformed"] += 1
                    if len(skipped) < LISTED:
                        skipped.append({"where": where, "reason": str(error)})
                    continue
                if isinstance(ready, str):
                    dropped[ready] += 1
                else:
                    prepared.append(ready)
                    sample_ids.append(number)
            chunks.append(_flatten(template.tokenize(prepared), sample_ids))
            count += len(chunk)
            bar.update(len(chunk))
    if not count:
        raise ValueError(f"there are no records in {source.name}")
    columns = zip(*chunks, strict=True)
    arrays = {name: np.concatenate(c) for name, c in zip(ARRAYS, columns, strict=True)}
    facts = {"records": count, "dropped": dict(dropped), "skipped": skipped}
    return arrays, facts | {"digest": token_cache.content_digest(arrays)}


def _prepare(raw: Any, template: Template, exclude_type: str | None) -> Any:
    """What `template.tokenize` takes, or the reason (text) to drop the example."""
    record = records.normalize(raw)
    if exclude_type and exclude_type in record.kind:
        return f"type contains {exclude_type}"
    if not record.messages[-1][1].strip():
        return "empty prompt"
    texts = (record.response, *(content for _, content in record.messages))
    if sum(map(len, texts)) > MOST_CHARACTERS:
        return f"longer than {MOST_CHARACTERS:,} characters"
    return template.prepare(record) if record.response.strip() else "empty response"


def _flatten(encoded: list[tuple[list, list]], sample_ids: list[int]) -> list[np.ndarray]:
    flat = [i for prompt, response in encoded for i in (*prompt, *response)]
    lengths = [[len(pair[side]) for pair in encoded] for side in (0, 1)]
    columns = (flat, *lengths, sample_ids)
    return [np.array(c, dtype=d) for c, d in zip(columns, ARRAYS.values(), strict=True)]


def _filter(
    arrays: dict[str, np.ndarray], facts: dict, options: DataOptions, end_ids: tuple[int, ...],
    name: str,
) -> TokenizedSet:  # fmt: skip
    totals = arrays["prompt_lengths"] + arrays["response_lengths"]  # [all well-formed records]
    keep = np.flatnonzero(totals <= options.max_length)
    dropped = dict(facts["dropped"])
    if len(keep) < len(totals):
        dropped[f"longer than max_length {options.max_length}"] = len(totals) - len(keep)
    if not len(keep):
        why = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        why += "".join(f"; {s['where']} {s['reason']}" for s in facts["skipped"][:1])
        raise ValueError(f"{name}: none of the {facts['records']} records is left: {why}")
    prompts, responses = (arrays[f"{part}_lengths"][keep] for part in ("prompt", "response"))
    lengths = {"prompt": prompts, "response": responses, "both": totals[keep]}
    report = {
        "records": facts["records"],
        "kept": len(keep),
        "dropped": dropped,
        "skipped": facts["skipped"],
        "gen_length": options.gen_length,
        "longer_than_gen_length": float(np.mean(responses > options.gen_length)),
        "lengths": {part: _quantiles(values) for part, values in lengths.items()},
    }
    limits = f"{facts['digest']} max_length {options.max_length}"
    return TokenizedSet(
        tokens=arrays["tokens"], starts=(np.cumsum(totals) - totals)[keep], prompt_lengths=prompts,
        response_lengths=responses, sample_ids=arrays["sample_ids"][keep], end_ids=end_ids,
        fingerprint=hashlib.sha256(limits.encode()).hexdigest(), report=report,
    )  # fmt: skip


def _quantiles(values: np.ndarray) -> dict[str, int]:
    """Lengths that the given share of examples doesn't exceed."""
    shares = {"min": 0.0, "50%": 0.5, "90%": 0.9, "99%": 0.99, "max": 1.0}
    found = np.quantile(values, list(shares.values()), method="inverted_cdf")
    return dict(zip(shares, map(int, found), strict=True))


def _check_ids(kept: TokenizedSet, name: str, options: DataOptions) -> None:
    """Raises ValueError for [MASK] or an id outside the vocabulary in any kept example."""
    bad = np.zeros(len(kept.tokens), dtype=bool)
    if options.mask_id is not None:
        bad |= kept.tokens == options.mask_id
    if options.vocab_size is not None:
        bad |= (kept.tokens < 0) | (kept.tokens >= options.vocab_size)
    at = np.flatnonzero(bad)
    owner = np.searchsorted(kept.starts, at, side="right") - 1
    ends = kept.starts + kept.prompt_lengths + kept.response_lengths
    mine = (owner >= 0) & (at < ends[owner])  # the others belong to dropped examples
    if not mine.any():
        return
    token, row = int(kept.tokens[at[mine][0]]), int(kept.sample_ids[owner[mine][0]])
    if token == options.mask_id:
        raise ValueError(f"record {row + 1} of {name} contains [MASK], id {token}")
    raise ValueError(
        f"record {row + 1} of {name} contains token id {token}, outside the model's vocabulary of"
        f" {options.vocab_size}: tokenizer and model don't belong together"
    )

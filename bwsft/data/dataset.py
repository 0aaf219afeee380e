"""Turns a data source into token ids, cached on disk by content.

A cached set holds every well-formed record, so that tokenizing once serves every max_length.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bwsft.data import preparation, sources, token_cache
from bwsft.data import tokenizer as tokenizer_module
from bwsft.data.chat_template import Template
from bwsft.data.examples import TURN_BIT, DataOptions
from bwsft.data.packing import Example
from bwsft.data.selection import Selection
from bwsft.utils import lines, strict_json
from bwsft.utils.files import cache_folder


@dataclass(frozen=True)
class TokenizedSet:
    """Examples as token ids. `fingerprint` changes with any token id and with max_length; `report`
    says what was kept, dropped and skipped, in plain JSON values."""

    tokens: np.ndarray  # [all tokens] int32, memory-mapped where cached
    # What follows is mapped too where `tokens` is.
    starts: np.ndarray  # [n] int64, where each example's prompt begins in `tokens`
    prompt_lengths: np.ndarray  # [n] int64
    response_lengths: np.ndarray  # [n] int64, end token included
    sample_ids: np.ndarray  # [n] int64, the record's number in the source, and the turn
    end_ids: tuple[int, ...]
    fingerprint: str
    report: dict[str, Any]

    @property
    def record_numbers(self) -> np.ndarray:
        """[n] the record that each example is a turn of."""
        return self.sample_ids & ((1 << TURN_BIT) - 1)

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

    def summary(self) -> str:
        """The report as a few lines of text."""
        r = self.report
        head = f"kept {r['kept']:,} of {r['examples']:,} {r['unit']}"
        head += f" ({r['kept'] / r['examples']:.2%})"
        dropped = [
            f"  dropped {count:,}: {reason}" + (f" (first: {r['first'][reason]})"
                                                if reason in r["first"] else "")
            for reason, count in r["dropped"].items()
        ]  # fmt: skip
        skipped = [f"    {entry['where']} {entry['reason']}" for entry in r["skipped"]]
        lengths = [
            f"  {part} tokens: median {q['50%']}, 90% up to {q['90%']}, 99% up to {q['99%']}, "
            f"longest {q['max']}"
            for part, q in r["lengths"].items()
        ]
        unread = ", ".join(f"{name} ({count:,})" for name, count in r["unread"].items())
        if unread:
            skipped.append(
                f"  not read: {unread}; --dataset.columns input=NAME sets a column under the "
                "prompt, ignore=NAME leaves it out of this line"
            )
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
    template = Template(tokenizer, options.template, options.template_args)
    path = None
    if opened.digest is not None:
        key = _cache_key(opened.digest, tokenizer_module.tokenizer_digest(tokenizer), options)
        path = cache_folder(cache_dir) / f"{key}.safetensors"
    whole = token_cache.load(path) if path else None
    if whole is None and path:
        place = str(source) if isinstance(source, str | Path) else None
        if preparation.prepare(path, opened, template, options, place):
            whole = token_cache.load(path)
    if whole is None:
        whole = preparation.in_memory(opened, template, options)
    folder = path.parent if path else None
    kept = _filter(*whole, options, template.end_ids, opened.name, folder)
    _check_ids(kept, opened.name, options)
    return kept


def _cache_key(source: str, tokenizer: str, options: DataOptions) -> str:
    """The code that makes the ids is part of the key, so that an edit never serves stale ids."""
    code = [file.read_bytes() for file in _code_files()]
    parts = [source, tokenizer, *(getattr(options, name) for name in preparation.DECISIVE)]
    parts += [hashlib.sha256(text).hexdigest() for text in code]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _code_files() -> list[Path]:
    beside = [Path(module.__file__) for module in (strict_json, lines)]
    return [*sorted(Path(__file__).parent.glob("*.py")), *beside]


def _filter(
    arrays: dict[str, np.ndarray], facts: dict, options: DataOptions, end_ids: tuple[int, ...],
    name: str, folder: Path | None,
) -> TokenizedSet:  # fmt: skip
    """The examples that fit; what is kept of each is mapped from `folder` where there is one."""
    found = Selection(arrays, options)
    columns = found.columns(folder)
    dropped, first = dict(facts["dropped"]), dict(facts["first"])
    for reason, (count, sample_id) in found.dropped.items():
        if count:
            number = sample_id & ((1 << TURN_BIT) - 1)
            dropped[reason], first[reason] = count, f"record {number + 1}"
    if not len(found.both):
        why = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        why += "".join(f"; {s['where']} {s['reason']}" for s in facts["skipped"][:1])
        why += found.remedy()
        raise ValueError(f"{name}: none of the {facts['records']} records is left: {why}")
    lengths = {"prompt": found.prompts, "response": found.responses, "both": found.both}
    report = {
        "records": facts["records"],
        "examples": facts["examples"],
        "unit": "records" if options.turns == "last" else f"turns of {facts['records']:,} records",
        "kept": len(found.both),
        "dropped": dropped,
        "first": first,
        "read": facts["read"],
        "unread": facts["unread"],
        "skipped": facts["skipped"],
        "gen_length": options.gen_length,
        "longer_than_gen_length": found.responses.above(options.gen_length) / len(found.both),
        "lengths": {part: values.quantiles() for part, values in lengths.items()},
    }
    limits = f"{facts['digest']} max_length {options.max_length}"
    return TokenizedSet(
        tokens=arrays["tokens"], **columns._asdict(), end_ids=end_ids,
        fingerprint=hashlib.sha256(limits.encode()).hexdigest(), report=report,
    )  # fmt: skip


def _check_ids(kept: TokenizedSet, name: str, options: DataOptions) -> None:
    """Raises ValueError for [MASK] or an id outside the vocabulary in any kept example."""
    for start, ids in token_cache.pieces(kept.tokens):
        bad = np.zeros(len(ids), dtype=bool)
        if options.mask_id is not None:
            bad |= ids == options.mask_id
        if options.vocab_size is not None:
            bad |= (ids < 0) | (ids >= options.vocab_size)
        at = start + np.flatnonzero(bad)
        owner = np.searchsorted(kept.starts, at, side="right") - 1
        lengths = kept.prompt_lengths[owner] + kept.response_lengths[owner]
        # The others belong to dropped examples.
        mine = (owner >= 0) & (at < kept.starts[owner] + lengths)
        if mine.any():
            break
    else:
        return
    token, row = int(kept.tokens[at[mine][0]]), int(kept.sample_ids[owner[mine][0]])
    if token == options.mask_id:
        raise ValueError(f"record {row + 1} of {name} contains [MASK], id {token}")
    raise ValueError(
        f"record {row + 1} of {name} contains token id {token}, outside the model's vocabulary of"
        f" {options.vocab_size}: tokenizer and model don't belong together"
    )

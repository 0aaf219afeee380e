"""When a decoder committed each token of the responses that are trained on: what `bwsft distill`
writes beside them, in the field `steps`."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bwsft.data.dataset import TokenizedSet
from bwsft.data.packing import Batch
from bwsft.data.sources import open_source
from bwsft.utils import strict_json

FIELD = "steps"
NEVER = -1  # the decoder ended before it committed this position


@dataclass(frozen=True)
class Traces:
    """Denoising steps of the response positions of every record, one record after the other."""

    steps: np.ndarray  # [all] int32
    edges: np.ndarray  # [records + 1] int64

    @classmethod
    def read(cls, source: Any, subset: str | None = None, split: str | None = None) -> Traces:
        """The traces of what `open_source` takes; ValueError, naming the record, where it has
        none."""
        rows = []
        for place, raw in open_source(source, subset, split).rows():
            record = strict_json.parse(raw) if isinstance(raw, bytes) else raw
            found = record.get(FIELD) if isinstance(record, dict) else None
            try:
                rows.append(np.array(found, dtype=np.int32))
                good = rows[-1].ndim == 1 and rows[-1].tolist() == found
            except (TypeError, ValueError, OverflowError):
                good = False
            if not good:
                raise ValueError(
                    f"{place} has no list {FIELD!r} of numbers: --objective.name distill trains on "
                    "what `bwsft distill` wrote"
                )
        edges = np.cumsum([0, *map(len, rows)])
        return cls(np.concatenate(rows) if rows else np.zeros(0, np.int32), edges)

    def of(self, record: int) -> np.ndarray:
        return self.steps[self.edges[record] : self.edges[record + 1]]

    def of_examples(self, examples: TokenizedSet) -> TokenizedSet:
        """The examples with a fingerprint that is of these traces too, and a report that counts
        their field as read; ValueError unless every token of every response has its step."""
        for i, record in enumerate(examples.record_numbers.tolist()):
            steps, length = self.of(record), examples.lengths(i)[1]
            if len(steps) < length or (steps[:length] < 0).any():
                raise ValueError(
                    f"record {record + 1} has {len(steps)} steps and a response of {length} tokens:"
                    " train with the tokenizer and the template that bwsft distill decoded with"
                )
        digest = hashlib.sha256(examples.fingerprint.encode())
        digest.update(self.edges.tobytes() + self.steps.tobytes())
        unread = {name: n for name, n in examples.report["unread"].items() if name != FIELD}
        report = examples.report | {"unread": unread}
        return dataclasses.replace(examples, fingerprint=digest.hexdigest(), report=report)

    def onto(self, batch: Batch, records: list[int]) -> Batch:
        """The batch with the steps of its sequences, which are of these records."""
        found = torch.full_like(batch.ids, NEVER)
        starts = (batch.cu_seqlens[:-1] + batch.prompt_lengths).tolist()
        for start, record, length in zip(
            starts, records, batch.response_lengths.tolist(), strict=True
        ):
            steps = torch.from_numpy(self.of(record)[:length].astype(np.int64))
            found[start : start + len(steps)] = steps
        return dataclasses.replace(batch, steps=found)

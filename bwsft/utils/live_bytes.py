"""Bytes of tensors while code runs: how many live at a time, and what they are for."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import bwsft_kernels  # noqa: F401 its operators
import torch
from bwsft_kernels.implementations import body_of
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OTHER = "activations"  # what nobody has named
LOGITS = "logits"


class LiveBytes(TorchDispatchMode):
    """Inside a `with` every storage that appears is counted until it is gone, tensors without
    values like others. What torch's own operators take and give back inside is not seen; those of
    bwsft_kernels are looked into, and what a loss takes there is called logits.

    card_bytes: the most logits at a time on a card that tensors without values stand for: its
    other operators are one kernel each, and are then not looked into.
    """

    def __init__(self, card_bytes: int | None = None):
        super().__init__()
        self.card_bytes = card_bytes
        self.known: dict[int, tuple[weakref.ref, str, int]] = {}
        self.now: Counter[str] = Counter()
        self.most: dict[str, Counter[str]] = {}
        """Of each phase what lived when it was most, by what it was for."""
        self.phase, self.part = "", OTHER

    def enter(self, phase: str) -> None:
        """What follows is of this phase."""
        self.phase = phase
        self._compare()

    @contextlib.contextmanager
    def called(self, part: str) -> Iterator[None]:
        """New storages are for this."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def call(self, tensors: Iterable[Tensor], part: str) -> None:
        """These are for something else than was said; new ones are counted from now on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if (key := storage._cdata) in self.known:
                ref, before, size = self.known[key]
                self.now[before] -= size
            else:
                size = storage.nbytes()
                ref = weakref.ref(storage, functools.partial(self._gone, key))
            self.known[key] = ref, part, size
            self.now[part] += size
        self._compare()

    def _gone(self, key: int, _: weakref.ref) -> None:
        _, part, size = self.known.pop(key)
        self.now[part] -= size

    def _compare(self) -> None:
        if self.now.total() > self.most.setdefault(self.phase, Counter()).total():
            self.most[self.phase] = self.now.copy()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        body = body_of(func)
        if body is None:
            out = func(*args, **(kwargs or {}))
        else:
            out = self._look_into(func, body, args)
        new = (x for x in tensors(out) if x.untyped_storage()._cdata not in self.known)
        self.call(new, self.part)
        return out

    def _look_into(self, func: OpOverload, body: Callable, args: tuple) -> Any:
        """Run an operator of ours as what it runs."""
        names = [argument.name for argument in func._schema.arguments]
        loss = "chunk_bytes" in names
        if self.card_bytes is not None:
            return self._loss_on_a_card(func, names, args) if loss else func(*args)
        with self, self.called(LOGITS if loss else self.part):
            out = body(*args)
        self.call(tensors(out), self.part)
        return out

    def _loss_on_a_card(self, func: OpOverload, names: list[str], args: tuple) -> Any:
        """A loss with a chunk of fp32 logits, where it makes them, and its head in the dtype of the
        products."""
        given = dict(zip(names, args, strict=True)) | {"chunk_bytes": self.card_bytes}
        x, head = given["x"], given["weight"]
        with self, self.called(LOGITS):
            size = 0 if "upstream" in given else min(4 * len(x) * len(head), self.card_bytes)
            held = [x.new_empty(size, dtype=torch.uint8), head.to(given["dtype"])]
        out = func(*given.values())
        self.call(tensors(out), self.part)
        held.clear()
        return out


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]

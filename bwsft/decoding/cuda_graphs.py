"""CUDA graphs for the forwards of denoising steps: one launch in place of forty per layer.

At batch 1 a step waits for the host, which launches some 1,400 kernels at 32 layers. The shapes of
a step come back step after step, so a forward is recorded once, on buffers that stay where they
are, and replayed: what changes is copied into the buffers first. The head and the choice of tokens,
about a hundred launches, stay outside; the host issues them while the graph runs.

S sequences, W width of a span, T packed tokens, D hidden size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bwsft.models.backbone import Backbone
from bwsft.models.kv_cache import ContextCache, Span

Run = Callable[[], Tensor]
Record = Callable[[Run], tuple[Callable[[], Any], Tensor]]
# A forward on buffers of its own: its inputs, what replays it, what a replay writes.
Kept = tuple[dict[str, Tensor], Callable[[], Any], Tensor]

# Of one batch. Rows that stand in different blocks have ever new shapes under a suffix window or in
# `prefix`; a recording keeps megabytes and costs three forwards, and the rest run as they are.
MOST_KEPT = 128


@dataclass
class GraphedPasses:
    """`hidden_states` and `active_hidden_states` of a backbone, for one batch of rows and one
    context cache. A result is a copy: recordings share their memory, in which any of them writes.

    Shapes are recorded when they come for the second time: a recording costs two forwards, and
    under a dynamic rule many never come back. `record(run)` runs the forward and returns (replay,
    its output).
    """

    model: Backbone
    record: Record
    met: set[tuple] = field(default_factory=set)
    kept: dict[tuple, Kept] = field(default_factory=dict)

    def hidden_states(
        self,
        ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        *,
        max_length: int,
        wanted: Tensor,
    ) -> Tensor:
        """As :meth:`Backbone.hidden_states`."""
        inputs = {
            "ids": ids, "position_ids": position_ids, "cu_seqlens": cu_seqlens, "wanted": wanted,
        }  # fmt: skip

        def run(at: dict[str, Tensor]) -> Tensor:
            return self.model.hidden_states(**at, max_length=max_length)

        return self.run((max_length,), inputs, run)

    def active_hidden_states(
        self, ids: Tensor, span: Span, cache: ContextCache, wanted: Tensor | None = None
    ) -> Tensor:
        """As :meth:`Backbone.active_hidden_states`.

        What a pass sees grows block by block under block_causal; unless it is the whole cache the
        recording makes a plan of ranges from what is visible, so that one serves every block.
        """
        inputs = {"ids": ids, "start": span.start, "length": span.length, "visible": cache.visible}
        inputs |= {} if cache.rows is None else {"rows": cache.rows}
        inputs |= {} if wanted is None else {"wanted": wanted}
        whole = cache.length if cache.even == cache.length else None
        key = (span.width, span.even, whole)

        def run(at: dict[str, Tensor]) -> Tensor:
            seen = replace(
                cache, visible=at["visible"], rows=at.get("rows"), even=whole, most=cache.length
            )
            place = replace(span, start=at["start"], length=at["length"])
            return self.model.active_hidden_states(at["ids"], place, seen, at.get("wanted"))

        return self.run(key, inputs, run)

    def run(
        self, key: tuple, inputs: dict[str, Tensor], run: Callable[[dict[str, Tensor]], Tensor]
    ) -> Tensor:
        key = (*key, *((name, x.shape, x.dtype) for name, x in inputs.items()))
        if key not in self.kept:
            if key not in self.met or len(self.kept) >= MOST_KEPT:
                self.met.add(key)
                return run(inputs)
            buffers = {name: x.clone() for name, x in inputs.items()}
            self.kept[key] = buffers, *self.record(lambda: run(buffers))
        buffers, replay, output = self.kept[key]
        for name, value in inputs.items():
            buffers[name].copy_(value)
        replay()
        return output.clone()


def graphed(model: Backbone) -> GraphedPasses:
    """Passes of `model` as CUDA graphs. ValueError where its forward reads from the device, which
    no graph can."""
    model.check_graphs()
    return GraphedPasses(model, Capture(model.head()[0].device))


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all recordings on a device: cuBLAS keeps up to 32 MiB for every stream that it
    has been used on, and never gives them back."""
    return torch.cuda.Stream(device)


class Capture:
    """Records on CUDA. The graphs of a batch share one pool: they replay one after the other, and
    what one of them returns stays allocated."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> tuple[Callable[[], Any], Tensor]:
        with torch.cuda.device(self.device), without_autocast_cache():
            # A first run on that stream makes what libraries allocate and compile when first used.
            stream, current = side_stream(self.device), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                run()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=stream):
                output = run()
        return graph.replay, output


@contextlib.contextmanager
def without_autocast_cache():
    """Autocast's copies of weights would be freed when its block ends; a graph makes its own."""
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)

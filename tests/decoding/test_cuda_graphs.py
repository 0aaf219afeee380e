"""Recorded forwards against eager ones. Where no GPU is, a tape stands for the CUDA graph: it keeps
every operator with the tensors it ran on and runs them again on that same memory, so that whatever
a replay doesn't copy into its buffers stays as it was when recorded."""

import contextlib
import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import tiny_decoding
import torch
from thinning import thinned
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from bwsft.decoding import context as decode_context
from bwsft.decoding import cuda_graphs as graphs
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.cuda_graphs import GraphedPasses
from bwsft.decoding.generate import generate
from bwsft.models.kv_cache import ContextCache


class Tape(TorchDispatchMode):
    """Operators in order, each with its arguments and what it wrote."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self.calls:
            aliases = [r.alias_info for r in func._schema.returns]
            if any(a is not None and not a.is_write for a in aliases):
                continue  # a view of memory that is on the tape
            new = func(*args, **kwargs)
            if not any(a is not None for a in aliases):
                tree_map(lambda x, y: x.copy_(y) if isinstance(x, torch.Tensor) else x, out, new)


class Recorder:
    """Counts what is recorded and replayed. As in a shared pool a replay writes over what later
    recordings have returned."""

    def __init__(self):
        self.replayed = 0
        self.outputs = []
        self.operators = set()

    @property
    def recorded(self):
        return len(self.outputs)

    def __call__(self, run):
        with Tape() as tape:
            output = run()
        self.operators |= {call[0] for call in tape.calls}
        self.outputs.append(output)
        later = self.recorded

        def replay():
            self.replayed += 1
            for other in self.outputs[later:]:
                other.fill_(float("nan"))
            tape.replay()

        return replay, output


model_of = partial(tiny_decoding.model_of, ends=1.0)


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    # Of range_attention the tape sees the operator, as a GPU sees its kernel: its body here makes
    # calls that depend on the plan.
    monkeypatch.setattr("bwsft_kernels._operator.recorded", lambda: True)
    monkeypatch.setattr(decode_context, "graphed", lambda model: GraphedPasses(model, found))
    return found


RULES = {
    "quota": {},
    "threshold": {"rule": "threshold", "threshold": 0.6},
    "noisy": {"temperature": 0.7, "seed": 3},
    "window": {"rule": "threshold", "threshold": 0.6, "active_blocks": 3},
}
FAMILIES = {"plain": {}, "shift": {"logit_shift": 1}, "grid": {"block_origin": "absolute"}}
PAIRS = [(context, family) for context in tiny_decoding.MODES for family in FAMILIES.values()]
PROMPTS = [[3, 4, 5], [7] * 6, [9, 3, 4, 8, 5], [6, 11], [4, 4], [8, 2, 9]]


@pytest.mark.parametrize(
    ("context", "family", "rule"),
    thinned([(*pair, rule) for rule in RULES for pair in PAIRS
             if rule != "window" or pair[0] in ("exact", "block_causal")], 5),
)
def test_tokens_and_confidences_are_those_of_eager_passes(context, rule, family, recorder):
    """Of models of which some rows end early and others go on to the last block."""
    config = DecodeConfig(16, 4, context=context, **RULES[rule])
    for seed in (0, 4):
        model = model_of(seed=seed, **family)
        plain = generate(model, PROMPTS[:4], config, trace=True)
        graphs_on = dataclasses.replace(config, graphs=True)
        found = generate(model, PROMPTS[:4], graphs_on, trace=True)
        for a, b in zip(plain, found, strict=True):
            assert (a.tokens, a.steps, a.passes) == (b.tokens, b.steps, b.passes)
            for x, y in zip(a.trace, b.trace, strict=True):
                assert x[:3] == y[:3]
                # Attention under a mask sums in another order: a few ulp of float64.
                assert x.confidence == pytest.approx(y.confidence, rel=1e-12)
    assert recorder.replayed > recorder.recorded > 0 or rule in ("threshold", "window")


@pytest.mark.parametrize("rule", ["quota", "window"])
def test_a_step_may_replay_two_recordings(rule, recorder):
    """Rows that enter a block are recorded apart from the others, some steps later."""
    config = DecodeConfig(32, 4, context="block_causal", stop_at_end=False, **RULES[rule])
    model = model_of(block_origin="absolute")
    plain = generate(model, PROMPTS[:4], config)
    found = generate(model, PROMPTS[:4], dataclasses.replace(config, graphs=True))
    assert [g.tokens for g in found] == [g.tokens for g in plain] and recorder.recorded > 2


@pytest.mark.parametrize(
    ("context", "recordings"), [("exact", 1), ("cached", 1), ("prefix", 4), ("block_causal", 3)]
)
def test_one_recording_serves_every_block(context, recordings, recorder, monkeypatch):
    """Of rows that stay to the end, and from the second time on. The suffix of `prefix` gets
    shorter block by block; in block_causal the pass that enters a block has its own shapes, and the
    last block sees the whole cache, which needs no mask."""
    for check in ("bwsft.models.backbone.check_ids", "bwsft_kernels._range_plan.require"):
        monkeypatch.setattr(check, lambda *_: None)  # they read on a CPU alone
    config = DecodeConfig(16, 4, context=context, stop_at_end=False, graphs=True)
    generate(model_of(), [[3, 4, 5], [7] * 3], config)
    assert recorder.recorded == recordings
    if context != "exact":  # its padded attention, which no CUDA graph takes, asks for the lengths
        assert torch.ops.aten._local_scalar_dense.default not in recorder.operators
    passes = {"exact": 16, "cached": 12, "prefix": 12, "block_causal": 15}
    assert recorder.replayed == passes[context] - recordings


def test_batches_do_not_share_recordings(recorder):
    config = DecodeConfig(8, 4, context="cached", batch_size=2, graphs=True)
    model, prompts = model_of(), PROMPTS[:4]
    plain = dataclasses.replace(config, graphs=False, batch_size=4)
    tokens = [g.tokens for g in generate(model, prompts, config)]
    assert tokens == [g.tokens for g in generate(model, prompts, plain)]


def test_recordings_end_with_their_cache(recorder, monkeypatch):
    """Of a cache that rows have left, a layer's buffer may lie where one of the old cache lay."""

    def keep(cache, rows):
        first = cache.keys[0][: len(rows)].copy_(cache.keys[0][rows])
        kept = usual(cache, rows)
        return dataclasses.replace(kept, keys=[first, *kept.keys[1:]])

    usual = ContextCache.keep
    monkeypatch.setattr(ContextCache, "keep", keep)
    for seed in range(4):
        model = model_of(seed=seed)
        config = DecodeConfig(24, 4, context="cached", rule="threshold", threshold=0.5)
        plain = generate(model, PROMPTS, config)
        found = generate(model, PROMPTS, dataclasses.replace(config, graphs=True))
        assert [g.tokens for g in found] == [g.tokens for g in plain]


def test_recordings_have_an_end(recorder, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_KEPT", 2)
    config = DecodeConfig(16, 4, context="prefix", stop_at_end=False)
    plain = generate(model_of(), PROMPTS[:2], config)
    found = generate(model_of(), PROMPTS[:2], dataclasses.replace(config, graphs=True))
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert recorder.recorded == 2 and 0 < recorder.replayed < 12 - 4


def test_all_recordings_share_a_stream(monkeypatch):
    """On the model's device, and not on one stream more for each."""
    log = []

    def named(*words):
        @contextlib.contextmanager
        def entered(*args, **options):
            log.append((*words, *args, *options.values()))
            yield

        return entered

    fakes = dict(
        Stream=lambda device: SimpleNamespace(device=device, wait_stream=lambda other: None),
        current_stream=lambda: SimpleNamespace(wait_stream=lambda other: None),
        CUDAGraph=lambda: SimpleNamespace(replay=len),
        graph_pool_handle=lambda: "pool", device=named("device"), stream=named("stream"),
        graph=lambda graph, pool, stream: named("graph")(stream),
    )  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs.side_stream.cache_clear()
    where, ran = torch.device("cuda", 1), []
    for _ in range(2):
        assert graphs.Capture(where)(lambda: ran.append(len(log))) == (len, None)
    graphs.side_stream.cache_clear()
    assert [entry[0] for entry in log] == ["device", "stream", "graph"] * 2
    assert ran == [2, 3, 5, 6]  # once on the stream, once as the graph is made
    streams = {id(entry[1]) for entry in log if entry[0] != "device"}
    assert len(streams) == 1 and log[0][1] == log[1][1].device == where


def test_heads_that_flash_attention_does_not_take(monkeypatch):
    model = model_of(dtype=torch.bfloat16)
    weight = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda"))
    monkeypatch.setattr(model, "head", lambda: (weight, None))
    monkeypatch.setattr(graphs, "Capture", lambda device: None)
    assert graphs.graphed(model).model is model
    monkeypatch.setattr(model.base_model.config, "n_heads", 4)
    with pytest.raises(ValueError, match="flash attention takes, not 4 wide"):
        graphs.graphed(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_says_what_graphs_need(dtype):
    with pytest.raises(ValueError, match="on a CUDA device: leave it out"):
        generate(model_of(dtype=dtype), [[3]], DecodeConfig(4, 4, graphs=True))


def test_autocast_cache_comes_back():
    assert torch.is_autocast_cache_enabled()
    with graphs.without_autocast_cache():
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("context", ["exact", "cached", "prefix"])
def test_cuda_graphs_give_the_tokens_of_eager_passes(context):
    """With prompts of one length both run the same kernels on the same shapes."""
    model = model_of(dtype=torch.bfloat16).cuda()
    prompts = [[3, 4, 5], [7] * 3, [9, 3, 4]]
    config = DecodeConfig(16, 4, context=context, stop_at_end=False)
    plain = generate(model, prompts, config)
    found = generate(model, prompts, dataclasses.replace(config, graphs=True))
    assert [g.tokens for g in plain] == [g.tokens for g in found]

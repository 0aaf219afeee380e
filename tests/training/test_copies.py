"""Noisy copies beside one clean row: what the block-causal decoder computes at the same state, in
float64, and gradients as a loop over blocks and copies gives them."""

import dataclasses
import itertools
import os
import subprocess
import sys

import pytest
import tiny_llada
import torch
import torch.nn.functional as F
from block_masks import block_causal_mask, clean_numbers
from thinning import thinned
from tiny_hf import FAMILY, backbone, float64  # noqa: F401 - every test here runs in float64
from tiny_modes import MASK, PLACE, batch, held_out, mode_of
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from bwsft import config as c
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate
from bwsft.models.attention import AttentionLayout, packed_layout
from bwsft.models.dream_sdar import SdarConfig, SDARForCausalLM
from bwsft.models.hf_decoder import new_decoder
from bwsft.models.kv_cache import Span
from bwsft.objectives.base import Draw, Objective, response_rows
from bwsft.training.block_causal import block_size_at
from bwsft.utils.flops import Cost, TrainingCost, flop_counter

NAMES = ["llada", "absolute", "sdar", "qwen2", "llama", "bert", "modernbert"]
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def sdar():
    shape = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, head_dim=8)
    config = SdarConfig(vocab_size=50, num_hidden_layers=2, num_key_value_heads=2,
                        max_position_embeddings=64, initializer_range=0.15, **shape)  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = SDARForCausalLM(config).double().eval()
    kind = dataclasses.replace(FAMILY, block_origin="absolute", attention="block_causal")
    return new_decoder(model, kind)


def model_of(name):
    if name == "sdar":
        return sdar()
    if name not in ("llada", "absolute"):
        return backbone(name)
    net = tiny_llada.backbone(seed=3, n_kv_heads=2)
    if name == "absolute":
        net.family = dataclasses.replace(net.family, block_origin="absolute")
    return net


@pytest.fixture(autouse=True)
def qwen3_in_float64(monkeypatch):
    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, True) + self.variance_epsilon)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", norm)


def mode_around(net, grad=True, **options):
    origin = net.family.block_origin
    mode = mode_of("block_causal", net, block_origin=origin, mask_id=net.family.mask_id, **options)
    blocks = net.family.attention == "block_causal"
    return dataclasses.replace(mode, prompt_blocks=blocks, context_grad=grad)


def supervised(mode, some):
    """[(sequence, start, noisy ids from there on, their blocks, places in them, targets, weights)]
    of every block of every copy, from the start of its group of active blocks."""
    active = mode.objective.active_blocks
    for draw in mode.objective.draws(some, PLACE, None):
        n = int(draw.num_rows)
        for s, edge in enumerate(some.cu_seqlens[:-1].tolist()):
            prompt, response = int(some.prompt_lengths[s]), int(some.response_lengths[s])
            row = draw.noisy.ids[edge : edge + prompt + response]
            blocks = mode.grid.blocks(prompt, response)
            offset = int(draw.groups.offset[s]) if active > 1 else 0
            for b, (start, stop) in enumerate(blocks):
                of = (draw.rows[:n] >= edge + start) & (draw.rows[:n] < edge + stop)
                group = blocks[max(b - (b + offset) % active, 0) : b + 1]
                start = group[0][0]
                if mode.prompt_blocks and start == prompt:
                    start = mode.grid.start(prompt)
                ends = torch.tensor([end for _, end in group])
                own = torch.searchsorted(ends, torch.arange(start, stop), right=True)
                where = draw.rows[:n][of] - edge - start
                weight = draw.weight[:n][of] / draw.of
                yield s, start, row[start:stop], own, where, draw.target[:n][of], weight


def clean_row(mode, some, s, stop):
    """Ids and block numbers of the first `stop` tokens of a clean row."""
    edge, shape = int(some.cu_seqlens[s]), (some.prompt_lengths, some.response_lengths)
    numbers = clean_numbers(mode.grid, *(int(x[s]) for x in shape), mode.prompt_blocks)
    return some.ids[edge : edge + stop], numbers[:stop]


def decoded(mode, some):
    """The loss as the decoder sees it: the blocks before the active ones are stored, without
    autograd, and the active ones run alone against them."""
    net, total = mode.backbone, 0.0
    head, bias = net.head()
    for s, start, ids, own, where, target, weight in supervised(mode, some):
        clean, numbers = clean_row(mode, some, s, start)
        cache = net.new_cache(1, start + len(ids))
        if start:
            with torch.no_grad():
                place = torch.arange(start)
                net.run_layers(clean, place, dataclasses.replace(
                    packed_layout(torch.tensor([0, start])), cache=cache, cache_slots=place,
                    mask=block_causal_mask(numbers)[None, None]))
        ends = start + torch.searchsorted(own, own, right=True)
        cache.show(ends[None] if own[-1] else start + len(ids))
        active = Span(torch.tensor([start]), torch.tensor([len(ids)]), len(ids), True)
        hidden = net.active_hidden_states(ids[None], active, cache)[where]
        each = F.cross_entropy(F.linear(hidden, head, bias), target, reduction="none")
        total = total + (each * weight).sum()
    return total


def whole(mode, some, layout_of=lambda made, start: made):
    """The loss by a forward over [clean blocks before, noisy active blocks up to this one] for
    every block and copy."""
    net, total = mode.backbone, 0.0
    head, bias = net.head()
    for s, start, ids, own, where, target, weight in supervised(mode, some):
        clean, numbers = clean_row(mode, some, s, start)
        row = torch.cat([clean, ids])
        mask = block_causal_mask(torch.cat([numbers, (1 << 20) + own]))[None, None]
        made = dataclasses.replace(packed_layout(torch.tensor([0, len(row)])), mask=mask)
        hidden = net.run_layers(row, torch.arange(len(row)), layout_of(made, start))
        logits = F.linear(hidden[start:][where], head, bias)
        each = F.cross_entropy(logits, target, reduction="none")
        total = total + (each * weight).sum()
    return total


@dataclasses.dataclass(frozen=True)
class Detached(AttentionLayout):
    """Keys and values before `start` are constants."""

    start: int = 0

    def attend(self, layer, q, k, v, width=None):
        k, v = (torch.cat([x[: self.start].detach(), x[self.start :]]) for x in (k, v))
        return super().attend(layer, q, k, v, width)


def detached(made, start):
    return Detached(**vars(made), start=start)


def gradients(net, loss):
    parameters = [p for p in net.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]


def loss_of(mode, some):
    (loss,) = mode.losses(some, PLACE)
    return loss.total


COPIES = {
    "three": ("response", {"draws": 3}), "pairs": ("fixed", {"draws": 4, "pairs": True}),
    "groups of two": ("response", {"draws": 2, "active": 2}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "copies"), thinned([(n, k) for k in COPIES for n in NAMES]))
def test_copies_are_what_the_decoder_computes(name, copies):
    """The loss of ragged batches with short first and last blocks, and the gradients of a frozen
    and a live context."""
    canvas, options = COPIES[copies]
    some, net = batch(((5, 9), (3, 12), (6, 2)), canvas=canvas), model_of(name)
    frozen, live = (mode_around(net, grad, **options) for grad in (False, True))
    for mode, reference in ((frozen, decoded), (live, whole)):
        expected, found = reference(mode, some), loss_of(mode, some)
        torch.testing.assert_close(found.double(), expected, **CLOSE)
        pairs = zip(gradients(net, found), gradients(net, expected), strict=True)
        for got, right in pairs:
            torch.testing.assert_close(got, right, **CLOSE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed(Objective):
    """One known draw."""

    draw: Draw

    def draws(self, batch, place, predict):
        yield self.draw


@pytest.mark.parametrize("visit", range(3))
@pytest.mark.parametrize("name", ["llada", "absolute", "qwen2"])
def test_a_decoder_of_two_active_blocks_meets_the_states_that_are_trained(name, visit):
    """What its first pass commits, and how sure it is, at the state of every group of a copy."""
    some, net = batch(canvas="fixed", visit=visit), model_of(name)
    mode = mode_around(net, active=2)
    (draw,) = mode.objective.draws(some, PLACE, None)
    decode = DecodeConfig(16, 4, context="block_causal", rule="threshold", threshold=0.0,
                          active_blocks=2, open_share=0.0, stop_at_end=False)  # fmt: skip
    seen, mask = 0, net.family.mask_id
    for s, edge in enumerate(some.cu_seqlens[:-1].tolist()):
        prompt, response = int(some.prompt_lengths[s]), int(some.response_lengths[s])
        blocks, short = mode.grid.blocks(prompt, response), int(draw.groups.offset[s])
        for cut in range(-short, len(blocks), 2):
            bounds = blocks[max(cut, 0) : cut + 2]
            start, stop = bounds[0][0], bounds[-1][1]
            if not mode.grid.at_response and stop % 4:
                continue  # the decoder fills the last block whole
            asked, clean = some.ids[edge : edge + prompt], some.ids[edge + prompt : edge + start]
            state = draw.noisy.ids[edge + start : edge + stop].tolist()
            given = clean.tolist() + [None if token == mask else token for token in state]
            (found,) = generate(net, [asked.tolist()], decode, canvases=[given], trace=True)
            at = {prompt + x.position: x for x in found.trace if x.step == 0}
            places = [start + i for i, token in enumerate(state) if token == mask]
            commits = [at[place] for place in places]
            chosen = dataclasses.replace(
                draw, rows=torch.tensor(places) + edge, num_rows=torch.tensor(len(places)),
                target=torch.tensor([x.token for x in commits]), weight=torch.ones(len(places)),
            )
            trained = loss_of(dataclasses.replace(mode, objective=Fixed(draw=chosen)), some)
            logs = torch.tensor([x.confidence for x in commits], dtype=torch.float64).log()
            torch.testing.assert_close(trained.double(), -logs.sum(), **CLOSE)
            seen += len(bounds) > 1
    assert seen > 0


@pytest.mark.parametrize("name", ["llada", "absolute", "bert", "modernbert"])
def test_a_frozen_context_is_one_of_detached_keys_and_values(name):
    some, net = batch(canvas="response"), model_of(name)
    mode = mode_around(net, grad=False, draws=2)
    expected, found = whole(mode, some, detached), loss_of(mode, some)
    for got, right in zip(gradients(net, found), gradients(net, expected), strict=True):
        torch.testing.assert_close(got, right, **CLOSE)
    live = gradients(net, loss_of(dataclasses.replace(mode, context_grad=True), some))
    frozen = gradients(net, loss_of(mode, some))
    assert any(not torch.allclose(a, b, rtol=1e-3) for a, b in zip(live, frozen, strict=True))


@pytest.mark.parametrize("pairs", [False, True])
def test_weights_sum_to_one_and_pairs_supervise_every_token_once(pairs):
    some = batch(canvas="response")
    mode = mode_around(model_of("llada"), draws=4 if pairs else 3, pairs=pairs)
    found = list(mode.objective.draws(some, PLACE, None))
    draw = mode.laid_out(some, found)
    owner = torch.searchsorted(draw.noisy.cu_seqlens[1:], draw.rows, right=True)
    sums = torch.zeros(3).index_add_(0, owner, draw.weight)
    torch.testing.assert_close(sums, torch.ones(3))
    assert len(draw.rows) == int(draw.num_rows) == len(draw.rows.unique())
    assert (draw.noisy.ids[draw.rows] == MASK).all()
    masked = torch.stack([d.noisy.ids == MASK for d in found])
    assert not torch.equal(masked[0], masked[2])
    if pairs:
        inside = response_rows(some).inside
        assert torch.equal(masked[0] ^ masked[1], inside)
        assert torch.equal(masked[2] ^ masked[3], inside)


def test_blocks_shrink_by_halves_to_the_block_size():
    config = c.Config(
        context="block_causal", steps=100, block_size=8, gen_length=40, block_size_schedule=0.3
    )
    sizes = [block_size_at(config, step) for step in range(100)]
    assert sizes == [64] * 10 + [32] * 10 + [16] * 10 + [8] * 70
    for steps, share, size, length in itertools.product((1, 7, 50), (0.1, 1), (1, 3, 32), (32, 96)):
        config = dataclasses.replace(
            config, steps=steps, block_size_schedule=share, block_size=size, gen_length=length
        )
        sizes = [block_size_at(config, step) for step in range(steps + 1)]
        assert 2 * length > sizes[0] >= length and sizes[-1] == size
        assert sizes == sorted(sizes, reverse=True)
    assert block_size_at(dataclasses.replace(config, block_size_schedule=0.0), 0) == 32


def test_an_update_masks_and_lays_out_the_blocks_of_its_step():
    """The loss at the large size is that of a run with such blocks; held-out scores stay."""
    some, net = batch(canvas="fixed"), model_of("llada")
    mode = mode_around(net, draws=2)
    shrinking = dataclasses.replace(mode, size_at={0: 16, 1: 8, 2: 4}.get)
    for step, size in enumerate((16, 8, 4)):
        plain = mode_around(net, draws=2, block_size=size)
        (loss,) = shrinking.losses(some, PLACE._replace(step=step))
        assert loss.total.item() == loss_of(plain, some).item()
    draw = next(held_out(mode, 1).draws(some))
    assert shrinking.score(draw).item() == mode.score(draw).item()


@pytest.mark.parametrize(("grad", "active"), [(True, 1), (False, 1), (True, 3)])
def test_the_formula_gives_the_counted_flops(grad, active):
    """Of whole canvases. Attention, of which a frozen context's backward computes more than the
    formula says, is little at this width."""
    lengths = [(8, 16)] * 12
    net = tiny_llada.backbone(torch.float32, d_model=256, mlp_hidden_size=640, vocab_size=50)
    some = batch(lengths, canvas="fixed")
    mode = mode_around(net, grad, pairs=active == 1, draws=4, active=active)
    with flop_counter() as counter:
        loss_of(mode, some).backward()
    shape = net.base_model.config
    cost = Cost(shape.d_model, shape.n_layers, shape.mlp_hidden_size, shape.embedding_rows)
    formula = TrainingCost(cost, passes=3, dense=True).blockwise(
        "block_causal", 8, 16, 4, draws=4, context_grad=grad, active=active
    )
    assert 12 * formula == pytest.approx(counter.get_total_flops(), rel=0.05)


LONG_STEP = """
import json, resource
from pathlib import Path
import torch, tiny_llada, tiny_modes
from bwsft.data.packing import CanvasLayout, Example, pack
import bwsft

fields = json.loads((Path(bwsft.__file__).parent / "tiny/config.json").read_text())
names = ("d_model", "n_layers", "n_heads", "mlp_hidden_size", "vocab_size", "mask_token_id")
net = tiny_llada.backbone(torch.float32, max_sequence_length=9216, **{n: fields[n] for n in names})
layout = CanvasLayout(mask_id=fields["mask_token_id"], eos_id=0, canvas="fixed", block_size=32,
                      gen_length=8192, max_length=9216)
some = pack([Example(*(torch.full((n,), 7).numpy() for n in (1024, 8191)), 0)], layout)
mode = tiny_modes.mode_of("block_causal", net.train(), draws=2, pairs=True, block_size=32,
                          mask_id=fields["mask_token_id"])
optimizer = torch.optim.AdamW(net.parameters())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(loss,) = mode.losses(some, tiny_modes.PLACE)
loss.total.backward()
optimizer.step()
assert int(loss.rows) == 8192
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_a_step_of_a_long_sequence_fits_in_four_gib():
    """The debug model at 1,024 + 8,192 with a pair of copies: 25,600 rows, of which a mask alone
    would take 655 MB, and its scores ten times as much."""
    run = subprocess.run([sys.executable, "-c", LONG_STEP], capture_output=True, text=True,
                         env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert run.returncode == 0, run.stderr
    before, peak = (int(n) * 1024 for n in run.stdout.split())
    print(f"{before / 2**30:.2f} GiB before, {peak / 2**30:.2f} GiB at the peak")
    assert peak < 4 * 2**30

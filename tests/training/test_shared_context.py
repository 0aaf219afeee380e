"""Several draws in exact mode of which the first alone runs the whole canvas (--shared-context).

Its loss and gradient are those of exact mode, and the others' those of the active rows against its
keys and values as constants, in float64. And what further draws and a supervised suffix cost.
"""

import dataclasses

import pytest
import tiny_llada
import tiny_modes
import torch
from tiny_hf import backbone, float64  # noqa: F401 - every test here runs in float64
from tiny_modes import PLACE, batch, gradients, losses, mode_of

from bwsft import config as c
from bwsft import presets
from bwsft.training.context_modes import SharedContext, make_mode
from bwsft.utils.flops import Cost, TrainingCost, flop_counter


def model_of(name):
    return tiny_modes.model().double() if name == "llada" else backbone(name)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["llada", "qwen2"])
@pytest.mark.parametrize(("canvas", "pairs"), [("fixed", False), ("response", True)])
def test_one_draw_is_live_and_the_others_see_its_context(name, canvas, pairs, recomputed):
    net, some = model_of(name), batch(canvas=canvas)
    options = dict(draws=4, pairs=pairs, mask_id=net.family.mask_id, even=canvas == "fixed")
    mode = mode_of("shared", net, **options)
    net.set_gradient_checkpointing(recomputed)
    net.train()
    total, found = gradients(mode, some)
    net.zero_grad()
    net.set_gradient_checkpointing(False)
    exact, frozen = (mode_of(kind, net, **options) for kind in ("exact", "frozen"))
    draws = list(mode.objective.draws(some, PLACE, None))
    parts = [exact.loss_of(draws[0], exact.context_of(draws[0], None))]
    parts[0].backward()
    for draw in draws[1:]:
        parts.append(frozen.loss_of(draw, frozen.context_pass(draws[0])))
        parts[-1].backward()
    assert total == pytest.approx(sum(part.item() for part in parts) / 4, rel=1e-12)
    for got, p in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(got, p.grad / 4, rtol=1e-9, atol=1e-12)
    own = exact.loss_of(draws[1], exact.context_of(draws[1], None))
    assert abs(own.item() - parts[1].item()) > 1e-6  # its own state differs, so its own context


def test_a_run_has_the_mode_and_is_scored_as_exact():
    net, some = tiny_modes.model(), batch()
    config = dataclasses.replace(
        presets.debug(), block_size=4, draws_per_context=4, shared_context=True
    )
    c.validate(config)
    mode = make_mode(config, net.family, net, mode_of("exact").objective, torch.device("cpu"))
    assert isinstance(mode, SharedContext)
    draw = next(tiny_modes.held_out(mode, 1).draws(some))
    assert mode.score(draw).item() == mode_of("exact", net).score(draw).item()


@pytest.mark.parametrize(("options", "kind", "draws"), [
    ({"shared": True}, "shared", 4), ({"suffix": True}, "exact", 2), ({}, "cached", 4),
])  # fmt: skip
def test_the_formula_gives_the_counted_flops(options, kind, draws):
    """Over enough masks that half of what can be masked is, in a block at each place. Attention, of
    whose backward a constant context has less, is little at this width."""
    net = tiny_llada.backbone(torch.float32, d_model=256, mlp_hidden_size=640, vocab_size=50)
    some = batch([(8, 16)] * 8, canvas="fixed")
    mode = mode_of(kind, net, draws=draws, even=True)
    if options.get("suffix"):
        objective = dataclasses.replace(mode.objective, suffix_weight=1.0)
        mode = dataclasses.replace(mode, objective=objective, prune=False)
    with flop_counter() as counter:
        losses(mode, some)
    shape = net.base_model.config
    cost = Cost(shape.d_model, shape.n_layers, shape.mlp_hidden_size, shape.embedding_rows)
    context = "cached" if kind == "cached" else "exact"
    formula = TrainingCost(cost, passes=3, dense=True).blockwise(
        context, 8, 16, 4, draws=draws, **options
    )
    assert 8 * formula == pytest.approx(counter.get_total_flops(), rel=0.05)

"""What every whole-response objective must do with a batch, and the settings at which each is
classical SFT, bit for bit. The facts of each method: test_<method>.py."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bwsft_kernels import MaskSpec, block_mask
from tiny_objectives import family_of, objective_of, packed

from bwsft import config as c
from bwsft import presets
from bwsft.objectives import rdm, two_step
from bwsft.objectives.base import ONE24, Place, ranks, response_rows
from bwsft.objectives.config import MdlmConfig, RdmConfig, SoftMaskedConfig, TwoStepConfig

MASK = 99
FAMILY = family_of(MASK)
# Fill, [MASK] behind, one token, none, a prompt of none.
LENGTHS = [(3, 16), (5, 1), (2, 0), (7, 13), (0, 21), (4, 5)]
NAMES = ("mdlm", "rdm", "soft_masked", "two_step")
GROUPS = {
    "mdlm": ("mdlm", MdlmConfig()),
    "mdlm plain": ("mdlm", MdlmConfig(False, False, "sequence", "llada")),
    "rdm": ("rdm", RdmConfig(levels=8)),
    "rdm plain": ("rdm", RdmConfig(8, "reciprocal", 0.0, False)),
    "soft_masked": ("soft_masked", SoftMaskedConfig()),
    "soft_masked elbo": ("soft_masked", SoftMaskedConfig(0.5, 4, "elbo")),
    "two_step": ("two_step", TwoStepConfig()),
    "two_step confidence": ("two_step", TwoStepConfig("step", "confidence", "constant")),
    "two_step all": ("two_step", TwoStepConfig("uniform", "random", "ramp", 0.3, "all")),
}


def batch_of(lengths, *, visit=0, canvas="fixed", ids=None):
    ids = ids or range(len(lengths))
    pairs = zip(lengths, ids, strict=True)
    texts = [(np.arange(p) % 90, (np.arange(r) * 7 + i) % 13) for (p, r), i in pairs]
    layout = {"canvas": canvas, "block_size": 4, "gen_length": 24, "max_length": 64}
    return packed(FAMILY, texts, ids=ids, visits=visit, **layout)


def prepared(case, **changes):
    """The objective of a case of GROUPS, or of (name, group)."""
    name, group = GROUPS.get(case, case)
    texts = [np.arange(n) % 13 for n in range(4, 20)]
    return objective_of(name, FAMILY, group, texts, {"seed": 9, "steps": 11}, **changes)


def predict(noisy, rows):
    """A stand-in for the model: a function of the row's own text and position."""
    position, shown = noisy.position_ids[rows], noisy.ids[rows]
    return SimpleNamespace(
        token=(position * 31 + shown) % 90, confidence=(position * 37 % 101).float() / 101
    )


def place_of(batch, step=5):
    return Place(step, 0, batch.num_sequences, int(batch.response_lengths.sum()))


def draw(case, batch, place=None, **changes):
    options = prepared(case, **changes)
    return list(options.draws(batch, place or place_of(batch), predict))


def by_sequence(batch, drawn):
    """Per example id: its noisy row, and (position, target, weight, smoothing) of the rows."""
    n, out = int(drawn.num_rows), {}
    smoothing = torch.as_tensor(drawn.smoothing).expand(len(drawn.rows))
    for s, sample in enumerate(batch.sample_ids.tolist()):
        a, end = batch.cu_seqlens[s : s + 2].tolist()
        mine = (drawn.rows[:n] >= a) & (drawn.rows[:n] < end)
        values = (drawn.rows - a, drawn.target, drawn.weight, smoothing)
        out[sample] = drawn.noisy.ids[a:end].tolist(), [v[:n][mine].tolist() for v in values]
    return out


@pytest.mark.parametrize("case", GROUPS)
def test_only_the_response_is_touched_and_rows_keep_the_contract(case):
    seen = 0
    for visit in range(8):
        batch = batch_of(LENGTHS, visit=visit)
        inside = response_rows(batch).inside
        assert int(inside.sum()) == int(batch.response_lengths.sum())
        for drawn in draw(case, batch):
            n, size = int(drawn.num_rows), batch.ids.numel()
            assert torch.equal(drawn.noisy.ids[~inside], batch.ids[~inside])
            assert drawn.weight.dtype == torch.float32
            assert len(drawn.rows) == len(drawn.target) == len(drawn.weight) == size
            rows, weight = drawn.rows[:n], drawn.weight[:n]
            assert inside[rows].all() and (rows.diff() > 0).all()
            assert torch.equal(drawn.target[:n], batch.ids[rows])
            assert (weight > 0).all() and weight.isfinite().all()
            assert (drawn.rows[n:] == 0).all() and (drawn.weight[n:] == 0).all()
            assert (drawn.target[n:] == -100).all()
            if case != "two_step all":
                assert (drawn.noisy.ids[rows] == MASK).all()
            assert drawn.region == batch.response_lengths.sum()
            assert not drawn.weight.requires_grad
            seen += n
    assert seen > 60


@pytest.mark.parametrize("case", GROUPS)
def test_draws_follow_the_example_and_the_visit_alone(case):
    """Any micro-batch split and, where times are not spread over the update, any order; another
    visit draws anew."""
    batch = batch_of(LENGTHS)
    place = place_of(batch)
    whole = [by_sequence(batch, x) for x in draw(case, batch)]
    for cut in (1, 2, 4):
        parts = [{} for _ in whole]
        for at in range(0, len(LENGTHS), cut):
            ids = range(at, min(at + cut, len(LENGTHS)))
            part = batch_of([LENGTHS[i] for i in ids], ids=ids)
            found = draw(case, part, place._replace(first=at))
            for mine, drawn in zip(parts, found, strict=True):
                mine.update(by_sequence(part, drawn))
        assert parts == whole
    if case != "mdlm":
        back = batch_of(LENGTHS[::-1], ids=range(len(LENGTHS))[::-1])
        assert [by_sequence(back, x) for x in draw(case, back)] == whole
    again = [by_sequence(batch, x) for x in draw(case, batch)]
    other = batch_of(LENGTHS, visit=1)
    later = [by_sequence(other, x) for x in draw(case, other)]
    assert again == whole
    for now, then in zip(whole, later, strict=True):
        assert sum(now[i] != then[i] for i in (0, 3, 4)) >= 2  # two top levels mask all alike
        assert now[2] == then[2]  # no response


@pytest.mark.parametrize("case", GROUPS)
def test_the_seed_matters_and_batches_without_a_response_are_fine(case):
    batch = batch_of(LENGTHS)
    options = prepared(case)
    other = dataclasses.replace(options, seed=10)
    one, two = (list(o.draws(batch, place_of(batch), predict)) for o in (options, other))
    assert not torch.equal(one[0].noisy.ids, two[0].noisy.ids)
    nothing = batch_of([(2, 0), (3, 0)])
    for drawn in draw(case, nothing):
        assert drawn.num_rows == 0 and torch.equal(drawn.noisy.ids, nothing.ids)


@pytest.mark.parametrize("case", GROUPS)
def test_draws_never_wait_for_the_device(case):
    """On the meta device any read of a value raises."""
    batch = batch_of(LENGTHS)
    options = prepared(case)
    for drawn in options.draws(batch.to("meta"), place_of(batch), predict):
        assert drawn.rows.device.type == "meta" and drawn.rows.shape == batch.ids.shape


def test_ranks_sort_within_each_sequence_and_ties_by_position():
    batch = batch_of([(2, 5), (1, 4)], canvas="response")
    rows = response_rows(batch)
    among = rows.inside.clone()
    among[4] = False
    key = torch.tensor([9.0, 9, 3, 1, 0, 1, 2, 0, 5, 5, 4, 5])
    found = ranks(batch, rows, among, key)
    assert found[among].tolist() == [3, 0, 1, 2, 1, 2, 0, 3]


# --- classical SFT as a special case ---


def classical(batch, rate24=None, **spec):
    """Masks of classical SFT with empty "skip", at one rate if it is given."""
    if rate24 is not None:
        spec |= {"low": rate24 / ONE24, "high": rate24 / ONE24}
    spec = MaskSpec(64, MASK, seed=9, empty="skip", **spec)
    return block_mask(
        batch.ids, batch.prompt_lengths, batch.response_lengths, spec,
        cu_seqlens=batch.cu_seqlens, sample_ids=batch.sample_ids, draw=batch.visits,
    )


def assert_same(drawn, masked, scale=1):
    n = int(masked.num_rows)
    assert n > 0 and n == drawn.num_rows
    assert torch.equal(drawn.noisy.ids, masked.noisy_ids)
    assert torch.equal(drawn.rows[:n], masked.rows[:n])
    assert torch.equal(drawn.target[:n], masked.row_target[:n])
    assert torch.equal(drawn.weight[:n] * scale, masked.row_weight[:n])
    assert drawn.smoothing == 0


REDUCTIONS = {
    "mdlm": (("mdlm", MdlmConfig(False, False, "sequence", "llada")), "rate"),
    "softness 0": (("soft_masked", SoftMaskedConfig(0.0, 3)), "count"),
    "one bucket": (("soft_masked", SoftMaskedConfig(0.7, 1)), "count"),
    "softness 0, elbo": (("soft_masked", SoftMaskedConfig(0.0, 3, "elbo")), "rate"),
    "one bucket, elbo": (("soft_masked", SoftMaskedConfig(1.0, 1, "elbo")), "rate"),
}


@pytest.mark.parametrize("case", REDUCTIONS)
def test_objectives_that_reduce_to_classical_sft(case):
    group, weight = REDUCTIONS[case]
    for visit, (low, high) in enumerate(((1e-3, 1.0), (0.3, 0.8), (1.0, 1.0))):
        batch = batch_of(LENGTHS * 50, visit=visit)  # another order of operations shows in a few
        (drawn,) = draw(group, batch, low=low, high=high)
        assert_same(drawn, classical(batch, weight=weight, low=low, high=high))
        assert prepared(group).excluded_id is None


def test_mdlm_with_its_knobs_on_is_not_classical():
    batch = batch_of(LENGTHS)
    plain = MdlmConfig(False, False, "sequence", "llada")
    masked = classical(batch, weight="rate")
    for change in ({"stratify": True}, {"rate": "mdlm"}, {"normalize": "token"}):
        (drawn,) = draw(("mdlm", dataclasses.replace(plain, **change)), batch)
        n = int(drawn.num_rows)
        same = n == masked.num_rows and torch.equal(drawn.weight[:n], masked.row_weight[:n])
        # (1 - eps) t rarely moves a mark among 64 tokens, and the weight is 1/t in both.
        assert same == (change == {"rate": "mdlm"})
    assert prepared("mdlm").excluded_id == MASK


def test_rdm_reduces_to_classical_sft_on_its_grid():
    """T = 8: the rates are exact and T times the weight rounds as the weight itself."""
    levels = set()
    for sample in range(40):
        batch = batch_of([(3, 16)], ids=[sample])
        options = prepared("rdm plain")
        (drawn,) = options.draws(batch, place_of(batch), predict)
        k = int(rdm.level(batch, options, batch.visits))
        levels.add(k)
        assert 0 <= k < 8
        if drawn.num_rows:
            assert_same(drawn, classical(batch, (k + 1) * ONE24 // 8, weight="rate"), scale=8)
    assert levels == set(range(8))


@pytest.mark.parametrize("gap", ["uniform", "step"])
def test_two_step_reduces_to_classical_sft_at_its_second_rate(gap):
    rows = 0
    for sample in range(30):
        batch = batch_of([(3, 16)], ids=[sample])
        options = prepared(("two_step", TwoStepConfig(gap=gap)))
        (drawn,) = options.draws(batch, place_of(batch, step=0), predict)
        second = int(two_step.rates(batch, options)[1])
        if drawn.num_rows:
            assert_same(drawn, classical(batch, second))
        rows += int(drawn.num_rows)
    assert rows > 60


# --- the command line's refusals ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("context", ["cached", "block_causal"])
def test_there_is_no_block_for_a_context_mode(name, context):
    config = dataclasses.replace(
        presets.debug(), context=context, objective=c.ObjectiveConfig(name=name)
    )
    with pytest.raises(ValueError, match=f"--objective.name {name} has no blocks"):
        c.validate(config)


@pytest.mark.parametrize(("fields", "words"), [
    ({"name": "mdlm", "weight": "flat", "empty": "skip"}, "--objective.weight belongs to"),
    ({"name": "mdlm", "rdm": RdmConfig(levels=9)}, "--objective.rdm belongs to"),
    ({"two_step": TwoStepConfig(replace=0.1)}, "--objective.two-step belongs to"),
    ({"name": "rdm", "low": 0.1}, "--objective.low belongs to objectives with mask rates"),
    ({"name": "soft_masked", "soft_masked": SoftMaskedConfig(1.5)}, "softness must lie in"),
    ({"name": "rdm", "rdm": RdmConfig(label_smoothing=-0.1)}, "label-smoothing must lie in"),
    ({"name": "rdm", "rdm": RdmConfig(levels=0)}, "levels must be at least 1"),
    ({"name": "soft_masked", "soft_masked": SoftMaskedConfig(1.0, 0)}, "buckets must be at"),
    ({"name": "two_step", "two_step": TwoStepConfig(replace=1.1)}, "replace must lie in"),
])
def test_options_without_effect_or_sense_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        c.validate(dataclasses.replace(presets.debug(), objective=c.ObjectiveConfig(**fields)))

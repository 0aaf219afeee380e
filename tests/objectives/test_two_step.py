"""Two-step loss: nested masks, the schedule, what the second step shows and where it is scored."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_objectives import family_of, objective_of, packed

from bwsft.objectives import two_step
from bwsft.objectives.base import ONE24, Place, count, response_rows
from bwsft.objectives.config import TwoStepConfig

MASK, N, STEPS = 49, 16, 21
FAMILY = family_of(MASK, vocab_size=60)
GUESS = 33  # never in a response


def batch_of(size, visit=0, prompt=2):
    texts = [(range(prompt), np.arange(N) + i % 8) for i in range(size)]
    return packed(FAMILY, texts, visits=visit)


def prepare(low=1e-3, high=1.0, steps=STEPS, **group):
    run, group = {"steps": steps, "seed": 4}, TwoStepConfig(**group)
    return objective_of("two_step", FAMILY, group, run=run, low=low, high=high)


def guess(noisy, rows):
    """Predicts GUESS everywhere; confidence falls along the row."""
    return SimpleNamespace(
        token=torch.full_like(rows, GUESS), confidence=1 / (1.0 + noisy.position_ids[rows])
    )


def draw(batch, options, step=10, predict=guess):
    place = Place(step, 0, batch.num_sequences, N * batch.num_sequences)
    return next(options.draws(batch, place, predict))


def first_inputs(batch, options):
    """(noisy batch, rows, their number) that predict meets."""
    seen = []

    def spy(noisy, rows):
        seen.append((noisy, rows))
        return guess(noisy, rows)

    drawn = draw(batch, options, predict=spy)
    assert len(seen) == 1
    return *seen[0], drawn


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("linear", [0, 0.25, 0.5, 1]), ("constant", [1, 1, 1, 1]), ("ramp", [0, 1, 1, 1])],
)
def test_beta(schedule, expected):
    options = prepare(schedule=schedule)
    assert [two_step.beta(s, options) for s in (0, 5, 10, 20)] == expected
    if schedule == "linear":
        assert sum(two_step.beta(s, options) for s in range(STEPS)) / STEPS == pytest.approx(0.5)
    if schedule == "ramp":
        assert two_step.beta(2, options) == pytest.approx(0.5)
    assert two_step.beta(0, prepare(steps=1, schedule=schedule)) == expected[0]


@pytest.mark.parametrize("gap", ["uniform", "step"])
@pytest.mark.parametrize("reveal", ["random", "confidence"])
def test_masks_are_nested_and_predict_meets_the_first(gap, reveal):
    batch = batch_of(500)
    options = prepare(gap=gap, reveal=reveal)
    noisy, rows, drawn = first_inputs(batch, options)
    inside = response_rows(batch).inside
    one, two = noisy.ids == MASK, drawn.noisy.ids == MASK
    assert (two <= one).all() and (one <= inside).all() and (two != one).any()
    assert torch.equal(noisy.ids[~one], batch.ids[~one])
    n = int(one.sum())
    assert torch.equal(rows[:n], one.nonzero()[:, 0]) and (rows[n:] == 0).all()
    first, second = two_step.rates(batch, options)
    assert (second <= first).all() and (second >= options.low).all()
    if gap == "step":  # one of the 40 positions of the preset's canvas
        free = first - options.low > ONE24 // 40
        assert ((first - second)[free] == round(ONE24 / 40)).all()
        assert (second[~free] == options.low).all() and (~free).any()
    else:
        share = (second - options.low).double() / (first - options.low).clamp(min=1)
        assert abs(float(share.mean()) - 0.5) < 5 / math.sqrt(12 * 500)
        both = torch.stack([share, first.double()])
        assert abs(float(both.corrcoef()[0, 1])) < 5 / math.sqrt(500)
    for mask, rate in ((one, first), (two, second)):
        each = (mask & inside).view(500, N + 2).sum(1).double()
        expected = N * rate.double() / ONE24
        error = math.sqrt(float((expected * (1 - expected / N)).sum())) + 0.5  # and one rounding
        assert abs(float((each - expected).sum())) < 5 * error


def test_confidence_keeps_the_least_confident_masked():
    batch = batch_of(300)
    options = prepare(reveal="confidence")
    noisy, _, drawn = first_inputs(batch, options)
    first, second = two_step.rates(batch, options)
    one, two = ((x.ids == MASK).view(300, N + 2) for x in (noisy, drawn.noisy))
    wanted = (one.sum(1) * second / first + 0.5).floor().long()
    assert torch.equal(two.sum(1), wanted) and (wanted > 0).any()
    # Confidence falls along the row: the last places of the first mask stay masked.
    behind = one.flip(1).long().cumsum(1).flip(1)
    assert torch.equal(two, one & (behind <= wanted[:, None]))


@pytest.mark.parametrize("reveal", ["random", "confidence"])
def test_an_oracle_makes_the_schedule_irrelevant(reveal):
    batch = batch_of(50)

    def oracle(noisy, rows):
        found = guess(noisy, rows)
        return SimpleNamespace(token=batch.ids[rows], confidence=found.confidence)

    options = prepare(reveal=reveal)
    draws = [draw(batch, options, step, oracle) for step in (0, 7, 20)]
    for other in draws[1:]:
        assert torch.equal(other.noisy.ids, draws[0].noisy.ids)
        assert torch.equal(other.rows, draws[0].rows)
        assert torch.equal(other.weight, draws[0].weight)
    shown = [draw(batch, options, step).noisy.ids for step in (0, 20)]
    assert not torch.equal(*shown) and not (shown[0] == GUESS).any()


@pytest.mark.parametrize("step", [0, 5, 20])
def test_a_sequence_shows_its_predictions_with_probability_beta(step):
    """Whole sequences, at revealed places alone; 5 standard errors."""
    size = 3000
    batch, options = batch_of(size), prepare()
    noisy, _, _ = first_inputs(batch, options)
    found = draw(batch, options, step).noisy.ids
    revealed = (noisy.ids == MASK) & (found != MASK)
    guessed = found == GUESS
    assert (guessed <= revealed).all()
    assert torch.equal(found[~guessed & (found != MASK)], batch.ids[~guessed & (found != MASK)])
    per_row, own = (x.view(size, N + 2).sum(1) for x in (revealed, guessed))
    assert ((own == 0) | (own == per_row)).all()
    some = per_row > 0
    share, chance = float((own[some] > 0).double().mean()), step / 20
    assert abs(share - chance) <= 5 * math.sqrt(chance * (1 - chance) / int(some.sum()))


def test_another_visit_mixes_anew():
    """At beta 1/2 two visits agree on half of the sequences, 5 standard errors."""
    options = prepare()
    own = [
        (draw(batch_of(1000, visit), options).noisy.ids == GUESS).view(1000, N + 2).any(1)
        for visit in (0, 1)
    ]
    share = float((own[0] & own[1]).double().mean())
    assert abs(share - float(own[0].double().mean() * own[1].double().mean())) < 5 * 0.5 / 1000**0.5


def test_predictions_land_where_they_were_made():
    """Also with a response token in row 0, which the tail of the rows names as well."""
    options, zero = prepare(schedule="constant"), 0

    def number(noisy, rows):
        return SimpleNamespace(token=torch.arange(len(rows)) + 100, confidence=rows.float())

    for visit in range(12):
        batch = batch_of(40, visit, prompt=0)
        noisy, rows, _ = first_inputs(batch, options)
        found = draw(batch, options, predict=number).noisy.ids
        n = int((noisy.ids == MASK).sum())
        expected = batch.ids.scatter(0, rows[:n], torch.arange(n) + 100)
        shown = found != MASK
        assert torch.equal(found[shown], expected[shown]) and n < len(rows)
        zero += int(rows[0] == 0 and found[0] == 100)
    assert zero > 0


@pytest.mark.parametrize("supervise", ["masked", "revealed", "all"])
def test_supervised_places_and_their_weights(supervise):
    batch = batch_of(200)
    options = prepare(supervise=supervise)
    noisy, _, drawn = first_inputs(batch, options)
    rows = response_rows(batch)
    where = {
        "masked": drawn.noisy.ids == MASK,
        "revealed": noisy.ids == MASK,
        "all": rows.inside,
    }[supervise]
    n = int(drawn.num_rows)
    assert torch.equal(drawn.rows[:n], where.nonzero()[:, 0])
    assert torch.equal(drawn.target[:n], batch.ids[where])
    sums = torch.zeros(200).index_add_(0, rows.owner[drawn.rows[:n]], drawn.weight[:n])
    bears = count(where, rows) > 0
    torch.testing.assert_close(sums, bears.float(), rtol=1e-6, atol=0)
    assert bears.all() == (supervise == "all")


def test_replacement_hits_visible_response_tokens_with_any_token_but_the_mask():
    batch = batch_of(2000)
    clean, options = prepare(), prepare(replace=0.3)
    plain, mixed = (draw(batch, o, step=0) for o in (clean, options))
    assert torch.equal(plain.rows, mixed.rows)
    inside = response_rows(batch).inside
    visible = inside & (plain.noisy.ids != MASK)
    changed = plain.noisy.ids != mixed.noisy.ids
    assert (changed <= visible).all()
    new, n = mixed.noisy.ids[changed], int(visible.sum())
    assert set(new.tolist()) == set(range(60)) - {MASK}
    chance = 0.3 * 58 / 59  # one of 59 is the token that stood there
    assert abs(int(changed.sum()) / n - chance) < 5 * math.sqrt(chance * (1 - chance) / n)
    shares = torch.bincount(new, minlength=60)[59] / len(new)
    assert abs(float(shares) - 1 / 59) < 6 * math.sqrt(1 / 59 / len(new))


def test_the_degenerate_gap_meets_the_same_input_twice():
    """t2 = t1 and carried-over text: the literal port of the original, whose second step is the
    first."""
    options = prepare(low=0.5, high=0.5)
    noisy, _, drawn = first_inputs(batch_of(20), options)
    assert torch.equal(noisy.ids, drawn.noisy.ids)

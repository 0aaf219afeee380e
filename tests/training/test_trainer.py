"""One update against plain float64 arithmetic, what LoRA trains, and what a run leaves behind."""

import copy
import dataclasses
import math

import pytest
import torch
from bwsft_kernels import reference

from bwsft import config as c
from bwsft.models.backbone import trainable
from bwsft.training import trainer as t
from bwsft.training.metrics import read_log
from bwsft.training.setup import train

NO_CLIP = c.OptimConfig(lr=3e-3, clip=0.0)


def gradients(run):
    return {name: p.grad.clone() for name, p in trainable(run.backbone).items()}


def plain_step(run, step, dtype):
    """Loss and gradients of update `step`: one sequence at a time, its canvas built here, marks
    from the loop in bwsft_kernels.reference, full logits of the transformers model, autograd."""
    backbone = copy.deepcopy(run.backbone).to(dtype)
    backbone.zero_grad(set_to_none=True)
    config, slots = run.config, run.data.samples(step, run.config.batch_size, run.config.seed)
    total = torch.zeros((), dtype=dtype)
    for index, visit in slots:
        prompt = run.data.examples.prompt(index).tolist()
        response = run.data.examples.response(index).tolist()
        response += [run.backbone.family.eos_id] * (-len(response) % config.block_size)
        behind = [run.backbone.family.mask_id] * (config.gen_length - len(response))
        masked = reference.block_mask(
            torch.tensor([prompt + response + behind]),
            torch.tensor([len(prompt)]),
            torch.tensor([len(response)]),
            run.mode.objective.spec,
            sample_ids=torch.tensor(run.data.sample_ids([(index, visit)])),
            draw=visit,
        )
        log_p = backbone.model(masked.noisy_ids).logits[0].log_softmax(-1)
        rows = masked.rows[: int(masked.num_rows)]
        chosen = log_p[rows, masked.row_target[: len(rows)]]
        total = total - (masked.row_weight[: len(rows)].to(dtype) * chosen).sum()
    (total / len(slots)).backward()
    return total.item() / len(slots), gradients(dataclasses.replace(run, backbone=backbone))


def distance(found, truth):
    """Norm of the difference over the norm, all gradients together."""
    difference = sum((found[n].double() - truth[n]).square().sum() for n in truth)
    return math.sqrt(difference / sum(truth[n].square().sum() for n in truth))


CASES = {
    "full": {},
    "lora": {"lora": c.LoraConfig(rank=3, alpha=6.0, dropout=0.0)},
    "rate": {"objective": c.ObjectiveConfig(weight="rate", empty="skip", prefix_noise=0.2)},
    "classical": {"objective": c.ObjectiveConfig(name="classical")},
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_float64_reference(tiny, make_run, case):
    """In float64: equal up to summation order. In float32: at most 3 times the error that plain
    torch of the same dtype makes."""
    config = tiny(optim=NO_CLIP, **CASES[case])
    exact = make_run(config, torch.float64)
    loss, truth = plain_step(exact, 8, torch.float64)  # step 8 holds the end of epoch 0
    found = t.train_step(exact, 8)
    assert found.loss == pytest.approx(loss, rel=1e-12)
    grads = gradients(exact)
    assert grads.keys() == truth.keys()
    for name in truth:
        assert distance({name: grads[name]}, {name: truth[name]}) < 1e-11, name
    norm = math.sqrt(sum(g.square().sum() for g in truth.values()))
    assert found.grad_norm == pytest.approx(norm, rel=1e-10)

    single = make_run(config)
    plain_loss, plain = plain_step(single, 8, torch.float32)
    ours = t.train_step(single, 8)
    assert distance(gradients(single), truth) <= 3 * distance(plain, truth)
    assert abs(ours.loss - loss) <= 3 * abs(plain_loss - loss) + 2e-7 * loss


@pytest.mark.parametrize("case", ["full", "lora"])
def test_micro_batches_add_up_to_the_batch(tiny, make_run, case):
    config = tiny(optim=NO_CLIP, batch_size=8, micro_batch_size=8, **CASES[case])
    run = make_run(config, torch.float64)
    start = copy.deepcopy(run.backbone.state_dict())
    whole, truth = t.train_step(run, 2), gradients(run)
    for size in (1, 2, 4):
        run.config = dataclasses.replace(config, micro_batch_size=size)
        run.backbone.load_state_dict(start)
        step = t.train_step(run, 2)
        assert step.loss == pytest.approx(whole.loss, rel=1e-12)
        assert distance(gradients(run), truth) < 1e-12
        assert (step.tokens, step.supervised_tokens) == (whole.tokens, whole.supervised_tokens)
    assert whole.supervised_tokens > 8


def test_clipping_bounds_the_gradient_and_reports_its_full_norm(tiny, make_run):
    runs = [make_run(tiny(optim=c.OptimConfig(clip=clip)), torch.float64) for clip in (0.0, 0.25)]
    free, bound = (t.train_step(run, 0) for run in runs)
    assert free.grad_norm == bound.grad_norm > 0.25
    norm = math.sqrt(sum(g.square().sum() for g in gradients(runs[1]).values()))
    assert norm == pytest.approx(0.25, rel=1e-5)  # clip_grad_norm_ adds 1e-6 to the norm


def test_a_uniform_model_loses_log_v(tiny, make_run):
    """Exactly, since the weights of a sequence sum to 1."""
    for name in ("blockwise", "classical"):
        run = make_run(tiny(objective=c.ObjectiveConfig(name=name)))
        weight, _ = run.backbone.head()
        weight.data.zero_()
        assert t.train_step(run, 0).loss == pytest.approx(math.log(len(weight)), rel=1e-6)
        weight.data.zero_()
        assert t.evaluate(run) == pytest.approx(math.log(len(weight)), rel=1e-6)


LORA = c.LoraConfig(rank=3, alpha=6.0, dropout=0.3)


@pytest.mark.parametrize("lora", [c.LoraConfig(rank=0), LORA], ids=["full", "lora"])
def test_gradient_checkpointing_changes_no_bit(tiny, tmp_path, lora):
    losses = []
    for enabled in (False, True):
        config = tiny(
            grad_checkpointing=enabled, lora=lora, steps=3, out=str(tmp_path / f"{enabled}"),
            eval=c.EvalConfig(every=0),
        )
        assert train(config) == 0
        losses.append([r["loss"] for r in read_log(tmp_path / f"{enabled}" / "metrics.jsonl")])
    assert len(losses[0]) == 3 and losses[0] == losses[1]


MATRICES = ["attn_out", "ff_out", "ff_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
RELEASED = ["k_proj", "q_proj", "up_proj", "v_proj"]


@pytest.mark.parametrize(("targets", "expected"), [("all", MATRICES), ("released", RELEASED)])
def test_lora_trains_its_adapters_and_nothing_else(tiny, make_run, targets, expected):
    run = make_run(tiny(lora=dataclasses.replace(LORA, targets=targets)))
    names = trainable(run.backbone)
    adapted = {tuple(n.split(".lora_")[0].split(".")[-2:]) for n in names}
    assert adapted == {(str(layer), m) for layer in range(2) for m in expected}
    assert len(names) == 2 * 2 * len(expected) and all("lora_" in n for n in names)
    assert all(p.dtype == torch.float32 for p in names.values())
    before = copy.deepcopy(run.backbone.state_dict())
    t.train_step(run, 0)
    changed = {n for n, w in run.backbone.state_dict().items() if not torch.equal(w, before[n])}
    assert changed == set(names)


def test_adapters_on_a_bf16_base_are_fp32(tiny, make_run):
    run = make_run(tiny())
    run.backbone.to(torch.bfloat16)
    from bwsft.models.lora import add_lora

    add_lora(run.backbone, LORA, seed=0)
    dtypes = {n: p.dtype for n, p in run.backbone.named_parameters()}
    assert {d for n, d in dtypes.items() if "lora_" in n} == {torch.float32}
    assert {d for n, d in dtypes.items() if "lora_" not in n} == {torch.bfloat16}


def test_dropout_follows_step_and_sample_only(tiny):
    def draw(*arguments):
        t.seed_dropout(*arguments)
        return torch.rand(4).tolist()

    first = draw(3, 5, 7)
    torch.rand(9)
    assert draw(3, 5, 7) == first
    others = [draw(4, 5, 7), draw(3, 6, 7), draw(3, 5, 8), draw(3, 5, 7 + 2**32)]
    assert all(o != first for o in others) and others[0] != others[1] != others[2]


def test_every_micro_batch_is_reseeded(tiny, make_run, monkeypatch):
    run, calls = make_run(tiny(lora=LORA)), []
    monkeypatch.setattr(t, "seed_dropout", lambda *arguments: calls.append(arguments))
    for step in (0, 8):
        t.train_step(run, step)
    ids = [run.data.sample_ids(run.data.samples(step, 4, 3)) for step in (0, 8)]
    assert calls == [(3, 0, ids[0][0]), (3, 0, ids[0][2]), (3, 8, ids[1][0]), (3, 8, ids[1][2])]


def test_evaluation_leaves_training_as_it_was(tiny, make_run):
    run = make_run(tiny(lora=LORA))
    value = t.evaluate(run)
    assert t.evaluate(run) == value and run.backbone.training
    one_by_one = dataclasses.replace(run, config=tiny(micro_batch_size=1, lora=LORA))
    assert t.evaluate(one_by_one) == pytest.approx(value, rel=1e-6)
    sizes = [b.num_sequences for b in run.data.holdout_batches(4)]
    assert sizes == [4, 2]
    # Another seed trains another way, on the same held-out masks.
    other = make_run(tiny(seed=4, lora=LORA, out=str(run.folder) + "4"))
    assert other.held_out == run.held_out
    assert other.data.holdout_index.tolist() == run.data.holdout_index.tolist()
    assert other.data.samples(0, 4, 4) != run.data.samples(0, 4, 3)


def test_a_run_learns_and_writes_what_others_read(tiny, capsys):
    config = tiny(steps=60, eval=c.EvalConfig(every=30, draws=4), save_every=25, keep_last=2)
    assert train(config) == 0
    folder = c.run_folder(config)
    metrics, evals = read_log(folder / "metrics.jsonl"), read_log(folder / "eval.jsonl")
    assert [r["step"] for r in metrics] == list(range(1, 61))
    assert list(metrics[0]) == [
        "step", "loss", "lr", "grad_norm", "tokens", "supervised_tokens",
        "region_tokens", "data_seconds", "seconds",
    ]
    assert [r["step"] for r in evals] == [0, 30, 60]
    assert evals[2]["nelbo"] < evals[1]["nelbo"] < evals[0]["nelbo"] - 1
    assert sum(r["loss"] for r in metrics[-10:]) < sum(r["loss"] for r in metrics[:10]) - 10
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-50", "step-60"]
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert c.from_json((folder / "config.json").read_text()) == config
    out = capsys.readouterr().out
    assert "kept 40 of 40 records" in out and "41,120 of 41,120 parameters train" in out
    assert "canvas 16 = 4 blocks x 4; batch 4 = 2 x 2" in out


def test_a_frozen_clean_row_is_refused_for_a_shifted_family(tiny, monkeypatch):
    from bwsft.training import setup as r

    plan = r.plan_model

    def shifted(*args):
        found = plan(*args)
        family = dataclasses.replace(found.family, logit_shift=1)
        return dataclasses.replace(found, family=family)

    monkeypatch.setattr(r, "plan_model", shifted)
    config = tiny(context="block_causal", objective=c.ObjectiveConfig(context_grad=False))
    with pytest.raises(ValueError, match="would be a constant; leave it out"):
        r.setup(config, c.run_folder(config), None)
    assert not c.run_folder(config).exists()

"""Training with the objectives that mask the whole response: one command, the same step in any
micro-batches, resumable bit for bit, a falling loss, and the FLOPs that a method says it costs."""

import copy
import dataclasses
import shutil

import pytest
import torch
import torch.nn.functional as F
from thinning import thinned
from tiny_runs import resumed

from bwsft import config as c
from bwsft.cli import main
from bwsft.models.backbone import trainable
from bwsft.objectives.config import RdmConfig, TwoStepConfig
from bwsft.training import trainer as t
from bwsft.training.metrics import read_log
from bwsft.training.setup import train
from bwsft.utils.flops import flop_counter

NAMES = ["mdlm", "rdm", "soft_masked", "two_step"]
MORE = {
    "rdm uncoupled": c.ObjectiveConfig(name="rdm", rdm=RdmConfig(coupled=False)),
    "two_step hard": c.ObjectiveConfig(
        name="two_step", two_step=TwoStepConfig("step", "confidence", "constant", 0.1, "all")
    ),
    "soft_masked, sure": c.ObjectiveConfig(name="soft_masked", confidence=0.5),
}
CASES = {name: c.ObjectiveConfig(name=name) for name in NAMES} | MORE


def history(folder):
    lines = read_log(folder / "metrics.jsonl")
    for line in lines:
        del line["seconds"], line["data_seconds"]
    return lines, read_log(folder / "eval.jsonl")


@pytest.mark.parametrize("name", thinned(NAMES, 2))
def test_a_run_by_command_learns(tiny, flags, name):
    """Sixty updates: the mean loss of ten falls below 0.8 of the first ten's, and the held-out
    bound with it."""
    config = tiny(objective=CASES[name], steps=60, eval=c.EvalConfig(every=60, draws=2))
    assert main(flags(config)) == 0
    folder = c.run_folder(config)
    lines, evals = history(folder)
    losses = [line["loss"] for line in lines]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert evals[-1]["nelbo"] < evals[0]["nelbo"] - 1
    assert c.from_json((folder / "config.json").read_text()) == config


@pytest.mark.parametrize("case", thinned(["two_step hard", "mdlm", "rdm", "soft_masked"]))
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tiny, tmp_path, case):
    """With dropout, in the first step of two too."""
    lora = c.LoraConfig(rank=3, alpha=6.0, dropout=0.3)
    config = tiny(objective=CASES[case], lora=lora)
    assert train(config) == 0
    folder, later = c.run_folder(config), tmp_path / "resumed"
    shutil.copytree(folder, later)
    for step in (9, 10):
        shutil.rmtree(later / "checkpoints" / f"step-{step}")
    assert train(resumed(config, later)) == 0
    assert history(later) == history(folder)
    ends = [sorted((f / "checkpoints" / "step-10").glob("*.safetensors")) for f in (folder, later)]
    assert [p.name for p in ends[0]] == [p.name for p in ends[1]] and len(ends[0]) == 2
    assert [p.read_bytes() for p in ends[0]] == [p.read_bytes() for p in ends[1]]


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_add_up_to_the_batch(tiny, make_run, case):
    """Float64, no dropout: equal up to summation order."""
    config = tiny(
        objective=CASES[case], batch_size=8, micro_batch_size=8, optim=c.OptimConfig(clip=0.0)
    )
    run = make_run(config, torch.float64)
    start = copy.deepcopy(run.backbone.state_dict())
    whole, truth = t.train_step(run, 6), gradients(run)
    for size in (1, 2, 4):
        run.config = dataclasses.replace(config, micro_batch_size=size)
        run.backbone.load_state_dict(start)
        step = t.train_step(run, 6)
        assert step.loss == pytest.approx(whole.loss, rel=1e-12)
        assert step.supervised_tokens == whole.supervised_tokens > 8
        assert step.region_tokens == whole.region_tokens
        for name, grad in gradients(run).items():
            torch.testing.assert_close(grad, truth[name], rtol=1e-9, atol=1e-13)


def gradients(run):
    return {name: p.grad.clone() for name, p in trainable(run.backbone).items()}


def calls_of(run, monkeypatch):
    """Every call of the backbone: (noisy ids, other arguments, were gradients on)."""
    calls, forward = [], run.backbone.forward

    def spy(batch, rows, target, weight, *others):
        calls.append((batch, rows, target, weight, others, torch.is_grad_enabled()))
        return forward(batch, rows, target, weight, *others)

    monkeypatch.setattr(run.backbone, "forward", spy)
    return calls


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_plain_arithmetic_on_its_inputs(tiny, make_run, monkeypatch, case):
    """Loss and gradient in float64 from full logits of the noisy inputs alone, so that nothing
    flows through a first step; the rows' weights, smoothing and the missing column by hand."""
    config = tiny(objective=CASES[case], optim=c.OptimConfig(clip=0.0), micro_batch_size=4)
    run = make_run(config, torch.float64)
    plain = copy.deepcopy(run.backbone)
    calls = calls_of(run, monkeypatch)
    found = t.train_step(run, 6)
    scored = [call for call in calls if call[2] is not None]
    predicted = [call for call in calls if call[2] is None]
    assert [call[5] for call in scored] == [True] * len(scored)
    assert [call[5] for call in predicted] == [False] * len(predicted)
    assert len(predicted) == ("two_step" in case) and len(scored) == 1 + (case == "rdm")

    total = torch.zeros((), dtype=torch.float64)
    for batch, rows, target, weight, (_, smoothing, excluded, sharp, count), _ in scored:
        real = target != -100
        assert count() == real.sum()  # so that nobody has to look for them
        assert torch.is_tensor(smoothing) == ("rdm" in case)
        assert excluded == (run.backbone.family.mask_id if case == "mdlm" else None)
        hidden = plain.hidden_states(batch.ids, batch.position_ids, batch.cu_seqlens)
        logits = hidden[rows[real]] @ plain.head()[0].T
        if excluded is not None:
            logits[:, excluded] = -torch.inf
        log_p = logits.log_softmax(-1)
        ce = F.nll_loss(log_p, target[real], reduction="none")
        if torch.is_tensor(smoothing):
            s = smoothing[real].double()
            ce = (1 - s) * ce - s * log_p.mean(-1)
        assert sharp == CASES[case].confidence
        if sharp:
            right = log_p.argmax(-1) == target[real]
            ce = ce - sharp * torch.where(right, (log_p.exp() * log_p).sum(-1), 0)
        total = total + (weight[real].double() * ce).sum() / 4
    total.backward()
    assert found.loss == pytest.approx(total.item(), rel=1e-12)
    truth = {n: p.grad for n, p in trainable(plain).items()}
    for name, grad in gradients(run).items():
        torch.testing.assert_close(grad, truth[name], rtol=1e-9, atol=1e-13)


def test_the_schedule_follows_the_run(tiny, make_run, monkeypatch):
    """The first update shows the truth at every revealed place, the last one predictions."""
    config = tiny(objective=CASES["two_step"], steps=7, micro_batch_size=4)
    run = make_run(config)
    calls = calls_of(run, monkeypatch)
    for step in (0, 6):
        t.train_step(run, step)
        (before, *_), (after, *_) = calls[-2:]
        clean = run.data.pack(run.data.samples(step, 4, config.seed)).ids
        revealed = before.ids != after.ids
        assert revealed.sum() > 5
        right = (after.ids == clean)[revealed].double().mean()
        assert right == 1 if step == 0 else right < 0.5  # of 259 tokens, by a random model


def flops_of(tiny, make_run, tmp_path, name, objective):
    config = tiny(objective=objective, out=str(tmp_path / name.replace(" ", "-")))
    run = make_run(config)
    with flop_counter() as counter:
        step = t.train_step(run, 6)
    return run, step, counter.get_total_flops()


def test_what_a_step_costs(tiny, make_run, tmp_path):
    """Two-step: exactly one forward more than its own second step, 4/3 for full fine-tuning; RDM
    coupled: twice. Both within 1 %, the head left out: its cost follows the rows (of which
    predict has as many as tokens), while the ratio is of equal rows."""
    cost = {}
    for name, objective in CASES.items():
        run, step, total = flops_of(tiny, make_run, tmp_path, name, objective)
        weight, _ = run.backbone.head()
        head = 2 * weight.numel()  # of one row; forward, and two products backward
        cost[name] = total - 3 * head * step.supervised_tokens
        if name == "two_step":
            cost[name] -= head * step.tokens
            batches = [run.data.pack(part) for part in halves(run)]
            with flop_counter() as counter, torch.no_grad():
                for batch in batches:
                    run.backbone.hidden_states(batch.ids, batch.position_ids, batch.cu_seqlens)
            forward = counter.get_total_flops()
    plain = cost["mdlm"]
    assert plain == cost["soft_masked"] == cost["rdm uncoupled"]
    assert cost["two_step"] == plain + forward
    assert cost["two_step"] / plain == pytest.approx(4 / 3, rel=0.01)
    assert cost["rdm"] == 2 * plain


def halves(run):
    slots = run.data.samples(6, 4, run.config.seed)
    return slots[:2], slots[2:]


def test_soft_masked_counts_its_own_training_responses(tiny, make_run):
    """The held-out examples are not among them."""
    run = make_run(tiny(objective=CASES["soft_masked"]))
    table = run.mode.objective.table
    texts = list(run.data.responses())
    assert len(texts) == 34 and table.shape == (2, run.backbone.family.vocab_size)
    seen = torch.zeros(table.shape[1], dtype=torch.bool)
    seen[torch.cat([torch.as_tensor(x).long() for x in texts])] = True
    assert torch.equal(table[1] > 0, seen)

"""One-pass training of DiffusionGemma is inference's forward, canvas by canvas, and the loss of its
own corruption."""

import copy

import numpy as np
import peft
import pytest
import torch
from tiny_diffusion_gemma import (
    CANVAS,
    VOCABULARY,
    WINDOW,
    canvas_mode,
    tiny_diffusion_gemma,
)
from transformers import DiffusionGemmaGenerationConfig, DynamicCache, EntropyBoundSamplerConfig

from bwsft.data.packing import CanvasLayout, Example, pack
from bwsft.models.loading import as_backbone
from bwsft.objectives.base import Place

PLACE = Place(0, 0, 3, 1)
LENGTHS = [(5, 11), (13, 16), (2, 3)]  # prompts and responses: rows of 8 to 29, a window of 6
ADAPTED = r".*decoder\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.up_proj)"


def batch_of(visit=0):
    rng = np.random.default_rng(7)
    examples = [
        Example(*(rng.integers(2, VOCABULARY, n).astype(np.int32) for n in lengths), number, visit)
        for number, lengths in enumerate(LENGTHS)
    ]
    layout = CanvasLayout(mask_id=0, eos_id=1, block_size=CANVAS, gen_length=2 * CANVAS)
    return pack(examples, layout)


def backbone(dtype=torch.float64, rank=0, std=0.25):
    model = tiny_diffusion_gemma(std).to(dtype)
    if rank:
        model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=ADAPTED))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    return as_backbone(model)


def inferred(model, clean, canvas, conditioned, cache=None):
    """Logits of a canvas [canvas, V] after clean tokens, as transformers' decoding computes them:
    with the cache that drops what a window has passed."""
    cache = DynamicCache(config=model.config.text_config)
    out = model(input_ids=clean[None], cache=cache, decoder_input_ids=canvas[None])
    if conditioned:
        said = {"self_conditioning_logits": out.logits}
        out = model(cache=cache, decoder_input_ids=canvas[None], **said)
    return out.logits[0]


def reference_loss(model, mode, batch):
    """Forward by forward, from full logits."""
    (draw,) = mode.objective.draws(batch, PLACE, mode.predict)
    seen = draw.conditioned
    starts, total, seeing = batch.cu_seqlens.tolist(), 0, []
    for s, first in enumerate(starts[:-1]):
        prompt, response = int(batch.prompt_lengths[s]), int(batch.response_lengths[s])
        ids, noisy = batch.ids[first:], draw.noisy.ids[first:]
        blocks = range(prompt, prompt + response, CANVAS)
        for start in blocks:
            span = slice(start, start + CANVAS)
            seeing.append(bool(seen[first:][start]))
            logits = inferred(model, ids[:start], noisy[span], seeing[-1])
            each = torch.nn.functional.cross_entropy(logits, ids[span])
            total = total + each / len(blocks)
        if mode.ar_weight:
            clean = ids[: prompt + response]
            hidden = model.model.encoder(input_ids=clean[None]).last_hidden_state[0]
            logits = 30 * torch.tanh(model.lm_head(hidden)[prompt - 1 : -1] / 30)
            each = torch.nn.functional.cross_entropy(logits, clean[prompt:])
            total = total + mode.ar_weight * each
    assert any(seeing) and not all(seeing)
    return total


def test_loss_and_gradients_are_those_of_inference_beyond_the_window():
    """One encoder pass and one decoder call per batch; the reference runs a forward per canvas.
    Self-conditioning's first pass is a constant here; in the reference it must be one too."""
    ours, batch = backbone(), batch_of()
    assert max(p + r for p, r in LENGTHS) > 3 * WINDOW
    theirs = copy.deepcopy(ours).base_model
    mode = canvas_mode(ours, seed=3, ar_weight=0.5)
    (loss,) = mode.losses(batch, PLACE)
    with torch.no_grad():
        expected = reference_loss(theirs, mode, batch)
    # transformers softens logits in float32, here and there.
    assert loss.total.item() == pytest.approx(expected.item(), abs=1e-5)
    assert loss.rows == loss.region
    mode = canvas_mode(ours, seed=3, self_conditioning=0.0)
    (loss,) = mode.losses(batch, PLACE)
    loss.total.backward()
    found = {n: p.grad.clone() for n, p in ours.model.named_parameters() if p.grad is not None}
    gradients = _reference_gradients(theirs, mode, batch)
    assert gradients.keys() == found.keys()
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        assert torch.allclose(found[name], gradient, atol=1e-6 * largest, rtol=0), name
    ours.zero_grad()
    ours.train().set_gradient_checkpointing(True)
    (again,) = mode.losses(batch, PLACE)
    again.total.backward()
    for name, parameter in ours.model.named_parameters():
        if name in found:
            assert torch.allclose(parameter.grad, found[name], atol=1e-6 * largest, rtol=0), name


def _reference_gradients(model, mode, batch):
    (draw,) = mode.objective.draws(batch, PLACE, mode.predict)
    for s, first in enumerate(batch.cu_seqlens.tolist()[:-1]):
        prompt, response = int(batch.prompt_lengths[s]), int(batch.response_lengths[s])
        blocks = range(prompt, prompt + response, CANVAS)
        for start in blocks:
            span = slice(first + start, first + start + CANVAS)
            clean = batch.ids[first : first + start]
            logits = inferred(model, clean, draw.noisy.ids[span], False)
            loss = torch.nn.functional.cross_entropy(logits, batch.ids[span])
            (loss / len(blocks)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_logits_are_those_of_inference_in_float32():
    """And would not be without the window's edge, or with the edge one further."""
    ours, batch = backbone(torch.float32, std=0.1), batch_of()
    mode = canvas_mode(ours, seed=3)
    one = mode.laid_out(batch, list(mode.objective.draws(batch, PLACE, mode.predict))).noisy
    text, found = ours.base_model.config.text_config, {}
    for window in (WINDOW, WINDOW + 1, 1000):
        text.sliding_window = window
        with torch.no_grad():
            hidden, index = ours._rows_of(one, one.noisy_rows, None)
            found[window] = 30 * torch.tanh(hidden[index] @ ours.head()[0].t() / 30)
    text.sliding_window = WINDOW
    theirs, expected, rows = ours.base_model, [], iter(one.noisy_rows.split(CANVAS))
    for s, first in enumerate(batch.cu_seqlens.tolist()[:-1]):
        prompt, response = int(batch.prompt_lengths[s]), int(batch.response_lengths[s])
        for start, canvas in zip(range(prompt, prompt + response, CANVAS), rows, strict=False):
            seeing = bool(one.conditioned[canvas[0]])
            with torch.no_grad():
                clean = batch.ids[first : first + start]
                expected.append(inferred(theirs, clean, one.ids[canvas], seeing))
    worst = {w: float((f - torch.cat(expected)).abs().max()) for w, f in found.items()}
    assert worst[WINDOW] < 1e-5 and min(worst[WINDOW + 1], worst[1000]) > 1e-2, worst


def test_a_drawn_block_costs_what_is_before_it_and_every_block_is_drawn():
    starts = set()
    for visit in range(40):
        mode = canvas_mode(backbone_once(), seed=5, one_block=True)
        whole = batch_of(visit)
        batch = mode.objective.visited(whole)
        (draw,) = mode.objective.draws(batch, PLACE, None)
        assert int(draw.num_rows) == int(batch.response_lengths.sum()) == 3 * CANVAS
        for s in range(3):
            length = int(batch.cu_seqlens[s + 1] - batch.cu_seqlens[s])
            ours = batch.ids[batch.cu_seqlens[s] :][:length]
            assert torch.equal(ours, whole.ids[whole.cu_seqlens[s] :][:length])
        assert draw.weight.sum() == pytest.approx(3, abs=1e-6)
        starts.add(int(batch.prompt_lengths[1]))
    assert starts == {13, 17, 21, 25}


def backbone_once(kept=[]):  # noqa: B006
    if not kept:
        kept.append(backbone())
    return kept[0]


def test_tokens_are_replaced_at_the_blocks_rate_by_any_token():
    mode = canvas_mode(backbone_once(), seed=5, low=0.5, high=0.5)
    new = same = 0
    found = torch.zeros(VOCABULARY)
    for visit in range(60):
        batch = batch_of(visit)
        (draw,) = mode.objective.draws(batch, PLACE, None)
        rows = draw.rows[: int(draw.num_rows)]
        changed = draw.noisy.ids[rows] != batch.ids[rows]
        assert int((draw.noisy.ids != batch.ids).sum()) == int(changed.sum())
        new, same = new + int(changed.sum()), same + int((~changed).sum())
        found += torch.bincount(draw.noisy.ids[rows[changed]], minlength=VOCABULARY)
    n, chance = new + same, 0.5 * (1 - 1 / VOCABULARY)
    assert abs(new - n * chance) < 5 * (n * chance * (1 - chance)) ** 0.5
    assert found.min() > 0 and found.max() < 3 * found.mean()


def test_one_adapter_serves_both_halves_decodes_and_merges():
    ours, batch = backbone(rank=2), batch_of()
    mode = canvas_mode(ours, seed=3, ar_weight=0.5)
    (loss,) = mode.losses(batch, PLACE)
    loss.total.backward()
    trained = {n: p for n, p in ours.named_parameters() if p.requires_grad}
    assert trained and all("lora" in n and p.grad.abs().max() > 0 for n, p in trained.items())
    settings = DiffusionGemmaGenerationConfig(
        max_new_tokens=2 * CANVAS, max_denoising_steps=3, t_min=0.4, t_max=0.8,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=0.1),
    )  # fmt: skip

    def decoded(model):
        torch.manual_seed(1)
        return model.generate(input_ids=batch.ids[None, :9], generation_config=settings).sequences

    with ours.shared():
        texts = decoded(ours.base_model)
    merged = ours.model.merge_and_unload()
    assert not [n for n, _ in merged.named_parameters() if "lora" in n]
    assert torch.equal(texts, decoded(merged))
    (loss_again,) = canvas_mode(as_backbone(merged), seed=3, ar_weight=0.5).losses(batch, PLACE)
    assert loss_again.total.item() == pytest.approx(loss.total.item(), rel=1e-6)


def test_an_adapter_on_the_encoder_is_refused():
    model = tiny_diffusion_gemma()
    target = r".*language_model\.layers\.\d+\.self_attn\.q_proj"
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=target))
    with pytest.raises(ValueError, match="put adapters on the decoder's layers alone"):
        list(canvas_mode(as_backbone(model)).losses(batch_of(), PLACE))

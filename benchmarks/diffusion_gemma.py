"""DiffusionGemma: parity, FLOPs and memory of one-pass training, as results/diffusion_gemma.md.

python benchmarks/diffusion_gemma.py [--out FILE]

Compared with the example of TRL as published descriptions have it, written anew here: one canvas of
each row, the whole clean row through the encoder, later tokens hidden from the decoder by a mask,
full logits of the canvas and of every clean token, and in half of the steps a first pass of the
decoder whose prediction the second one sees. A random model of small size is measured; the same
cost is then counted for the sizes of the published class.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType

import torch
from bwsft_kernels import linear_cross_entropy
from lib.gemma_flops import Sizes, trained
from lib.memory import tensor_bytes
from roofline import write_page
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import cross_entropy
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DynamicCache
from transformers.models.diffusion_gemma import modeling_diffusion_gemma as modeling

from bwsft.config import Config
from bwsft.data.packing import Batch
from bwsft.models.backbone import Backbone
from bwsft.models.loading import as_backbone
from bwsft.objectives.base import Place
from bwsft.objectives.config import ObjectiveConfig, UniformConfig
from bwsft.objectives.uniform import Uniform
from bwsft.training.context_modes import BlockCausal, make_mode
from bwsft.utils.flops import flop_counter

PROMPT, CANVASES, CAP, AR_WEIGHT = 256, 8, 30.0, 0.5
ROWS, WIDTH = 1024, 64  # of the loss whose memory is measured
SMALL = MappingProxyType(dict(
    vocab_size=8192, hidden_size=64, intermediate_size=128, num_hidden_layers=6,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=32,
    num_global_key_value_heads=1, num_experts=8, top_k_experts=2, moe_intermediate_size=48,
    sliding_window=96, max_position_embeddings=4096,
))  # fmt: skip
# The published class' own defaults, and experts as a comment in it has them: 26B, of which 4B run.
LARGE = MappingProxyType(dict(
    vocab_size=262_144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30,
    num_attention_heads=8, num_key_value_heads=4, head_dim=256, global_head_dim=512,
    num_global_key_value_heads=2, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
))  # fmt: skip


def small_model(canvas: int) -> DiffusionGemmaForBlockDiffusion:
    """A random model whose weights are all frozen but those of the attention."""
    vision = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                  num_key_value_heads=1, head_dim=8, patch_size=4)  # fmt: skip
    config = DiffusionGemmaConfig(
        text_config=dict(SMALL), canvas_length=canvas,
        vision_config={"model_type": "gemma4_vision"} | vision,
    )  # fmt: skip
    config._experts_implementation = "eager"  # whose products torch counts
    torch.manual_seed(0)
    model = DiffusionGemmaForBlockDiffusion(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("self_attn.q_proj" in name)
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def small_batch(canvas: int) -> Batch:
    """One example: a prompt and whole canvases of random tokens."""
    length = PROMPT + CANVASES * canvas
    one = torch.zeros(1, dtype=torch.long)
    ids = torch.randint(2, SMALL["vocab_size"], (length,), generator=torch.manual_seed(1))
    return Batch(
        ids=ids, cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
        prompt_lengths=one + PROMPT, response_lengths=one + CANVASES * canvas, sample_ids=one,
        position_ids=torch.arange(length), visits=one, max_length=length,
    )  # fmt: skip


def example_step(
    model: DiffusionGemmaForBlockDiffusion, ids: Tensor, start: int, canvas: int,
    conditioned: bool,
) -> Tensor:  # fmt: skip
    """The loss of the canvas that begins at `start` in a row, ids [L], and of the encoder."""
    noisy = torch.randint(0, SMALL["vocab_size"], (1, canvas))
    positions = torch.arange(start, start + canvas)[None]
    cache = DynamicCache(config=model.config.text_config)
    encoded = model.model.encoder(input_ids=ids[None], cache=cache).last_hidden_state
    kept = [layer.keys.shape[-2] for layer in cache.layers]
    seen = torch.arange(len(ids)) < start  # and the canvas, of which nothing is hidden
    types = model.config.text_config.layer_types
    masks = {
        kind: torch.cat([seen[-kept[types.index(kind)] :], torch.ones(canvas, dtype=torch.bool)])
        .expand(1, 1, canvas, -1) for kind in set(types)
    }  # fmt: skip
    given = {"decoder_input_ids": noisy, "decoder_position_ids": positions, "cache": cache,
             "decoder_attention_mask": masks}  # fmt: skip
    said = None
    if conditioned:
        with torch.no_grad():
            said = model(**given).logits
    logits = model(**given, self_conditioning_logits=said).logits
    clean = CAP * torch.tanh(model.lm_head(encoded).float() / CAP)
    loss = cross_entropy(logits[0], ids[start : start + canvas])
    return loss + AR_WEIGHT * cross_entropy(clean[0, :-1], ids[1:])


def mode_of(backbone: Backbone, canvas: int, seed: int = 0, **uniform: float) -> BlockCausal:
    """The context mode of a run of `bwsft train` on a model."""
    objective = ObjectiveConfig(name="uniform", uniform=UniformConfig(**uniform))
    config = Config(
        seed=seed, block_size=canvas, context="block_causal", clean_attention="causal",
        ar_weight=AR_WEIGHT, objective=objective,
    )  # fmt: skip
    made = Uniform.of(config, backbone.family)
    return make_mode(config, backbone.family, backbone, made, torch.device("cpu"))


def counted(canvas: int) -> tuple[float, float]:
    """FLOPs per supervised token of the small model: (the example, ours), forward and backward.
    Half of the example's steps see their own prediction, and half of our canvases."""
    ids, theirs = small_batch(canvas).ids, 0.0
    for conditioned in (False, True):
        model = small_model(canvas)
        with flop_counter() as flops:
            start = PROMPT + CANVASES // 2 * canvas
            example_step(model, ids, start, canvas, conditioned).backward()
        theirs += flops.get_total_flops() / 2 / canvas
    mode = mode_of(as_backbone(small_model(canvas)), canvas, _even_seed(canvas))
    with flop_counter() as flops:
        for loss in mode.losses(small_batch(canvas), Place(0, 0, 1, 1)):
            loss.total.backward()
    return theirs, flops.get_total_flops() / (CANVASES * canvas)


def _even_seed(canvas: int) -> int:
    """A seed with which half of the canvases see their own prediction."""
    batch, backbone = small_batch(canvas), as_backbone(small_model(canvas))
    for seed in range(100):
        draw = mode_of(backbone, canvas, seed).objective.one_pass_draw(batch)
        if int(draw.conditioned.sum()) == CANVASES // 2 * canvas:
            return seed
    raise RuntimeError("no seed of a hundred conditions half of the canvases")


def by_formula(text: MappingProxyType, canvas: int, window: int) -> tuple[float, float]:
    """FLOPs per supervised token: (the example, ours), where the first pass of self-conditioning
    runs for half of all canvases."""
    sizes, response = Sizes(text), CANVASES * canvas
    length = PROMPT + response
    encoder = trained(sizes.layers(length, length))
    cached = min(length, window - 1) + canvas
    one = sizes.decoder(canvas, length + canvas, cached)
    said = sum(one) + 2 * sizes.head(canvas)  # logits, and their mean embedding
    theirs = encoder + trained(one) + said / 2 + 2 * sizes.head(canvas + length)
    all_ = sizes.decoder(response, length + response)
    half = sizes.decoder(response // 2, length + response // 2)
    ours = encoder + trained(all_) + sum(half) + sizes.head(response)
    ours += 2 * sizes.head(2 * response)
    return theirs / canvas, ours / response


def full_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Softcapped cross-entropy from logits [N, V] in memory."""
    return cross_entropy(CAP * torch.tanh(hidden @ weight.t() / CAP), target)


def loss_memory(loss: Callable[..., Tensor], **options: float) -> int:
    """Most bytes that a loss of ROWS rows and its gradient take beside hidden states and head."""
    vocabulary = LARGE["vocab_size"]
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight, target = torch.randn(vocabulary, WIDTH), torch.randint(vocabulary, (ROWS,))
    return tensor_bytes(lambda: loss(hidden, weight, target, **options).backward())


@contextmanager
def norms_in_full() -> Iterator[None]:
    """Norms and routers of transformers, which compute in float32, in the dtype of their input."""
    norm, softmax = modeling.DiffusionGemmaRMSNorm.forward, functional.softmax

    def forward(self: torch.nn.Module, hidden: Tensor) -> Tensor:
        out = self._norm(hidden)
        return out * self.weight if self.with_scale else out

    modeling.DiffusionGemmaRMSNorm.forward = forward
    functional.softmax = lambda x, dim, dtype=None: softmax(x, dim)
    try:
        yield
    finally:
        modeling.DiffusionGemmaRMSNorm.forward, functional.softmax = norm, softmax


def logits_of(model: DiffusionGemmaForBlockDiffusion, hidden: Tensor) -> Tensor:
    """In the dtype of the weights; transformers' are float32."""
    return CAP * torch.tanh(hidden @ model.lm_head.weight.t() / CAP)


@torch.no_grad()
def every_logit(canvas: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of all canvases [tokens, V]: ours in one pass, inference's and the example's, canvas
    by canvas."""
    backbone, batch = as_backbone(small_model(canvas).to(dtype)), small_batch(canvas)
    mode, place = mode_of(backbone, canvas, self_conditioning=0.0), Place(0, 0, 1, 1)
    one = mode.laid_out(batch, list(mode.objective.draws(batch, place, mode.predict))).noisy
    hidden, index = backbone._rows_of(one, one.noisy_rows, None)
    model, found = backbone.base_model, {"inference": [], "example": []}
    for number, rows in enumerate(one.noisy_rows.split(canvas)):
        start, noisy = PROMPT + number * canvas, one.ids[rows][None]
        hidden_later = torch.ones(1, len(batch.ids) + canvas, dtype=torch.bool)
        hidden_later[:, start : len(batch.ids)] = False
        whole = {"decoder_attention_mask": hidden_later,
                 "decoder_position_ids": torch.arange(start, start + canvas)[None]}  # fmt: skip
        for name, length, more in (("inference", start, {}), ("example", len(batch.ids), whole)):
            cache = DynamicCache(config=model.config.text_config)
            given = {"input_ids": batch.ids[None, :length], "decoder_input_ids": noisy}
            found[name].append(model.model(**given, cache=cache, **more).last_hidden_state[0])
    sides = hidden[index], *map(torch.cat, found.values())
    return tuple(logits_of(model, side) for side in sides)


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference."""
    return float((a.double() - b.double()).abs().max())


def parity(canvas: int, dtype: torch.dtype) -> tuple[float, float, float]:
    """Largest difference of logits from inference's: (ours, the example's), and the largest
    logit."""
    ours, right, example = every_logit(canvas, dtype)
    return apart(ours, right), apart(example, right), float(right.abs().max())


def rounding(canvas: int) -> tuple[float, float, float]:
    """With norms in full: our logits against inference's in float64, and against that the float32
    ones of inference and ours."""
    ours, right, _ = every_logit(canvas, torch.float32)
    with norms_in_full():
        exact, reference, _ = every_logit(canvas, torch.float64)
    return apart(exact, reference), apart(right, reference), apart(ours, reference)


def page() -> str:
    canvas = 64
    ours, example, largest = parity(canvas, torch.float32)
    exact, exact_example, _ = parity(canvas, torch.float64)
    in_full, theirs_rounded, ours_rounded = rounding(canvas)
    small, formula = counted(canvas), by_formula(SMALL, canvas, SMALL["sliding_window"])
    large = by_formula(LARGE, 256, 512)
    memory = loss_memory(full_loss), loss_memory(linear_cross_entropy, softcap=CAP)
    rows = 256 + PROMPT + CANVASES * 256
    logits = 4 * rows * LARGE["vocab_size"]
    table = [
        ("what", "the example", "ours", "goal"),
        ("---",) * 4,
        ("logits against inference's, rows beyond the window, in fp64 (fp32), largest logit "
         f"{largest:.1f}", f"{exact_example:.1e} ({example:.1e})", f"{exact:.1e} ({ours:.1e})",
         "below 1e-5"),
        ("the same in fp64 with norms and routers in fp64, which transformers has in fp32", "",
         f"{in_full:.1e}", ""),
        ("fp32's own rounding: logits in fp32 against inference's in fp64", f"{theirs_rounded:.1e} "
         "(inference)", f"{ours_rounded:.1e}", ""),
        _flops_row("small model, counted as it runs", small, "at most 0.33"),
        _flops_row("the same, by formula", formula, ""),
        _flops_row("large sizes, by formula", large, "at most 0.33"),
        (f"peak memory of the loss, {ROWS:,} rows of {LARGE['vocab_size']:,}, fp32, measured",
         f"{memory[0] / 2**20:.0f} MiB",
         f"{memory[1] / 2**20:.0f} MiB (1/{memory[0] / memory[1]:.0f})", "at most 1/20"),
    ]
    parts = [
        "# DiffusionGemma: one-pass training against one canvas a step", "",
        "Written by `python benchmarks/diffusion_gemma.py`. The other side is the example of TRL, "
        f"written anew from its description. Prompt {PROMPT}, {CANVASES} canvases, half of them "
        "self-conditioned; the encoder's loss of the next token in both (over every token there, "
        "over the response here); matrices frozen, adapters left out.", "",
        *("| " + " | ".join(row) + " |" for row in table), "",
        f"At the large sizes the example's {rows:,} rows of logits are {logits / 2**30:.1f} GiB in "
        "fp32, of which several copies are held at once; ours holds at most 512 MiB on a GPU.", "",
        "- Inference in fp32 is as far from its own fp64 as ours is: such differences are "
        "rounding, and no order of sums makes them less. Logits are compared in the dtype of the "
        "weights, before transformers casts them to fp32. In fp64 the last norm, in fp32 there, "
        "hides what is below its own rounding; with norms in fp64 it is seen.",
        f"- Small: {_sizes(SMALL)}; canvas {canvas}.",
        f"- Large: {_sizes(LARGE)}; canvas 256. These are the defaults of transformers' config "
        "class; the experts, which it leaves open, are assumed. Nothing of that size was run.",
        "- By formula: matrices twice (forward, and the gradient of their input), attention three "
        "and a half times, every key of a mask counted whether it is shown or not; router and "
        "experts of a token as they run.",
        f"- Memory: tensor bytes on a CPU beside hidden states and head, inside of operators too, "
        f"hidden size {WIDTH}; on a GPU nothing was measured.",
        "- One canvas alone (`--objective.uniform.one-block`) makes a step cheaper, but pays "
        "for a whole encoder pass: the gain is that one such pass serves all canvases.",
    ]
    return "\n".join(parts) + "\n"


def _flops_row(what: str, pair: tuple[float, float], goal: str) -> tuple[str, ...]:
    theirs, ours = pair
    share = f"{ours:.3g} ({ours / theirs:.2f} of it)"
    return f"FLOPs per supervised token, {what}", f"{theirs:.3g}", share, goal


def _sizes(text: MappingProxyType) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in text.items())


def main(argv: list[str] | None = None) -> None:
    write_page(page, __doc__, "diffusion_gemma.md", argv)


if __name__ == "__main__":
    main()

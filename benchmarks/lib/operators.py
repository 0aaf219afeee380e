"""Operators of every denoising step of a decoding, for bench_operators.py."""

from lib.harness import CountOperators

from bwsft.decoding.canvas import Canvas
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.context import DecodeContext
from bwsft.decoding.generate import decoding, denoise, poll
from bwsft.decoding.request import make_rows
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import new_backbone


def operators_per_step(model, prompts, config: DecodeConfig) -> list[int]:
    """Launched operators of every denoising step of one batch, the poll included. Rule quota."""
    family, weight = model.family, model.head()[0]
    rows = make_rows(prompts, None, range(len(prompts)), family, config)
    canvas, counts = Canvas.begin(rows, family, weight), []
    with decoding(model, weight):
        context = DecodeContext.begin(model, config, canvas)
        for step in range(len(rows[0].plan)):
            planned = [row.plan[step] for row in rows]
            with CountOperators() as operators:
                outcome = denoise(context, canvas, planned, step)
                poll(canvas, outcome, outcome.nan, step + 1, config)
            counts.append(operators.count)
    return counts


def narrow_model(layers: int, positions: int):
    config = LladaConfig(
        d_model=32, n_layers=layers, n_heads=2, mlp_hidden_size=48, vocab_size=64,
        max_sequence_length=positions, mask_token_id=63, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return new_backbone(config, seed=0).eval()

"""Operators that a denoising step launches: the host's share of a step, the same in every run.

python benchmarks/operators.py [--layers 32] [--batch 1] [--prompt 128] [--gen 128] [--block 32]

Views are not counted. The width of the model does not matter, so a narrow one stands for LLaDA-8B.
The first step of a block and the later ones differ where the context is cached. On a CPU attention
lays ragged rows into a grid, which CUDA's packed kernel need not.
"""

import argparse

from harness import CountOperators

from bwsft.backbones.llada import LladaConfig
from bwsft.backbones.load import new_backbone
from bwsft.canvas import Canvas
from bwsft.decode_context import DecodeContext
from bwsft.decoding import DecodeConfig
from bwsft.generate import decoding, denoise, poll
from bwsft.request import make_rows

MODES = ("exact", "cached", "prefix", "block_causal")


def operators_per_step(model, prompts, config: DecodeConfig) -> list[int]:
    """Launched operators of every denoising step of one batch, the poll included. Rule quota."""
    family, weight = model.family, model.head()[0]
    rows = make_rows(prompts, None, range(len(prompts)), family, config)
    canvas, counts = Canvas.begin(rows, family, weight), []
    with decoding(model, weight):
        context = DecodeContext.begin(model, config, canvas)
        for step in range(len(rows[0].plan)):
            turns = [row.plan[step] for row in rows]
            with CountOperators() as operators:
                outcome = denoise(model, context, canvas, turns, step)
                poll(canvas, outcome, outcome.nan, step + 1, config)
            counts.append(operators.count)
    return counts


def narrow_model(layers: int, positions: int):
    config = LladaConfig(
        d_model=32, n_layers=layers, n_heads=2, mlp_hidden_size=48, vocab_size=64,
        max_sequence_length=positions, mask_token_id=63, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return new_backbone(config, seed=0).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("layers", 32), ("batch", 1), ("prompt", 128), ("gen", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--block", type=int, default=32)
    args = parser.parse_args()
    model = narrow_model(args.layers, args.prompt + args.gen)
    prompts = [[3] * args.prompt] * args.batch
    print(f"{'context':14}{'first step':>12}{'later step':>12}{'next block':>12}")
    for mode in MODES:
        config = DecodeConfig(args.gen, args.block, context=mode)
        counts = operators_per_step(model, prompts, config)
        print(f"{mode:14}{counts[0]:>12}{counts[1]:>12}{counts[args.block]:>12}")


if __name__ == "__main__":
    main()

"""Operators of training and denoising steps without and with the small fused operations, of
denoising steps as CUDA graphs too, and of a matrix with LoRA: the counted tables of
bench_operators.py."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from unittest import mock

import torch
from lib import harness, models, output
from lib.launches import Launches, fused_launches
from lib.steps import MODES, Job, Variant, make_job
from torch.utils._python_dispatch import _disable_current_modes

from bwsft.decoding import context as decode_context
from bwsft.decoding.canvas import Canvas
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.context import DecodeContext
from bwsft.decoding.cuda_graphs import GraphedPasses
from bwsft.decoding.generate import decoding, denoise, poll
from bwsft.decoding.request import make_rows
from bwsft.models.backbone import Backbone
from bwsft.objectives.base import Place

CPU = torch.device("cpu")
CONTEXTS = ("exact", "cached", "prefix", "block_causal")


def trained(layers: int, fused: bool) -> Backbone:
    """A narrow model with LoRA on all matrices, prepared as on CUDA."""
    from peft.tuners.lora import LoraLayer

    backbone = models.random_backbone("tiny", torch.bfloat16, CPU, layers)
    models.adapt(backbone, 2)
    for module in backbone.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False
    backbone.set_fused_ops("on" if fused else "off")
    return backbone


def training_operators(variant: Variant, job: Job, layers: int, fused: bool) -> list[int]:
    """[operators] of forward and backward of the job's first micro-batch."""
    backbone = trained(layers, fused)
    mode = job.mode(backbone, variant)
    mode = dataclasses.replace(mode, autocast=partial(torch.autocast, "cpu", torch.bfloat16))
    with Launches() as count:
        for loss in mode.losses(job.batches[0], Place(0, 0, 1, 0)):
            loss.total.backward()
    return [count.count]


def operators_per_step(
    model: Backbone, prompts: list[list[int]], config: DecodeConfig,
    counter: type[harness.CountOperators] = harness.CountOperators,
) -> list[int]:
    """Operators of every denoising step of one batch, the poll included. Rule quota."""
    family, weight = model.family, model.head()[0]
    rows = list(make_rows(prompts, None, range(len(prompts)), family, config))
    canvas, counts = Canvas.begin(rows, family, weight), []
    with decoding(model, weight):
        context = DecodeContext.begin(model, config, canvas)
        for step in range(len(rows[0].plan)):
            planned = [row.plan[step] for row in rows]
            with counter() as operators:
                outcome = denoise(context, canvas, planned, step)
                poll(canvas, outcome, outcome.nan, step + 1, config)
            counts.append(operators.count)
    return counts


def decoding_operators(context: str, layers: int, kind: str) -> list[int]:
    """Operators of a later denoising step of a block, and of its first one."""
    model = models.random_backbone("tiny", torch.bfloat16, CPU, layers)
    model.set_fused_ops("off" if kind == "naive" else "on")
    config = DecodeConfig(16, 8, context=context, graphs=kind == "graphs")

    graphed = partial(GraphedPasses, record=one_launch)
    with mock.patch.object(decode_context, "graphed", graphed):
        counts = operators_per_step(model, [[3] * 16], config, Launches)
    return [counts[12], counts[8]]  # shapes new to step 9 are recorded in step 10


def one_launch(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """A recording whose replay counts as one operator."""
    output = run()

    def replay() -> None:
        with _disable_current_modes():
            output.copy_(run())
            one = torch.ones(())
        one.neg()

    return replay, output


def counted(
    names: Iterable[str], count: Callable[[str, int, str], list[int]], layers: int,
    kinds: tuple[str, ...],
) -> list[harness.Result]:
    """A result for each name and kind; count -> [operators, those of a first step if it differs].

    Layers but the last cost the same, so two and three tell the cost of any number."""
    results = []
    for name, kind in itertools.product(names, kinds):
        with fused_launches():
            two, three = (count(name, n, kind) for n in (2, 3))
        total = [a + (layers - 2) * (b - a) for a, b in zip(two, three, strict=True)]
        extra = {"per layer": three[0] - two[0]}
        if len(total) > 1:
            extra |= {"first step": total[1], "its layers": three[1] - two[1]}
        results.append(harness.Result(f"{name}_{kind}", operators=total[0], extra=extra))
    return results


def counted_points(layers: int) -> list[output.Point]:
    job = make_job("tiny", [(16, 32)] * 4, 4, 8, CPU, gen_length=32)

    def training(name: str, layers: int, kind: str) -> list[int]:
        return training_operators(MODES[name], job, layers, kind == "fused")

    steps = counted(MODES, training, layers, ("naive", "fused"))
    decoding = counted(CONTEXTS, decoding_operators, layers, ("naive", "fused", "graphs"))
    return [({"part": "training step", "layers": layers}, steps),
            ({"part": "denoising step", "layers": layers}, decoding)]


def lora_linear() -> output.Point:
    """One matrix without and with LoRA, forward and backward, in fp32."""
    rows, width, out, rank = 256, 64, 96, 8
    x, results = torch.randn(rows, width, requires_grad=True), []
    for name, dropout in (("base", None), ("peft", 0.0), ("peft_dropout", 0.05)):
        module = torch.nn.Sequential(torch.nn.Linear(width, out, bias=False)).requires_grad_(False)
        if dropout is not None:
            import peft

            config = peft.LoraConfig(r=rank, target_modules=["0"], lora_dropout=dropout)
            module = peft.get_peft_model(module, config).train()

        def step(module: torch.nn.Module = module) -> Iterator[str]:
            y = module(x)
            yield "forward"
            y.sum().backward()
            yield "backward"

        result = harness.Result(name)
        harness.count_cost(step, result)
        result.extra = {"rank products": (result.flops - 4 * rows * width * out)
                        / (rows * rank * (width + out))}
        results.append(result)
    settings = {"part": "LoRA linear", "rows": rows, "in": width, "out": out, "rank": rank}
    return settings, results

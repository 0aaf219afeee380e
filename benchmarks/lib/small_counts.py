"""Operators of training and denoising steps without and with the small fused operations, of
denoising steps as CUDA graphs too, and of a matrix with LoRA: the counted tables of
bench_operators.py."""

import itertools
from functools import partial
from unittest import mock

import torch
from lib import harness, models, operators, shapes
from lib.launches import Launches, fused_launches
from lib.steps import MODES, Job, make_job
from torch.utils._python_dispatch import _disable_current_modes

from bwsft.decoding import context as decode_context
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.cuda_graphs import GraphedPasses
from bwsft.models.loading import new_backbone

CONTEXTS = ("exact", "cached", "prefix", "block_causal")


def trained(layers: int, fused: bool):
    """A narrow model with LoRA on all matrices, prepared as on CUDA."""
    from peft.tuners.lora import LoraLayer

    config = shapes.config_of("tiny")
    config.n_layers = layers
    backbone = new_backbone(config, seed=0).bfloat16()
    models.adapt(backbone, 2)
    for module in backbone.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False
    backbone.set_fused_ops("on" if fused else "off")
    return backbone


def training_operators(mode, job: Job, layers: int, fused: bool) -> list[int]:
    """[operators] of forward and backward of the job's first micro-batch."""
    backbone = trained(layers, fused)
    run = job.run(backbone, mode)
    run.autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    with Launches() as count:
        for loss in mode.losses(run, job.batches[0]):
            loss.total.backward()
    return [count.count]


def decoding_operators(context: str, layers: int, kind: str) -> list[int]:
    """Operators of a later denoising step of a block, and of its first one."""
    model = operators.narrow_model(layers, 64).bfloat16()
    model.set_fused_ops("off" if kind == "naive" else "on")
    config = DecodeConfig(16, 8, context=context, graphs=kind == "graphs")

    def graphed(model):
        return GraphedPasses(model, one_launch)

    with (mock.patch.object(operators, "CountOperators", Launches),
          mock.patch.object(decode_context, "graphed", graphed)):
        counts = operators.operators_per_step(model, [[3] * 16], config)
    return [counts[12], counts[8]]  # shapes new to step 9 are recorded in step 10


def one_launch(run):
    """A recording whose replay counts as one operator."""
    output = run()

    def replay():
        with _disable_current_modes():
            output.copy_(run())
            one = torch.ones(())
        one.neg()

    return replay, output


def counted(names, count, layers: int, kinds) -> list[harness.Result]:
    """A row for each name and kind; count(name, layers, kind) -> operators, and those of a first
    step.

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


def counted_points(layers: int) -> list:
    job = make_job("tiny", [(16, 32)] * 4, 4, 8, torch.device("cpu"), gen_length=32)

    def training(name, layers, kind):
        return training_operators(MODES[name], job, layers, kind == "fused")

    steps = counted(MODES, training, layers, ("naive", "fused"))
    decoding = counted(CONTEXTS, decoding_operators, layers, ("naive", "fused", "graphs"))
    return [({"part": "training step", "layers": layers}, steps),
            ({"part": "denoising step", "layers": layers}, decoding)]


def lora_linear():
    """(settings, results) of one matrix without and with LoRA, forward and backward, in fp32."""
    rows, width, out, rank = 256, 64, 96, 8
    x, results = torch.randn(rows, width, requires_grad=True), []
    for name, dropout in (("base", None), ("peft", 0.0), ("peft_dropout", 0.05)):
        module = torch.nn.Sequential(torch.nn.Linear(width, out, bias=False)).requires_grad_(False)
        if dropout is not None:
            import peft

            config = peft.LoraConfig(r=rank, target_modules=["0"], lora_dropout=dropout)
            module = peft.get_peft_model(module, config).train()

        def step(module=module):
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

"""`bwsft train --dry-run` against a real step of the same run."""

import dataclasses

import pytest
import torch

from bwsft import presets
from bwsft.checkpoints.resolve import TINY
from bwsft.cli import main
from bwsft.commands import dry_run
from bwsft.models.loading import load_backbone
from bwsft.objectives.config import ObjectiveConfig

MODES = {
    "exact": {},
    "suffix": {"objective": ObjectiveConfig(suffix_weight=1.0)},
    "shared": {"draws_per_context": 4, "shared_context": True},
    "cached": {"context": "cached", "draws_per_context": 2},
    "pair": {
        "context": "block_causal", "draws_per_context": 2,
        "objective": ObjectiveConfig(pairs=True, weight="flat", empty="skip"),
    },
    "frozen": {
        "context": "block_causal", "draws_per_context": 2,
        "objective": ObjectiveConfig(pairs=True, context_grad=False, weight="flat", empty="skip"),
    },
}


@pytest.mark.parametrize("name", MODES)
def test_it_counts_what_a_real_step_takes(name):
    config = dataclasses.replace(presets.debug(), **MODES[name])
    shape = dry_run.llada_of(config)
    found = dry_run.count(config, shape)
    real = dry_run.step_of(config, load_backbone(TINY, dtype=torch.float32).train())
    assert shape.n_layers == 4 and dataclasses.astuple(found) == dataclasses.astuple(real)


def test_what_it_prints(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", "llada-8b-dense", "--dry-run"])
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["tokens through the layers"] == "16,384 an update, 3,276,800 in all"
    assert lines["supervised tokens"] == "4,096 an update, 819,200 in all"
    assert "G per supervised token" in lines["FLOPs"]
    # 8.02 G weights in bfloat16; 671 M adapters in float32 with gradient and two moments.
    assert lines["memory"].startswith("26.8 GB of weights, gradients and moments, and ")


@pytest.mark.parametrize(("words", "message"), [
    (["debug", "--objective.name", "mdlm"], "counts blockwise and classical SFT"),
    (["sdar-4b-lora"], "counts the layers of a LLaDA, which JetLM/SDAR-4B-Chat is not"),
])
def test_what_it_cannot_count(words, message, capsys):
    assert main(["train", *words, "--dry-run"]) == 2
    assert message in capsys.readouterr().err

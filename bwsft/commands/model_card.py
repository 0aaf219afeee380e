"""The model card of an exported folder: README.md with front matter, from what the folders say."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.repocard import metadata_load

from bwsft.checkpoints.generation_config import FILE, OWN_FILE, DecodingContract
from bwsft.checkpoints.resolve import Trained
from bwsft.commands.export_files import Origin
from bwsft.objectives.config import ObjectiveConfig
from bwsft.training.metrics import read_log
from bwsft.utils import hub
from bwsft.utils.lines import one_line
from bwsft.version import __version__

DATA_FILE = re.compile(r"\.(jsonl?|ndjson|csv|parquet|gz)$", re.I)
OBJECTIVES = {"blockwise": "Blockwise SFT", "classical": "classical SFT (LLaDA's)",
              "distill": "trace distillation of its own decodings",
              "uniform": "the loss of canvases of random tokens (DiffusionGemma's)"}
PAPER = "Blockwise SFT for Diffusion Language Models: Reconciling Bidirectional Attention and "
PAPER += "Autoregressive Decoding"
CITATION = f"""```bibtex
@article{{sun2025blockwise,
  title   = {{{PAPER}}},
  author  = {{Sun and Cai and Yang and Wang}},
  journal = {{arXiv preprint arXiv:2508.19529}},
  year    = {{2025}}
}}
@software{{bwsft,
  title   = {{bwsft}},
  author  = {{{{The bwsft authors}}}},
  version = {{{__version__}}}
}}
```"""


def model_card(trained: Trained, origin: Origin, name: str) -> str:
    """The text of README.md for a model that others will call `name`."""
    known = None if trained.assumed else trained.contract
    parts = [f"# {plain(name)}", about(trained, origin), *decoding(name, known, masks(trained))]
    if trained.state:
        parts += ["## Training", training(trained)]
    parts += ["## Citation", CITATION]
    return f"---\n{front_matter(trained, origin)}\n---\n\n" + "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """Somebody's text as Markdown shows it: one line, nothing of it markup."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|&~$-])", r"\\\1", one_line(text)[:200])


def code(text: str) -> str:
    """Somebody's name as a code span."""
    return f"`{one_line(text)[:200].replace('`', chr(39))}`"


def front_matter(trained: Trained, origin: Origin) -> str:
    data = trained.state["config"]["data"] if trained.state else None
    kind = "masked-diffusion" if masks(trained) else "block-diffusion"
    card = ModelCardData(
        base_model=origin.model if hub.is_id(origin.model) else None,
        datasets=[data] if is_hub_data(trained.state) else None,
        library_name="bwsft", pipeline_tag="text-generation",
        tags=[kind, "diffusion-language-model", "blockwise-sft", "bwsft"],
        **base_license(origin.model),
    )  # fmt: skip
    return card.to_yaml()


def is_hub_data(state: dict[str, Any] | None) -> bool:
    data = state["config"]["data"] if state else None
    if data is None or "data" in state.get("local", ()):
        return False
    return hub.is_id(data) and not DATA_FILE.search(data)


def base_license(origin: str | None) -> dict[str, str]:
    """The license that the base's own card states, where it is at hand."""
    card = Path(origin or "") / "README.md"
    try:
        found = metadata_load(card) if origin and card.is_file() else None
    except (OSError, ValueError, yaml.YAMLError):
        found = None
    fields = ("license", "license_name", "license_link")
    return {f: v for f in fields if isinstance(v := (found or {}).get(f), str)}


def masks(trained: Trained) -> bool:
    """Whether undecided tokens of the model are [MASK]."""
    return trained.backbone.family.noise == "mask"


def about(trained: Trained, origin: Origin) -> str:
    base = f"{code(Path(origin.model).name)}, a local folder" if origin.model else origin.own
    if hub.is_id(origin.model):
        base = f"[{plain(origin.model)}](https://huggingface.co/{origin.model})"
    kind = "masked-diffusion" if masks(trained) else "block-diffusion"
    if not trained.state:
        return f"A {kind} language model, written by bwsft from {base}."
    config = trained.state["config"]
    name = config["objective"]["name"]
    method = OBJECTIVES.get(name, f"SFT with the objective {name}")
    cite = f"*{PAPER}*, [arXiv:2508.19529](https://arxiv.org/abs/2508.19529)"
    return (
        f"A {kind} language model, trained with {method} by bwsft, which implements "
        f"{cite}.\n\n"
        f"Base: {base}."
    )


def decoding(name: str, contract: DecodingContract | None, masks: bool) -> list[str]:
    """How to decode it, as a command and in Python."""
    name = one_line(name)
    command = f"""```
bwsft generate --model {shlex.quote(name)} --prompt "How many eggs are in 4 bags of 9?"
```

```python
from bwsft.decoding.pipeline import Decoder
from bwsft.decoding.settings import DecoderOptions

decoder = Decoder.load({json.dumps(name)}, DecoderOptions())
for answer in decoder.answers(decoder.encode(["How many eggs are in 4 bags of 9?"])):
    print(decoder.text(answer.tokens))
```"""
    if contract is None:
        return ["## Decoding", command]
    arguments = f" ({code(contract.template_args)})" if contract.template_args else ""
    mask, file = (f"[MASK] {contract.mask_id}, ", FILE) if masks else ("", OWN_FILE)
    said = (
        f"Both read `{file}`, which says how the model was trained: template "
        f"`{contract.template}`{arguments}, context mode `{contract.context}`, blocks of "
        f"{contract.block_size} on a canvas of {contract.gen_length} tokens, "
        f"{mask}end ids {', '.join(map(str, contract.end_ids))}, logit shift "
        f"{contract.logit_shift}. Decoded otherwise, it may answer much worse."
    )
    return ["## Decoding", command, said]


def training(trained: Trained) -> str:
    """The run's settings, data and figures, a line each."""
    state = trained.state
    config, optim, lora = (state["config"], *(state["config"][n] for n in ("optim", "lora")))
    weights = f"LoRA, r {lora['rank']}, alpha {lora['alpha']:g}" if lora["rank"] else "all weights"
    lines = {
        "data": data_line(state),
        "updates": f"{state['step']:,}, of {config['batch_size']} sequences each",
        "trained": f"{weights}; peak learning rate {optim['lr']:g}",
        "blocks": f"{config['block_size']} tokens; canvas {config['dataset']['canvas']} of "
        f"{config['gen_length']}; context {config['context']}",
        "seed": str(config["seed"]),
        ObjectiveConfig(name=config["objective"]["name"]).held_out: figures(trained),
    }
    return "\n".join(f"- {what}: {line}" for what, line in lines.items() if line)


def data_line(state: dict[str, Any]) -> str:
    config, data = state["config"], state["config"]["data"]
    if data is None or data.startswith("wordproblems-"):
        line = "word problems that bwsft generates"
    else:
        line = code(data if is_hub_data(state) else Path(data).name)
    more = (config["dataset"].get(name) for name in ("subset", "split"))
    line = ", ".join([line, *(code(value) for value in more if value)])
    if examples := state.get("examples"):
        line += f"; {examples['train']:,} examples, {examples['held_out']:,} more held out"
    return line


def figures(trained: Trained) -> str | None:
    """The first and the last held-out NELBO of the run up to the checkpoint."""
    checkpoint = Path(trained.folder)
    if checkpoint.parent.name != "checkpoints":
        return None
    try:
        log = read_log(checkpoint.parents[1] / "eval.jsonl")
    except (OSError, ValueError):
        return None
    log = [r for r in log if r["step"] <= trained.state["step"] and type(r.get("nelbo")) is float]
    if len(log) < 2:
        return None
    first, last = log[0], log[-1]
    return (
        f"{first['nelbo']:.4f} nats per token at update {first['step']}, {last['nelbo']:.4f} at "
        f"update {last['step']}"
    )

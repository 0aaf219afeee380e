"""The plugin of axolotl: in the package where it is installed, and by what it documents."""

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, TrainingArguments

from bwsft import BlockwiseConfig, BlockwiseTrainer
from bwsft.data.tokenizer import load_tokenizer

PLUGIN = "bwsft.training.hf_axolotl.BlockwisePlugin"
RATES = {"learning_rate": 1e-3, "adam_beta1": 0.95, "adam_beta2": 0.99}


class Settings(dict):
    """A config of axolotl: what is not said is None."""

    __getattr__ = dict.get


@dataclasses.dataclass
class TrainDatasetMeta:
    train_dataset: Any
    eval_dataset: Any = None
    total_num_steps: int | None = None


@pytest.fixture
def documented(monkeypatch):
    """Modules as axolotl's documentation of plugins has them, unless the package is here."""
    try:
        import axolotl.integrations.base  # noqa: F401
    except ImportError:
        content = {
            "axolotl.integrations.base": {"BasePlugin": type("BasePlugin", (), {})},
            "axolotl.common.datasets": {"TrainDatasetMeta": TrainDatasetMeta},
        }
        for name in ("axolotl", "axolotl.integrations", "axolotl.common", *content):
            module = types.ModuleType(name)
            vars(module).update(content.get(name, {}))
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, PLUGIN.rpartition(".")[0], raising=False)


@pytest.fixture
def said(model_folder, data_file, tmp_path):
    """said(**changes) -> a config of axolotl, as it reads one from YAML."""

    def make(**changes):
        plain = {
            "base_model": str(model_folder()), "datasets": [{"path": str(data_file)}],
            "blockwise": {"block_size": 4, "gen_length": 16, "context": "cached"}, "seed": 3,
            "output_dir": str(tmp_path / "out"), "val_set_size": 0.25, "micro_batch_size": 2,
            "gradient_accumulation_steps": 2, "num_epochs": 2, "optimizer": "adamw_torch_fused",
            "lr_scheduler": "cosine", "plugins": [PLUGIN], "sequence_len": 40, **RATES,
        }  # fmt: skip
        return Settings(plain | changes)

    return make


def losses(trainer):
    trainer.train()
    trainer.save_model()
    contract = json.loads((Path(trainer.args.output_dir) / "generation_config.json").read_text())
    assert (contract["block_size"], contract["gen_length"]) == (4, 16)
    held_out = trainer.evaluate()["eval_loss"]
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], held_out


def direct(cfg):
    """BlockwiseTrainer with the same settings."""
    args = BlockwiseConfig(
        cfg.output_dir, **cfg.blockwise, **RATES, holdout=0.25, num_train_epochs=2, seed=3,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
        lr_scheduler_type="cosine", use_cpu=True, report_to=[], save_strategy="no",
    )  # fmt: skip
    return BlockwiseTrainer(cfg.base_model, args, train_dataset=cfg.datasets[0]["path"])


def test_it_trains_as_documented(said, documented):
    """As axolotl calls a plugin, its collators and tags included."""
    from bwsft.training.hf_axolotl import BlockwisePlugin

    cfg, plugin = said(), BlockwisePlugin()
    module, _, name = plugin.get_input_args().rpartition(".")
    assert "blockwise" in getattr(sys.modules[module], name).model_fields
    meta = plugin.load_datasets(cfg, preprocess=False)
    args = TrainingArguments(
        cfg.output_dir, **RATES, max_steps=meta.total_num_steps, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, logging_steps=1, lr_scheduler_type="cosine", seed=3,
        use_cpu=True, report_to=[], save_strategy="no", average_tokens_across_devices=False,
    )  # fmt: skip
    trainer = plugin.get_trainer_cls(cfg)(
        model=AutoModelForCausalLM.from_pretrained(cfg.base_model), args=args,
        train_dataset=meta.train_dataset, eval_dataset=meta.eval_dataset, data_collator=len,
        callbacks=[], eval_data_collator=len, bench_data_collator=len, dataset_tags=["x"],
        processing_class=load_tokenizer(cfg.base_model),
    )  # fmt: skip
    found = losses(trainer)
    assert found == losses(direct(cfg)) and len(found[0]) == meta.total_num_steps > 4


def test_it_trains_in_the_package(said, monkeypatch):
    """By axolotl's own plugin manager, arguments and builder of trainers."""
    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")
    reason = "axolotl is not installed whole: its builder runs here"
    pytest.importorskip("axolotl.core.builders", reason=reason, exc_type=ImportError)
    from axolotl.integrations.base import PluginManager
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.trainer import setup_trainer

    cfg, manager = DictDefault(said(save_strategy="no")), PluginManager.get_instance()
    manager.register(PLUGIN)
    assert "blockwise" in merge_input_args()[1].model_fields
    meta, model = manager.load_datasets(cfg), AutoModelForCausalLM.from_pretrained(cfg.base_model)
    trainer = setup_trainer(
        cfg, meta.train_dataset, meta.eval_dataset, model, load_tokenizer(cfg.base_model), None,
        meta.total_num_steps,
    )  # fmt: skip
    assert losses(trainer) == losses(direct(cfg))


def test_seed_0_is_a_seed(said, documented):
    from bwsft.training.hf_axolotl import run_of

    assert [run_of(said(seed=seed)).seed for seed in (0, None)] == [0, 42]


@pytest.mark.parametrize(("change", "message"), [
    ({"sample_packing": True}, "takes no sample_packing"),
    ({"test_datasets": [{"path": "a.jsonl"}]}, "takes no test_datasets"),
    ({"blockwise": {"holdout": 0.1}}, "blockwise.holdout: val_set_size says it"),
    ({"blockwise": {"learning_rate": 1.0}}, "blockwise.learning_rate: known are .*block_size"),
    ({"datasets": []}, "one entry of datasets"),
])  # fmt: skip
def test_what_it_cannot_follow_is_named(change, message, said, documented):
    from bwsft.training.hf_axolotl import BlockwisePlugin

    with pytest.raises(ValueError, match=message):
        BlockwisePlugin().load_datasets(said(**change))

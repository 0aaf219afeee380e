"""What BlockwiseTrainer does with every field of transformers' TrainingArguments.

A field is honoured, without effect here, or refused by name; tests/training/test_hf_arguments.py
fails for a transformers whose TrainingArguments have a field that stands in none of the three.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection
from typing import Any

# The Trainer's machinery does what they say, around this loss as around its own.
HONOURED = frozenset(
    # updates, optimizer, schedule
    "per_device_train_batch_size num_train_epochs max_steps gradient_accumulation_steps "
    "average_tokens_across_devices auto_find_batch_size learning_rate lr_scheduler_type "
    "lr_scheduler_kwargs warmup_steps optim optim_args optim_target_modules weight_decay "
    "adam_beta1 adam_beta2 adam_epsilon max_grad_norm "
    # numbers, memory, device (seed: of dropout and LoRA; masks and order follow config.seed)
    "bf16 fp16 bf16_full_eval fp16_full_eval tf32 torch_compile torch_compile_backend "
    "torch_compile_mode activation_checkpointing "
    "activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs "
    "torch_empty_cache_steps full_determinism seed use_cpu local_rank ddp_find_unused_parameters "
    "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout "
    # data
    "train_sampling_strategy length_column_name remove_unused_columns dataloader_drop_last "
    "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
    "accelerator_config ignore_data_skip "
    # logging
    "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter "
    "include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name "
    "project trackio_space_id trackio_bucket_id trackio_static_space_id debug skip_memory_metrics "
    # evaluation
    "eval_strategy eval_steps eval_delay eval_on_start eval_accumulation_steps "
    "eval_use_gather_object per_device_eval_batch_size "
    # saving
    "output_dir save_strategy save_steps save_total_limit save_only_model save_on_each_node "
    "enable_jit_checkpoint restore_callback_states_from_checkpoint load_best_model_at_end "
    "metric_for_best_model greater_is_better push_to_hub hub_token hub_private_repo hub_model_id "
    "hub_strategy hub_always_push hub_revision".split()
)

# Nothing here depends on them, so any value will do.
NO_EFFECT = {
    "do_train": "the Trainer leaves it to the script",
    "do_eval": "eval_strategy and evaluate() decide",
    "do_predict": "the Trainer leaves it to the script",
    "resume_from_checkpoint": "the Trainer leaves it to the script: train() takes it",
    "prediction_loss_only": "evaluation computes nothing but the loss",
    "eval_do_concat_batches": "evaluation keeps nothing but the loss",
    "label_names": "the labels are the response's tokens",
    "use_cache": "training says itself which pass keeps keys and values",
    "fsdp_config": "read with fsdp alone",
    "liger_kernel_config": "read with use_liger_kernel alone",
}

# Name -> (values that ask for nothing, what to do in place of another one).
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "label_smoothing_factor": ((0,), "the loss is the objective's: leave it at 0"),
    "neftune_noise_alpha": (
        (None,),
        "its noise is scaled by the length of padded sequences, and a context and the draws "
        "against it would see different noise: leave it at None",
    ),
    "use_liger_kernel": ((False,), "head and loss are one kernel already: leave it at False"),
    "data_seed": ((None,), "the order of the examples follows config.seed: leave it at None"),
    "include_for_metrics": (([],), "there are no predictions to compute metrics from"),
    "batch_eval_metrics": ((False,), "there are no predictions to compute metrics from"),
    "fsdp": ((None, False, "", []), "use bwsft train --parallel fsdp, or torchrun for DDP"),
    "deepspeed": ((None,), "use bwsft train --parallel fsdp, or torchrun for DDP"),
    "parallelism_config": ((None,), "start it by torchrun, which runs DDP"),
}
STRATEGIES = ("random", "sequential", "group_by_length")


def check_arguments(args: Any, own: Collection[str] = ()) -> None:
    """``ValueError`` naming the field of TrainingArguments that BlockwiseTrainer cannot follow; a
    warning for set fields that it does not know, as those of a subclass other than `own`."""
    for name, (neutral, remedy) in REFUSED.items():
        value = getattr(args, name, neutral[0])
        if value not in neutral:
            raise ValueError(f"BlockwiseTrainer takes no {name}={value!r}: {remedy}")
    if args.train_sampling_strategy not in STRATEGIES:
        raise ValueError(
            f"train_sampling_strategy={args.train_sampling_strategy!r}: BlockwiseTrainer has "
            f"{', '.join(STRATEGIES)}"
        )
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name, None):
            raise ValueError(
                f"accelerator_config: {name} would cut a packed batch between processes: leave it "
                "out"
            )
    known = HONOURED | NO_EFFECT.keys() | REFUSED.keys() | set(own)
    others = [field for field in dataclasses.fields(args) if field.name not in known]
    if unknown := [field.name for field in others if _set(args, field)]:
        warnings.warn(
            f"BlockwiseTrainer does not know {', '.join(unknown)} of {type(args).__name__} and may "
            "not follow it",
            stacklevel=3,
        )


def _set(args: Any, field: dataclasses.Field) -> bool:
    """Whether a field has another value than its default."""
    value, default = getattr(args, field.name), field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return value is not default and value != default

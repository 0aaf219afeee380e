"""transformers' Trainer around a model, with the settings of one of our runs."""

from transformers import TrainerCallback, TrainingArguments

from bwsft.training.hf_trainer import BlockwiseTrainer, load_examples


class Losses(TrainerCallback):
    """The loss of every update, unrounded, and how often each event was called."""

    def __init__(self):
        self.losses, self.events = [], []

    def on_step_end(self, args, state, control, **_):
        self.events.append("step_end")

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self.losses.append(logs["loss"])


def arguments(folder, config, **changes):
    optim = config.optim
    values = dict(
        max_steps=config.steps, per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.micro_batch_size, learning_rate=optim.lr,
        adam_beta1=optim.beta1, adam_beta2=optim.beta2, adam_epsilon=optim.eps,
        weight_decay=optim.weight_decay, max_grad_norm=optim.clip, lr_scheduler_type="constant",
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )
    return TrainingArguments(str(folder), **(values | changes))


def trainer_of(model, config, tokenizer, folder, **changes):
    train, held_out = load_examples(config, tokenizer, model)
    recorder = Losses()
    trainer = BlockwiseTrainer(
        model, arguments(folder, config, **changes), config=config, train_dataset=train,
        eval_dataset=held_out, processing_class=tokenizer, callbacks=[recorder],
    )
    return trainer, recorder

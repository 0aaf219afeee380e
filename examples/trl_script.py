"""Blockwise SFT as a script of TRL: its parser and its arguments for model, data and adapter.

`python examples/trl_script.py --dataset_name my.jsonl --use_peft --lora_r 8 --max_steps 20
--block_size 8 --output_dir out`, or `--config run.yaml`; for the 8B model add
`--model_name_or_path GSAI-ML/LLaDA-8B-Instruct --bf16`. Without a model it is the LLaDA that ships
with bwsft. Needs `pip install trl`.
"""

from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from bwsft import BlockwiseConfig, BlockwiseTrainer

parser = TrlParser((ScriptArguments, BlockwiseConfig, ModelConfig))
script, args, model = parser.parse_args_and_config()
trainer = BlockwiseTrainer(
    model=model.model_name_or_path, args=args, train_dataset=script.dataset_name,
    peft_config=get_peft_config(model),
)  # fmt: skip
trainer.train()
trainer.save_model()  # for bwsft.load, bwsft generate, or PeftModel.from_pretrained
print(f"{args.output_dir}: {trainer.state.global_step} updates, {trainer.state.log_history[-1]}")

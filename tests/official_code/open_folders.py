"""Open model folders as their users do, with whatever transformers there is; JSON to stdout."""

import json
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, GenerationConfig


def opened(folder, text, ids, what):
    words = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    settings = GenerationConfig.from_pretrained(folder)
    turn = [{"role": "user", "content": text}]
    found = {
        "ids": words(text)["input_ids"],
        "mask": words.mask_token_id, "eos": words.eos_token_id, "pad": words.pad_token_id,
        "special": sorted(set(words.all_special_ids)),
        "chat": words.apply_chat_template(turn, tokenize=False, add_generation_prompt=True),
        "settings": [settings.eos_token_id, settings.mask_id, settings.steps],
        "kept": settings.bwsft["template"],
        "class": type(words).__name__,
    }  # fmt: skip
    if what != "tokenizer":
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        found["config"] = [config.rope_theta, str(config.torch_dtype).removeprefix("torch.")]
    if what == "model":
        model, report = AutoModel.from_pretrained(
            folder, trust_remote_code=True, torch_dtype=torch.float32, output_loading_info=True
        )
        assert not (report["missing_keys"] or report["unexpected_keys"]), report
        everything = torch.zeros(1, 1, len(ids), len(ids))  # additive: hides nothing
        with torch.no_grad():
            logits = model(torch.tensor([ids]), attention_mask=everything).logits
        found["logits"], found["model"] = logits[0].tolist(), type(model).__name__
        found["sampler"] = type(model.generation_config).__name__
    return found


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    answers = {f: opened(f, asked["text"], asked["ids"], w) for f, w in asked["folders"].items()}
    print(json.dumps({"version": transformers.__version__, "folders": answers}))

"""bwsft models in EleutherAI's lm-evaluation-harness, as model "bwsft".

    python -m bwsft.lm_eval_model run --model bwsft --tasks gsm8k \\
        --model_args pretrained=RUN_OR_FOLDER

is the harness' own command line with this model known to it; `import bwsft.evaluation.lm_eval`
does the same for `lm_eval.simple_evaluate(model="bwsft", ...)`. Needs `pip install bwsft[lm-eval]`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from bwsft.data.chat_template import Template
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate
from bwsft.decoding.pipeline import Decoder
from bwsft.decoding.request import whole_blocks
from bwsft.decoding.settings import DecoderOptions
from bwsft.evaluation.generation_kwargs import decoding_of
from bwsft.evaluation.likelihood import LikelihoodConfig, log_likelihoods

try:
    from lm_eval import utils
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise ImportError(
        "lm-evaluation-harness is not installed: pip install 'bwsft[lm-eval]'"
    ) from error

logger = logging.getLogger(__name__)
OPTIONS = {field.name for field in dataclasses.fields(DecoderOptions)}
BATCH = DecoderOptions.batch_size


@register_model("bwsft")
class BwsftLM(TemplateLM):
    """A run folder, checkpoint, model folder or Hub id (`pretrained`; None: the embedded LLaDA).

    draws, estimator, likelihood_seed: as in likelihood.py. blockwise: likelihoods block by block
    with the decoder's block size and canvas, not of the whole continuation in any order. greedy:
    also decode, to tell whether a continuation is the one that decoding gives (one pass per token;
    False says so of none). template: the prompt that is put around the harness' text, by default
    the one that the model was trained with, so that answers are those of `bwsft evaluate`; none,
    the text as the harness made it, where the model's folder does not say or the harness renders
    (--apply_chat_template). Every other option is one of `bwsft generate` (DecoderOptions).
    ValueError for an unknown one.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        draws: int = LikelihoodConfig.draws,
        estimator: str = LikelihoodConfig.estimator,
        likelihood_seed: int = 0,
        blockwise: bool = False,
        greedy: bool = True,
        **options: Any,
    ):
        super().__init__()
        options.pop("max_batch_size", None)  # the harness' bound of its batch size search
        if options.get("batch_size") == "auto":
            raise ValueError("batch_size auto is not supported: give a number of prompts")
        options["batch_size"] = int(options.get("batch_size", BATCH))
        if str(options.get("device")).startswith("cuda") and not torch.cuda.is_available():
            options["device"] = "cpu"  # the harness' command line says cuda:0 unless told otherwise
        if odd := [name for name in options if name not in OPTIONS]:
            names = ", ".join(sorted(OPTIONS))
            raise ValueError(f"model_args {odd[0]} is unknown to bwsft; known are {names}")
        chosen = DecoderOptions(**options)
        self.template_asked = chosen.template
        self.decoder = Decoder.load(pretrained, chosen, template="none")
        if (context := self.decoder.config.context) != "exact":
            logger.warning(
                "answers are decoded under context %s, likelihoods are bounds under context exact",
                context,
            )
        self.tokenizer = self.decoder.trained.tokenizer
        self.family = self.decoder.trained.backbone.family
        self.greedy = greedy
        config = self.decoder.config
        self.likelihood = LikelihoodConfig(
            draws=draws, estimator=estimator, block_size=config.block_size if blockwise else None,
            gen_length=config.gen_length, seed=likelihood_seed, batch_size=config.batch_size,
        )  # fmt: skip

    @property
    def eot_token_id(self) -> int:
        return self.family.eos_id

    @property
    def tokenizer_name(self) -> str:
        return self.decoder.trained.folder.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Special tokens in the text count; none is added, as in training."""
        return self.tokenizer(string, add_special_tokens=bool(add_special_tokens))["input_ids"]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        self._harness_renders()
        return self.renderer.render(chat_history, (), add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The harness asks for it, to log it, where it renders; rendered prompts may then come
        from its cache."""
        if chat_template:
            self._harness_renders()
        return super().chat_template(chat_template)

    def _harness_renders(self) -> None:
        """Put nothing around the prompts; ValueError where that was asked for."""
        if self.template_asked not in (None, "none"):
            raise ValueError(
                f"template={self.template_asked} puts a prompt around the text that "
                "--apply_chat_template has rendered: leave one of them out"
            )
        template = Template(self.tokenizer, "none")
        template.first_ids = []  # the chat template prints what it needs
        self.decoder = dataclasses.replace(self.decoder, template=template)

    @functools.cached_property
    def renderer(self) -> Template:
        """The chat template with the arguments of the training."""
        return Template(self.tokenizer, "chat", self.decoder.trained.contract.template_args)

    def _prompt(self, context: str) -> list[int]:
        if self.decoder.template.name == "none":
            return self._begun(self.tok_encode(context))
        return self.decoder.template.encode_prompts([context])[0]

    def _begun(self, ids: list[int]) -> list[int]:
        """The ids of a text with those that begin every prompt, such as BOS, once."""
        first = self.decoder.template.first_ids
        return ids if ids[: len(first)] == first else [*first, *ids]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if self.decoder.template.name == "none":
            prompt, answer = super()._encode_pair(context, continuation)
            return self._begun(prompt), answer
        return self._prompt(context), self.tok_encode(continuation)  # apart, as in training

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Decoded texts, cut before the first of each request's `until` strings. Requests with the
        same gen_kwargs are decoded together."""
        found: list[str | None] = [None] * len(requests)
        groups: dict[tuple, list[int]] = {}
        wishes = [decoding_of(request.args[1], self.decoder.config) for request in requests]
        for i, (config, limit, _) in enumerate(wishes):
            groups.setdefault((config, limit), []).append(i)
        for (config, limit), members in groups.items():
            decoded = max(whole_blocks(n, self.family, config) for n in range(config.block_size))
            room = self.family.max_positions - decoded
            prompts = [tail(self._prompt(requests[i].args[0]), room) for i in members]
            answers = dataclasses.replace(self.decoder, config=config).answers(prompts)
            for i, answer in zip(members, answers, strict=True):
                text = cut(self.decoder.text(answer.tokens[:limit]), wishes[i][2])
                found[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [self._fit(prompt, response) for _, prompt, response in requests]
        estimates = log_likelihoods(self.decoder.trained.backbone, pairs, self.likelihood)
        results = []
        for (texts, *_), pair, found in zip(requests, pairs, estimates, strict=True):
            results.append((found.value, self.greedy and self._is_greedy(*pair)))
            self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The sum over windows that do not overlap, each after the token before it, the first
        after the end token, a short last one after as many tokens as fit."""
        windows, owner = [], []
        most = self.family.max_positions - self._room_after() - 1
        for number, request in enumerate(requests):
            for pair in utils.get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.eot_token_id, most, context_len=1
            ):
                windows.append(utils.make_disjoint_window(pair))
                owner.append(number)
        totals = [0.0] * len(requests)
        estimates = log_likelihoods(self.decoder.trained.backbone, windows, self.likelihood)
        for number, found in zip(owner, estimates, strict=True):
            totals[number] += found.value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _room_after(self) -> int:
        """Positions that blockwise scoring may need after a response."""
        config = self.likelihood
        return 0 if config.block_size is None else max(config.gen_length, config.block_size)

    def _fit(self, prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
        room = self.family.max_positions - len(response) - self._room_after()
        return tail(prompt, room), response

    def _is_greedy(self, prompt: list[int], response: list[int]) -> bool:
        """Whether decoding one token at a time gives this response."""
        n, size = len(response), self.likelihood.block_size
        shape = {"gen_length": n, "block_size": n}
        if size is not None:
            blocks = max(-(-n // size), self.likelihood.gen_length // size)
            shape = {"gen_length": blocks * size, "block_size": size}
        config = DecodeConfig(**shape, stop_at_end=False)
        (answer,) = generate(self.decoder.trained.backbone, [prompt], config)
        return answer.tokens[:n] == list(response)


def tail(prompt: list[int], room: int) -> list[int]:
    """The prompt's last `room` tokens, as elsewhere in the harness, with a warning."""
    if len(prompt) <= room:
        return prompt
    logger.warning("a prompt of %d tokens is cut to its last %d", len(prompt), max(room, 0))
    return prompt[len(prompt) - max(room, 0) :]


def cut(text: str, until: Sequence[str]) -> str:
    """The text before the first of the strings that it contains."""
    found = (text.find(word) for word in until if word)
    return text[: min((at for at in found if at >= 0), default=None)]


def main() -> None:
    """The harness' own command line, which finds the model by its name."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()

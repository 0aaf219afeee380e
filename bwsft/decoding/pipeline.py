"""A loaded model with everything that turns a question into an answer, for the commands."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from bwsft.checkpoints.contents import weights_content
from bwsft.checkpoints.resolve import (
    TINY,
    Trained,
    identity_of,
    load_trained,
    locate,
    tokenizer_place,
)
from bwsft.data.chat_template import Prompt, Template
from bwsft.data.tokenizer import chunks, load_tokenizer
from bwsft.decoding.config import RULES, DecodeConfig
from bwsft.decoding.generate import decode_stream
from bwsft.decoding.recipes import RECIPES
from bwsft.decoding.request import check_request
from bwsft.decoding.result import Decoded, Generation
from bwsft.decoding.settings import DecoderOptions, DecodeSettings
from bwsft.models.backbone import Backbone, check_context
from bwsft.utils.identity import short
from bwsft.utils.lines import say

if TYPE_CHECKING:  # it needs transformers, and most rules do without
    from bwsft.models.verifier import Verifier

FROM_TRAINING = ("gen_length", "block_size", "context")
OF_MODEL = ("end_ids", "mask_id", "logit_shift")
NEED_CONTEXT = ("refresh", "cfg_scale", "suffix")


class AskedModel:
    """A model that an evaluation names (None: the embedded base). A run's checkpoint is found once,
    so that its digests are of what answers; it is loaded when it answers."""

    def __init__(self, model: str | None, options: DecoderOptions):
        self.model, self.options = model, options

    @functools.cached_property
    def found(self) -> tuple[str, dict | None]:
        return locate(self.model) if self.model else (str(TINY), None)

    def identity(self) -> dict[str, str]:
        """The digests of `identity_of`."""
        tokenizer = load_tokenizer(tokenizer_place(*self.found, self.options.tokenizer))
        return identity_of(*self.found, tokenizer)

    def decode(self, questions: Sequence[Prompt], skip: int = 0) -> Iterator[Decoded]:
        """The answers to the prompts after the first `skip`, in order, as they come."""
        decoder = Decoder.load(self.found[0], self.options)
        return map(decoder.decoded, decoder.answers(decoder.encode(questions), skip))


@dataclass(frozen=True)
class Decoder:
    """A loaded model with everything that turns a question into an answer."""

    trained: Trained
    template: Template
    config: DecodeConfig
    verifier: Verifier | None = None

    @classmethod
    def load(
        cls, model: str | None, options: DecoderOptions, template: str = "metamath"
    ) -> Decoder:
        """Load a model; what the options leave open is as its folder says, and `template` is that
        of a folder that says nothing. What had to be guessed is said on stderr."""
        settings = chosen_settings(options)
        dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
        trained = load_trained(
            model, tokenizer=options.tokenizer, device=options.device, dtype=dtype,
            mask_token=options.mask_token, logit_shift=options.logit_shift,
        )  # fmt: skip
        trained.backbone.set_fused_ops(options.fused_ops)
        if "template" in trained.assumed:
            contract = dataclasses.replace(trained.contract, template=template)
            trained = dataclasses.replace(trained, contract=contract)
        given = settings.keys() | ({"template"} if options.template else set())
        settings = defaults_of(trained) | settings
        check_context(trained.backbone.family, settings["context"])
        config = DecodeConfig(**settings)
        name = options.template or trained.contract.template
        args = options.template_args
        args = trained.contract.template_args if args is None else args
        decoder = cls(
            trained, Template(trained.tokenizer, name, args), config,
            options.verifier and load_verifier_for(trained, options.verifier),
        )  # fmt: skip
        for hint in (assumptions(trained, given), block_hint(trained, config), decoder.hint()):
            if hint:
                say(hint, file=sys.stderr)
        return decoder

    @classmethod
    def around(cls, trained: Trained) -> Decoder:
        """That of a model in memory, greedy and as its contract says."""
        said, config = trained.contract, DecodeConfig(**defaults_of(trained))
        return cls(trained, Template(trained.tokenizer, said.template, said.template_args), config)

    @property
    def backbone(self) -> Backbone:
        return self.trained.backbone

    @property
    def tokenizer(self) -> Any:
        return self.trained.tokenizer

    def generate(self, prompts: str | Sequence[Prompt], **changes: Any) -> str | list[str]:
        """The answer to a text, or the list of answers to several prompts (texts, or the turns of
        conversations). `changes`: fields of DecodeConfig, such as context or temperature."""
        decoder = dataclasses.replace(self, config=dataclasses.replace(self.config, **changes))
        one = isinstance(prompts, str)
        answers = [found.text for found in decoder.decode([prompts] if one else prompts)]
        return answers[0] if one else answers

    def decode(self, questions: Sequence[Prompt]) -> list[Decoded]:
        """The answers to prompts, in order."""
        return list(map(self.decoded, self.answers(self.encode(questions))))

    def decoded(self, found: Generation) -> Decoded:
        return Decoded(self.text(found.tokens), len(found.tokens), found.ended, found.passes)

    def hint(self) -> str | None:
        """What a user should know of the context mode, in a line."""
        trained, chosen = self.trained.contract.context, self.config.context
        if "context" in self.trained.assumed or trained == chosen:
            return None
        if (trained, chosen) == ("exact", "prefix"):
            return None
        return f"the model was trained with --context {trained} and decodes with {chosen}"

    def encode(self, questions: Sequence[Prompt]) -> list[Sequence[int]]:
        """Token ids of the prompts (texts, or turns of a conversation), in 4 bytes each; ValueError
        for one that the model cannot take."""

        def characters(asked: Prompt) -> int:
            return len(asked) if isinstance(asked, str) else sum(len(t["content"]) for t in asked)

        prompts: list[Sequence[int]] = []
        for some in chunks(questions, characters):
            prompts += [array("i", ids) for ids in self.template.encode_prompts(some)]
        family = self.trained.backbone.family
        check_request(prompts, range(len(prompts)), family, self.config)
        return prompts

    def answers(
        self, prompts: Sequence[Sequence[int]], skip: int = 0, trace: bool = False
    ) -> Iterator[Generation]:
        """Decode the prompts after the first `skip`, in order, with a progress bar. ValueError if
        the model produces NaN."""
        numbers = range(len(prompts))
        options = {"trace": trace, "requests": numbers[skip:], "verifier": self.verifier}
        found = decode_stream(self.trained.backbone, prompts[skip:], self.config, **options)
        options = {"total": len(prompts), "initial": skip, "disable": len(prompts) == 1}
        bar = tqdm(found, "decoding", unit=" prompts", smoothing=0, **options)
        try:
            yield from in_order(bar)
        except FloatingPointError as error:
            raise ValueError(f"{error} (--dtype float32)") from error

    def text(self, tokens: list[int]) -> str:
        return self.trained.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def trace_record(self, generation: Generation) -> dict:
        """A generation's history as JSON: `commits` are [step, position, token, confidence]."""
        tokens = dict.fromkeys(commit.token for commit in generation.trace)
        pieces = {token: self.trained.tokenizer.decode([token]) for token in tokens}
        shape = {"gen_length": self.config.gen_length, "block_size": self.config.block_size}
        return {**shape, "tokens": pieces, "commits": [list(commit) for commit in generation.trace]}

    def identity(self) -> dict[str, str]:
        """Short digests of the contents behind the names: "weights", "tokenizer" (the chat template
        included), "verifier"."""
        found = identity_of(self.trained.folder, self.trained.state, self.tokenizer)
        if self.verifier:
            found["verifier"] = short(weights_content(self.verifier.name))
        return found

    def digest(self) -> str:
        """12 hex digits that change with the settings and names that decide an answer."""
        settings = dataclasses.asdict(self.config) | {
            "model": place_of(self.trained.folder),
            "template": self.template.name,
            "template_args": self.template.args,
            "dtype": str(self.trained.backbone.head()[0].dtype),
            **{name: getattr(self.backbone.family, name) for name in OF_MODEL},
        }
        if self.verifier:
            settings["verifier"] = place_of(self.verifier.name)
        del settings["batch_size"], settings["graphs"]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def defaults_of(trained: Trained) -> dict[str, Any]:
    """Settings that follow from the model and its training."""
    rule = {} if trained.backbone.family.noise == "mask" else {"rule": "renoise"}
    return rule | {name: getattr(trained.contract, name) for name in FROM_TRAINING}


def place_of(model: str | Path) -> str:
    """A folder's absolute path, or a Hub id as it is."""
    folder = Path(model)
    return str(folder.resolve() if folder.exists() else folder)


def assumptions(trained: Trained, given: Collection[str]) -> str | None:
    """What was guessed of a foreign model's training, as options that would say it."""
    guessed = [name for name in trained.assumed if name not in given]
    if not guessed:
        return None
    options = ", ".join(
        f"--{name.replace('_', '-')} {getattr(trained.contract, name)}" for name in guessed
    )
    faster = " (--context prefix is faster and approximate)" if "context" in guessed else ""
    return f"{trained.folder} does not say how it was trained; assumed: {options}{faster}"


def block_hint(trained: Trained, config: DecodeConfig) -> str | None:
    made_for = trained.contract.block_size
    if trained.backbone.family.attention != "block_causal" or "block_size" in trained.assumed:
        return None
    if made_for == config.block_size:
        return None
    return f"the model was made for blocks of {made_for}, not {config.block_size}"


def load_verifier_for(trained: Trained, path: str) -> Verifier:
    """The causal LM in a folder or of a Hub id, in the model's dtype and on its device; ValueError
    if its token ids mean other tokens."""
    from bwsft.models.verifier import load_verifier

    ours, theirs = trained.tokenizer, load_tokenizer(path).get_vocab()
    added = ours.get_added_vocab()  # such as [MASK], which it need not know
    other = [
        (number, token) for token, number in ours.get_vocab().items()
        if theirs.get(token, number if token in added else None) != number
    ]  # fmt: skip
    if other:
        number, token = min(other)
        raise ValueError(
            f"--verifier {path} has another vocabulary: {token!r} is {theirs.get(token)} there "
            f"and {number} in the model's"
        )
    weight = trained.backbone.head()[0]
    return load_verifier(path, dtype=weight.dtype, device=weight.device)


def recipe_settings(recipe: str, rule: str | None) -> dict:
    """What a recipe sets; beside another rule than its own without the options of that."""
    settings = RECIPES[recipe].settings
    own = settings.get("rule")
    if own is None or rule in (None, own):
        return settings
    return {name: v for name, v in settings.items() if name not in RULES[own].options()}


def chosen_settings(options: DecoderOptions) -> dict:
    """The fields of DecodeConfig that the options set, and those of their recipe that they leave
    open; ValueError for those that can't be, found before a large model is read as far as no
    default comes from its training."""
    settings = {f.name: getattr(options, f.name) for f in dataclasses.fields(DecodeSettings)}
    settings = {name: value for name, value in settings.items() if value is not None}
    if options.recipe is not None:
        settings = recipe_settings(options.recipe, options.rule) | settings
    known = dict(settings)
    if not {"gen_length", "block_size"} <= settings.keys():  # one that the other options fit
        size = max(settings.get("steps", 1), options.min_length, 1)
        known |= {"gen_length": size, "block_size": size}
    if "context" not in settings:
        known = {name: value for name, value in known.items() if name not in NEED_CONTEXT}
    method = DecodeConfig(**known).method
    if options.verifier and not method.takes_verifier:
        raise ValueError(f"--verifier belongs to rule apd, and the rule is {method.name}")
    if method.needs_verifier and not options.verifier:
        raise ValueError("--rule apd needs --verifier DIR, a causal LM with the model's vocabulary")
    return settings


def in_order(results: Iterator[tuple[int, Generation]]) -> Iterator[Generation]:
    """Results by index, each as soon as those before it are there."""
    waiting: dict[int, Generation] = {}
    following = 0
    for index, result in results:
        waiting[index] = result
        while following in waiting:
            yield waiting.pop(following)
            following += 1

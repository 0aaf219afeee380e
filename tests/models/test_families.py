"""Every model family from end to end: training, decoding, checkpoint, resume, export, reload.

Each family is a tiny random model that transformers itself (LLaDA: bwsft) builds from a config and
saves; whatever bwsft computes is compared with plain runs of that model on one sequence at a time,
whole logits and all.
"""

import dataclasses
import json
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from block_masks import masked_states
from safetensors.torch import load_file
from tiny_folders import SHAPE, WEIGHTS
from tiny_modes import PLACE
from tiny_runs import resumed
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    LlamaConfig,
    ModernBertConfig,
    Qwen2Config,
    Qwen3Config,
)

from bwsft import config as c
from bwsft import presets
from bwsft.checkpoints.resolve import load_trained
from bwsft.cli import main
from bwsft.commands.export import run_export
from bwsft.commands.options import ExportOptions
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate
from bwsft.decoding.pipeline import Decoder
from bwsft.decoding.settings import DecoderOptions
from bwsft.models.dream_sdar import A2DQwen3Config, DreamConfig, FastDllmConfig, SdarConfig
from bwsft.models.experts import LLaDA2MoeConfig, LladaMoeConfig, SdarMoeConfig
from bwsft.models.families import model_class, read_config
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import read_family
from bwsft.models.support import MIXTURES
from bwsft.objectives.base import response_rows
from bwsft.training.setup import setup, train

B = 4
MODES = ("exact", "cached", "block_causal")
GROUPED, EXPERTS = {"num_key_value_heads": 2}, {"num_experts": 8, "num_experts_per_tok": 2}
# The byte-level tokenizers below: 256 EOS, 257 end of turn, 258 [MASK] (where it has one).
IDS = {"eos_token_id": 256, "pad_token_id": 256}
NEW = {"mask_token": "<|mask|>", "logit_shift": 1}
CONFIGS = {
    "llada": LladaConfig(
        d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, mlp_hidden_size=48, vocab_size=320,
        max_sequence_length=96, mask_token_id=258, init_fn="normal", init_std=0.2, **IDS,
    ),
    "Dream": DreamConfig(
        vocab_size=320, mask_token_id=258, tie_word_embeddings=False, rope_theta=1e6,
        auto_map={"AutoModel": "modeling_dream.DreamModel"}, **SHAPE, **GROUPED, **IDS,
    ),
    "sdar": SdarConfig(vocab_size=320, mask_token_id=258, head_dim=8, **SHAPE, **GROUPED, **IDS),
    "qwen2": Qwen2Config(vocab_size=320, tie_word_embeddings=False, **SHAPE, **GROUPED, **IDS),
    "qwen3": Qwen3Config(vocab_size=259, head_dim=16, **SHAPE, **GROUPED, **IDS),
    "llama": LlamaConfig(vocab_size=258, **SHAPE, **GROUPED, **IDS),
    "smollm": LlamaConfig(vocab_size=258, tie_word_embeddings=True, **SHAPE, **GROUPED, **IDS),
    "a2d-qwen3": A2DQwen3Config(vocab_size=320, head_dim=16, **SHAPE, **GROUPED, **IDS),
    "fast_dllm": FastDllmConfig(
        vocab_size=320, mask_token_id=258, bd_size=None, tie_word_embeddings=True, **SHAPE,
        **GROUPED, **IDS,
    ),
    "sdar_moe": SdarMoeConfig(
        vocab_size=320, mask_token_id=258, head_dim=16, moe_intermediate_size=16,
        norm_topk_prob=True, rope_theta=1e6, **EXPERTS, **SHAPE, **GROUPED, **IDS,
    ),
    "lladamoe": LladaMoeConfig(
        vocab_size=320, mask_token_id=258, num_key_value_heads=4, expert_intermediate_size=16,
        dense_intermediate_size=24, moe_layer_freq=[0, 1], rope_theta=5e4, **EXPERTS, **IDS,
        **{k: v for k, v in SHAPE.items() if k != "intermediate_size"},
    ),
    "llada2_moe": LLaDA2MoeConfig(
        vocab_size=320, mask_token_id=258, head_dim=16, moe_intermediate_size=16, n_group=4,
        topk_group=2, routed_scaling_factor=2.5, partial_rotary_factor=0.5, rope_theta=6e5,
        **EXPERTS, **SHAPE, **GROUPED, **IDS,
    ),
    "bert": BertConfig(vocab_size=320, **SHAPE),
    "modernbert": ModernBertConfig(vocab_size=320, local_attention=128, **SHAPE, **IDS),
}  # fmt: skip
# What --mask-token and --logit-shift say: a new token in a spare row, a reserved one, new rows.
OPTIONS = {
    "qwen2": NEW,
    "qwen3": {"mask_token": "<|spare|>", "logit_shift": 0},
    "llama": {**NEW, "logit_shift": 0},
    "smollm": NEW,
}
FACTS = {
    "Dream": (1, "full", "response"), "fast_dllm": (1, "block_causal", "absolute"),
    **dict.fromkeys(("sdar", "sdar_moe", "llada2_moe"), (0, "block_causal", "absolute")),
    "qwen2": (1, "full", "response"), "smollm": (1, "full", "response"),
}  # logit shift, attention, where blocks start
BLOCKS = [name for name, facts in FACTS.items() if facts[1] == "block_causal"]
UNSUPPORTED = {(name, mode) for name in BLOCKS for mode in ("exact", "cached")}

families = pytest.mark.parametrize("name", CONFIGS)
modes = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(scope="module")
def folders(tokenizer_folder, tmp_path_factory):
    """{family: folder} with a random model and its tokenizer, as published: a decoder's knows no
    [MASK], an encoder's names [MASK] and [SEP] where config.json does not."""
    root, made = tmp_path_factory.mktemp("families"), {}
    for name, config in CONFIGS.items():
        folder = root / name
        torch.manual_seed(len(name))
        model = model_class(config)(config)
        for key, p in model.named_parameters():
            if key.endswith("bias"):  # they start at 0
                torch.nn.init.normal_(p, std=0.2)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.2)
        model.save_pretrained(folder)
        words(tokenizer_folder, name).save_pretrained(folder)
        made[name] = folder
    return made


def words(tokenizer_folder, name):
    from transformers import PreTrainedTokenizerFast

    plain = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    plain["added_tokens"] = []
    from tokenizers import Tokenizer

    roles = {"eos_token": "<|endoftext|>", "additional_special_tokens": ["<|end|>"]}
    if name in ("bert", "modernbert"):
        roles["sep_token"] = roles.pop("eos_token")
    if name not in OPTIONS:
        roles["mask_token"] = "[MASK]"
    if name == "qwen3":
        roles["additional_special_tokens"] = ["<|end|>", "<|spare|>"]
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(plain)))
    for role in ("eos_token", "sep_token"):
        if role in roles:
            made.add_special_tokens({role: roles.pop(role)})
    for text in roles.pop("additional_special_tokens"):
        made.add_tokens(text, special_tokens=True)
    made.add_special_tokens(roles)
    made.chat_template = (tokenizer_folder / "chat_template.jinja").read_text()
    return made


@pytest.fixture
def config_of(folders, data_file, tmp_path_factory):
    """config_of(family, mode) -> Config of a run of 3 updates."""
    cache = tmp_path_factory.getbasetemp() / "cache"

    def make(name, mode, **changes):
        values = dict(
            preset="debug", data=str(data_file), model=str(folders[name]), steps=3, seed=3,
            block_size=B, gen_length=16, max_length=40, batch_size=4, micro_batch_size=4,
            context=mode, save_every=2, out=str(tmp_path_factory.mktemp("run") / "run"),
            dataset=c.DataConfig(template="none", holdout=6, cache_dir=str(cache)),
            lora=c.LoraConfig(rank=0), optim=c.OptimConfig(lr=3e-3),
            eval=c.EvalConfig(every=0), **OPTIONS.get(name, {}),
        )  # fmt: skip
        return c.Config(**(values | changes))

    return make


def start_of(name, mode):
    """The mode, or one that the family has."""
    return "block_causal" if name in BLOCKS else mode


@pytest.mark.parametrize(("preset", "name"), [
    ("llada-8b-lora", "llada"), ("llada-8b-dense", "llada"), ("dream-7b-lora", "Dream"),
    ("sdar-4b-lora", "sdar"), ("qwen3-4b-lora", "qwen3"), ("llada-moe-7b-lora", "lladamoe"),
    pytest.param("sdar-30b-a3b-lora", "sdar_moe", marks=pytest.mark.slow),
    pytest.param("fast-dllm-v2-7b-lora", "fast_dllm", marks=pytest.mark.slow),
    pytest.param("llada2-mini-lora", "llada2_moe", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_preset_trains_its_family(preset, name, folders, data_file, tmp_path, monkeypatch):
    """A small model of the family in the place of its own, lengths from the data, then decoding."""
    monkeypatch.setenv("BWSFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run = str(tmp_path / "run")
    words = f"--model {folders[name]} --data {data_file} --lora.rank 2 --batch-size 4 --steps 1"
    words += f" --dataset.template chat --block-size {B} --out {run}"
    assert main(["train", preset, *words.split()]) == 0
    trained = load_trained(run)
    assert trained.contract.context == presets.PRESETS[preset]().context
    assert (trained.contract.gen_length, trained.contract.block_size) == (16, B)
    assert main(["generate", "--model", run, "--prompt", "1+1"]) == 0


# --- plain runs ---


@dataclasses.dataclass(frozen=True)
class Plain:
    """A model as transformers runs it, on one sequence under an explicit mask."""

    model: torch.nn.Module
    family: object

    def logits(self, ids, positions, mask):
        ids, positions = ids[None], positions[None]
        if self.model.config.model_type == "modernbert":  # its windows are wider than all rows
            mask = {"full_attention": mask, "sliding_attention": mask}
            mask = {kind: m[None, None] for kind, m in mask.items()}
        else:
            mask = mask[None, None]
        return self.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[0]

    def block(self, mode, ids, prompt, start, stop, entered=None):
        """Logits of the tokens at start..stop - 1 of a canvas `ids` [L]; `entered`: the canvas as
        it was when the block's context was frozen."""
        first, last = start - self.family.logit_shift, stop - self.family.logit_shift
        place = torch.arange(len(ids))
        if mode == "exact":
            sees = torch.ones(len(ids), len(ids), dtype=torch.bool)
            return self.logits(ids, place, sees)[first:last]
        if mode == "cached":
            # The canvas that was frozen, and after it the active rows at the same positions, which
            # see themselves in the place of what they were.
            rows, size = torch.cat([entered, ids[first:last]]), len(ids)
            active = torch.arange(len(rows)) >= size
            replaced = (torch.arange(len(rows)) >= first) & (torch.arange(len(rows)) < last)
            sees = torch.where(active[:, None], ~replaced, ~active)
            return self.logits(rows, torch.cat([place, place[first:last]]), sees)[size:]
        if self.family.attention == "block_causal":
            number = place // B
        else:
            number = torch.where(place < prompt, 0, (place - prompt) // B + 1)
        sees = (number[:, None] >= number)[:stop, :stop]
        return self.logits(ids[:stop], place[:stop], sees)[first:last]


def plain_model(folder, family, dtype=torch.float32):
    """What transformers loads from a folder, [MASK] added where there is none."""
    kind = json.loads((folder / "config.json").read_text())
    auto, options = AutoModelForCausalLM, {"dtype": dtype, "attn_implementation": "sdpa"}
    if "bert" in kind["model_type"]:
        auto = AutoModelForMaskedLM
    elif kind["architectures"] == ["LLaDAMoEModelLM"]:  # model_type is that of LLaDA
        options["config"] = read_config(folder)
        auto = model_class(options["config"])
    model = auto.from_pretrained(folder, **options).eval()
    rows = model.get_input_embeddings().num_embeddings
    if family.mask_id == rows:
        model.resize_token_embeddings(rows + 1, mean_resizing=False)
        for matrix in (model.get_input_embeddings().weight, model.lm_head.weight):
            matrix.data[rows] = matrix.data[:rows].mean(0)
    return Plain(model, family)


def recorded(backbone):
    """Let the backbone's forward note its arguments."""
    calls, forward = [], backbone.forward

    def note(*arguments):
        calls.append(arguments)
        return forward(*arguments)

    backbone.forward = note
    return calls


@torch.no_grad()
def plain_loss(plain, mode, batch, call, mask_id):
    """The loss of one call of a backbone's forward, a sequence and a block at a time."""
    noisy, rows, target, weight = call[:4]
    total, seen = 0.0, 0
    edges = batch.cu_seqlens.tolist()
    places = {int(r): (int(k), w) for r, k, w in zip(rows, target, weight, strict=True) if w}
    copies = None
    if mode == "block_causal":
        inside = response_rows(batch).inside
        copies, named = (iter(x[0, inside].tolist()) for x in (noisy.copy_of, noisy.row_of))
    for s, prompt in enumerate(batch.prompt_lengths.tolist()):
        own = batch.ids[edges[s] : edges[s + 1]]
        if copies is None:
            canvas = noisy.ids[edges[s] : edges[s + 1]]
            where = {p: edges[s] + p for p in range(len(own))}
            clean = canvas
        else:
            response = int(batch.response_lengths[s])
            where = {prompt + i: next(named) for i in range(response)}
            clean = own[: prompt + response]
            canvas = torch.cat([clean[:prompt], noisy.ids[[next(copies) for _ in where]]])
        origin = 0 if plain.family.block_origin == "absolute" else prompt
        for k in range((len(canvas) - origin) // B + 1):
            start, stop = max(origin + k * B, prompt), min(origin + k * B + B, len(canvas))
            wanted = [p for p in range(start, stop) if where[p] in places]
            if not wanted:
                continue
            x, entered = canvas.clone(), canvas.clone()
            if copies is not None:
                x[:start] = clean[:start]
            entered[start:stop] = mask_id
            logits = plain.block(mode, x, prompt, start, stop, entered)
            for p in wanted:
                token, w = places[where[p]]
                total = total + F.cross_entropy(logits[p - start], torch.tensor(token)) * w
                seen += 1
    assert seen == len(places) > 3
    return float(total)


@torch.no_grad()
def plain_score(plain, mode, batch, state, mask_id):
    """The held-out loss of a state: one block of every sequence is partly masked."""
    total, edges = 0.0, batch.cu_seqlens.tolist()
    blocks = zip(state.block_start.tolist(), state.block_length.tolist(), strict=True)
    for s, (start, length) in enumerate(blocks):
        stop = start + length
        ids = state.noisy.ids[edges[s] : edges[s + 1]]
        entered = ids.clone()
        entered[start:stop] = mask_id
        logits = plain.block(mode, ids, int(batch.prompt_lengths[s]), start, stop, entered)
        for row, token, weight in zip(state.rows, state.target, state.weight, strict=True):
            if edges[s] <= row < edges[s + 1]:
                total += F.cross_entropy(logits[row - edges[s] - start], token) * weight
    return float(total)


# --- training ---


def facts_of(family):
    return family.logit_shift, family.attention, family.block_origin


@families
@modes
def test_train(name, mode, config_of, folders):
    """Held-out scores and the first loss are those of plain runs in float64, in which transformers'
    norms stay in float32; updates lower the loss."""
    config = config_of(name, mode)
    if (name, mode) in UNSUPPORTED:
        with pytest.raises(ValueError, match="attends from block to block"):
            setup(config, c.run_folder(config), None)
        return
    run = setup(config, c.run_folder(config), None)
    assert facts_of(run.backbone.family) == FACTS.get(name, (0, "full", "response"))
    run.backbone.set_gradient_checkpointing(name in ("qwen2", "sdar", "bert"))
    run.backbone.double()
    plain = plain_model(folders[name], run.backbone.family, torch.float64)
    batch = run.data.pack(run.data.samples(0, 4, config.seed))
    held_out = dataclasses.replace(run.held_out, count=2)
    for state in held_out.draws(batch):
        with torch.no_grad():
            score = float(run.mode.score(state))
        expected = plain_score(plain, mode, batch, state, run.backbone.family.mask_id)
        assert score == pytest.approx(expected, rel=1e-6)
    losses = []
    for _ in range(6):
        calls = recorded(run.backbone)
        (loss,) = run.mode.losses(batch, PLACE)
        del run.backbone.forward
        losses.append(loss.total.item())
        if len(losses) == 1:
            expected = plain_loss(plain, mode, batch, calls[-1], run.backbone.family.mask_id)
            assert losses[0] == pytest.approx(expected, rel=1e-6)
        run.optimizer.zero_grad()
        loss.total.backward()
        run.optimizer.param_groups[0]["lr"] = 3e-3
        run.optimizer.step()
    assert losses[-1] < 0.8 * losses[0], losses


@pytest.mark.parametrize("name", ["llada", "qwen3", "bert"])
def test_noisy_copies_need_no_positions_of_their_own(name, config_of):
    config = config_of(name, "block_causal")
    run = setup(config, c.run_folder(config), None)
    batch = run.data.pack(run.data.samples(0, 4, config.seed))
    needed = int((batch.prompt_lengths + batch.response_lengths).max())

    def loss(max_positions):
        run.backbone.family = dataclasses.replace(run.backbone.family, max_positions=max_positions)
        (found,) = run.mode.losses(batch, PLACE)
        return found.total.item()

    assert loss(needed) > 0
    with pytest.raises(ValueError, match=f"needs {needed} positions, the model has {needed - 1}"):
        loss(needed - 1)


# --- decoding ---


@torch.no_grad()
def plain_decode(plain, mode, prompt, gen_length):
    """One token a step, the most probable first."""
    family, length = plain.family, len(prompt) + gen_length
    origin = 0 if family.block_origin == "absolute" else len(prompt)
    length += (origin - length) % B  # the last block is whole
    ids = torch.tensor([*prompt, *[family.mask_id] * (length - len(prompt))])
    for k in range((len(ids) - origin + B - 1) // B):
        start, stop = max(origin + k * B, len(prompt)), min(origin + k * B + B, len(ids))
        entered = ids.clone()
        for _ in range(start, stop):
            logits = plain.block(mode, ids, len(prompt), start, stop, entered).double()
            logits[:, list(family.end_ids)] = -torch.inf
            confidence = logits.softmax(-1)
            confidence[:, family.mask_id] = -1
            best, token = confidence.max(-1)
            best[ids[start:stop] != family.mask_id] = -2
            at = best.argmax()
            ids[start + at] = token[at]
    return ids[len(prompt) :].tolist()[:gen_length]


PROMPTS = [[65, 70, 42], [50, 51, 52, 53, 54, 55, 56, 57, 58], [66, 67, 68, 69, 70, 71, 72, 73]]


def test_a_context_that_the_family_lacks_is_refused_without_a_hint(folders, capsys):
    with pytest.raises(ValueError, match="has no context exact: its only one is block_causal"):
        Decoder.load(str(folders["sdar"]), DecoderOptions(context="exact"))
    assert "prefix is faster" not in capsys.readouterr().err


def test_sdars_block_size_is_its_training(config_of, folders, tmp_path, capsys):
    folder = shutil.copytree(folders["sdar"], tmp_path / "sdar")
    content = json.loads((folder / "config.json").read_text()) | {"block_size": 8}
    (folder / "config.json").write_text(json.dumps(content))
    assert Decoder.load(str(folder), DecoderOptions()).config.block_size == 8
    Decoder.load(str(folder), DecoderOptions(block_size=B))
    assert f"was made for blocks of 8, not {B}" in capsys.readouterr().err
    for rank in (0, 2):
        config = config_of("sdar", "block_causal", model=str(folder), steps=1,
                           lora=c.LoraConfig(rank=rank))  # fmt: skip
        with pytest.warns(UserWarning, match=f"made for blocks of 8, --block-size is {B}"):
            train(config)
        out = tmp_path / f"out{rank}"
        run_export(ExportOptions(model=config.out, out=out))
        assert Decoder.load(str(out), DecoderOptions()).config.block_size == B


@families
@modes
def test_decode(name, mode, config_of, folders):
    """Tokens are those of a plain loop, for prompts that end inside a block and at its edge."""
    config = config_of(name, start_of(name, "exact"))
    backbone = setup(config, c.run_folder(config), None).backbone.double().eval()
    options = DecodeConfig(
        gen_length=12, block_size=B, context=mode, banned_ids=backbone.family.end_ids
    )
    if (name, mode) in UNSUPPORTED:
        with pytest.raises(ValueError, match="attends from block to block"):
            generate(backbone, PROMPTS, options)
        return
    plain = plain_model(folders[name], backbone.family, torch.float64)
    found = [g.tokens for g in generate(backbone, PROMPTS, options)]
    assert found == [plain_decode(plain, mode, prompt, 12) for prompt in PROMPTS]
    assert len({token for tokens in found for token in tokens}) > 3


# --- checkpoints and export ---


def tokens_of(trained, mode):
    config = DecodeConfig(gen_length=8, block_size=B, context=mode)
    return [(g.tokens, g.ended) for g in generate(trained.backbone, PROMPTS, config)]


@torch.no_grad()
def full_logits(backbone, ids):
    """Whole logits of one sequence, under full attention (SDAR: from block to block)."""
    number = torch.arange(len(ids)) // B
    blocks = number[:, None] >= number
    sees = blocks if backbone.family.attention == "block_causal" else torch.ones_like(blocks)
    hidden = masked_states(backbone, ids, sees)
    return F.linear(hidden, *backbone.head()), torch.arange(len(ids)), sees


LORA = c.LoraConfig(rank=2, alpha=8, dropout=0.0)


# Each layout with an adapter or whole; the other of the two, and llama and qwen3 (layers of qwen2
# and smollm, nearly), take their time.
WAYS = {"lora": LORA, "full": c.LoraConfig(rank=0)}
QUICK = {
    "lora": "llada sdar qwen2 bert llada2_moe",
    "full": "Dream smollm modernbert fast_dllm sdar_moe",
}


@pytest.mark.parametrize(("name", "way"), [
    pytest.param(name, way, marks=[] if name in QUICK[way].split() else pytest.mark.slow)
    for name in CONFIGS
    for way in WAYS
])
def test_export_and_reload(name, way, config_of, folders, tmp_path, capsys):
    """A run, its checkpoint and its export decode the same tokens; transformers loads the export
    and computes the same logits; a resumed run goes on exactly."""
    mode = start_of(name, "cached")
    lora = WAYS[way]
    if lora.rank and name in MIXTURES:
        lora = dataclasses.replace(lora, targets="experts")
    config = config_of(name, mode, lora=lora)
    assert train(config) == 0
    run = c.run_folder(config)
    newest = load_trained(str(run))
    assert newest.tokenizer.convert_tokens_to_ids(newest.tokenizer.mask_token) == 258
    assert newest.backbone.family.mask_id == 258
    base = load_trained(str(folders[name])) if name not in OPTIONS else None
    if base is not None:
        assert tokens_of(base, mode) != tokens_of(newest, mode)

    out = tmp_path / "out"
    assert run_export(ExportOptions(str(run), out, dtype="float32")) == 0
    exported = load_trained(str(out))
    found = (exported.backbone.family, newest.backbone.family, read_family(out))
    assert len({dataclasses.replace(family, end_ids=()) for family in found}) == 1
    assert tokens_of(exported, mode) == tokens_of(newest, mode)
    ids = torch.tensor([*PROMPTS[1], *[258] * 6])
    logits, place, sees = full_logits(exported.backbone, ids)
    plain = plain_model(out, exported.backbone.family)
    torch.testing.assert_close(plain.logits(ids, place, sees), logits, rtol=1e-4, atol=1e-4)
    if name != "lladamoe":
        found = type(AutoModel.from_pretrained(out)).__name__
        asked = {"smollm": "llama"}.get(name, name)
        found, asked = (re.sub("[-_]", "", text).lower() for text in (found, asked))
        assert found.startswith(asked)

    shutil.rmtree(run / "checkpoints" / "step-3")
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").open()]
    assert train(resumed(config, run)) == 0
    again = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").open()]
    assert again == losses and len(losses) == 3
    assert tokens_of(load_trained(str(run)), mode) == tokens_of(newest, mode)


def test_a_router_is_exported_in_float32(folders, tmp_path):
    run_export(ExportOptions(str(folders["llada2_moe"]), tmp_path / "out", dtype="bfloat16"))
    stored, before = (load_file(f / WEIGHTS) for f in (tmp_path / "out", folders["llada2_moe"]))
    wide = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    assert wide == {f"model.layers.1.mlp.gate.{name}" for name in ("weight", "expert_bias")}
    assert all(torch.equal(stored[name], before[name]) for name in wide)
    assert stored.keys() == before.keys()


def test_causal_clean_rows_are_decoded_so(config_of, tmp_path):
    """What the training says of them is in its checkpoint and in the exported folder."""
    options = {"clean_attention": "causal", "ar_weight": 0.5, "steps": 1}
    config = config_of("qwen2", "block_causal", **options)
    train(config)
    run_export(ExportOptions(model=config.out, out=tmp_path / "out"))
    found = [load_trained(str(folder)) for folder in (config.out, tmp_path / "out")]
    assert [trained.backbone.family.clean_attention for trained in found] == ["causal"] * 2
    causal = tokens_of(found[0], "block_causal")
    assert causal == tokens_of(found[1], "block_causal")
    family = dataclasses.replace(found[1].backbone.family, clean_attention="block")
    found[1].backbone.family = family
    assert causal != tokens_of(found[1], "block_causal")
    for name in ("qwen3", "sdar"):
        config = config_of(name, "block_causal", **options)
        with pytest.raises(ValueError, match="a bidirectional model that predicts the next token"):
            setup(config, c.run_folder(config), None)

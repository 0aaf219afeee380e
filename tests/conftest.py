"""What several files train: a byte-level tokenizer, 40 short records, a LLaDA of 40,000 weights."""

import dataclasses
import hashlib
import importlib.util
import shutil
import signal

import jsonl
import pytest

from bwsft import config as c

if importlib.util.find_spec("triton") is None:  # it exists for Linux alone
    collect_ignore_glob = ["kernels/triton/*", "*/test_compile_offline.py", "*/test_tuning.py",
                           "*/test_bench_operators.py"]

CHAT = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """One token per byte, then the specials: ids 256 (EOS), 257 ([MASK]), 258 (end of turn)."""
    from tiny_tokenizer import byte_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(
        eos_token="<|endoftext|>", mask_token="[MASK]", additional_special_tokens=["<|end|>"],
        chat_template=CHAT,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data_file(tmp_path_factory):
    """40 sums; responses of 4 to 14 bytes, so that blocks are full, short and several."""
    rows = [
        {"query": f"{7 * i}+{i}", "response": f"{8 * i}" + "; ok so"[: i % 8] + "!" * (i % 3 + 2)}
        for i in range(40)
    ]
    return jsonl.write(tmp_path_factory.mktemp("data") / "sums.jsonl", *rows)


@pytest.fixture
def questions(tmp_path, monkeypatch):
    """A file of four questions in GSM8K's shape, in the working directory."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": q, "answer": f"so\n#### {len(q)}"} for q in ("1+1", "What?", "7", "x")]
    return jsonl.write(tmp_path / "gsm8k.jsonl", *rows)


@pytest.fixture
def tiny(tokenizer_folder, data_file, tmp_path):
    """tiny(**changes) -> Config of a run of 10 updates over two epochs, a second on one core."""
    base = c.Config(
        preset="debug",
        data=str(data_file),
        tokenizer=str(tokenizer_folder),
        out=str(tmp_path / "run"),
        steps=10,
        seed=3,
        block_size=4,
        gen_length=16,
        max_length=40,
        batch_size=4,
        micro_batch_size=2,
        save_every=3,
        keep_last=0,
        dataset=c.DataConfig(template="chat", holdout=6, cache_dir=str(tmp_path / "cache")),
        lora=c.LoraConfig(rank=0),
        optim=c.OptimConfig(lr=3e-3),
        eval=c.EvalConfig(every=4, draws=2),
        init=c.InitConfig(d_model=32, n_layers=2, n_heads=2, mlp_hidden_size=64),
    )
    return lambda **changes: dataclasses.replace(base, **changes)


@pytest.fixture
def make_run():
    """make_run(config, dtype) -> a Run, ready for train_step."""
    import torch

    from bwsft.training.optim import make_optimizer
    from bwsft.training.setup import setup

    def make(config, dtype=torch.float32):
        run = setup(config, c.run_folder(config), None)
        run.backbone.to(dtype)
        for name, parameter in run.backbone.named_parameters():
            if "lora_B" in name:  # zero at the start, which hides the gradient of A
                torch.nn.init.normal_(parameter, std=0.05, generator=torch.manual_seed(len(name)))
        run.optimizer = make_optimizer(run.backbone, config.optim)
        return run

    return make


@pytest.fixture
def flags():
    """flags(config) -> the command line that gives this config, from the preset's defaults."""

    def flat(tree, prefix=""):
        for name, value in tree.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{name}.")
            elif value is not None and name != "preset":
                path = f"{prefix}{name}".replace("_", "-")
                if isinstance(value, bool):
                    yield f"--{path}" if value else f"--{prefix}no-{name}".replace("_", "-")
                else:
                    yield from (f"--{path}", str(value))

    return lambda config: ["train", config.preset, *flat(dataclasses.asdict(config))]


@pytest.fixture
def snapshot():
    """snapshot(folder) -> {relative path: digest} of everything below it but caches."""

    def take(folder):
        return {
            str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(folder.rglob("*"))
            if p.is_file() and "cache" not in p.parts
        }

    return take


@pytest.fixture
def model_folder(tokenizer_folder, tmp_path):
    """model_folder(**LladaConfig fields) -> folder with a random LLaDA and the tokenizer."""
    from bwsft.models.llada_config import LladaConfig
    from bwsft.models.loading import new_backbone

    def make(name="model", **fields):
        config = LladaConfig(
            **{
                "d_model": 32, "n_layers": 2, "n_heads": 2, "mlp_hidden_size": 64,
                "vocab_size": 320, "max_sequence_length": 64, "mask_token_id": 257,
                "eos_token_id": 256, "pad_token_id": 256, **fields,
            }
        )
        folder = tmp_path / name
        new_backbone(config, seed=1).model.save_pretrained(folder)
        shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
        return folder

    return make


@pytest.fixture(scope="session")
def batch_of():
    """(prompt length, response length) pairs -> a packed batch of a vocabulary of 50, B 4."""
    import numpy as np

    from bwsft.data.packing import CanvasLayout, Example, pack

    def build(lengths, visit=0, canvas="response", origin="response"):
        layout = CanvasLayout(
            mask_id=49, eos_id=1, canvas=canvas, block_size=4, gen_length=16, max_length=64,
            block_origin=origin,
        )
        visits = np.broadcast_to(visit, len(lengths))
        return pack(
            [
                Example(np.arange(p) % 40 + 2, np.arange(r) * 7 % 40 + 2, i, int(v))
                for i, ((p, r), v) in enumerate(zip(lengths, visits, strict=True))
            ],
            layout,
        )

    return build


@pytest.fixture(scope="session")
def sums():
    """Summed row weights of each sequence: its loss if every cross-entropy is 1."""
    import torch

    def per_sequence(batch, masked):
        owner = torch.searchsorted(batch.cu_seqlens[1:], masked.rows.int(), right=True)
        out = torch.zeros(batch.num_sequences, dtype=torch.float64)
        return out.index_add_(0, owner, masked.row_weight.double())

    return per_sequence


@pytest.fixture(scope="session")
def assert_no_worse():
    """assert_no_worse(own, torchs, truth, band): error at most 3x that of torch in the same dtype
    on the same numbers, both against float64, plus a rounding band (absolute)."""

    def check(own, torchs, truth, band):
        assert own.shape == truth.shape and own.isfinite().all()
        if own.numel():
            error, torchs_error = ((t.double() - truth).abs().max() for t in (own, torchs))
            assert error <= 3 * torchs_error + band, (float(error), float(torchs_error), band)

    return check


@pytest.fixture
def usual_interrupt():
    """Ctrl-C raises KeyboardInterrupt, also where the shell that started the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

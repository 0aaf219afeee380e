"""The folder kernels/, laid out as the Hub's builder does, in the real `kernels` package.

Each test runs in a process of its own: kernelize changes classes of transformers for good.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("kernels.layer") is None:  # the folder kernels/ isn't that package
    pytest.skip("needs the package `kernels`", allow_module_level=True)
pytest.importorskip("tomllib", reason="Python 3.10 has no TOML parser")

PROJECT = Path(__file__).resolve().parents[2] / "kernels"
START = """
import importlib
import os
import sys
from pathlib import Path

import kernels
import torch

folders = [Path(folder) for folder in sys.argv[1:]]
"""
# transformers 5.24 asks for kernels 0.18.2; what it uses of that is in 0.17, too.
TRANSFORMERS = """
from transformers.utils import import_utils

accepts = import_utils.is_kernels_available
while hasattr(accepts, "__wrapped__"):
    accepts = accepts.__wrapped__
accepts.__defaults__ = ("0.17", "1")
import_utils.is_kernels_available.cache_clear()
"""
TWO_COPIES = """
first, second = (kernels.get_local_kernel(folder) for folder in folders)
assert kernels.get_local_kernel(folders[0]) is first is not second
x, head = torch.randn(6, 8, requires_grad=True), torch.randn(50, 8)
target = torch.tensor([1, -100, 3, 4, -100, 6])
losses = []
for copy in (first, second):
    ops = importlib.import_module("._ops", copy.__name__)
    assert ops.add_op_namespace_prefix("x") == f"{copy.__name__}::x"
    spec = copy.MaskSpec(block_size=4, mask_id=49)
    assert (copy.block_mask(target.clamp(min=0)[None], [1], [5], spec).noisy_ids == 49).any()
    noise = copy.GumbelKey(1, *torch.arange(18).view(3, 6))
    best = copy.linear_argmax(x.detach(), head, temperature=1.0, gumbel=noise)
    assert best.token.shape == (6,)
    losses.append(copy.linear_cross_entropy(x, head, target))
    losses[-1].backward()
assert first.MaskSpec is not second.MaskSpec and torch.equal(*losses)
metadata = [loaded.metadata for loaded in kernels.get_loaded_kernels()]
assert {m.id for m in metadata} == {first.__name__, second.__name__}
assert {str(m.name) for m in metadata} == {"bwsft-kernels"}
"""
KERNELIZED = """
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

NAMES = {"RMSNorm": "RMSNorm", "rotary_pos_emb": "RotaryPosEmb", "SwiGLUMLP": "SwiGLUMLP"}
for module in (modeling_llama.LlamaMLP, modeling_qwen3.Qwen3MLP):
    kernels.replace_kernel_forward_from_hub(module, "SwiGLUMLP")
SHAPE = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
             num_attention_heads=4, num_key_value_heads=2)
COMPILED = Mode.TRAINING | Mode.TORCH_COMPILE
ids = torch.randint(96, (3, 14))
labels = torch.where(torch.rand(3, 14) < 0.4, ids, -100)


def step(model, run):
    model.zero_grad()
    output = run(ids, labels=labels)
    output.loss.backward()
    return output.logits.detach(), [p.grad for p in model.parameters()]


for kind, config, mode, page in (
    (LlamaForCausalLM, LlamaConfig(**SHAPE), COMPILED, modeling_llama),
    (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=8), Mode.TRAINING, modeling_qwen3),
    (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=8), Mode.INFERENCE, modeling_qwen3),
):
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    logits, grads = step(model, model)
    mapping = {
        name: {"cpu": {mode: LocalLayerRepository(folders[0], layer_name=layer)}}
        for name, layer in NAMES.items()
    }
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=mode, device="cpu")
    replaced = [type(m).__name__ for m in [*model.modules(), page.apply_rotary_pos_emb]
                if m.forward.__func__.__module__.startswith("_bwsft_kernels_cpu_")]
    # Norms of the layer and the last one, of Qwen 3's queries and keys; the MLP; the function.
    assert len(replaced) == (3 if kind is LlamaForCausalLM else 5) + 1 + 1, replaced
    found, found_grads = step(model, torch.compile(model, backend="eager")
                              if Mode.TORCH_COMPILE in mode else model)
    # Sums over the hidden size or the features in another order.
    band = 80 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found, logits, rtol=0, atol=float(band * logits.abs().max()))
    largest = max(float(grad.abs().max()) for grad in grads)
    for grad, true in zip(found_grads, grads, strict=True):
        torch.testing.assert_close(grad, true, rtol=0, atol=band * largest)
    print(kind.__name__, mode, float((found - logits).abs().max()))


@kernels.use_kernel_forward_from_hub("Loss")
class Loss(torch.nn.Linear):
    def forward(self, input, target):
        return torch.nn.functional.cross_entropy(super().forward(input), target)


loss, x, target = Loss(8, 50), torch.randn(6, 8), torch.randint(50, (6,))
true = loss(x, target)
mapping = {"Loss": {"cpu": LocalLayerRepository(folders[0], layer_name="LinearCrossEntropy")}}
with use_kernel_mapping(mapping, inherit_mapping=False):
    kernelize(loss, mode=COMPILED, device="cpu", use_fallback=False)
assert loss.forward.__func__ is not Loss.forward
torch.testing.assert_close(loss(x, target), true)

q, k = torch.randn(2, 4, 14, 8), torch.randn(2, 2, 14, 8)
angles = torch.rand(1, 14, 4)  # one table for all sequences
cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
layer = kernels.get_local_kernel(folders[0]).layers.RotaryPosEmb()
for first, other in zip(layer(q, k, cos, sin),
                        layer(q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2), strict=True):
    assert torch.equal(first, other.transpose(1, 2))
rotated = modeling_llama.rotate_half(q) * sin[:, None] + q * cos[:, None]
torch.testing.assert_close(layer(q, k, cos, sin)[0], rotated)
"""
CARD = """
os.environ["LOCAL_KERNELS"] = f"<organization>/bwsft-kernels={folders[0]}"
hub = kernels.LayerRepository


def local(repository, *, layer_name, **options):
    hub(repository, layer_name=layer_name, **options)  # asks the Hub only when it loads
    return kernels.LocalLayerRepository(folders[0], layer_name=layer_name)


kernels.LayerRepository = local
"""


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """Folders of two builds, whose sources differ by a comment."""
    spec = importlib.util.spec_from_file_location("local_build", PROJECT / "local_build.py")
    local_build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(local_build)
    folder = tmp_path_factory.mktemp("hub")
    ignored = shutil.ignore_patterns("__pycache__", "build")
    other = Path(shutil.copytree(PROJECT, folder / "project", ignore=ignored))
    with open(other / "torch-ext/bwsft_kernels/layers.py", "a", encoding="utf-8") as file:
        file.write("# another version\n")
    for project, out in ((PROJECT, folder / "first"), (other, folder / "second")):
        local_build.lay_out(project, out)
    return folder / "first", folder / "second"


def run(code, builds, cwd):
    """`bwsft_kernels` can't be imported by its name: what runs is the build."""
    hidden = "import sys; sys.modules['bwsft_kernels'] = None\n"
    command = [sys.executable, "-c", hidden + START + code, *map(str, builds)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr[-4000:]


def test_two_copies_in_one_process(builds, tmp_path):
    run(TWO_COPIES, builds, tmp_path)


def test_kernelized_models_are_the_same(builds, tmp_path):
    run(TRANSFORMERS + KERNELIZED, builds, tmp_path)


def test_the_cards_examples(builds, tmp_path):
    text = (PROJECT / "CARD.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert len(blocks) == 2
    run(TRANSFORMERS + CARD + "\n".join(blocks), builds, tmp_path)

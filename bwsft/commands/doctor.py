"""`bwsft doctor`: versions, device, which kernels are used, and whether they are right here."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from bwsft_kernels import linear_cross_entropy, reference
from bwsft_kernels.implementations import implementations
from huggingface_hub import constants
from torch import Tensor

from bwsft.checkpoints.folders import versions
from bwsft.commands.options import DoctorOptions
from bwsft.models.attention import varlen_kernel
from bwsft.utils.devices import pick_device
from bwsft.utils.files import cache_folder
from bwsft.utils.lines import say
from bwsft.utils.threads import idle_cores

ROWS, WIDTH, VOCABULARY = 192, 128, 3_000  # of the self-test; a row in four is not supervised


def run_doctor(options: DoctorOptions) -> int:
    """Print the report and return the exit status: 1 if a result on the device is wrong."""
    device = pick_device(options.device)
    half = device.type == "cuda"
    dtype = torch.bfloat16 if half else torch.float32
    section("versions", [*versions().items(), ("CUDA of torch", torch.version.cuda or "none")])
    section("device", machine(device))
    kernels = implementations(device, dtype)
    packed = varlen_kernel(device, dtype, WIDTH) is not None
    why = "flash attention of torch" if packed else f"padded; packed needs CUDA, not {device.type}"
    lines = [(name, f"{found}: {reason}") for name, (found, reason) in kernels.items()]
    section(f"kernels for {dtype} on {device.type}", [*lines, ("attention", why)])
    section("caches", [(name, f"{path}  {size_of(path)}") for name, path in caches().items()])
    tests = [self_test(device, kind) for kind in ((dtype, torch.float32) if half else (dtype,))]
    section("self-test: fused loss and its gradients against float64", [t[:2] for t in tests])
    if all(right for _, _, right in tests):
        return 0
    say("\nThe fused loss is wrong on this device: please report it with the lines above.")
    return 1


def section(title: str, lines: list[tuple[str, str]]) -> None:
    say(f"{title}\n" + "".join(f"  {name:22}{value}\n" for name, value in lines))


def machine(device: torch.device) -> list[tuple[str, str]]:
    """The device, and the cores beside it."""
    lines = [("device", "CPU")]
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
        memory = f"{free:.1f} of {total:.1f} GiB free"
        lines = [("device", f"{card.name}, sm_{card.major}{card.minor}, {memory}")]
    idle = idle_cores()
    cores = f"{os.cpu_count()}" + ("" if idle is None else f", {idle:.1f} of ours idle")
    given = os.environ.get("OMP_NUM_THREADS", "not set")
    threads = f"{torch.get_num_threads()} (OMP_NUM_THREADS {given})"
    system = f"{platform.system()} {platform.machine()}"
    return [*lines, ("system", system), ("cores", cores), ("threads of torch", threads)]


def caches() -> dict[str, Path]:
    """Folders that grow with use."""
    triton = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton/cache"
    return {
        "models and data sets": Path(constants.HF_HUB_CACHE),
        "tokenized data": cache_folder(), "compiled kernels": Path(triton),
    }  # fmt: skip


def size_of(folder: Path) -> str:
    """What a folder holds, and what its disk has left."""
    if not folder.is_dir():
        return "(not there yet)"
    files = (Path(at) / name for at, _, names in os.walk(folder) for name in names)
    size = sum(file.lstat().st_size for file in files)
    return f"{size / 1e9:.2f} GB, {shutil.disk_usage(folder).free / 1e9:.0f} GB free"


def self_test(device: torch.device, dtype: torch.dtype) -> tuple[str, str, bool]:
    """(what, how far off, whether that is rounding): the fused loss may be off from full logits in
    float64 by three times what torch's own head and loss are off in the same dtype."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator).to(device, dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(device, dtype) / WIDTH**0.5
    target = torch.randint(VOCABULARY, (ROWS,), generator=generator).to(device)
    target[::4] = -100

    def torch_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), target)

    exact = with_gradients(reference.linear_cross_entropy, x.double(), weight.double(), target)
    fused = errors(with_gradients(linear_cross_entropy, x, weight, target), exact)
    usual = errors(with_gradients(torch_loss, x, weight, target), exact)
    floor = torch.finfo(dtype).eps  # a result that is exact by chance allows one rounding
    right = all(a <= 3 * max(b, floor) for a, b in zip(fused, usual, strict=True))
    said = f"off by {max(fused):.1e}, torch's own by {max(usual):.1e}: "
    return str(dtype), said + ("right" if right else "WRONG"), right


def with_gradients(loss, x: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
    """The loss, and its gradients in x and weight."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
    value = loss(*leaves, target)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Relative error of each, by norm; infinite for what is not finite."""
    ratios = [
        float((one.double() - other).norm() / other.norm())
        for one, other in zip(found, exact, strict=True)
    ]
    return [ratio if ratio == ratio else float("inf") for ratio in ratios]

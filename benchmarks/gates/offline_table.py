"""Compile every shipped Triton configuration for sm_80, sm_86, sm_90 and sm_120 without a GPU.

python benchmarks/gates/offline_table.py [--write FOLDER] prints registers, spills, shared memory,
CTAs per SM, matrix instruction and vector width of each kernel, and fails if one spills or doesn't
fit. The launchers themselves run (offline_cases.py), so what is compiled is what a GPU would get;
only the launch is left out. tests/kernels/test_compile_offline.py asserts on the rows.
"""

import argparse
import contextlib
import datetime
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch
import triton
from bwsft_kernels import _tuning
from offline_cases import VOCABULARIES, D, cases
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Chip:
    """Limits from the CUDA programming guide, table of compute capabilities."""

    target: int
    table: object  # the key in _tuning.TABLE
    processors: int  # of A100, RTX 3090, H100, RTX 5090
    sm_bytes: int  # shared memory of one SM
    cta_bytes: int  # the most one CTA may have
    warps: int
    ctas: int


CHIPS = {
    80: Chip(80, 80, 108, 164 << 10, 163 << 10, 64, 32),
    86: Chip(86, _tuning.SAFE, 82, 100 << 10, 99 << 10, 48, 16),
    90: Chip(90, 90, 132, 228 << 10, 227 << 10, 64, 32),
    120: Chip(120, _tuning.SAFE, 170, 100 << 10, 99 << 10, 48, 24),
}


@dataclass(frozen=True)
class Row:
    kernel: str
    variant: str
    arch: int
    tile: str
    warps: int
    stages: int
    registers: int
    spilled: int  # bytes of local memory a thread uses, spills and everything else
    shared: int
    ctas: int
    matrix: str
    widths: tuple  # bytes of the asynchronous copies, or else of the vector loads; or "TMA"
    copies: int  # asynchronous copies in the code, of all stages
    stores: int  # of 16 bytes to global memory, in the code
    fp_fusion: bool


class _Driver:
    """Enough of a Triton driver to compile for a chip that isn't there."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return self.arch  # kernels are cached by device

    def get_current_stream(self, device):
        return 0


@contextlib.contextmanager
def _compiling_for(chip: Chip, kernels: list):
    """Inside, launches compile for `chip` and append to `kernels` instead of running."""
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(_tuning, "architecture", lambda device: chip.table),
        mock.patch.object(_tuning, "processors", lambda device: chip.processors),
        mock.patch.object(driver, "_active", _Driver(chip.target)),
    ):
        yield


def compile_launch(launch, arch: int) -> list:
    """The kernels that launch() would start on `arch`, compiled."""
    kernels = []
    with _compiling_for(CHIPS[arch], kernels):
        launch()
    return kernels


def inspect(kernel, arch: int, variant: str, tile: str) -> Row:
    """What ptxas and the PTX say about a compiled kernel."""
    chip, ptx, meta = CHIPS[arch], kernel.asm["ptx"], kernel.metadata
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            capture_output=True, text=True, check=True,
        ).stdout
    registers, stack, local = (
        int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL")
    )
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x[0-9a-f]+|\d+)[,;]", ptx)
    loads = re.findall(r"ld\.global[.\w:]*\.v(\d)\.b(\d+)", ptx)
    widths = [int(size, 0) for size in copies]
    if "cp.async.bulk.tensor" in ptx:
        widths = ["TMA"]
    widths = widths or [int(count) * int(bits) // 8 for count, bits in loads]
    # Registers go to warps in units of 256; 1 KB of shared memory is reserved for each CTA.
    warps = meta.num_warps
    by_registers = 65536 // (-(-registers * 32 // 256) * 256) // warps
    by_shared = chip.sm_bytes // (meta.shared + 1024)
    return Row(
        kernel=meta.name.removeprefix("_").removesuffix("_kernel"),
        variant=variant, arch=arch, tile=tile, warps=warps, stages=meta.num_stages,
        registers=registers, spilled=stack + local, shared=meta.shared,
        ctas=min(by_registers, by_shared, chip.warps // warps, chip.ctas),
        matrix=next((name for name in ("wgmma", "mma.sync") if name in ptx), "-"),
        widths=tuple(sorted(set(widths))),
        copies=len(copies),
        stores=len(re.findall(r"st\.global[.\w:]*\.(?:v4\.b32|v2\.b64)", ptx)),
        fp_fusion=meta.enable_fp_fusion,
    )  # fmt: skip


def build(arch: int, dtype=torch.bfloat16, cases=cases, **which) -> list[Row]:
    kind = "" if dtype == torch.bfloat16 else f", {str(dtype)[6:]}"  # torch.float32
    rows = []
    for name, variant, tile, launch in cases(CHIPS[arch].table, dtype, **which):
        variant = f"{name}, {variant}" if name in ("capped", "noise") else variant
        kernels = compile_launch(launch, arch)
        shapes = [tile] + ["-"] * (len(kernels) - 1)  # a second kernel merges the parts
        rows += [
            inspect(kernel, arch, variant + kind, shape)
            for kernel, shape in zip(kernels, shapes, strict=True)
        ]
    return list(dict.fromkeys(rows))


def complaints(row: Row) -> list[str]:
    """What is wrong with a row, in words."""
    wrong = []
    if row.spilled:
        wrong.append(f"spills {row.spilled} bytes")
    if row.shared > CHIPS[row.arch].cta_bytes:
        wrong.append(f"needs {row.shared} bytes of shared memory")
    if row.ctas < 1:
        wrong.append("doesn't fit an SM")
    return [f"{row.kernel} sm_{row.arch} {row.tile} {row.variant}: {text}" for text in wrong]


def markdown(rows: list[Row]) -> str:
    titles = (
        "kernel", "variant", "arch", "tile", "warps", "stages", "registers", "spilled B",
        "shared B", "CTAs/SM", "matrix instruction", "load bytes", "16-byte stores", "FP fusion",
    )
    lines = [
        f"Triton {triton.__version__}, torch {torch.__version__}, {datetime.date.today()}, "
        f"D {D}; compiled offline, run on no GPU. V is each of "
        f"{', '.join(map(str, VOCABULARIES))}; a row stands for all whose figures it shares.\n",
        "| " + " | ".join(titles) + " |",
        "|---" * len(titles) + "|",
    ]
    for row in rows:
        cells = (
            row.kernel, row.variant, f"sm_{row.arch}", row.tile, row.warps, row.stages,
            row.registers, row.spilled, row.shared, row.ctas, row.matrix,
            ", ".join(map(str, row.widths)) or "-", row.stores, "on" if row.fp_fusion else "off",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the table there too")
    parser.add_argument("--arch", type=int, nargs="+", choices=CHIPS, default=list(CHIPS))
    options = parser.parse_args()
    dtypes = (torch.bfloat16, torch.float32)
    rows = [row for arch in options.arch for dtype in dtypes for row in build(arch, dtype)]
    table = markdown(rows)
    print(table)
    if options.write:
        name = f"offline_table_triton-{triton.__version__}.md"
        (options.write / name).write_text(table)
    wrong = [text for row in rows for text in complaints(row)]
    print(json.dumps({"rows": [asdict(row) for row in rows], "complaints": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""`bwsft doctor`: what it reports, and that its self-test finds a wrong loss."""

import re

import torch
from bwsft_kernels import linear_cross_entropy
from bwsft_kernels.implementations import KERNELS, implementations

from bwsft.cli import main
from bwsft.commands import doctor


def test_the_report(capsys, monkeypatch, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/a.safetensors").write_bytes(bytes(30_000_000))
    monkeypatch.setenv("BWSFT_CACHE", str(tmp_path / "cache"))
    assert main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert f"torch                 {torch.__version__.split('+')[0]}" in out
    assert re.search(r"tokenized data +\S+cache  0.03 GB, \d+ GB free", out)
    assert out.count("torch: Triton kernels are for CUDA, this is cpu") == len(KERNELS)
    assert re.search(r"torch.float32 +off by \S+, torch's own by \S+: right", out)


def test_a_wrong_gradient_is_found(capsys, monkeypatch):
    """A loss whose value is right, and whose gradient misses one part in a thousand."""

    def wrong(x, weight, target):
        value = linear_cross_entropy(x, weight, target)
        return value + 1e-3 * (value - value.detach())

    monkeypatch.setattr(doctor, "linear_cross_entropy", wrong)
    assert main(["doctor", "--device", "cpu"]) == 1
    assert "WRONG" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "linear_cross_entropy", lambda x, w, t: (x.sum() + w.sum()) / 0)
    assert not doctor.self_test(torch.device("cpu"), torch.float32)[2]


def test_every_kernel_has_a_file():
    assert set(implementations(torch.device("cpu"), torch.float32)) == set(KERNELS)
    from importlib.util import find_spec

    assert all(find_spec(f"bwsft_kernels.{name}") for name in KERNELS.values())

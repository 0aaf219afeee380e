"""Bytes of live tensors by phase and by what they are for."""

import torch
from bwsft_kernels import linear_cross_entropy
from torch._subclasses.fake_tensor import FakeTensorMode

from bwsft.utils.live_bytes import LOGITS, OTHER, LiveBytes


def test_a_storage_counts_once_until_it_is_gone():
    live, x = LiveBytes(), torch.zeros(256)
    live.call([x], "inputs")
    with live:
        live.enter("first")
        y = x + 1
        z = y.view(16, 16)
        with live.called("more"):
            w = torch.ones(512)
        del w
        live.enter("second")
        del y  # its view keeps it
        u = z * 2
        del z
        live.call([u], "kept")
    assert +live.most["first"] == {"inputs": 1024, OTHER: 1024, "more": 2048}
    assert +live.most["second"] == {"inputs": 1024, OTHER: 2048}
    assert +live.now == {"inputs": 1024, "kept": 1024}


def test_a_loss_is_looked_into_and_a_card_has_its_own_chunks():
    rows, vocabulary = 64, 1000
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(rows, 32, requires_grad=True)
        weight = torch.empty(vocabulary, 32)
    target, whole = torch.zeros(rows, dtype=torch.long), 4 * rows * vocabulary
    for card, least, most in ((None, whole, 1.5 * whole), (whole // 4, whole / 4, whole / 2)):
        live = LiveBytes(card)
        live.call([x, weight], "inputs")
        with live:
            loss = linear_cross_entropy(x, weight, target)
        assert least <= live.most[""][LOGITS] <= most and loss.shape == ()

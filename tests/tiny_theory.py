"""A random bidirectional model of four tokens, in float64, and its predictions and gradients: what
the tests of expectations sum over all that can happen."""

import torch

from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import new_backbone

V, MASK, EOS = 4, 4, 5


def model(seed=3):
    """With weights large enough for uneven predictions."""
    config = LladaConfig(
        d_model=8, n_layers=1, n_heads=2, mlp_hidden_size=12, vocab_size=V + 2,
        max_sequence_length=32, mask_token_id=MASK, eos_token_id=EOS, pad_token_id=EOS,
    )  # fmt: skip
    net = new_backbone(config, seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        if p.dim() > 1:
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) / p.shape[1] ** 0.3
    return net


def log_p(net, rows):
    """Log-probabilities of the V tokens at every position of rows [S, L] of ids: [S, L, V]."""
    rows = torch.as_tensor(rows)
    size, length = rows.shape
    hidden = net.hidden_states(
        rows.flatten(), torch.arange(length).repeat(size), torch.arange(size + 1) * length
    )
    return (hidden @ net.head()[0].T)[:, :V].log_softmax(-1).view(size, length, V)


def gradient(net, loss):
    parts = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    return torch.cat([p.flatten() for p in parts])

"""The kernels in somebody else's loop: masks and loss of Blockwise SFT, with torch alone.

A one-layer bidirectional encoder learns to count: `python examples/loss.py` (seconds on a CPU).
"""

import torch
from bwsft_kernels import MaskSpec, block_mask, linear_cross_entropy
from torch import nn
from torch.nn.functional import cross_entropy

MASK, VOCAB, D = 99, 100, 64
torch.manual_seed(0)
spec = MaskSpec(block_size=8, mask_id=MASK)
ids = (torch.arange(32)[:, None] + torch.arange(24)) % 90  # [S, L]: counting from S starts
prompt, response = torch.full((32,), 4), torch.full((32,), 20)  # lengths [S]
embed, place, head = nn.Embedding(VOCAB, D), nn.Embedding(24, D), nn.Linear(D, VOCAB, bias=False)
body = nn.TransformerEncoderLayer(D, 4, 128, dropout=0.0, batch_first=True)
parameters = [p for m in (embed, place, head, body) for p in m.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=1e-2)

for step in range(201):
    masked = block_mask(ids, prompt, response, spec, draw=torch.full((32,), step))
    hidden = body(embed(masked.noisy_ids) + place.weight)  # [S, L, D]
    loss = linear_cross_entropy(hidden, head.weight, masked.labels)  # only the masked tokens
    if step % 50 == 0:
        naive = cross_entropy(head(hidden).flatten(0, 1), masked.labels.flatten())
        count = int((masked.labels != -100).sum())
        print(f"step {step}: loss {loss:.4f} of {count} tokens, {naive:.4f} of all {ids.numel()}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

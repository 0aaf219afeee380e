"""Hidden states, head and targets for bench_loss.py: random ones, or those of a trained model."""

import math
from argparse import Namespace
from dataclasses import dataclass

import torch
from bwsft_kernels import MaskSpec, block_mask
from torch import Tensor

RARER = 5.0  # nats by which all added words together are rarer than all real ones


@dataclass
class Problem:
    """x [T, D], head weight [V, D], target [T] with N kept rows."""

    x: Tensor
    weight: Tensor
    target: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.x, self.weight) if t.requires_grad]


def make_problem(args: Namespace, rows: int, vocabulary: int, head: str, data: str) -> Problem:
    """`rows` of the args.batch x args.length tokens supervised, chosen at random."""
    make = {"random": _random, "model": _of_model}[data]
    x, weight, target = make(args, vocabulary)
    generator = torch.Generator(args.device).manual_seed(0)
    left_out = torch.randperm(len(target), generator=generator, device=args.device)[rows:]
    target[left_out] = -100
    return Problem(x.requires_grad_(), weight.requires_grad_(head == "trainable"), target)


def _random(args: Namespace, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits near 0 that are sure of nothing."""
    tokens, device = args.batch * args.length, args.device
    options = dict(generator=torch.Generator(device).manual_seed(1), device=device)
    x = torch.randn(tokens, args.hidden, **options).to(args.dtype)
    weight = torch.empty(vocabulary, args.hidden, dtype=args.dtype, device=device)
    for part in weight.split(16_384):  # no fp32 copy of the whole head
        part.copy_(torch.randn(part.shape, **options) * 0.02)
    return x, weight, torch.randint(vocabulary, (tokens,), **options)


def _of_model(args: Namespace, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """The embedded model's on word problems, half of each answer masked, so that the logits are as
    peaked as in training. Hidden states and head keep their logits in `args.hidden` dimensions; the
    words that the model doesn't have are copies of its own at random ids, made rarer by a constant.
    """
    hidden, head, target = _trained_states(args.batch * args.length)
    width, words = head.shape[1], len(head)
    if args.hidden <= width or vocabulary <= words:
        raise SystemExit(f"--data model needs --hidden above {width} and --vocab above {words}")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(vocabulary, generator=generator)  # of the words; the real ones first
    source = torch.randint(words, (vocabulary - words,), generator=generator)
    copies = (vocabulary - words) / words
    x = torch.zeros(len(hidden), args.hidden)
    x[:, :width], x[:, width] = hidden, 1.0
    weight = torch.zeros(vocabulary, args.hidden, dtype=args.dtype)
    weight[ids[:words], :width] = head.to(args.dtype)
    weight[ids[words:], :width] = head[source].to(args.dtype)
    weight[ids[words:], width] = -(RARER + math.log(copies))
    return tuple(t.to(args.device) for t in (x.to(args.dtype), weight, ids[target]))


@torch.no_grad()
def _trained_states(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden states [tokens, D], head weight, the tokens themselves) of the embedded model."""
    from bwsft.checkpoints.resolve import load_trained
    from bwsft.data.word_problems import generate
    from bwsft.decoding.pipeline import Decoder

    decoder = Decoder.around(load_trained(None, device="cpu", dtype=torch.float32))
    backbone = decoder.trained.backbone
    records = generate(tokens // 32)  # a problem and its answer take more than 32 tokens
    prompts = decoder.encode([record["query"] for record in records])
    answers = [decoder.trained.tokenizer.encode(record["response"]) for record in records]
    ids = [torch.tensor([*p, *a]) for p, a in zip(prompts, answers, strict=True)]
    starts = torch.tensor([0, *map(len, ids)]).cumsum(0)
    spec = MaskSpec(tokens, backbone.family.mask_id, low=0.5, high=0.5)
    lengths = torch.tensor(list(map(len, prompts))), torch.tensor(list(map(len, answers)))
    masked = block_mask(torch.cat(ids), *lengths, spec, cu_seqlens=starts)
    position = torch.cat([torch.arange(len(row)) for row in ids])
    hidden = backbone.hidden_states(masked.noisy_ids, position, starts.int())
    return hidden[:tokens], backbone.head()[0].detach(), torch.cat(ids)[:tokens]

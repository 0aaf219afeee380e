"""The context cache: pruned, recorded and active-row passes against whole forwards, in float64."""

import dataclasses

import pytest
import tiny_llada
import tiny_packed
import torch
from tiny_packed import LENGTHS, SIZES, STARTS, full, masked, packed, span, supervised_rows

from bwsft.models.kv_cache import Context, Span


def backbone(**changes):
    return tiny_llada.backbone(seed=3, n_layers=3, n_kv_heads=2, **changes)


def test_pruned_rows_are_the_rows_of_the_whole_forward():
    model, batch, where = backbone(), packed(), span()
    flat = where.flat(batch.cu_seqlens)
    pruned = model.hidden_states(batch.ids, batch.position_ids, batch.cu_seqlens, wanted=flat)
    torch.testing.assert_close(pruned, full(model, batch)[flat.flatten()], rtol=1e-12, atol=1e-12)


def test_exact_loss_and_gradients_do_not_change_with_pruning():
    batch, where = packed(), span()
    rows, target, weight = supervised_rows(batch, where)
    found = []
    for context in (None, Context(where)):
        model = backbone()
        loss = model(batch, rows, target, weight, context)
        loss.backward()
        found.append((loss.item(), [p.grad for p in model.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-7)  # the loss is fp32
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lengths", [LENGTHS, (13, 13, 13)])
def test_active_rows_of_the_state_that_was_cached_equal_the_whole_forward(lengths):
    """With the block as the context pass saw it, freezing the context changes nothing."""
    even = len(set(lengths)) == 1
    where = span(sizes=(4, 4, 4), starts=(5, 4, 9), even=True) if even else span()
    model, batch = backbone(), masked(packed(lengths), where)
    cache = model.new_cache(3, max(lengths))
    flat = where.flat(batch.cu_seqlens)
    with torch.no_grad():
        first = model.fill(batch, cache, wanted=flat)
        active = model.active_hidden_states(batch.ids[flat], where, cache)
        expected = full(model, batch)[flat.flatten()]
    assert (cache.even is not None) == even
    torch.testing.assert_close(first, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(active, expected, rtol=1e-12, atol=1e-12)


def frozen_rows(model, batch, noisy, where):
    """A slow loop with an explicitly frozen context: keys and values of `batch` outside the span,
    those of `noisy` inside; one sequence and one layer after the other."""
    core = model.base_model.model
    blocks, out = core.transformer["blocks"], []
    heads, size = 4, 8
    for s in range(len(where.start)):
        a, b = int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1])
        start, stop = int(where.start[s]), int(where.start[s] + where.length[s])
        x = core.transformer["wte"](batch.ids[a:b])
        y = core.transformer["wte"](noisy.ids[a + start : a + stop])
        position = torch.arange(b - a, dtype=torch.float64)
        angle = position[:, None] / 500000.0 ** (torch.arange(0, size, 2).double() / size)

        def turn(t, angle):
            c, d = angle.cos()[:, None], angle.sin()[:, None]
            u, v = t[..., : size // 2], t[..., size // 2 :]
            return torch.cat([u * c - v * d, v * c + u * d], -1)

        def qkv(block, rows, angle):
            normed = block.attn_norm(rows)
            q = turn(block.q_proj(normed).view(len(rows), heads, size), angle)
            k = turn(block.k_proj(normed).view(len(rows), 2, size), angle)
            v = block.v_proj(normed).view(len(rows), 2, size)
            return q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)

        def mix(block, rows, q, k, v):
            score = torch.einsum("qhe,khe->hqk", q, k) / size**0.5
            mixed = torch.einsum("hqk,khe->qhe", score.softmax(-1), v).flatten(1)
            rows = rows + block.attn_out(mixed)
            return rows + block.mlp(block.ff_norm(rows))

        for block in blocks:
            q, k, v = qkv(block, x, angle)
            qa, ka, va = qkv(block, y, angle[start:stop])
            keys = torch.cat([k[:start].detach(), ka, k[stop:].detach()])
            values = torch.cat([v[:start].detach(), va, v[stop:].detach()])
            x, y = mix(block, x, q, k, v), mix(block, y, qa, keys, values)
        out.append(core.transformer["ln_f"](y))
    return out


@pytest.mark.parametrize("checkpointing", [False, True])
def test_cached_gradients_equal_those_of_an_explicitly_frozen_context(checkpointing):
    where = span()
    clean = packed()
    context, noisy = masked(clean, where), masked(clean, span(sizes=(2, 1, 3)))
    rows, target, weight = supervised_rows(clean, where)

    model = backbone()
    model.set_gradient_checkpointing(checkpointing)
    cache = model.new_cache(3, max(LENGTHS))
    model(context, None, None, None, Context(where, cache))
    loss = model(noisy, rows, target, weight, Context(where, cache))
    loss.backward()

    slow = backbone()
    hidden = torch.cat(frozen_rows(slow, context, noisy, where))
    logits = hidden @ slow.head()[0].T
    expected = (torch.nn.functional.cross_entropy(logits, target, reduction="none") * weight).sum()
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # the loss is fp32
    for (name, p), q in zip(model.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-9, msg=name)


def test_cached_gradients_equal_finite_differences_with_the_cache_held_fixed():
    where, clean = span(), packed()
    noisy = masked(clean, span(sizes=(2, 1, 3)))
    rows, target, weight = supervised_rows(clean, where)
    model = backbone()
    cache = model.new_cache(3, max(LENGTHS))
    model(masked(clean, where), None, None, None, Context(where, cache))

    def loss():
        # In float64: the fp32 loss of the public entry is too coarse for differences.
        hidden = model.active_hidden_states(
            noisy.ids[where.flat(noisy.cu_seqlens)], where, fresh(cache)
        )
        logits = hidden[where.index_of(rows, noisy.cu_seqlens)] @ model.head()[0].T
        each = torch.nn.functional.cross_entropy(logits, target, reduction="none")
        return (each * weight).sum()

    loss().backward()
    checked = 0
    for name in ("k_proj", "v_proj", "q_proj", "attn_out", "ff_out", "attn_norm"):
        for block in model.base_model.model.transformer["blocks"]:
            p = getattr(block, name).weight
            flat, i = p.detach().view(-1), (7 * checked) % p.numel()
            with torch.no_grad():
                h, old = 1e-6, flat[i].item()
                flat[i] = old + h
                up = loss().item()
                flat[i] = old - h
                down = loss().item()
                flat[i] = old
            assert p.grad.view(-1)[i].item() == pytest.approx((up - down) / (2 * h), rel=1e-5,
                                                              abs=1e-8), name
            checked += 1
    assert checked == 18


def fresh(cache):
    """A copy: a pass without gradients writes its own rows into the buffers."""
    return dataclasses.replace(
        cache, keys=[k.clone() for k in cache.keys], values=[v.clone() for v in cache.values]
    )


def test_a_draw_writes_its_own_slots_alone_and_draws_do_not_mix():
    """The context stays for the next draw; backward is right although another draw came between."""
    where, clean = span(), packed()
    noisy = masked(clean, span(sizes=(2, 1, 3)))
    model = backbone()
    cache = model.new_cache(3, max(LENGTHS))
    context = Context(where, cache)
    model(masked(clean, where), None, None, None, context)
    outside = torch.ones(3, max(LENGTHS), dtype=torch.bool)
    for s, (start, size) in enumerate(zip(STARTS, SIZES, strict=True)):
        outside[s, start : start + size] = False
    before = [k[:, :-1][outside].clone() for k in cache.keys]
    rows = supervised_rows(clean, where)
    model(clean, *rows, context).backward()
    alone = [p.grad.clone() for p in model.parameters()]
    assert all(torch.equal(a, k[:, :-1][outside]) for a, k in zip(before, cache.keys, strict=True))
    model.zero_grad()
    first = model(clean, *rows, context)
    model(noisy, *rows, context)
    first.backward()
    for p, q in zip(model.parameters(), alone, strict=True):
        torch.testing.assert_close(p.grad, q, rtol=1e-12, atol=1e-15)


def test_rows_of_one_sequence_do_not_depend_on_its_batch_mates():
    model, where = backbone(), span()
    together = masked(packed(), where)
    cache = model.new_cache(3, max(LENGTHS))
    flat = where.flat(together.cu_seqlens)
    with torch.no_grad():
        model.fill(together, cache)
        rows = model.active_hidden_states(together.ids[flat], where, cache).unflatten(0, (3, -1))
        for s in range(3):
            a, b = int(together.cu_seqlens[s]), int(together.cu_seqlens[s + 1])
            alone = tiny_packed.batch_of(together.ids[a:b])
            one = Span(where.start[s : s + 1], where.length[s : s + 1], SIZES[s], True)
            small = model.new_cache(1, b - a)
            model.fill(alone, small)
            got = model.active_hidden_states(alone.ids[one.flat(alone.cu_seqlens)], one, small)
            torch.testing.assert_close(got, rows[s, : SIZES[s]], rtol=1e-12, atol=1e-12)


def test_invisible_slots_do_not_matter():
    """block_causal: slots after the block may hold anything."""
    model, where = backbone(), span(sizes=(4, 4, 4), even=True)
    batch = packed()
    cache = model.new_cache(3, max(LENGTHS))
    flat = where.flat(batch.cu_seqlens)
    with torch.no_grad():
        model.fill(batch, cache)
        cache.show(where.start + where.length)
        first = model.active_hidden_states(batch.ids[flat], where, cache)
        for buffer in (*cache.keys, *cache.values):
            for s in range(3):
                buffer[s, STARTS[s] + 4 :] = 1e3
        second = model.active_hidden_states(batch.ids[flat], where, cache)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_keep_drops_rows():
    model, where = backbone(), span()
    batch = packed()
    cache = model.new_cache(3, max(LENGTHS))
    with torch.no_grad():
        model.fill(batch, cache)
        rows = model.active_hidden_states(
            batch.ids[where.flat(batch.cu_seqlens)], where, cache
        ).unflatten(0, (3, -1))
        kept = cache.keep(torch.tensor([True, False, True]))
        some = Span(where.start[[0, 2]], where.length[[0, 2]], where.width)
        ids = batch.ids[where.flat(batch.cu_seqlens)][[0, 2]]
        again = model.active_hidden_states(ids, some, kept).unflatten(0, (2, -1))
    torch.testing.assert_close(again, rows[[0, 2]], rtol=1e-12, atol=1e-12)

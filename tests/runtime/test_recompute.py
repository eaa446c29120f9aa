"""Guided recompute: the tokens chosen and the pass over them, against slow written-out references."""

import copy
import random
from functools import partial

import pytest
import torch
import zoo
from made_mappers import cache_of, content, mapper_spec, prefilled, random_mapper, same, spec_of
from torch.overrides import TorchFunctionMode

import kvfit
from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model import cache as caches
from kvfit.runtime.choice import auto_counts, choose, choose_tokens, keep_only
from kvfit.runtime.recompute import DRAFT_TOKENS, OTHERS_WEIGHT, QUESTION_TOKENS, guided_tokens
from kvfit.runtime.rewrite import rewrite

# These conversations are short. With the default of sixteen exact first tokens, little of them would be mapped.
handoff = partial(kvfit.handoff, exact_head=1)

FAMILIES = {family.name: family for family in zoo.FAMILIES}
# Every way in which attention differs between families, in either backend that the family has.
EAGER_ONLY = {"gemma2", "gpt-oss"}
CASES = [
    (name, backend)
    for name in FAMILIES
    for backend in (("eager",) if name in EAGER_ONLY else ("eager", "sdpa"))
    if backend == "eager"
    or name in {"qwen2-window", "qwen3", "llama", "mistral-window", "gemma3", "gemma4-shared", "cohere2", "smollm3", "phi3"}
]


def build(name, backend="eager"):
    return zoo.build(FAMILIES[name], attn_implementation=backend)


def tokens(batch, length, seed=0):
    return torch.randint(5, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


def every(n_tokens):
    return torch.ones(1, n_tokens, dtype=torch.bool)


def left_padded(ids, paddings):
    mask = torch.ones_like(ids)
    for row, padding in enumerate(paddings):
        mask[row, :padding] = 0
    return mask


def one_at_a_time(model, ids, mask, cache, chosen):
    """Each chosen token of each row alone, in order, on top of what the earlier ones have by then; per row keys and values."""
    rows = []
    for row in range(ids.shape[0]):
        current = [(k[row : row + 1].clone(), v[row : row + 1].clone()) for k, v in caches.read_cache(cache)]
        for token in sorted(set(chosen[row].tolist())):
            seen = caches.full_cache()
            for layer, (keys, values) in enumerate(current):
                caches.append(seen, layer, keys[:, :, :token], values[:, :, :token])
            position = mask[row, : token + 1].sum() - 1
            with torch.no_grad():
                model(
                    input_ids=ids[row : row + 1, token : token + 1],
                    attention_mask=mask[row : row + 1, : token + 1],
                    position_ids=position.clamp(min=0)[None, None],
                    **{caches.cache_argument(model): seen},
                )
            for (keys, values), layer in zip(current, seen.layers, strict=True):
                keys[:, :, token], values[:, :, token] = layer.keys[:, :, token], layer.values[:, :, token]
        rows.append(current)
    return rows


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_the_pass_equals_one_token_at_a_time(name, backend, monkeypatch):
    monkeypatch.setattr("kvfit.runtime.rewrite.BLOCK_TOKENS", 2)  # of 7 tokens, so that attention runs in four blocks
    model = build(name, backend)
    batch, length = 2, 44
    ids = tokens(batch, length)
    mask = left_padded(ids, (0, 5))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    generator = torch.Generator().manual_seed(3)
    native = prefilled(model, ids, mask, cache=caches.full_cache())
    noisy = cache_of(
        [
            (k + torch.randn(k.shape, generator=generator), v + torch.randn(v.shape, generator=generator))
            for k, v in caches.read_cache(native)
        ]
    )
    chosen = torch.tensor([[0, 1, 9, 10, 11, 30, 43], [6, 7, 20, 20, 31, 41, 42]])
    wanted = one_at_a_time(model, ids, mask, noisy, chosen)
    before = content(noisy)
    windows = caches.layer_windows(model, 3)
    rewrite(model, ids, noisy, chosen, position_ids=positions, attention_mask=mask, windows=windows)
    for row in range(batch):
        for (keys, values), (wanted_keys, wanted_values) in zip(caches.read_cache(noisy), wanted[row], strict=True):
            assert torch.allclose(keys[row], wanted_keys[0], atol=2e-4, rtol=1e-4)
            assert torch.allclose(values[row], wanted_values[0], atol=2e-4, rtol=1e-4)
        rest = sorted(set(range(length)) - set(chosen[row].tolist()))
        assert all(torch.equal(now[row, :, rest], then[row, :, rest]) for now, then in zip(content(noisy), before, strict=True))
    assert not torch.allclose(content(noisy)[0], before[0], atol=0.1)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_no_key_is_read_behind_a_blocks_last_token(name, monkeypatch):
    """Attention of a pass over chosen tokens computes few of the pairs that its mask hides."""

    class Lengths(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.nn.functional.scaled_dot_product_attention:
                seen.append((args[0].shape[2], args[1].shape[2]))
            return function(*args, **(kwargs or {}))

    model, ids = build(name, "sdpa"), tokens(2, 60)
    chosen = torch.tensor([[2, 3, 9, 10, 11, 30, 31, 55], [0, 3, 4, 5, 20, 40, 41, 42]])
    arguments = {
        "position_ids": torch.arange(60).expand(2, -1),
        "attention_mask": torch.ones_like(ids),
        "windows": caches.layer_windows(model, 3),
    }
    found = []
    for block_tokens, wanted in ((3, [(3, 10), (3, 41), (2, 56)]), (8, [(8, 56)])):
        monkeypatch.setattr("kvfit.runtime.rewrite.BLOCK_TOKENS", block_tokens)
        seen, cache = [], prefilled(model, ids, cache=caches.full_cache())
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys + 0.3, layer.values - 0.2
        with Lengths():
            rewrite(model, ids, cache, chosen, **arguments)
        assert seen == wanted * 2  # the last layer attends to nothing: its keys and values are all that is needed
        found.append(cache)
    close(*found)


@pytest.fixture(scope="module")
def pair(tiny_pair, load):
    source, target = (load(folder).model for folder in tiny_pair)
    return source, target, random_mapper(mapper_spec(spec_of(source), spec_of(target), [[0, 1], [1], [1, 2], [2]]))


def close(found, wanted, atol=1e-4):
    for a, b in zip(content(found), content(wanted), strict=True):
        assert torch.allclose(a, b, atol=atol), float((a - b).abs().max())


@pytest.mark.parametrize("paddings", [(0, 0), (0, 7)])
@pytest.mark.parametrize("head", [0, 1])
def test_all_tokens_are_a_prefill_and_none_a_transfer(pair, head, paddings):
    source, target, mapper = pair
    ids = tokens(2, 30)
    mask = left_padded(ids, paddings)
    cache = prefilled(source, ids, mask)
    native = prefilled(target, ids[:, :29], mask[:, :29])
    plain = handoff(mapper, target, ids, cache, attention_mask=mask, exact_head=head)
    shared = {"attention_mask": mask, "exact_head": head}
    for arguments in ({"exact_tokens": range(29)}, {"recompute": 1.0, "guide": source}):
        moved = handoff(mapper, target, ids, cache, **shared, **arguments)
        for a, b, c in zip(content(moved.cache), content(native), content(plain.cache), strict=True):
            real = mask[:, None, :29, None].bool().expand_as(a)
            assert torch.allclose(a[real], b[real], atol=1e-4)
            assert not torch.allclose(c[real], b[real], atol=0.1)  # the control: the transfer itself is far from it
    for arguments in (
        {"exact_tokens": []},
        {"recompute": 0.0, "guide": source},
        {"exact_tokens": torch.zeros(2, 0, dtype=torch.long)},
    ):
        none = handoff(mapper, target, ids, cache, **shared, **arguments)
        assert same(none.cache, plain.cache)
        assert none.recomputed is None


@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("padding", [0, 3])
def test_a_prompt_that_the_target_runs_itself_has_nothing_to_run_again(pair, length, padding):
    """The head covers what is moved: a prompt of two tokens, or the padding of a batch of short ones."""
    source, target, mapper = pair
    ids = tokens(2, length + padding)
    mask = left_padded(ids, (padding, 0))
    cache = prefilled(source, ids, mask)
    for arguments in ({"recompute": 0.5, "guide": source}, {"recompute": "auto", "guide": source}, {"exact_tokens": [0]}):
        moved = handoff(mapper, target, ids, cache, attention_mask=mask, exact_head=length, **arguments)
        assert (moved.n_mapped, moved.n_exact, moved.recomputed) == (0, length + padding - 1, None)
        close(moved.cache, prefilled(target, ids[:, :-1], mask[:, :-1]))


@pytest.mark.parametrize("name", ["gemma3", "qwen2-window", "mistral-window"])
def test_windows(name):
    model = build(name, "sdpa")
    spec = spec_of(model)
    mapper = random_mapper(mapper_spec(spec, spec, [[0, 1], [1], [2]]))
    ids = tokens(2, 61)
    source = prefilled(model, ids[:, :60], cache=caches.full_cache())
    every = handoff(mapper, model, ids, source, exact_tokens=range(60))
    native = prefilled(model, ids[:, :60])
    assert [layer.keys.shape for layer in every.cache.layers] == [layer.keys.shape for layer in native.layers]
    close(every.cache, native)
    # Some tokens, then the exact tail on top: as one at a time on full-length layers.
    some = handoff(mapper, model, ids, source, exact_tail=6, exact_tokens=[3, 20, 21, 50])
    base = handoff(mapper, model, ids[:, :55], [(k[:, :, :54], v[:, :, :54]) for k, v in caches.read_cache(source)])
    assert base.n_mapped == 53
    whole = caches.full_cache()
    caches.forward(model, ids[:, :1], whole, base=True)
    for layer, (keys, values) in enumerate(mapper.transfer_layers(source)):
        caches.append(whole, layer, keys[:, :, 1:54], values[:, :, 1:54])
    chosen = torch.tensor([[3, 20, 21, 50]] * 2)
    rows = one_at_a_time(model, ids, torch.ones_like(ids), whole, chosen)
    wanted = cache_of([tuple(torch.cat(halves) for halves in zip(*layer, strict=True)) for layer in zip(*rows, strict=True)])
    caches.forward(model, ids[:, 54:60], wanted, base=True)
    for layer, (keys, values) in zip(some.cache.layers, caches.read_cache(wanted), strict=True):
        stored = layer.keys.shape[2]
        assert torch.allclose(layer.keys, keys[:, :, -stored:], atol=2e-4)
        assert torch.allclose(layer.values, values[:, :, -stored:], atol=2e-4)


def test_a_next_turn_on_windowed_layers():
    model = build("gemma3", "sdpa")
    spec = spec_of(model)
    mapper = random_mapper(mapper_spec(spec, spec, [[0, 1], [1], [2]]))
    ids = tokens(1, 81)
    source = prefilled(model, ids[:, :80], cache=caches.full_cache())
    first = handoff(mapper, model, ids[:, :51], [(k[:, :, :50], v[:, :, :50]) for k, v in caches.read_cache(source)])
    # Token 10 lies where a windowed layer has dropped what it would need; only the new ones are run again.
    chosen = {"exact_tokens": [10, 50, 51, 60, 79]}
    kept = content(first.cache)
    moved = handoff(mapper, model, ids, source, target_cache=first.cache, target_ids=ids[:, :50], **chosen)
    assert moved.recomputed.tolist() == [[50, 51, 60, 79]]
    assert moved.n_reused == 50
    assert same(first.cache, kept)  # made anew
    at_once = handoff(mapper, model, ids, source, exact_tokens=[50, 51, 60, 79])
    close(moved.cache, at_once.cache)


def test_an_earlier_turns_tokens_can_be_run_again(pair):
    """A question may be about what was moved turns ago."""
    source, target, mapper = pair
    ids = tokens(1, 41)
    first = handoff(mapper, target, ids[:, :21], prefilled(source, ids[:, :20]))
    cache = prefilled(source, ids[:, :40])
    moved = handoff(mapper, target, ids, cache, target_cache=first.cache, target_ids=ids[:, :20], exact_tokens=[7, 8, 30])
    close(moved.cache, handoff(mapper, target, ids, cache, exact_tokens=[7, 8, 30]).cache)


def test_rows_choose_for_themselves(pair):
    source, target, mapper = pair
    ids = tokens(3, 25)
    cache = prefilled(source, ids)
    chosen = torch.tensor([[9, 3, 20], [5, 5, 5], [22, 23, 1]])
    moved = handoff(mapper, target, ids, cache, exact_tokens=chosen)
    for row in range(3):
        alone = [(k[row : row + 1], v[row : row + 1]) for k, v in caches.read_cache(cache)]
        single = handoff(mapper, target, ids[row : row + 1], alone, exact_tokens=sorted(set(chosen[row].tolist())))
        for a, b in zip(content(moved.cache), content(single.cache), strict=True):
            assert torch.allclose(a[row], b[0], atol=1e-4)


def test_tokens_of_the_tail_are_exact_anyway(pair):
    source, target, mapper = pair
    ids = tokens(1, 25)
    cache = prefilled(source, ids)
    plain = handoff(mapper, target, ids, cache, exact_tail=5)
    close(handoff(mapper, target, ids, cache, exact_tail=5, exact_tokens=[20, 23]).cache, plain.cache)
    both = handoff(mapper, target, ids, cache, exact_tail=5, exact_tokens=[4, 23])
    close(both.cache, handoff(mapper, target, ids, cache, exact_tail=5, exact_tokens=[4]).cache)


def test_the_guide_chooses_among_mapped_tokens_alone(pair):
    """In a padded batch the exact head spans the longest padding; what is run again lies behind it, in every row."""
    source, target, mapper = pair
    ids = tokens(2, 60)
    mask = left_padded(ids, (0, 40))
    cache = prefilled(source, ids, mask)
    for fraction, count in ((0.1, 2), (0.5, 10), (1.0, 18)):
        moved = handoff(mapper, target, ids, cache, attention_mask=mask, recompute=fraction, guide=source)
        assert moved.n_mapped == 18
        assert [len(set(row)) for row in moved.recomputed.tolist()] == [count] * 2
        assert moved.recomputed.amin() >= 41
        assert moved.recomputed.amax() < 59
        assert f"18 mapped, {count} of them run again" in repr(moved)
    moved = handoff(mapper, target, ids, cache, attention_mask=mask, recompute="auto", guide=source)
    assert 1 <= moved.recomputed.shape[1] <= 4
    assert moved.recomputed.amin() >= 41


def test_a_row_has_its_own_budget(pair):
    """Without an exact head a row is mapped from its first token on, so rows have unlike numbers of mapped tokens."""
    source, target, mapper = pair
    ids = tokens(3, 60)
    mask = left_padded(ids, (0, 40, 59))
    cache = prefilled(source, ids, mask)
    moved = handoff(mapper, target, ids, cache, attention_mask=mask, exact_head=0, recompute=0.5, guide=source)
    rows = [set(row) for row in moved.recomputed.tolist()]
    assert [len(row) for row in rows] == [30, 10, 1]
    assert min(rows[1]) > 40
    assert rows[2] == {0}  # nothing of it is mapped, and its padding changes nothing


def test_a_longer_exact_head_leaves_the_guide_the_rest(pair):
    source, target, mapper = pair
    ids = tokens(1, 61)
    cache = prefilled(source, ids[:, :60])
    moved = handoff(mapper, target, ids, cache, exact_head=41, exact_tail=4, recompute=0.5, guide=source)
    assert (moved.n_mapped, moved.recomputed.shape[1]) == (15, 8)  # half of 15 and the first
    assert moved.recomputed.amin() >= 41
    assert moved.recomputed.amax() < 56


def test_only_mapped_tokens_count_as_run_again(pair):
    source, target, mapper = pair
    ids = tokens(2, 31)
    cache = prefilled(source, ids)
    plain = handoff(mapper, target, ids, cache, exact_tail=10)
    moved = handoff(mapper, target, ids, cache, exact_tail=10, exact_tokens=[0, 5, *range(20, 30)])
    assert moved.recomputed.tolist() == [[5]] * 2
    assert "19 mapped, 1 of them run again" in repr(moved)
    rows = torch.tensor([[5, 22, 9, 25], [3, 3, 28, 28]])
    moved = handoff(mapper, target, ids, cache, exact_tail=10, exact_tokens=rows)
    assert moved.recomputed.tolist() == [[5, 9], [3, 3]]
    # A row that asks for exact tokens alone is that of a plain transfer.
    moved = handoff(mapper, target, ids, cache, exact_tail=10, exact_tokens=[[5, 9], [0, 28]])
    assert moved.recomputed.tolist() == [[5, 9], [0, 0]]
    for found, wanted in zip(content(moved.cache), content(plain.cache), strict=True):
        assert torch.allclose(found[1], wanted[1], atol=1e-4)
    assert handoff(mapper, target, ids, cache, exact_tail=10, exact_tokens=[0, 28]).recomputed is None


def test_held_tokens_that_are_run_again_are_not_counted_as_mapped(pair):
    source, target, mapper = pair
    ids = tokens(1, 41)
    cache = prefilled(source, ids[:, :40])
    for arguments in ({"exact_tokens": [7, 8, 21, 30]}, {"recompute": 0.1, "guide": source}):
        first = handoff(mapper, target, ids[:, :21], prefilled(source, ids[:, :20]))
        moved = handoff(mapper, target, ids, cache, target_cache=first.cache, target_ids=ids[:, :20], **arguments)
        assert "20 reused, 20 mapped, 4 run again, 0 exact" in repr(moved)


@pytest.mark.parametrize("seed", range(10))
def test_tokens_that_are_kept(seed):
    """Against sets: each row's own tokens, once each, as wide as the longest row."""
    rng = random.Random(seed)
    n_rows, n_tokens, width = rng.randrange(1, 4), rng.randrange(1, 12), rng.randrange(1, 9)
    rows = [[rng.randrange(n_tokens + 4) for _ in range(width)] for _ in range(n_rows)]
    among = [{token for token in range(n_tokens) if rng.random() < 0.6} for _ in range(n_rows)]
    mask = torch.tensor([[token in own for token in range(n_tokens)] for own in among])
    wanted = [sorted(set(row) & own) for row, own in zip(rows, among, strict=True)]
    longest = max(len(row) for row in wanted)
    found = keep_only(torch.tensor(rows), mask, 99).tolist()
    assert found == [sorted(row + (row[:1] or [99]) * (longest - len(row))) for row in wanted]


def test_what_may_not_be_chosen_never_is():
    """However large its attention is, and however large the budget. The first token and excluded ones come last."""
    worth = torch.zeros(2, 40)
    worth[:, :20] = 1.0
    among = torch.arange(40).expand(2, -1) >= torch.tensor([[20], [30]])
    first = torch.arange(40).expand(2, -1) == torch.tensor([[0], [30]])
    excluded = torch.arange(40).expand(2, -1) == torch.tensor([[39], [40]])
    for fraction, counts in ((0.25, (6, 3)), (0.9, (19, 9)), (1.0, (20, 10))):
        found = [set(row) for row in choose(worth, among, fraction, first, excluded).tolist()]
        assert tuple(len(row) for row in found) == counts
        assert min(found[0]) >= 20
        assert min(found[1]) >= 30
        assert (30 in found[1]) == (39 in found[0]) == (fraction == 1)


def attentions(model, ids, mask, prefix):
    """(B, queries, L * Hq, prefix) attention of the question's last tokens and of a greedy draft, everything run at once."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    length = ids.shape[1]
    for _ in range(DRAFT_TOKENS):
        with torch.no_grad():
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = eager(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        found = eager(input_ids=ids, attention_mask=mask, position_ids=positions, output_attentions=True, use_cache=False)
    rows = slice(length - QUESTION_TOKENS, None)
    assert len(found.attentions) == model.config.get_text_config().num_hidden_layers  # also those that reuse another's keys
    return torch.cat([weights[:, :, rows, :prefix] for weights in found.attentions], 1).double().transpose(1, 2)


def reference_worth(weights, first_real, n_heads):
    """One row: per query the strongest heads, their mean; then the last question token's, or a part of another's."""
    total = [0.0] * len(weights[0][0])
    for query, heads in enumerate(weights):
        part = 1.0 if query == QUESTION_TOKENS - 1 else OTHERS_WEIGHT
        strength = [max(row[first_real + 1 :]) for row in heads]
        best = sorted(range(len(heads)), key=lambda head: -strength[head])[:n_heads]
        for t in range(first_real + 1, len(total)):
            total[t] = max(total[t], part * sum(heads[head][t] for head in best) / len(best))
    return total


def reference_choice(weights, first_real, n_tokens, count, window=16, n_heads=16):
    """One row: the strongest heads, their mean, the best windows, in plain Python."""
    heads = [row[:n_tokens] for row in weights]
    strength = [max(row[first_real + 1 :]) for row in weights]
    best = sorted(range(len(heads)), key=lambda head: -strength[head])[:n_heads]
    mean = [sum(heads[head][t] for head in best) / len(best) if t > first_real else 0.0 for t in range(n_tokens)]
    starts = range(n_tokens - min(window, n_tokens) + 1)
    chosen = []
    for start in sorted(starts, key=lambda start: -sum(mean[start : start + window])):
        for token in sorted(range(start, min(start + window, n_tokens)), key=lambda token: -mean[token]):
            if token not in chosen and token > first_real and len(chosen) < count:
                chosen.append(token)
    return sorted(chosen)


@pytest.mark.parametrize(("name", "backend"), CASES)
@pytest.mark.parametrize("n_new", [1, 4])
def test_the_guide_equals_its_own_attention(name, backend, n_new, monkeypatch):
    monkeypatch.setattr("kvfit.runtime.recompute.N_HEADS", 2)  # of 12, so that it matters which
    model = build(name, backend)
    prefix = 60
    ids = tokens(2, prefix + n_new)
    mask = left_padded(ids, (0, 9))
    pairs = caches.read_cache(prefilled(model, ids[:, :prefix], mask[:, :prefix], cache=caches.full_cache()))
    before = [half.clone() for pair in pairs for half in pair]
    found = guided_tokens(model, pairs, ids, prefix=prefix, among=mask[:, :55] != 0, fraction=0.3, attention_mask=mask)
    weights = attentions(model, ids, mask, prefix)
    for row, first_real in enumerate((0, 9)):
        worth = reference_worth(weights[row].tolist(), first_real, 2)
        count = (17, 14)[row]  # three in ten of 55 tokens, and of the 46 behind the padding
        assert sorted(set(found[row].tolist())) == reference_choice([worth], first_real, 55, count)
    assert all(torch.equal(a, b) for a, b in zip(before, [half for pair in pairs for half in pair], strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_choice_of_tokens(seed):
    rng = random.Random(seed)
    n_tokens, n_heads = rng.randrange(1, 120), rng.randrange(1, 5)
    weights = torch.rand(2, n_heads, n_tokens, generator=torch.Generator().manual_seed(seed)) ** 8
    eligible = torch.ones(2, n_tokens, dtype=torch.bool)
    eligible[:, 0] = False
    count = rng.randrange(0, n_tokens + 1)
    found = choose_tokens(weights, eligible, [count, count])
    assert found.shape == (2, count)
    for row in range(2):
        chosen = found[row].tolist()
        assert chosen == sorted(set(chosen))
        wanted = reference_choice(weights[row].double().tolist(), 0, n_tokens, min(count, n_tokens - 1))
        assert [token for token in chosen if token] == wanted  # token 0 only when all others are chosen
        assert (0 in chosen) == (count == n_tokens)


def test_the_needle_is_found_and_a_wrong_head_would_not_find_it():
    weights = torch.full((1, 4, 200), 1e-4)
    weights[0, 2, 77] = 0.9
    eligible = torch.ones(1, 200, dtype=torch.bool)
    chosen = choose_tokens(weights, eligible, [20])[0].tolist()
    assert 77 in chosen
    assert max(chosen) - min(chosen) < 31
    assert 77 not in choose_tokens(weights[:, :2], eligible, [20])[0].tolist()


def test_budget():
    model = build("qwen3")
    ids = tokens(1, 31)
    pairs = caches.read_cache(prefilled(model, ids[:, :30]))

    def count(fraction):
        return guided_tokens(model, pairs, ids, prefix=30, among=every(30), fraction=fraction).shape[1]

    assert [count(fraction) for fraction in (0, 0.01, 0.1, 0.2, 0.5, 1)] == [0, 1, 3, 6, 15, 30]
    with pytest.raises(MismatchError, match=r"recompute: found 1\.1"):
        count(1.1)


def test_a_budget_of_its_own():
    """As many windows as hold most of the attention, in the row that needs most, within bounds."""
    eligible = torch.ones(2, 1600, dtype=torch.bool)
    worth = torch.zeros(2, 1600)
    for windows, count in ((1, 32), (3, 48), (10, 160), (40, 320)):
        worth[1, : 16 * windows] = 1.0  # one window is less than the least, forty are more than the most
        worth[0, :8] = 1.0
        expected = count if windows != 10 else 144  # nine of ten hold 90 %
        assert auto_counts(worth, eligible, [1600, 1600]) == [expected] * 2
    assert auto_counts(worth, eligible, [1600, 100]) == [320, 20]  # of a row's own tokens
    model = build("qwen3")
    ids = tokens(1, 101)
    source = prefilled(model, ids)
    mapper = random_mapper(mapper_spec(spec_of(model), spec_of(model), [[0], [1], [2]], inputs="same"))
    moved = handoff(mapper, model, ids, source, recompute="auto", guide=model)
    assert 2 <= moved.recomputed.shape[1] <= 20
    with pytest.raises(MismatchError, match="recompute: found 'all', needed a fraction"):
        handoff(mapper, model, ids, source, recompute="all", guide=model)


def test_nothing_is_left_behind_in_the_guide():
    model = build("llama", "sdpa")
    ids = tokens(1, 31)
    pairs = caches.read_cache(prefilled(model, ids[:, :30]))
    before = (model.config.to_dict(), model.config._attn_implementation, torch.nn.functional.scaled_dot_product_attention)
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    guided_tokens(model, pairs, ids, prefix=30, among=every(30), fraction=0.2)
    after = (model.config.to_dict(), model.config._attn_implementation, torch.nn.functional.scaled_dot_product_attention)
    assert before == after
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


def test_no_attention_of_other_tokens_is_kept(monkeypatch):
    """The guide reads the weights of the last tokens and of the draft only, however many new tokens there are."""
    from kvfit.runtime import recompute

    taken = []
    take = recompute._Reader._take
    monkeypatch.setattr(
        recompute._Reader,
        "_take",
        lambda self, layer, weights: (taken.append(tuple(weights.shape)), take(self, layer, weights)),
    )
    model = build("qwen3", "sdpa")
    ids = tokens(2, 50)
    pairs = caches.read_cache(prefilled(model, ids[:, :30]))
    guided_tokens(model, pairs, ids, prefix=30, among=every(30).expand(2, -1), fraction=0.2)
    assert taken == [(2, 4, QUESTION_TOKENS, 50)] * 3 + [(2, 4, 1, 51 + step) for step in range(DRAFT_TOKENS) for _ in range(3)]


def compiled_whole(model, backend):
    model.compile(backend=backend)


def compiled_layers(model, backend):
    for layer in model.model.layers:
        layer.compile(backend=backend)


def compiled_forward(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)


@pytest.mark.parametrize("compiled", [compiled_whole, compiled_layers, compiled_forward])
def test_a_model_that_was_compiled_in_place(compiled):
    """The passes that watch attention and that run chosen tokens run what was compiled as it was written."""
    runs = []

    def backend(graph, _inputs):
        runs.append(graph)
        return graph.forward

    model = build("llama", "sdpa")
    mapper = random_mapper(mapper_spec(spec_of(model), spec_of(model), [[0, 1]] * spec_of(model).n_layers)).bind(model, model)
    ids = tokens(2, 40)
    cache = prefilled(model, ids[:, :-1])
    wanted = kvfit.handoff(mapper, model, ids, cache, exact_head=0, recompute=0.3, guide=model)
    compiled(model, backend)
    moved = kvfit.handoff(mapper, model, ids, cache, exact_head=0, recompute=0.3, guide=model)
    assert moved.recomputed.shape[1] >= 12
    assert torch.equal(moved.recomputed, wanted.recomputed)
    assert same(moved.cache, wanted.cache)
    # Another `forward` is compared with the class's own first, by a plain pass, which may be compiled.
    assert runs == [] or compiled is compiled_forward
    runs.clear()
    with caches.uncompiled(), caches.uncompiled():
        assert torch.compile(torch.sin, backend=backend)(torch.ones(3)).shape == (3,)
    assert runs == []
    torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(3))  # compiles again afterwards
    assert len(runs) == 1


@pytest.mark.parametrize("device", ["meta"])
def test_the_default_device_does_not_matter(device):
    """Every tensor that is made on the way names its device."""
    model = build("llama", "sdpa")
    mapper = random_mapper(mapper_spec(spec_of(model), spec_of(model), [[0, 1]] * spec_of(model).n_layers)).bind(model, model)
    ids = tokens(2, 40)
    cache = prefilled(model, ids[:, :-1])
    settings = {"exact_tail": 3, "guide": model, "source_ids": ids[:, :-1]}
    for recompute in (0.3, "auto"):
        wanted = kvfit.handoff(mapper, model, ids, cache, recompute=recompute, **settings)
        torch.set_default_device(device)
        try:
            moved = kvfit.handoff(mapper, model, ids, cache, recompute=recompute, **settings)
        finally:
            torch.set_default_device(None)
        assert torch.equal(moved.recomputed, wanted.recomputed)
        assert same(moved.cache, wanted.cache)


def test_other_kernels_are_refused():
    model = build("llama")
    ids = tokens(1, 11)
    pairs = caches.read_cache(prefilled(model, ids[:, :10]))
    other = copy.deepcopy(model)
    other.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="found attention implementation flash_attention_2, needed sdpa or eager"):
        guided_tokens(other, pairs, ids, prefix=10, among=every(10), fraction=0.2)
    with pytest.raises(UnsupportedModelError, match="to run chosen tokens"):
        rewrite(
            other,
            ids,
            cache_of(pairs),
            torch.tensor([[1]]),
            position_ids=torch.arange(11)[None],
            attention_mask=torch.ones(1, 11),
            windows=(None,) * 3,
        )


def test_attention_that_cannot_be_seen_is_refused(monkeypatch):
    model = build("llama", "sdpa")
    ids = tokens(1, 11)
    pairs = caches.read_cache(prefilled(model, ids[:, :10]))
    monkeypatch.setattr("kvfit.runtime.watch.Watch._seen", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"llama, layer 0: found no attention weights"):
        guided_tokens(model, pairs, ids, prefix=10, among=every(10), fraction=0.2)


def test_a_static_target_cache_is_refused(pair):
    """Its memory is of a fixed length. Nothing has been changed then; without chosen tokens it is taken."""
    from transformers import StaticCache

    source, target, mapper = pair
    ids = tokens(1, 20)
    static = prefilled(target, ids[:, :6], cache=StaticCache(config=target.config, max_cache_len=40))
    before = content(static)
    arguments = {"target_cache": static, "target_ids": ids[:, :6], "exact_tokens": [3, 9]}
    with pytest.raises(MismatchError, match=r"cache layer 0: found StaticLayer, needed a dynamic cache to run chosen"):
        handoff(mapper, target, ids, prefilled(source, ids), **arguments)
    assert same(static, before)
    moved = handoff(mapper, target, ids, prefilled(source, ids), **{**arguments, "exact_tokens": None})
    assert (moved.cache is static, moved.n_reused, moved.n_mapped) == (True, 6, 13)

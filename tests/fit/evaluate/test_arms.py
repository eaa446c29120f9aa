"""Arms on pairs that are awkward: windows, padded vocabularies, two dtypes, guided recompute."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import FLOAT32, fit_tiny, heldout, paired
from made_mappers import content, identity_mapper, prefilled, same
from zoo import FAMILIES, build

import kvfit
from kvfit.bundle.bundle import Bundle, write_bundle
from kvfit.errors import MismatchError
from kvfit.fit.evaluate.arms import (
    Pair,
    Prefixes,
    Rewindable,
    answer,
    greedy,
    load_pair,
    mean_pairs,
    shared_vocabulary,
    source_pairs,
)
from kvfit.fit.evaluate.diagnose import diagnose
from kvfit.fit.evaluate.likelihood import likelihood
from kvfit.fit.evaluate.measure import Measured
from kvfit.fit.evaluate.options import Options
from kvfit.fit.evaluate.pair import mapper_for
from kvfit.fit.evaluate.ways import work_shares
from kvfit.model.cache import cache_length, forward, new_cache, read_cache
from kvfit.model.identity import describe_model
from kvfit.runtime.handoff import handoff
from kvfit.runtime.mapper import Mapper
from kvfit.spec import FORMAT_VERSION, KINDS, LayerMap, MapperSpec

Loader = Callable[[Path | str], Any]


def tiny(seed: int, **changes: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = {
        "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2,
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**{**config, **changes})).eval()


def identical(model: Any, tokenizer: Any) -> Mapper:
    """The exact map of a model to itself."""
    spec = describe_model(model, tokenizer, ref="org/tiny", revision=None)
    layers = tuple(LayerMap(kind, i, (i,), 0.0, 1.0, 1.0) for i in range(spec.n_layers) for kind in KINDS)
    both = MapperSpec(FORMAT_VERSION, kvfit.__version__, spec, spec, False, "full", "same", "none", "float32", layers)
    return Mapper(both, {(layer.kind, layer.layer_index): (torch.eye(spec.width), torch.zeros(spec.width)) for layer in layers})


def plain_nll(model: Any, ids: torch.Tensor, prefix: int, vocabulary: int | None = None) -> torch.Tensor:
    with torch.no_grad():
        logits = model(ids).logits[..., :vocabulary].double()
    scores = logits.log_softmax(-1)[:, prefix - 1 : -1].gather(-1, ids[:, prefix:, None])
    return -scores[..., 0].mean(1)


def test_a_target_with_windows(tiny_pair: tuple[Path, Path], load: Loader) -> None:
    """Its layers drop tokens, so that no cache can be cropped; what it says must not depend on that."""
    tokenizer = load(tiny_pair[1]).tokenizer
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = tiny(0, use_sliding_window=True, sliding_window=12, max_window_layers=0, layer_types=kinds)
    pair = Pair(model, model, identical(model, tokenizer))
    assert pair.mapper.spec.target.windows == (12, None, 12)
    ids = heldout(tokenizer, 3, 60)
    found = likelihood(pair, ids, 40, Options(batch_size=2, greedy=5), progress=False)
    expected = plain_nll(model, ids, 40)
    for arm in ("native", "transfer", "handoff", "source", "raw"):
        assert torch.allclose(found[arm].nll, expected, atol=1e-4), arm  # type: ignore[index]
        assert bool((found[arm].greedy == 1).all()), arm  # type: ignore[index]
    assert not torch.allclose(found["shuffled"].nll, expected, atol=1e-2)
    for layer in diagnose(pair, ids, 40).layers:
        assert layer["attention_cosine"] == pytest.approx(1, abs=1e-5)
    cache = Rewindable(Prefixes(pair, ids[:1, :30]).cache("native"))
    first = greedy(model, cache.fresh(model), ids[:1, 30:31], 20)
    assert torch.equal(greedy(model, cache.fresh(model), ids[:1, 30:31], 20), first)


def test_an_answer_and_a_transcript_end_at_any_of_the_models_end_tokens(tiny_pair: tuple[Path, Path], load: Loader) -> None:
    """Chat models have several. What a loop decodes after one of them was never said."""
    tokenizer = load(tiny_pair[1]).tokenizer
    model = tiny(0)
    ids = heldout(tokenizer, 1, 40)
    said = greedy(model, new_cache(model), ids, 48)[0].tolist()
    absent = next(token for token in range(2048) if token not in said)
    first = min(said.index(said[20]), said.index(said[30]))
    pair = Pair(model, model, identical(model, tokenizer))
    measured = Measured(pair, tokenizer, Options(prefix=40, transcripts=1), progress=False)
    for ends, n_said in ((None, 48), (absent, 48), (said[20], said.index(said[20])), ([absent, said[30], said[20]], first)):
        model.generation_config.eos_token_id = ends
        assert answer(model, new_cache(model), ids, 48) == said[:n_said]
        (shown,) = measured.transcripts(ids)
        assert shown["native"] == shown["source"] == tokenizer.decode(said[:n_said])


def test_two_paddings_of_one_vocabulary(tiny_pair: tuple[Path, Path], load: Loader) -> None:
    """Probabilities are over the tokens that both models have."""
    tokenizer = load(tiny_pair[1]).tokenizer
    source, target = tiny(0), tiny(1, vocab_size=2048 + 64)
    spec = identical(source, tokenizer).spec
    described = describe_model(target, tokenizer, ref="org/padded", revision=None)
    both = MapperSpec(*[getattr(spec, name) if name != "target" else described for name in spec.__dataclass_fields__])
    width = spec.target.width
    mapper = Mapper(both, {(layer.kind, layer.layer_index): (torch.eye(width), torch.zeros(width)) for layer in spec.layers})
    pair = Pair(source, target, mapper)
    assert shared_vocabulary(pair) == 2048
    ids = heldout(tokenizer, 2, 40)
    found = likelihood(pair, ids, 30, Options(batch_size=2, greedy=4), progress=False)
    assert torch.allclose(found["native"].nll, plain_nll(target, ids, 30, 2048), atol=1e-4)
    assert torch.allclose(found["source"].nll, plain_nll(source, ids, 30), atol=1e-4)
    assert bool((found["source"].kl > 0).all())


def test_a_source_in_another_dtype(tiny_pair: tuple[Path, Path], load: Loader) -> None:
    tokenizer = load(tiny_pair[1]).tokenizer
    target, source = tiny(0), tiny(0).to(torch.bfloat16)
    pair = Pair(source, target, identical(target, tokenizer))
    ids = heldout(tokenizer, 2, 40)
    assert source_pairs(pair, ids)[0][0].dtype == torch.bfloat16  # as the source's cache comes in production
    prefixes = Prefixes(pair, ids[:, :29])
    for arm in ("source", "raw", "mean", "transfer"):
        cache = prefixes.cache(arm)
        assert {half.dtype for half in read_cache(cache)[1]} == {source.dtype if arm == "source" else target.dtype}
    logits = forward(target, ids[:, 29:], cache)
    whole = forward(target, ids, new_cache(target))[:, 29:]
    assert float((logits - whole).abs().mean()) < 0.1 * float(whole.std())


def test_what_is_judged_is_what_bind_makes(tiny_pair: tuple[Path, Path], load: Loader, tmp_path: Path) -> None:
    """A map of 16 bits between models of 32: production turns its weights into the target's dtype, and so must the arms."""
    opened = Bundle.open(fit_tiny(tiny_pair, tmp_path))
    weights = [
        (m.kind, m.layer_index, *(part.bfloat16() for part in opened.layer(m.kind, m.layer_index))) for m in opened.spec.layers
    ]
    short, refs = tmp_path / "short", [str(folder) for folder in tiny_pair]
    write_bundle(short, replace(opened.spec, dtype="bfloat16"), weights, recipe=opened.recipe, solve=opened.solve)
    pair, tokenizer = load_pair(Bundle.open(short), source=refs[0], target=refs[1], loading=FLOAT32)
    ids = heldout(tokenizer, 2, 40)
    source, target = (load(folder).model for folder in tiny_pair)
    loaded = Mapper.from_bundle(Bundle.open(short))
    in_production = handoff(loaded.bind(source, target), target, ids, prefilled(source, ids[:, :-1]))
    unbound = handoff(loaded, target, ids, prefilled(source, ids[:, :-1]))
    judged = Prefixes(pair, ids[:, :-1]).cache("handoff")
    assert same(content(judged), content(in_production.cache))
    assert not same(content(judged), content(unbound.cache))
    assert mapper_for(Bundle.open(short), target).maps.weights["keys", 1][0].dtype == torch.float32


def test_the_handoff_arm_is_the_handoff(tiny_pair: tuple[Path, Path], load: Loader, tmp_path: Path) -> None:
    source, target = (load(folder) for folder in tiny_pair)
    ids = heldout(target.tokenizer, 2, 40)
    options: dict[str, Any] = {"exact_head": 2, "exact_tail": 3, "recompute": 0.2}
    pair = paired(fit_tiny(tiny_pair, tmp_path), source, target, **options)
    sources = source_pairs(pair, ids[:, :30])
    cache = Prefixes(pair, ids[:, :30]).cache("handoff", next_ids=ids[:, 30:35])
    moved = handoff(pair.mapper, target.model, ids[:, :35], sources, guide=source.model, **options)
    assert cache_length(cache) == 30
    for a, b in zip(read_cache(cache), read_cache(moved.cache), strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])


def test_a_single_document_is_not_shuffled_with_itself(tiny_pair: tuple[Path, Path], load: Loader, tmp_path: Path) -> None:
    source, target = (load(folder) for folder in tiny_pair)
    pair = paired(fit_tiny(tiny_pair, tmp_path), source, target)
    ids = heldout(target.tokenizer, 2, 20)
    with pytest.raises(MismatchError, match="arm shuffled: found one document"):
        Prefixes(pair, ids[:1]).cache("shuffled")
    given = Prefixes(pair, ids[:1], other=Prefixes(pair, ids[1:])).cache("shuffled")
    own = Prefixes(pair, ids[1:]).cache("transfer")
    for a, b in zip(read_cache(given), read_cache(own), strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("arm", ["native", "transfer", "source", "handoff", "auto", "shuffled"])
def test_arms_that_share_their_prefills_are_each_as_if_made_alone(
    arm: Any, tiny_pair: tuple[Path, Path], load: Loader, tmp_path: Path
) -> None:
    """Whatever was made before, an arm's cache is its own; chosen rows are the rows of documents taken one at a time."""
    source, target = (load(folder) for folder in tiny_pair)
    pair = paired(fit_tiny(tiny_pair, tmp_path), source, target)
    ids = heldout(target.tokenizer, 3, 24)
    shared = Prefixes(pair, ids)
    for other in ("transfer", "mean", "shuffled", "source"):
        cache = shared.cache(other)  # type: ignore[arg-type]
        for layer in cache.layers:
            layer.keys += 1  # what an arm does to its cache is no other arm's business
    rows = [2, 0, 0]
    found = read_cache(shared.cache(arm, rows=torch.tensor(rows)))
    for place, row in enumerate(rows):
        wrong = Prefixes(pair, ids[row - 1 : row] if row else ids[2:])
        alone = read_cache(Prefixes(pair, ids[row : row + 1], other=wrong).cache(arm))
        for a, b in zip(found, alone, strict=True):
            assert torch.allclose(a[0][place], b[0][0], atol=1e-4)
            assert torch.allclose(a[1][place], b[1][0], atol=1e-4)


def test_the_mean_has_the_right_positions(tiny_pair: tuple[Path, Path], load: Loader, tmp_path: Path) -> None:
    """Every token of the control has the mean key, turned to its own position: attention sees nothing but distance."""
    source, target = (load(folder) for folder in tiny_pair)
    pair = paired(fit_tiny(tiny_pair, tmp_path), source, target)
    ids = heldout(target.tokenizer, 2, 20)
    prefixes = Prefixes(pair, ids)
    keys = read_cache(prefixes.cache("mean"))[1][0]
    mean = mean_pairs(pair, prefixes.mapped)[1][0]
    from kvfit.model.rope import angles, rotate

    table = pair.mapper.spec.target.rope.table(1)
    assert table is not None
    turned = rotate(mean, table, angles(table, torch.tensor([7])))
    assert torch.allclose(keys[1, :, 7], turned[0, :, 0], atol=1e-5)
    assert torch.equal(keys[0], keys[1])


def test_experts_that_a_token_does_not_use_are_no_work() -> None:
    shares = []
    for n_experts in (4, 16):
        (family,) = [one for one in FAMILIES if one.name == "qwen3-moe"]
        model = build(replace(family, config={**family.config, "num_experts": n_experts}))
        shares.append(work_shares(Pair(model, model, identity_mapper(model)), 64, {"auto": 0.25}))
    for way in ("transfer", "auto"):
        assert shares[0][way] == pytest.approx(shares[1][way], rel=0.1)  # the router alone grows
    assert 0 < shares[0]["transfer"] < shares[0]["auto"]

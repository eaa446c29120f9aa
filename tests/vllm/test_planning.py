"""Addresses, options and plans: what of a prompt can be mapped, and why not."""

from dataclasses import replace

import pytest
import torch
from bundle_factory import mapper_spec

from kvfit.errors import OptionError, UnsupportedModelError
from kvfit.vllm.addresses import AddressBook, sampled_identity
from kvfit.vllm.options import connector_options, request_options
from kvfit.vllm.plans import Load, LoadPlanner, Miss, Reading
from kvfit.vllm.requirements import check_mapper

BOOK = AddressBook("model", 4, "salt")
IDS = list(range(100, 122))  # five whole blocks of four, and two tokens


class Held(dict):
    """A store in memory."""

    def put(self, address, data):
        self[address] = data
        return True

    def has(self, address):
        return address in self


def planner(held, engine_block=4, recompute=0.0, **options):
    # One exact token: of prompts as short as these, the default would leave nothing to map.
    given = {"role": "target", "mapper": "m", "store": "s", "exact_head": 1, **options}
    return LoadPlanner(BOOK, held, connector_options(given), engine_block, recompute)


def stored(blocks=5, guide=False):
    held = Held({BOOK.marker(): b""})
    held.update(dict.fromkeys(BOOK.blocks(IDS)[:blocks], b""))
    if guide:
        held[BOOK.guide(IDS)] = b""
    return held


def plan(held, *, tenant="", wanted=None, ids=IDS, **options):
    return planner(held, **options).plan("r", ids, tenant, request_options({"kvfit": wanted or {}}))


def reason(*args, **kwargs):
    with pytest.raises(Miss) as miss:
        plan(*args, **kwargs)
    return miss.value.reason


def test_prompts_share_addresses_as_far_as_they_share_tokens():
    other = [*IDS[:9], 7, *IDS[10:]]
    same = [a == b for a, b in zip(BOOK.blocks(IDS), BOOK.blocks(other), strict=True)]
    assert same == [True, True, False, False, False]
    assert BOOK.blocks(IDS)[:2] == BOOK.blocks(IDS[:11])
    assert BOOK.guide(IDS) != BOOK.guide(IDS[:-1])


@pytest.mark.parametrize(
    "other", [AddressBook("other", 4, "salt"), AddressBook("model", 4, "pepper"), AddressBook("model", 2, "salt")]
)
def test_nothing_is_shared_across_models_salts_block_lengths_and_tenants(other):
    mine = {BOOK.marker(), BOOK.guide(IDS), *BOOK.blocks(IDS)}
    assert mine.isdisjoint({other.marker(), other.guide(IDS), *other.blocks(IDS)})
    assert mine.isdisjoint({BOOK.guide(IDS, "tenant"), *BOOK.blocks(IDS, "tenant")})
    assert len({sampled_identity(*one) for one in (("a", "b", None), ("a", "c", None), ("b", "b", None), ("a", "b", "x"))}) == 4


def test_the_last_token_and_the_tail_are_never_mapped():
    assert len(plan(stored()).token_ids) == 20
    assert len(plan(stored(), ids=IDS[:20]).token_ids) == 16  # the twentieth is the last
    assert len(plan(stored(), exact_tail=3).token_ids) == 16
    assert len(plan(stored(), exact_tail=3, wanted={"exact_tail": 0}).token_ids) == 20
    assert len(plan(stored(), wanted={"max_mapped_tokens": 11}).token_ids) == 8


def test_a_prefix_ends_at_a_block_of_the_engine_and_before_the_first_missing_block():
    assert len(plan(stored(3)).token_ids) == 12
    longer = plan(stored(3), engine_block=8)
    assert (len(longer.token_ids), len(longer.addresses)) == (8, 2)
    held = stored()
    del held[BOOK.blocks(IDS)[2]]
    assert len(plan(held).token_ids) == 8


def test_a_miss_has_its_reason():
    assert reason(stored(), wanted={"map": False}) == "opted_out"
    assert reason(stored(), ids=IDS[:4]) == "short"
    assert reason(stored(), wanted={"max_mapped_tokens": 3}) == "short"
    # Whole blocks, but of tokens that the target runs itself in any case.
    assert reason(stored(), ids=IDS[:12], exact_head=8) == "short"
    assert len(plan(stored(), ids=IDS[:13], exact_head=8).token_ids) == 12
    assert reason(stored(2), exact_head=8) == "missing"
    assert len(plan(stored(3), exact_head=8).token_ids) == 12
    assert reason(stored(0)) == "missing"
    assert reason(stored(), tenant="someone") == "missing"
    assert reason(Held()) == "other_source"
    assert reason(stored(1), engine_block=8) == "missing"
    assert reason(stored(), recompute=0.1) == "no_guide"


def test_the_share_to_run_again_is_the_requests_then_the_connectors_then_the_mappers():
    held = stored(guide=True)
    assert plan(held, recompute=0.1).recompute == 0.1
    assert plan(held, recompute=0.1).guide == BOOK.guide(IDS)
    assert (
        LoadPlanner(BOOK, held, connector_options({"role": "target", "mapper": "m", "store": "s", "recompute": 0.2}), 4, 0.1)
        .plan("r", IDS, "", request_options(None))
        .recompute
        == 0.2
    )
    assert plan(held, recompute=0.1, wanted={"recompute": "auto"}).guide == BOOK.guide(IDS)
    none = plan(held, recompute=0.1, wanted={"recompute": 0})
    assert (none.recompute, none.guide) == (0, None)
    named = plan(stored(), recompute=0.1, wanted={"exact_tokens": [3, [8, 10]]})
    assert (named.exact_tokens, named.guide) == ({3, 8, 9}, None)


def test_blocks_are_saved_once_as_steps_complete_them():
    held = stored(0)
    reading = Reading(IDS, BOOK.blocks(IDS), BOOK.guide(IDS), [])
    reading.block_ids = [10, 11, 12]
    first = reading.save(6, 2, 4, held)
    assert (first.addresses, first.block_ids, first.guide) == (BOOK.blocks(IDS)[:1], [10, 11], None)
    assert reading.save(7, 2, 4, held) is None
    held[BOOK.blocks(IDS)[2]] = b""  # another engine was faster
    reading.block_ids = list(range(10, 21))
    last = reading.save(22, 2, 4, held)
    assert last.addresses == [BOOK.blocks(IDS)[1], "", *BOOK.blocks(IDS)[3:]]
    assert last.block_ids == list(range(12, 20))
    assert (last.guide, last.all_block_ids) == (BOOK.guide(IDS), list(range(10, 21)))
    assert reading.save(23, 2, 4, held) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "no 'role'"),
        ({"role": "both", "store": "s"}, "role"),
        ({"role": "target", "store": "s"}, "mapper"),
        ({"role": "source", "store": "s", "block_token": 4}, "'block_token'"),
        ({"role": "source", "store": "s", "block_tokens": 0}, "block_tokens"),
        ({"role": "source", "store": "s", "block_tokens": True}, "block_tokens"),
        ({"role": "source", "store": "s", "exact_head": -1}, "exact_head"),
        ({"role": "source", "store": "s", "recompute": 1.5}, "recompute"),
        ({"role": "source", "store": "s", "recompute": "all"}, "recompute"),
        ({"role": "source", "store": 5}, "store"),
    ],
)
def test_an_option_that_cannot_be_is_named(values, message):
    with pytest.raises(OptionError, match=message):
        connector_options(values)


@pytest.mark.parametrize(
    "values",
    [{"maps": True}, {"exact_tokens": "all"}, {"exact_tokens": [[1, 2, 3]]}, {"exact_tokens": [-1]}, {"exact_tail": -1}],
)
def test_a_requests_option_that_cannot_be_is_named(values):
    with pytest.raises(OptionError):
        request_options({"kvfit": values})


def test_a_request_need_not_say_anything():
    for nothing in (None, {}, {"other": 1}, {"kvfit": {}}):
        assert request_options(nothing).map
    with pytest.raises(OptionError, match="needed an object"):
        request_options({"kvfit": 3})


@pytest.mark.parametrize("side", ["source", "target"])
def test_models_whose_heads_differ_by_layer_are_refused_by_name(side):
    spec = mapper_spec()
    check_mapper(spec)
    model = getattr(spec, side)
    heads = (model.n_heads, model.head_dim, model.head_dim)
    uneven = replace(model, geometry=(heads,) * (model.n_layers - 1) + ((3, 4, 4),))
    with pytest.raises(UnsupportedModelError, match=f"mapper: found {model.ref}, whose heads differ by layer"):
        check_mapper(replace(spec, **{side: uneven}))


@pytest.mark.parametrize(
    ("head", "share", "count"), [(0, 0.1, 40), (1, 0.1, 40), (300, 0.1, 11), (300, 0.5, 51), (400, 0.5, 0)]
)
def test_the_guide_chooses_behind_the_exact_head(head, share, count):
    """The source looks at the first 300 tokens most. Those of the head are run in any case, and are no part of the share."""
    guide = torch.linspace(1, 0.5, 450)
    guide[:300] += 5
    plan = Load("one", list(range(400)), [], "address", share, None, 451)
    found = plan.run_again(head, guide)
    assert found == sorted(set(found))
    assert found[:head] == list(range(head))
    # The largest weights lie first, and the first token of all is chosen last.
    assert found[head:] == list(range(max(1, head), max(1, head) + count))
    assert plan.run_again(head, None) == list(range(head))


def test_a_request_names_tokens_instead():
    plan = Load("one", list(range(20)), [], None, 0.5, frozenset({1, 7, 19, 20, 40}), 30)
    assert plan.run_again(3, None) == [0, 1, 2, 7, 19]

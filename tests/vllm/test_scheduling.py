"""What the scheduler's half tells about a request: what vLLM has done with it, not what was planned. No engine runs."""

import pytest

# A module of vLLM's: this folder alone would pass for a package of that name.
pytest.importorskip("vllm.v1", reason="vLLM is not installed")

from vllm import SamplingParams
from vllm.v1.request import Request

from kvfit.vllm.addresses import AddressBook
from kvfit.vllm.options import connector_options
from kvfit.vllm.plans import LoadPlanner
from kvfit.vllm.scheduling import LoadScheduling

BOOK = AddressBook("model", 4, "salt")
IDS = list(range(100, 122))  # five whole blocks of four, and two tokens
ASKING = {"prompt_logprobs": 1}, {"prompt_logprobs": 0}, {"skip_reading_prefix_cache": True}


class Held(set):
    """A store that has some addresses."""

    has = set.__contains__


@pytest.fixture
def scheduling():
    """One whose store has the whole of `IDS`."""
    options = connector_options({"role": "target", "mapper": "m", "store": "s"})
    return LoadScheduling(LoadPlanner(BOOK, Held(BOOK.blocks(IDS)), options, engine_block=4, recompute=0.0))


def request(**sampled):
    sampling = SamplingParams(max_tokens=1, **sampled)
    return Request(request_id="r", prompt_token_ids=IDS, sampling_params=sampling, pooling_params=None)


def run(scheduling, asked, taken=None):
    """vLLM's calls for one request; it takes `taken` of the tokens that it is offered, by default as its scheduler does."""
    offered = scheduling.matched(asked, 0)
    if taken is None:
        taken = 0 if asked.skip_reading_prefix_cache else offered
    scheduling.allocated(asked, list(range(6)), taken)
    return [plan.block_ids for plan in scheduling.take_due()]


def told(scheduling, asked):
    said = scheduling.finished(asked)["kvfit"]
    assert not scheduling._plans
    return said["status"], said["reason"], said["mapped_tokens"]


def test_a_request_that_was_loaded_is_told_so(scheduling):
    asked = request()
    assert run(scheduling, asked) == [[0, 1, 2, 3, 4]]
    assert told(scheduling, asked) == ("applied", None, 20)
    assert scheduling.stats.take() is None


@pytest.mark.parametrize("sampled", ASKING)
def test_a_request_whose_whole_prompt_is_run_is_offered_nothing(scheduling, sampled):
    asked = request(**sampled)
    assert scheduling.matched(asked, 0) == 0
    assert run(scheduling, asked) == []
    assert told(scheduling, asked) == ("fallback_prefill", "whole_prompt", 0)
    assert scheduling.stats.take().data == {"fallback_prefill:whole_prompt": 1}


def test_a_request_whose_tokens_vllm_does_not_take_is_not_told_that_they_were_mapped(scheduling):
    asked = request()
    assert run(scheduling, asked, taken=0) == []
    assert told(scheduling, asked) == ("fallback_prefill", "not_taken", 0)
    assert scheduling.matched(asked, 0) == 20  # and it may be aborted before it gets any blocks
    assert told(scheduling, asked) == ("fallback_prefill", "not_taken", 0)
    assert scheduling.stats.take().data == {"fallback_prefill:not_taken": 2}


def test_what_happened_last_counts_for_a_request_that_was_preempted(scheduling):
    asked = request()
    assert run(scheduling, asked) == run(scheduling, asked) == [[0, 1, 2, 3, 4]]
    assert run(scheduling, asked, taken=0) == []
    assert told(scheduling, asked) == ("fallback_prefill", "not_taken", 0)


def test_a_failure_is_told_and_not_kept_for_a_request_that_has_left(scheduling):
    asked = request()
    run(scheduling, asked)
    scheduling.failed({"r": "slow"})
    assert told(scheduling, asked) == ("fallback_prefill", "slow", 0)
    scheduling.failed({"r": "slow"})  # the worker's news of a request that was aborted comes later
    assert not scheduling._plans

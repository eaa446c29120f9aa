"""Generate from a prompt whose first tokens are cached, in the same way on every version of transformers.

Transformers' own `generate` expects a cache that it has built itself. With another cache it goes wrong without an error if a
setting turns the cache off (``use_cache: false``), if the decoding mode ignores that part of the prompt is cached (assisted
decoding), or if the batch grows after the cache was filled (beams, several sequences). This module handles these cases, and
checks before each pass that the cached and the new tokens together are exactly the tokens of the mask.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model.cache import cache_argument, cache_length, check_cache
from kvfit.model.decoder import family, unwrapped

_FOREIGN = ("cache", "past_key_values", "cache_implementation", "cache_config")
_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


def generate(model: Any, input_ids: Tensor, cache: Any, /, *, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """Continue a prompt whose first tokens are cached. The result is what ``model.generate`` gives for the whole prompt.

    This works for greedy search, sampling, beams, several sequences per prompt, logits processors such as a repetition penalty,
    and assisted decoding. The cache is used even if the model's configuration turns caching off.

    Args:
        model: a causal language model.
        input_ids: (B, S), the whole prompt, cached tokens included.
        cache: a transformers cache of at most S - 1 tokens. It grows in place; with n sequences per prompt its batch also
            becomes n times as large. After beam search it holds the prompts alone, one row for each returned sequence, because
            the order of the beams' rows is not known. It is empty then where a window has dropped tokens.
        attention_mask: (B, S), 0 on the padding of a left-padded batch; all ones by default.
        **kwargs: arguments of ``model.generate``: ``max_new_tokens``, ``do_sample``, ``num_beams``, ``generation_config``, ...

    Returns:
        The result of ``model.generate``: prompt and new tokens, (B * sequences, S + new), or its output object.

    Raises:
        MismatchError: the cache was filled by another model or holds the whole prompt; shapes do not agree; or an argument asks
            for another cache. Nothing has changed then.
        UnsupportedModelError: the model cannot generate.
    """
    model = unwrapped(model)
    _check(model, input_ids, cache, kwargs)
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise MismatchError(
            f"attention_mask: found shape {tuple(attention_mask.shape)}, needed {tuple(input_ids.shape)}: the whole prompt"
        )
    settings = _forced_settings(model, kwargs)
    copies = max(int(_of(model, kwargs, name) or 1) for name in ("num_beams", "num_return_sequences"))
    compiled = bool(getattr(cache, "is_compileable", False))
    if compiled and (copies > 1 or any(_of(model, kwargs, name) for name in _ASSISTED)):
        raise MismatchError(
            "cache: found a static cache, needed a dynamic one for beams, several sequences or assisted decoding: use "
            "kvfit.model.cache.new_cache(model)"
        )
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    # Compiled passes belong to the model object, so a copy of it would have to compile again.
    runner = model if compiled else _checked(model, cache, chunked=_of(model, kwargs, "prefill_chunk_size") is not None)
    result = runner.generate(input_ids, attention_mask=attention_mask, **{cache_argument(model): cache}, **settings)
    beams = int(_of(model, kwargs, "num_beams") or 1)
    if beams > 1:
        _keep_prompts(cache, input_ids.shape[1], beams, int(_of(model, kwargs, "num_return_sequences") or 1))
    return result


def end_ids(model: Any) -> list[int]:
    """The tokens that end an answer: several in chat models, which end a turn in other ways than a text; perhaps none."""
    found = getattr(getattr(unwrapped(model), "generation_config", None), "eos_token_id", None)
    return [found] if isinstance(found, int) else list(found or [])


def _keep_prompts(cache: Any, length: int, beams: int, returned: int) -> None:
    """Crop a cache after beam search to the prompts.

    Its rows hold the beams before the last choice and not the returned sequences, so the next turn of a conversation would
    continue other text. All beams of a prompt share the prompt.

    Args:
        cache: a cache with B * `beams` rows.
        length: tokens of the prompts.
        beams: beams of each prompt.
        returned: returned sequences of each prompt; the cache gets one row for each.
    """
    layers = [layer for layer in cache.layers if isinstance(getattr(layer, "keys", None), Tensor) and layer.keys.dim() == 4]
    if any(int(layer.get_seq_length()) > layer.keys.shape[2] for layer in layers):
        length = 0
    for layer in layers:
        rows = torch.arange(len(layer.keys) // beams * returned, device=layer.keys.device) // returned * beams
        layer.keys, layer.values = layer.keys[rows, :, :length], layer.values[rows, :, :length]
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length


def _check(model: Any, input_ids: Any, cache: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a prompt or a cache that cannot be continued, before anything changes."""
    if not callable(getattr(model, "generate", None)):
        raise UnsupportedModelError(f"{family(model)}: found no generate, needed a causal language model with its head")
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        found = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise MismatchError(f"input_ids: found {found}, needed a tensor (B, S), the whole prompt")
    given = kwargs.get("generation_config")
    for name in _FOREIGN:
        if kwargs.get(name) is not None or (given is not None and getattr(given, name, None) is not None):
            raise MismatchError(f"{name}: found a value, needed none, because generation continues on the given cache: drop it")
    if kwargs.get("use_cache") is False:
        raise MismatchError("use_cache: found False, needed True, because generation continues on the given cache: drop it")
    for name, needed in (
        ("inputs_embeds", "input_ids, the whole prompt"),
        ("inputs", "input_ids, the whole prompt"),
        ("input_ids", "the prompt once"),
        ("position_ids", "none, because the cached tokens have the positions that follow from attention_mask"),
    ):
        if kwargs.get(name) is not None:
            raise MismatchError(f"{name}: found a tensor, needed {needed}: drop {name}")
    check_cache(model, cache)
    held, length = cache_length(cache), input_ids.shape[1]
    if held >= length:
        raise MismatchError(
            f"cache: found {held} tokens for a prompt of {length}, needed at least one prompt token outside the cache: "
            f"crop it to {length - 1}"
        )
    states = [layer.keys for layer in cache.layers if getattr(layer, "keys", None) is not None and layer.keys.dim() == 4]
    if held and states and states[0].shape[0] != input_ids.shape[0]:
        raise MismatchError(f"cache: found {states[0].shape[0]} sequences, needed {input_ids.shape[0]} as input_ids has")


def _forced_settings(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The caller's settings, with the cache on, and without the kind of cache that the model's own configuration asks for."""
    settings: dict[str, Any] = {name: value for name, value in kwargs.items() if name not in _FOREIGN}
    settings["use_cache"] = True
    if getattr(model.generation_config, "cache_implementation", None) is not None:
        settings["cache_implementation"] = None
    return settings


def _of(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """A setting as `generate` resolves it: from the arguments, else from `generation_config`, else from the model."""
    if kwargs.get(name) is not None:
        return kwargs[name]
    own, given = getattr(model.generation_config, name, None), kwargs.get("generation_config")
    if given is None:
        return own
    default = getattr(type(given)(), name, None)  # None since version 5, a number before
    value = getattr(given, name, default)
    return own if value == default else value


def _checked(model: Any, cache: Any, *, chunked: bool) -> Any:
    """A shallow copy of the model whose passes get exactly the tokens that the cache lacks.

    The copy shares every layer and weight. The model itself stays unchanged, also for other threads.
    """
    runner = copy.copy(model)
    argument = cache_argument(model)

    @functools.wraps(model.prepare_inputs_for_generation)
    def prepare(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs = type(model).prepare_inputs_for_generation(runner, input_ids, *args, **kwargs)
        mask = kwargs.get("attention_mask")  # newer versions drop a mask of ones
        if inputs.get(argument) is cache and not (chunked and mask is None):
            _keep_new_tokens(inputs, cache_length(cache), (input_ids if mask is None else mask).shape[1])
        return inputs

    runner.prepare_inputs_for_generation = prepare
    return runner


def _keep_new_tokens(inputs: dict[str, Any], held: int, total: int) -> None:
    """Remove the tokens that are cached from the inputs of one pass.

    Args:
        inputs: arguments of `forward`; changed in place.
        held: number of tokens in the cache.
        total: number of tokens of the mask, cached and new.

    Raises:
    MismatchError: the cache and the tokens to run do not add up to the mask, so the pass would be silently wrong.
    """
    found, needed = inputs["input_ids"].shape[1], total - held
    if found < needed or needed < 1:
        raise MismatchError(
            f"cache: found {held} tokens before a pass over {found}, needed {total} together: an earlier pass did not cache "
            "its tokens (gradient checkpointing in a model that trains?), or prefill_chunk_size is at most the cached length"
        )
    if found > needed:
        for name in ("input_ids", "position_ids", "token_type_ids", "mm_token_type_ids", "cache_position"):
            if isinstance(inputs.get(name), Tensor):
                inputs[name] = inputs[name][..., -needed:]

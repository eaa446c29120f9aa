"""Pairs of unlike geometry, from text to generated tokens, against the same thing written out without kvfit's own arithmetic.

Real (random) models whose key/value heads differ in number and in size, with other depths, widths, rotary tables and pairings.
The reference takes keys and values from hooks on the models' projections, solves each map by least squares on those rows,
and rotates with the target's own rotary module and function.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_mappers import cache_of, mapper_spec, model_spec, random_mapper, random_pairs, reference_transfer
from torch import Tensor

from kvfit import handoff, load_mapper
from kvfit.fit.capture import models
from kvfit.fit.capture.capture import Options as CaptureOptions
from kvfit.fit.capture.capture import capture
from kvfit.fit.capture.sequences import sequences
from kvfit.fit.capture.text import TextOptions
from kvfit.fit.solve.solve import Options, solve
from kvfit.fit.solve.system import source_head
from kvfit.model import cache as caches
from kvfit.model.generate import generate

TEXT = TextOptions("demo:text")
# Keys from keys and values from values, every token: what the oracle below writes out.
CAPTURE = CaptureOptions(
    num_sequences=48, seq_len=64, token_stride=1, skip_tokens=0, holdout=0.25, stats_dtype="float64", inputs="same", lexical=()
)
LOADING = (models.Options(dtype="float32", device="cpu"),) * 2
PENALTY = 1e-2
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}

# Shapes of Qwen2.5 0.5B (2 heads of 64) and 1.5B (2 of 128), in narrow models.
SMALL = ("qwen2", {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
                   "num_hidden_layers": 3, "rope_theta": 1e6})  # fmt: skip
LARGE = ("qwen2", {"hidden_size": 128, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128,
                   "num_hidden_layers": 5, "rope_theta": 1e4})  # fmt: skip
# Heads of another number and another size, rotated in another way: half-split and scaled; interleaved, and half of each head.
TWO = ("llama", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3,
                 "rope_theta": 1e4, "rope_scaling": YARN})  # fmt: skip
FOUR = ("glm", {"hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 24, "num_hidden_layers": 4,
                "rope_theta": 1e5, "partial_rotary_factor": 0.5})  # fmt: skip
PAIRS = {"2x64 to 2x128": (SMALL, LARGE), "2x16 to 4x24": (TWO, FOUR), "4x24 to 2x16": (FOUR, TWO)}


def save(shape: tuple[str, dict[str, Any]], tokenizer: Any, folder: Path) -> Path:
    """A random model of a shape, with the demo's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {
        "vocab_size": len(tokenizer), "intermediate_size": 128, "max_position_embeddings": 1024, "initializer_range": 0.15,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(shape[1]["num_hidden_layers"])
    AutoModelForCausalLM.from_config(AutoConfig.for_model(shape[0], **common, **shape[1])).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Fitted:
    """A captured pair and its models."""

    source: models.Loaded
    target: models.Loaded
    store: Path

    def rows(self) -> tuple[list[bool], list[dict[str, list[np.ndarray]]], list[dict[str, list[np.ndarray]]]]:
        """Which sequences are held out, and what both models made of each."""
        ids = [
            one.ids
            for _, one in zip(range(CAPTURE.num_sequences), sequences(TEXT, self.source.tokenizer, seq_len=64), strict=False)
        ]
        held = [CAPTURE.split(index) == "holdout" for index in range(len(ids))]
        return held, *([made_by(side.model, torch.tensor([one])) for one in ids] for side in (self.source, self.target))


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    tokenizer = models.load_tokenizer("demo:source")
    folder = tmp_path_factory.mktemp("geometry")
    refs = [str(save(shape, tokenizer, folder / name)) for name, shape in zip(("a", "b"), PAIRS[request.param], strict=True)]
    capture(*refs, folder / "pair.zarr", text=TEXT, options=CAPTURE, loading=LOADING, batch_size=8, progress=False)
    source, target = (models.load(ref, options=LOADING[0]) for ref in refs)
    return Fitted(source, target, folder / "pair.zarr")


@torch.no_grad()
def made_by(model: Any, ids: Tensor) -> dict[str, list[np.ndarray]]:
    """What a model's projections made of ids (B, T): keys before the rotary function and values, (B * T, H * D) per layer."""
    made: dict[str, list[np.ndarray]] = {"keys": [], "values": []}
    hooks = []
    for layer in model.model.layers:
        for kind, projection in (("keys", layer.self_attn.k_proj), ("values", layer.self_attn.v_proj)):
            keep = made[kind].append
            hooks.append(
                projection.register_forward_hook(
                    lambda _module, _inputs, out, keep=keep: keep(out.flatten(0, 1).double().numpy())
                )
            )
    model(ids)
    for hook in hooks:
        hook.remove()
    return made


@torch.no_grad()
def rotated(model: Any, keys: Tensor) -> Tensor:
    """Keys (B, H, T, D) at positions 0 to T - 1, by the model's own rotary module and rotary function."""
    cos, sin = model.model.rotary_emb(torch.empty(1), torch.arange(keys.shape[2])[None])
    return sys.modules[type(model).__module__].apply_rotary_pos_emb(keys, keys, cos, sin)[1]


def serving(head: int, n_source: int, n_target: int) -> int:
    """The source head that the first query head of a target head would read, were both models to have the same query heads."""
    n_query = math.lcm(n_source, n_target)
    return (head * (n_query // n_target)) // (n_query // n_source)


def least_squares(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ridge as least squares on the centred rows, with rows of the penalty below them."""
    xc, yc = x - x.mean(0), y - y.mean(0)
    below = np.sqrt(PENALTY * len(x) * x.var(0).mean()) * np.eye(x.shape[1])
    zeros = np.zeros((x.shape[1], y.shape[1]))
    weight = np.linalg.lstsq(np.concatenate([xc, below]), np.concatenate([yc, zeros]), rcond=None)[0]
    return weight, y.mean(0) - x.mean(0) @ weight


Map = Callable[[dict[str, list[np.ndarray]]], np.ndarray]


def written_out(fitted: Fitted, support: str) -> Iterator[tuple[str, int, Map]]:
    """For each kind and target layer, the map (source rows in, target rows out) with the variance gain."""
    held, source, target = fitted.rows()
    a, b = (side.model.config for side in (fitted.source, fitted.target))
    heads = [None] if support == "full" else list(range(b.num_key_value_heads))

    def fit_rows(parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([part for part, out in zip(parts, held, strict=True) if not out])

    for kind in ("keys", "values"):

        def inputs(made: dict[str, list[np.ndarray]], head: int | None, kind: str = kind) -> np.ndarray:
            if head is None:
                return np.concatenate(made[kind], 1)
            at = serving(head, a.num_key_value_heads, b.num_key_value_heads)
            return np.concatenate([layer[:, at * a.head_dim : (at + 1) * a.head_dim] for layer in made[kind]], 1)

        for layer_index in range(b.num_hidden_layers):
            parts = []
            for head in heads:
                columns = slice(None) if head is None else slice(head * b.head_dim, (head + 1) * b.head_dim)
                x = fit_rows([inputs(one, head) for one in source])
                y = fit_rows([one[kind][layer_index][:, columns] for one in target])
                weight, bias = least_squares(x, y)
                # The holdout rows are too few to measure variances on, so the fit rows do.
                gain = np.sqrt(y.var(0) / (x @ weight).var(0))
                parts.append((head, weight * gain, y.mean(0) + (bias - y.mean(0)) * gain))

            def mapped(made: dict[str, list[np.ndarray]], parts: list[Any] = parts, inputs: Any = inputs) -> np.ndarray:
                return np.concatenate([inputs(made, head) @ weight + bias for head, weight, bias in parts], 1)

            yield kind, layer_index, mapped


def by_head(rows: np.ndarray, config: Any, batch: int) -> Tensor:
    """(B * T, H * D) as (B, H, T, D)."""
    return torch.from_numpy(rows).view(batch, -1, config.num_key_value_heads, config.head_dim).transpose(1, 2)


def off(found: Tensor, wanted: Tensor) -> float:
    """Largest error relative to the spread."""
    return float((found.double() - wanted).abs().max() / wanted.std())


@pytest.mark.parametrize("support", ["full", "head"])
@pytest.mark.filterwarnings("ignore:.*was not evaluated")
def test_from_text_to_tokens(pair: Fitted, support: Any, tmp_path: Path) -> None:
    # Without a limit on the cost, so that every source layer is read.
    options = Options(penalty=PENALTY, support=support, rank="none", cost=None)
    solved = solve(pair.store, tmp_path / "bundle", options=options, progress=False)
    source, target = pair.source.model, pair.target.model
    a, b = source.config, target.config
    mapper = load_mapper(solved.bundle).bind(source, target, tokenizer=pair.target.tokenizer)
    spec = mapper.spec
    assert (spec.source.n_layers, spec.source.n_heads, spec.source.head_dim) == (
        a.num_hidden_layers,
        a.num_key_value_heads,
        a.head_dim,
    )
    assert (spec.target.n_layers, spec.target.n_heads, spec.target.head_dim) == (
        b.num_hidden_layers,
        b.num_key_value_heads,
        b.head_dim,
    )
    f = a.num_hidden_layers * a.head_dim
    g = b.num_key_value_heads * b.head_dim
    shape = (f * a.num_key_value_heads, g) if support == "full" else (b.num_key_value_heads, f, b.head_dim)
    assert {spec.weight_shape(layer.kind, layer.layer_index) for layer in spec.layers} == {shape}

    # The transfer of a text that nothing was fitted on.
    ids = torch.randint(5, 2000, (2, 41), generator=torch.Generator().manual_seed(8))
    source_cache = caches.full_cache()
    caches.forward(source, ids[:, :-1], source_cache, base=True)
    moved = caches.read_cache(mapper.transfer(source_cache, target_model=target))
    made = made_by(source, ids[:, :-1])
    wanted: list[list[Tensor]] = [[], []]
    plain = []
    for kind, layer_index, mapped in written_out(pair, support):
        states = by_head(mapped(made), b, 2)
        if kind == "keys":
            plain.append(states)
            states = rotated(target, states)
        wanted[kind == "values"].append(states)
        assert off(moved[layer_index][kind == "values"], states) < 2e-3, (kind, layer_index)
    # The controls: keys that were not rotated, or maps of another layer, are told apart.
    assert off(moved[0][0], plain[0]) > 0.5
    assert off(moved[0][1], wanted[1][1]) > 0.5

    # The handoff: the first token and the last three by the target itself, between them the written-out keys and values.
    cache = caches.new_cache(target)
    caches.forward(target, ids[:, :1], cache, base=True)
    for layer_index in range(b.num_hidden_layers):
        keys, values = (wanted[half][layer_index][:, :, 1:37].float() for half in (0, 1))
        caches.append(cache, layer_index, keys, values)
    caches.forward(target, ids[:, 37:40], cache, base=True)
    handed = handoff(mapper, target, ids, source_cache, exact_head=1, exact_tail=3)
    assert (handed.status, handed.n_mapped, handed.n_exact) == ("applied", 36, 4)
    pairs = zip(caches.read_cache(handed.cache), caches.read_cache(cache), strict=True)
    assert all(off(mine, theirs.double()) < 2e-3 for one, two in pairs for mine, theirs in zip(one, two, strict=True))

    # What the target says: generate against a loop of its own, on the two caches.
    answer = generate(target, ids, handed.cache, max_new_tokens=12, do_sample=False)[:, 41:]
    said, last = [], ids[:, -1:]
    for _ in range(12):
        last = caches.forward(target, last, cache)[:, -1].argmax(-1, keepdim=True)
        said.append(last)
    assert torch.equal(answer, torch.cat(said, 1))
    assert len(answer.unique()) > 3


@pytest.mark.parametrize(("n_source", "n_target"), [(2, 4), (4, 2), (1, 3), (3, 1), (2, 3), (3, 2), (6, 4), (8, 8)])
def test_head_support_follows_the_grouped_query_assignment(n_source: int, n_target: int) -> None:
    """Whatever the counts, in the solver and in the transfer."""
    matched = [serving(head, n_source, n_target) for head in range(n_target)]
    assert [source_head(head, n_source, n_target) for head in range(n_target)] == matched
    source, target = model_spec(2, n_source, 4), model_spec(2, n_target, 6)
    mapper = random_mapper(mapper_spec(source, target, [[0, 1], [1]], support="head"))
    pairs = random_pairs(source, 1, 5)
    moved = mapper.transfer(cache_of(pairs))
    for mine, theirs in zip(caches.read_cache(moved), reference_transfer(mapper, pairs, torch.arange(5)), strict=True):
        assert all(off(found, wanted) < 1e-5 for found, wanted in zip(mine, theirs, strict=True))
    # A source head that no target head is matched with changes nothing; one that is changes its own target heads only.
    for changed in range(n_source):
        other = [(keys.clone(), values.clone()) for keys, values in pairs]
        for keys, values in other:
            keys[:, changed] += 1
            values[:, changed] += 1
        again = caches.read_cache(mapper.transfer(cache_of(other)))
        for head, at in enumerate(matched):
            for mine, theirs in zip(again, caches.read_cache(moved), strict=True):
                for half in (0, 1):
                    assert torch.equal(mine[half][:, head], theirs[half][:, head]) == (at != changed)

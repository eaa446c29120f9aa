"""From text to tokens between two models whose heads differ by layer, against the same thing written out.

Two random models of gemma4: larger or fewer heads in full-attention layers, a rotary table for each kind of layer, values made
of keys, and in the source two layers that read the keys and values of earlier ones. The reference takes keys and values from
hooks on the models' norms, solves each map by least squares on those rows, and rotates with the target's own code.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvfit import handoff, load_mapper
from kvfit.errors import MismatchError
from kvfit.fit.capture import models
from kvfit.fit.capture.capture import Options as CaptureOptions
from kvfit.fit.capture.capture import capture
from kvfit.fit.capture.inspect import inspect_model
from kvfit.fit.capture.sequences import sequences
from kvfit.fit.capture.text import TextOptions
from kvfit.fit.plan import Options as PlanOptions
from kvfit.fit.plan import plan
from kvfit.fit.solve.solve import Options, solve
from kvfit.fit.stats.layout import Layout
from kvfit.fit.stats.store import Store
from kvfit.model import cache as caches
from kvfit.spec import KINDS

pytest.importorskip("transformers.models.gemma4", reason="this transformers has no gemma4")

TEXT = TextOptions("demo:text")
CAPTURE = CaptureOptions(
    num_sequences=40, seq_len=64, token_stride=1, skip_tokens=0, holdout=0.25, stats_dtype="float64", inputs="both", lexical=()
)
LOADING = (models.Options(dtype="float32", device="cpu"),) * 2
PENALTY = 1e-2
_S, _F = "sliding_attention", "full_attention"
SMALL = {"hidden_size": 64, "head_dim": 8, "global_head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 4, "layer_types": [_S, _F, _S, _F], "num_kv_shared_layers": 2, "sliding_window": 24}  # fmt: skip
LARGE = {"hidden_size": 96, "head_dim": 16, "global_head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_hidden_layers": 3, "layer_types": [_S, _S, _F],
         "sliding_window": 24}  # fmt: skip
GEOMETRY = ([[2, 8, 8], [2, 16, 16]], [[2, 16, 16], [2, 16, 16], [1, 24, 24]])


def save(shape: dict[str, Any], tokenizer: Any, folder: Path) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {
        "vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer), "hidden_size_per_layer_input": 8,
        "intermediate_size": 96, "max_position_embeddings": 1024, "initializer_range": 0.15, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(shape["num_hidden_layers"])
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **common, **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def refs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    tokenizer = models.load_tokenizer("demo:source")
    folder = tmp_path_factory.mktemp("heads")
    return save(SMALL, tokenizer, folder / "small"), save(LARGE, tokenizer, folder / "large")


@pytest.fixture(scope="module")
def store(refs: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "pair.zarr"
    capture(*refs, path, text=TEXT, options=CAPTURE, loading=LOADING, batch_size=8, progress=False)
    return path


@torch.no_grad()
def made_by(model: Any, n_layers: int, ids: Tensor) -> dict[str, list[np.ndarray]]:
    """Keys before the rotary function and values of ids (B, T), as the model's norms give them, (B * T, H * D) per layer."""
    made: dict[str, list[np.ndarray]] = {"keys": [], "values": []}
    hooks = []
    for layer in model.model.layers[:n_layers]:
        for kind, norm in (("keys", layer.self_attn.k_norm), ("values", layer.self_attn.v_norm)):
            keep = made[kind].append
            hooks.append(
                norm.register_forward_hook(
                    lambda _module, _inputs, out, keep=keep: keep(out.flatten(2).flatten(0, 1).double().numpy())
                )
            )
    model(ids)
    for hook in hooks:
        hook.remove()
    return made


@torch.no_grad()
def rotated(model: Any, layer_index: int, keys: Tensor) -> Tensor:
    """Keys (B, T, H, D) at positions 0 to T - 1, by the model's own rotary module and function."""
    layer_type = model.config.layer_types[layer_index]
    cos, sin = model.model.rotary_emb(torch.empty(1), torch.arange(keys.shape[1])[None], layer_type)
    return sys.modules[type(model).__module__].apply_rotary_pos_emb(keys, cos, sin, unsqueeze_dim=2)


def least_squares(groups: list[np.ndarray], y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ridge as least squares on the centred rows, with rows of each group's penalty below them; with the variance gain."""
    x = np.concatenate(groups, 1)
    xc, yc = x - x.mean(0), y - y.mean(0)
    below = np.concatenate([np.full(one.shape[1], np.sqrt(PENALTY * len(x) * one.var(0).mean())) for one in groups])
    weight = np.linalg.lstsq(
        np.concatenate([xc, np.diag(below)]), np.concatenate([yc, np.zeros((x.shape[1], y.shape[1]))]), rcond=None
    )[0]
    weight = weight * np.sqrt(y.var(0) / (x @ weight).var(0))
    return weight, y.mean(0) - x.mean(0) @ weight


def off(found: Tensor, wanted: Tensor) -> float:
    """Largest error relative to the spread."""
    return float((found.double() - wanted).abs().max() / wanted.std())


@pytest.mark.filterwarnings("ignore:.*was not evaluated")
def test_from_text_to_tokens(refs: tuple[str, str], store: Path, tmp_path: Path) -> None:
    options = Options(penalty=PENALTY, rank="none", cost=None, gain_split="fit")
    solved = solve(store, tmp_path / "bundle", options=options, progress=False)
    source, target = (models.load(ref, options=LOADING[0]).model for ref in refs)
    mapper = load_mapper(solved.bundle).bind(source, target)
    spec = mapper.spec
    assert [[list(heads) for heads in model.geometry or ()] for model in (spec.source, spec.target)] == list(GEOMETRY)

    tokenizer = models.load_tokenizer("demo:source")
    fitted = [one.ids for _, one in zip(range(40), sequences(TEXT, tokenizer, seq_len=64), strict=False)]
    kept = [one for index, one in enumerate(fitted) if CAPTURE.split(index) == "fit"]
    rows = [[made_by(model, n, torch.tensor([ids])) for ids in kept] for model, n in ((source, 2), (target, 3))]
    groups = [np.concatenate([np.concatenate(one[kind], 1) for one in rows[0]]) for kind in KINDS]
    ids = torch.randint(5, 2000, (2, 41), generator=torch.Generator().manual_seed(8))
    source_cache = caches.full_cache()
    caches.forward(source, ids[:, :-1], source_cache, base=True)
    made = made_by(source, 2, ids[:, :-1])
    inputs = np.concatenate([np.concatenate(made[kind], 1) for kind in KINDS], 1)
    moved = mapper.transfer_layers(source_cache)
    for half, kind in enumerate(KINDS):
        for layer_index in range(3):
            weight, bias = least_squares(groups, np.concatenate([one[kind][layer_index] for one in rows[1]]))
            wanted = (
                torch.from_numpy(inputs @ weight + bias)
                .unflatten(0, (2, 40))
                .unflatten(2, spec.target.shape(kind, layer_index))
            )
            if kind == "keys":
                plain, wanted = wanted, rotated(target, layer_index, wanted)
                assert off(moved[layer_index][0], plain.transpose(1, 2)) > 0.5  # the control
            assert off(moved[layer_index][half], wanted.transpose(1, 2)) < 2e-3, (kind, layer_index)

    handed = handoff(mapper, target, ids, source_cache, exact_head=1, exact_tail=3, recompute=0.2, guide=source)
    assert (handed.status, handed.n_mapped) == ("applied", 36)
    answer = handed.generate(max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert answer.shape == (2, 49)


def test_a_plan_is_what_it_takes(refs: tuple[str, str], store: Path, tmp_path: Path) -> None:
    """Sizes are exact; they come from shapes alone."""
    planned = plan(*refs, PlanOptions(capture=CAPTURE, solve=Options(rank="none", dtype="float32")))
    assert [list(map(list, side.layers or ())) for side in (planned.source, planned.target)] == list(GEOMETRY)
    found = Store.open(store)
    layout = Layout(found.source, found.target, "both", "float64")
    chunks = sum(array.chunk_bytes * len(array.chunks) for array in layout.arrays)
    assert planned.store_bytes == 2 * chunks + sum(array.chunk_bytes for array in layout.shifts)
    solved = solve(store, tmp_path / "bundle", options=Options(rank="none", dtype="float32", cost=None), progress=False)
    assert planned.bundle_bytes == load_mapper(solved.bundle, require="any").nbytes
    assert "1 layers x 2 KV heads x 8 and 1 layers x 2 KV heads x 16" in str(planned)
    with pytest.raises(MismatchError, match=r"--support head: found .*small, whose heads differ by layer"):
        plan(*refs, PlanOptions(capture=CAPTURE, solve=Options(support="head")))


def test_inspect_says_each_layers_heads(refs: tuple[str, str]) -> None:
    found = [inspect_model(ref) for ref in refs]
    assert [one.supported for one in found] == [True, True]
    assert [one.to_json()["geometry"] for one in found] == list(GEOMETRY)
    assert "2 of size 8, 2 of size 16, for 4 query heads" in str(found[0])
    assert "2 of size 16 x2, 1 of size 24, for 4 query heads" in str(found[1])

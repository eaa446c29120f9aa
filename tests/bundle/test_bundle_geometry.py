"""Bundles of models whose heads differ by layer; and those of other models, whose records have no trace of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bundle_factory import basis, lexical_spec, make_bundle, mapper_spec, weights

from kvfit.bundle.bundle import Bundle
from kvfit.bundle.records import from_json, to_json
from kvfit.errors import BundleError, SpecError
from kvfit.hub.card import render_card
from kvfit.spec import MapperSpec, ModelSpec

SOURCE = ((1, 4, 4), (2, 6, 4))
TARGET = ((2, 4, 6), (1, 8, 8), (2, 4, 4))


def uneven(spec: MapperSpec) -> MapperSpec:
    return replace(spec, source=replace(spec.source, geometry=SOURCE), target=replace(spec.target, geometry=TARGET))


def test_shapes_and_widths() -> None:
    model = uneven(mapper_spec()).target
    assert [model.shape("keys", i) for i in range(3)] == [(2, 4), (1, 8), (2, 4)]
    assert [model.shape("values", i) for i in range(3)] == [(2, 6), (1, 8), (2, 4)]
    assert [model.width_of("values", i) for i in range(3)] == [12, 8, 8]
    assert (model.width, model.first_width) == (12, 20)
    alike = mapper_spec().target
    assert [alike.width_of(kind, i) for kind in ("keys", "values") for i in range(3)] == [8] * 6
    assert (alike.width, alike.first_width) == (8, 16)


def test_weights_have_the_shapes_that_their_layers_need() -> None:
    spec = uneven(mapper_spec())  # layer 0 reads source layer 1, the others both; keys from keys
    assert [spec.weight_shape("keys", i) for i in range(3)] == [(12, 8), (16, 8), (16, 8)]
    assert [spec.weight_shape("values", i) for i in range(3)] == [(8, 12), (12, 8), (12, 8)]
    spec = uneven(lexical_spec(rank=None))  # layers 1 and 2 read keys and values of both, and two lags of target layer 0
    assert [spec.weight_shape("keys", i) for i in (1, 2)] == [(16 + 12 + 2 * 20, 8)] * 2
    assert uneven(lexical_spec(rank=5)).basis_shape == (68, 5)


@pytest.mark.parametrize("made", [mapper_spec(), lexical_spec()], ids=["maps", "lexical, basis"])
def test_a_bundle_reads_back(made: MapperSpec, tmp_path: Path) -> None:
    spec = uneven(made)
    bundle = Bundle.open(make_bundle(tmp_path / "bundle", spec))
    assert bundle.spec == spec
    for kind, layer_index, weight, bias in weights(spec):
        found = bundle.layer(kind, layer_index)
        assert torch.equal(found[0], weight)
        assert torch.equal(found[1], bias)
    wanted, found_basis = basis(spec), bundle.basis()
    assert (wanted is None) == (found_basis is None)
    assert wanted is None or torch.equal(found_basis, wanted)
    record = json.loads((tmp_path / "bundle" / "mapper.json").read_text())
    assert record["target"]["geometry"] == [list(heads) for heads in TARGET]
    card = render_card(bundle)
    assert "| key/value heads | 1 to 2, by layer | 1 to 2, by layer |" in card
    assert "| head size | 4 to 6, by layer | 4 to 8, by layer |" in card


def test_other_models_have_no_such_field(tmp_path: Path) -> None:
    record = json.loads((make_bundle(tmp_path / "bundle") / "mapper.json").read_text())
    assert not {"geometry"} & {*record, *record["source"], *record["target"]}


def test_weights_of_another_layers_shape_are_refused(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "bundle", uneven(mapper_spec()))
    record = json.loads((folder / "mapper.json").read_text())
    record["target"]["geometry"] = [[2, 4, 6], [2, 8, 8], [2, 4, 4]]
    (folder / "mapper.json").write_text(json.dumps(record))
    with pytest.raises(BundleError):
        Bundle.open(folder)


@pytest.mark.parametrize(
    ("geometry", "field"),
    [
        ([], "geometry: found 0 entries, needed 3"),
        ([[2, 4, 4]] * 2, "geometry: found 2 entries, needed 3"),
        ([[2, 4, 4]] * 3, "geometry: found the same heads in all layers, needed no such field"),
        ([[2, 4, 4], [2, 4], [2, 4, 4]], r"geometry\[1\]: found \[2, 4\]"),
        ([[2, 4, 4], [2, 0, 4], [2, 4, 4]], r"geometry\[1\]: found \[2, 0, 4\]"),
        ([[1, 4, 4], [2, 4, 4], [2, 4, 4]], r"geometry\[0\]: found \[1, 4, 4\]"),
        ([[2, 4, 4], [2, 2, 4], [2, 4, 4]], r"rope.tables\[0\].rotated_width: found 4, needed at most 2"),
        ([[2, 4, 4.5], [2, 4, 4], [2, 4, 4]], r"geometry\[0\]\[2\]"),
        ("2x4", "geometry"),
    ],
)
def test_what_a_record_may_not_say(geometry: object, field: str) -> None:
    record = to_json(mapper_spec().target)
    with pytest.raises(SpecError, match=field):
        from_json(ModelSpec, record | {"geometry": geometry})


def test_a_layer_count_of_millions_costs_nothing() -> None:
    record = to_json(mapper_spec().target)
    with pytest.raises(SpecError, match="windows: found 3 entries"):
        from_json(ModelSpec, record | {"n_layers": 1 << 60, "geometry": [[2, 4, 4]]})


def test_matching_heads_are_refused() -> None:
    with pytest.raises(SpecError, match="support: found head with a model whose heads differ by layer, needed full"):
        uneven(mapper_spec(support="head"))

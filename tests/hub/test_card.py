"""The card: a pure function of the bundle, held by a golden file; and its metadata as the Hub's client reads them."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from bundle_factory import (
    RECIPE,
    SOLVE,
    evaluated_bundle,
    evaluation,
    lexical_spec,
    make_bundle,
    mapper_spec,
    weights,
)

from kvfit.bundle.bundle import Bundle, add_files, write_bundle
from kvfit.errors import BundleError
from kvfit.hub.card import MARK, check_metadata, is_generated, metadata, render_card, write_card
from kvfit.runtime import EXACT_HEAD

GOLDEN = Path(__file__).parents[1] / "data" / "card.md"
FROZEN = Path(__file__).parents[1] / "data" / "bundle-v1"


def test_the_golden_card():
    """Change it on purpose with KVFIT_WRITE_GOLDEN=1, and look at what changed."""
    text = render_card(Bundle.open(FROZEN), ref="org/mapper", license="apache-2.0")
    if os.environ.get("KVFIT_WRITE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_the_clients_own_reader_agrees_on_the_metadata(tmp_path):
    bundle = Bundle.open(evaluated_bundle(tmp_path / "b"))
    found = check_metadata(render_card(bundle, ref="org/mapper", license="mit"), "b")
    assert found == metadata(bundle, "mit")
    assert found["base_model"] == ["org/small", "org/large"]
    assert found["datasets"] == ["example-org/plain-text"]
    assert found["library_name"] == "kvfit"
    assert found["license"] == "mit"


@pytest.mark.parametrize("dataset", ["/data/text.jsonl", "./text", "text.jsonl", "demo:text", None, 7, "a/b/c"])
def test_no_local_name_gets_into_the_metadata(tmp_path, dataset):
    spec = mapper_spec(source="demo:source", target="my-local-model")
    write_bundle(tmp_path / "b", spec, weights(spec), recipe={"text": {"dataset": dataset}}, solve=SOLVE)
    found = metadata(Bundle.open(tmp_path / "b"))
    assert "base_model" not in found
    assert "datasets" not in found
    assert "license" not in found


def test_one_hub_model_is_still_named(tmp_path):
    bundle = Bundle.open(make_bundle(tmp_path / "b", mapper_spec(source="demo:source")))
    assert metadata(bundle)["base_model"] == ["org/large"]


def test_a_card_without_evaluation_says_so_and_one_of_other_weights_too(tmp_path):
    plain = make_bundle(tmp_path / "a")
    assert "Not evaluated yet" in render_card(Bundle.open(plain))
    other = Bundle.open(make_bundle(tmp_path / "b", seed=1))
    add_files(plain, {"evaluation.json": json.dumps(evaluation(other)).encode()})
    text = render_card(Bundle.open(plain))
    assert "Not evaluated yet" in text
    assert "0.600" not in text


def test_a_failed_verdict_is_said_with_its_reasons(tmp_path):
    text = render_card(Bundle.open(evaluated_bundle(tmp_path / "b", "fail")))
    assert "Verdict of the evaluation: **fail**" in text
    assert "share of gap 0.10, needed 0.25" in text


@pytest.mark.parametrize(
    "solve", [{}, {"probe": []}, {"probe": {"keys": {"holdout": [[1]]}}}, {"r2": 3, "tokens": [], "options": None}]
)
@pytest.mark.parametrize("recipe", [{}, {"text": [], "options": {"seed": {"a": "|"}}}])
def test_records_of_another_form_are_left_out_not_stumbled_over(tmp_path, solve, recipe):
    spec = mapper_spec()
    write_bundle(tmp_path / "b", spec, weights(spec), recipe=recipe, solve=solve)
    text = render_card(Bundle.open(tmp_path / "b"))
    assert "R2 of single source layers" not in text


def test_an_evaluation_of_another_form_too(tmp_path):
    folder = make_bundle(tmp_path / "b")
    digest = Bundle.open(folder).weights_digest
    for arms in ({}, [], {"handoff": 3}, {"handoff": {"nll": "<b>|x\n", "interval": [1]}}):
        document = {"verdict": "pass", "weights_digest": digest, "arms": arms, "milliseconds": 3, "reasons": "no"}
        add_files(folder, {"evaluation.json": json.dumps(document).encode()})
        text = render_card(Bundle.open(folder))
        assert "<b>" not in text
        for line in text.splitlines():
            if line.startswith("| `handoff`"):
                assert line.replace("\\|", "").count("|") == 4


WAYS = [
    {"way": "native", "label": "x", "nll": 2.0, "share_of_gap": 1.0, "milliseconds": 80.0, "speed": 1.0, "share_of_work": 1.0,
     "breaks_even": None, "recall": 0.9},
    {"way": "handoff", "label": "x", "nll": 2.2, "share_of_gap": 0.6, "interval": [0.5, 0.7], "milliseconds": 20.0,
     "speed": 4.0, "share_of_work": 0.125, "breaks_even": 900, "recall": 0.8},
    {"way": "sideways", "label": "a way | of <b>another</b> kvfit", "nll": 3.0},
]  # fmt: skip


def table_rows(text: str, heading: str) -> list[dict[str, str]]:
    """The first table below a heading, a row as cells by column."""
    lines = [line for line in text.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def test_a_row_has_quality_time_and_work_of_the_same_way(tmp_path):
    folder = evaluated_bundle(tmp_path / "b")
    document = {**Bundle.open(folder).evaluation, "ways": WAYS}
    add_files(folder, {"evaluation.json": json.dumps(document).encode()})
    text = render_card(Bundle.open(folder))
    native, handoff, other = table_rows(text, "Quality")
    assert (native["way"], handoff["way"], other["way"]) == ("`native`", "`handoff`", "`sideways`")
    assert handoff["share of gap"] == "0.600 [0.500, 0.700]"
    assert (handoff["recall"], handoff["time"], handoff["times as fast as a prefill"]) == ("0.8", "20 ms", "4")
    assert (handoff["share of the target's work"], handoff["pays from"]) == ("12.5 %", "900 tokens")
    assert (native["time"], native["pays from"], other["time"]) == ("80 ms", "-", "-")
    assert other["what it is"] == "a way \0 of &lt;b>another&lt;/b> kvfit"
    assert "for 383 moved tokens" in text
    for ways in ([3, {"way": 4}, {"way": "native", "speed": "fast", "share_of_work": [], "nll": True}], {}, "x"):
        add_files(folder, {"evaluation.json": json.dumps(document | {"ways": ways}).encode()})
        render_card(Bundle.open(folder))


def test_an_evaluation_of_kvfit_0_1_has_its_times_in_the_same_row(tmp_path):
    native, transfer, *others = table_rows(render_card(Bundle.open(evaluated_bundle(tmp_path / "b"))), "Quality")
    assert (native["time"], native["times as fast as a prefill"]) == ("40 ms", "1")
    assert (transfer["recall"], transfer["time"], transfer["times as fast as a prefill"]) == ("0.5", "2.5 ms", "16")
    assert {row["time"] for row in others} == {"-"}


@pytest.mark.parametrize(
    ("cost", "sentence"),
    [
        (
            {"flops_per_token": 2e6, "prefill_flops_per_token": 4e7, "bytes_per_token": 3e5, "prefill_bytes_per_token": 1e6},
            "The map itself costs 2 MFLOP (5 %) and 0.3 MB (30 %) of the target's prefill per token.",
        ),
        (
            {"flops_per_token": 2e6, "prefill_flops_per_token": 4e7, "estimated": True},
            "The map itself costs 2 MFLOP (5 %) of the target's prefill per token, estimated.",
        ),
        ({"flops_per_token": "many", "prefill_flops_per_token": 0}, None),
        (None, None),
        ([1], None),
    ],
)
def test_the_price_of_the_map_is_named_where_it_is_known(tmp_path, cost, sentence):
    spec = mapper_spec()
    write_bundle(tmp_path / "b", spec, weights(spec), recipe=RECIPE, solve=SOLVE | {"cost": cost})
    folder = tmp_path / "b"
    add_files(folder, {"evaluation.json": json.dumps(evaluation(Bundle.open(folder))).encode()})
    text = render_card(Bundle.open(folder))
    assert ("The map itself costs" in text) == (sentence is not None)
    assert sentence is None or sentence in text


def test_a_lexical_mapper_with_a_basis_has_a_card(tmp_path):
    text = render_card(Bundle.open(make_bundle(tmp_path / "b", lexical_spec())))
    assert "| lexical inputs | lag 0, lag 1 |" in text
    assert "| rank of the shared basis | 5 |" in text
    assert "  2 |" in text


def test_a_refined_mapper_says_so(tmp_path):
    spec = mapper_spec()
    refine = {"kl_before": 0.25, "kl_after": 0.125}
    write_bundle(tmp_path / "b", spec, weights(spec), recipe=RECIPE, solve=SOLVE | {"refine": refine})
    text = render_card(Bundle.open(tmp_path / "b"))
    assert "| refined | KL to the target's own cache 0.250 before, 0.125 after; R2 is that of the map before |" in text
    assert "| refined |" not in render_card(Bundle.open(make_bundle(tmp_path / "plain", spec)))


@pytest.mark.parametrize("family", ["{{ 7 * 7 }}", "{% for x in y %}", "a: [b", "- no", "#x", "'\"", "null", "---"])
def test_text_of_a_bundle_is_no_template_and_no_metadata(tmp_path, family):
    spec = mapper_spec()
    spec = dataclasses.replace(spec, source=dataclasses.replace(spec.source, family=family))
    bundle = Bundle.open(make_bundle(tmp_path / "b", spec))
    text = render_card(bundle)
    assert f"| family | {family} | llama |" in text
    assert check_metadata(text, "b")["tags"] == ["kvfit", "kv-cache", "kv-cache-transfer", family, "llama"]


def test_nothing_that_steers_a_terminal_gets_into_a_card(tmp_path):
    folder = evaluated_bundle(tmp_path / "b")
    document = {**Bundle.open(folder).evaluation, "reasons": ["\x1b[2J \u202e <b>"], "text": "a\x07b", "verdict": "fail"}
    add_files(folder, {"evaluation.json": json.dumps(document).encode()})
    text = render_card(Bundle.open(folder))
    assert all(line.isprintable() for line in text.split("\n"))
    assert "&lt;b>" in text


def test_every_table_has_as_many_cells_in_every_row():
    text = render_card(Bundle.open(FROZEN), ref="org/mapper")
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table}) == 1


def test_the_lines_of_python_compile():
    text = render_card(Bundle.open(FROZEN), ref="org/mapper")
    code = text.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert 'load_mapper("org/mapper")' in code
    assert "moved.generate(max_new_tokens=" in code


def test_the_lines_of_python_are_what_was_judged(tmp_path):
    """A map that recalls with guided recompute alone must not be shown without it."""
    folder = evaluated_bundle(tmp_path / "b")
    evaluation = dict(Bundle.open(folder).evaluation)
    evaluation["options"] = {"exact_head": 2, "exact_tail": 16, "recompute": 0.1}
    add_files(folder, {"evaluation.json": json.dumps(evaluation).encode()})
    text = render_card(Bundle.open(folder))
    arguments = "exact_head=2, exact_tail=16, recompute=0.1, guide=source_model"
    assert f"handoff(mapper, target_model, input_ids, source_cache, {arguments})" in text
    assert f"mapped cache with `{arguments}`, as in production" in text
    compile(text.split("```python\n")[1].split("```")[0], "card", "exec")
    evaluation["options"] = {"exact_head": "2) or (", "recompute": True}
    add_files(folder, {"evaluation.json": json.dumps(evaluation).encode()})
    assert "source_cache, exact_head=1)" in render_card(Bundle.open(folder))
    # Nothing was judged: then it is the default, written out as the evaluated are.
    assert f"source_cache, exact_head={EXACT_HEAD})" in render_card(Bundle.open(make_bundle(tmp_path / "plain")))


@pytest.mark.parametrize(
    ("overlap", "sentence"),
    [
        ({"checked": True, "left_out": 0}, "Neither fit nor selection saw any of these documents."),
        (
            {"checked": True, "left_out": 3},
            "Neither fit nor selection saw any of these documents; 3 documents that they did see were left out.",
        ),
        ({"checked": True, "left_out": "<b>"}, "Neither fit nor selection saw any of these documents."),
        ({"checked": "yes"}, "is not known"),
        ({"checked": False, "left_out": 0}, "is not known"),
        (None, "is not known"),
    ],
)
def test_that_text_was_unseen_is_said_only_where_it_was_looked_up(tmp_path, overlap, sentence):
    folder = evaluated_bundle(tmp_path / "b")
    evaluation = {**Bundle.open(folder).evaluation, "overlap": overlap}
    add_files(folder, {"evaluation.json": json.dumps(evaluation).encode()})
    text = render_card(Bundle.open(folder))
    assert sentence in text
    assert ("Neither fit" in text) == ("Neither fit" in sentence)


def test_plots_are_shown(tmp_path):
    folder = make_bundle(tmp_path / "b")
    add_files(folder, {"r2-keys.png": b"\x89PNG"})
    assert "![r2-keys](r2-keys.png)" in render_card(Bundle.open(folder))


def test_write_card_follows_the_evaluation_and_keeps_an_authors_text(tmp_path):
    folder = make_bundle(tmp_path / "b")
    write_card(folder)
    assert "Not evaluated yet" in (folder / "README.md").read_text()
    add_files(folder, {"evaluation.json": json.dumps(evaluation(Bundle.open(folder))).encode()})
    write_card(folder, license="mit")
    assert (folder / "README.md").read_text() == render_card(Bundle.open(folder), license="mit")
    add_files(folder, {"README.md": b"mine\n"})
    write_card(folder)
    assert (folder / "README.md").read_bytes() == b"mine\n"


def test_generated_cards_are_known_by_their_last_line():
    text = render_card(Bundle.open(FROZEN))
    assert is_generated(text)
    assert not is_generated(text.replace(MARK, ""))
    assert not is_generated(text + "and more\n")


@pytest.mark.parametrize(
    ("front", "what"),
    [
        ("library_name: kvfit\nbase_model: /models/x", "base_model"),
        ("library_name: kvfit\nbase_model: [org/a, ../b]", "base_model"),
        ("library_name: kvfit\ndatasets: [./text.jsonl]", "datasets"),
        ("library_name: transformers", "library_name"),
        ("license: mit", "library_name"),
        ("library_name: [", "metadata"),
        ("library_name: kvfit\nbase_model: {a: b}", "base_model"),
    ],
)
def test_metadata_that_the_hub_would_refuse_or_that_leak_a_path(front, what):
    with pytest.raises(BundleError, match=what) as caught:
        check_metadata(f"---\n{front}\n---\n# x\n", "b")
    assert "\n" not in str(caught.value)


def test_old_names_of_data_sets_are_fine():
    assert check_metadata("---\nlibrary_name: kvfit\ndatasets: [squad, org/x]\n---\n", "b")["datasets"] == ["squad", "org/x"]

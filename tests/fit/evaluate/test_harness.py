"""The model for lm-evaluation-harness, on a task that is defined here; no network."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import fit_tiny, paired
from tokenizers import AddedToken

pytest.importorskip("lm_eval")

from kvfit.errors import MismatchError
from kvfit.fit.evaluate.arms import Prefixes
from kvfit.fit.evaluate.harness import ARMS, KvfitLM
from kvfit.model.cache import forward, new_cache
from kvfit.runtime import EXACT_HEAD

Loader = Callable[[Path | str], Any]
QUESTIONS = [
    ("And Moses said unto the people, remember this", [" day", " king", " of the house"], 0),
    ("The ship went down by the stern, and all the", [" men", " walked into it"], 1),
    ("In the beginning the heaven and the earth were", [" made", " so"], 0),
]


@pytest.fixture(scope="module")
def bundle(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit_tiny(tiny_pair, tmp_path_factory.mktemp("harness"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two tasks: one with choices, one that generates."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": question, "choices": choices, "answer": answer} for question, choices, answer in QUESTIONS]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shared = [f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'rows.jsonl'}}}}}\ntest_split: test"]
    (folder / "choices.yaml").write_text(
        "\n".join(
            [
                "task: kvfit_choices",
                *shared,
                'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"',
                'doc_to_choice: "{{choices}}"\ntarget_delimiter: ""\nmetric_list: [{metric: acc}]',
            ]
        )
    )
    (folder / "says.yaml").write_text(
        "\n".join(
            [
                "task: kvfit_says",
                *shared,
                'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{choices[answer]}}"',
                'generation_kwargs: {until: ["\\n"], max_gen_toks: 5, do_sample: false}\nmetric_list: [{metric: exact_match}]',
            ]
        )
    )
    return folder


def model(bundle: Path, tiny_pair: tuple[Path, Path], arm: Any, **options: Any) -> KvfitLM:
    return KvfitLM(
        str(bundle), arm, source=str(tiny_pair[0]), target=str(tiny_pair[1]), dtype="float32", device="cpu", **options
    )


@pytest.mark.parametrize("arm", ["native", "transfer", "handoff", "source", "no_context"])
def test_choices_are_scored_as_written_out(
    arm: Any, bundle: Path, tasks: Path, tiny_pair: tuple[Path, Path], load: Loader
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        model(bundle, tiny_pair, arm, exact_head=1), tasks=["kvfit_choices"], bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )  # fmt: skip
    source, target = (load(folder) for folder in tiny_pair)
    pair = paired(bundle, source, target, exact_head=1)
    used = source.model if arm == "source" else target.model
    right = 0
    samples = sorted(found["samples"]["kvfit_choices"], key=lambda sample: sample["doc_id"])
    for sample, (question, choices, answer) in zip(samples, QUESTIONS, strict=True):
        scores = []
        for choice, (scored, is_greedy) in zip(choices, sample["filtered_resps"], strict=True):
            prompt = target.tokenizer(question)["input_ids"]
            ids = torch.tensor([target.tokenizer(question + choice)["input_ids"]])
            assert ids[0, : len(prompt)].tolist() == prompt
            prefix = ids[:, : len(prompt) - 1]
            cache = Prefixes(pair, prefix).cache(arm)
            logits = forward(used, ids[:, len(prompt) - 1 : -1], new_cache(used) if cache is None else cache)[0].double()
            wanted = ids[0, len(prompt) :]
            steps = logits.log_softmax(-1)[torch.arange(len(wanted)), wanted]
            scores.append(float(steps.sum()))
            assert float(scored) == pytest.approx(scores[-1], abs=1e-3)
            assert str(is_greedy) == str(bool((logits.argmax(-1) == wanted).all()))
        right += scores.index(max(scores)) == answer
    assert found["results"]["kvfit_choices"]["acc,none"] == pytest.approx(right / 3)


def test_answers_are_generated_from_the_mapped_prompt(
    bundle: Path, tasks: Path, tiny_pair: tuple[Path, Path], load: Loader
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        model(bundle, tiny_pair, "transfer"), tasks=["kvfit_says"], log_samples=True, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )  # fmt: skip
    source, target = (load(folder) for folder in tiny_pair)
    pair = paired(bundle, source, target)
    for sample in found["samples"]["kvfit_says"]:
        ids = torch.tensor([target.tokenizer(QUESTIONS[sample["doc_id"]][0])["input_ids"]])
        cache = Prefixes(pair, ids[:, :-1]).cache("transfer")
        said, last = [], ids[:, -1:]
        for _ in range(5):
            last = forward(target.model, last, cache)[:, -1].argmax(-1, keepdim=True)
            said.append(int(last))
        assert sample["resps"][0][0] == target.tokenizer.decode(said).split("\n")[0]


def spoken(made: KvfitLM, **asked: Any) -> tuple[str, str, list[int]]:
    """What the model, and the harness's own, answer to the first question; and the token ids of the latter."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    request = Instance("generate_until", {}, (QUESTIONS[0][0], {"until": ["\n\n\n"], "max_gen_toks": 12, **asked}), 0)
    own = HFLM(pretrained=made.model, tokenizer=made.tokenizer, batch_size=1)
    ids: list[int] = []
    generated = own._model_generate

    def noted(context: torch.Tensor, **given: Any) -> torch.Tensor:
        found = generated(context, **given)
        ids.extend(found[0, context.shape[1] :].tolist())
        return found

    own._model_generate = noted
    theirs = own.generate_until([request], disable_tqdm=True)[0]
    return made.generate_until([request], disable_tqdm=True)[0], theirs, ids


def test_native_says_what_the_harnesss_own_model_says(bundle: Path, tiny_pair: tuple[Path, Path]) -> None:
    """Whatever ends an answer or changes it: a second end token, a special token, a setting of the model or of the task."""
    made = model(bundle, tiny_pair, "native")
    config = made.model.generation_config
    plain, theirs, ids = spoken(made)
    assert plain == theirs
    assert len(ids) == 12

    config.eos_token_id = [0, ids[4]]
    ours, theirs, fewer = spoken(made)
    assert ours == theirs
    assert fewer == ids[: ids.index(ids[4]) + 1]
    config.eos_token_id = 0

    for answer in (spoken(made, suppress_tokens=[ids[0]]), spoken(made, max_gen_toks=None, max_tokens=5)):
        assert answer[0] == answer[1] != plain
    config.suppress_tokens = [ids[0]]
    ours, theirs, _ = spoken(made)
    assert ours == theirs != plain
    config.suppress_tokens = None

    special = made.tokenizer.convert_ids_to_tokens(ids[2])
    made.tokenizer.add_tokens([AddedToken(special, special=True)], special_tokens=True)
    assert made.tokenizer.convert_tokens_to_ids(special) == ids[2]
    ours, theirs, same = spoken(made)
    assert ours == theirs != plain
    assert same == ids
    ours, theirs, fewer = spoken(made, until=[made.tokenizer.decode([ids[2]])])
    assert ours == theirs
    assert len(fewer) <= 3


@pytest.mark.parametrize("arm", ["native", "source"])
@pytest.mark.parametrize("max_length", [4, 9])
def test_a_long_prompt_is_cut_as_the_harnesss_own_model_cuts_it(
    arm: Any, max_length: int, bundle: Path, tiny_pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """An answer as long as `max_length` keeps one token of the prompt, because its own last token is not run."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    made = model(bundle, tiny_pair, arm, max_length=max_length)
    own = HFLM(pretrained=made.model, tokenizer=made.tokenizer, batch_size=1, max_length=max_length)
    prompt = made.tok_encode(QUESTIONS[0][0])
    answers = [made.tok_encode(QUESTIONS[1][0])[:length] for length in range(1, max_length + 1)]
    pairs = [(("", ""), prompt[:length], answer) for length in range(1, 14, 2) for answer in answers]
    caplog.clear()
    ours, theirs = (one._loglikelihood_tokens(pairs, disable_tqdm=True) for one in (made, own))
    n_cut = sum(len(before) + len(answer) > max_length + 1 for _, before, answer in pairs)
    assert 0 < n_cut < len(pairs)
    said = [record.getMessage() for record in caplog.records if record.name == "kvfit"]
    assert said == [f"loglikelihood: {n_cut} of {len(pairs)} prompts lost their beginning (max_length={max_length})"]
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], abs=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    with pytest.raises(MismatchError, match="max_length"):  # theirs asserts
        made._loglikelihood_tokens([(("", ""), prompt, [*answers[-1], 1])], disable_tqdm=True)

    asked = [Instance("generate_until", {}, (text, {"until": [], "max_gen_toks": 3}), 0) for text, _, _ in QUESTIONS]
    assert made.generate_until(asked, disable_tqdm=True) == own.generate_until(asked, disable_tqdm=True)
    n_cut = sum(len(made.tok_encode(text)) > max_length - 3 for text, _, _ in QUESTIONS)
    said = [record.getMessage() for record in caplog.records if record.name == "kvfit"]
    assert said[1:] == [f"generate: {n_cut} of 3 prompts lost their beginning (max_length={max_length})"]


def test_the_registry_makes_the_model_from_its_arguments(bundle: Path, tiny_pair: tuple[Path, Path]) -> None:
    from lm_eval.api.registry import get_model

    given = f"bundle={bundle},arm=source,source={tiny_pair[0]},target={tiny_pair[1]},exact_tail=3,recompute=0.1"
    made = get_model("kvfit").create_from_arg_string(given, {"batch_size": 1, "device": "cpu", "max_batch_size": None})
    assert isinstance(made, KvfitLM)
    assert (made.arm, made.pair.exact_tail, made.pair.recompute) == ("source", 3, 0.1)
    assert made.pair.exact_head == EXACT_HEAD
    assert made.model is made.pair.source


def harness(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as the documentation has it, in a process of its own."""
    command = [sys.executable, "-m", "kvfit.fit.evaluate.harness", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_starts() -> None:
    done = harness("--help")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "run" in done.stdout


@pytest.mark.slow  # the harness reads the names of all its own tasks first
def test_the_command_knows_the_model(bundle: Path, tasks: Path, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    given = f"bundle={bundle},arm=transfer,source={tiny_pair[0]},target={tiny_pair[1]},dtype=float32"
    done = harness(
        "run", "--model", "kvfit", "--model_args", given, "--tasks", "kvfit_choices", "--include_path", str(tasks),
        "--device", "cpu", "--output_path", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(path.read_text()) for path in (tmp_path / "out").rglob("results*.json")]
    assert len(results) == 1
    assert 0 <= results[0]["results"]["kvfit_choices"]["acc,none"] <= 1


def test_what_cannot_be_moved_is_refused(bundle: Path, tiny_pair: tuple[Path, Path]) -> None:
    from lm_eval.api.instance import Instance

    assert "shuffled" not in ARMS
    with pytest.raises(MismatchError, match="arm: found 'shuffled'"):
        model(bundle, tiny_pair, "shuffled")
    with pytest.raises(MismatchError, match="arm raw: found two geometries"):
        model(bundle, tiny_pair, "raw")
    made = model(bundle, tiny_pair, "transfer", max_length=20)
    with pytest.raises(MismatchError, match="task without prompts"):
        made.loglikelihood_rolling([])
    for settings in ({"do_sample": True}, {"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}):
        sampled = Instance("generate_until", {}, ("A question", {"until": [], **settings}), 0)
        with pytest.raises(MismatchError, match="samples"):
            made.generate_until([sampled])
    # A prompt that does not fit loses its beginning.
    assert made._fitted(list(range(30)), 5) == list(range(15, 30))
    with pytest.raises(MismatchError, match="max_length"):
        made._fitted([1], 20)


def test_a_prompt_begins_once(bundle: Path, tiny_pair: tuple[Path, Path]) -> None:
    """A chat template writes the beginning of sequence that the tokenizer adds to every text."""
    made = model(bundle, tiny_pair, "native")
    plain = made.tok_encode("And Moses said")
    made.tokenizer = Begins(made.tokenizer)
    assert made.tok_encode("<bos>And Moses said") == made.tok_encode("And Moses said") == [7, *plain]
    assert made.tok_encode("<bos>And Moses said", add_special_tokens=False) == [7, *plain]
    assert made._encode_pair("<bos>And Moses", " said")[0][:2] == [7, plain[0]]


class Begins:
    """A tokenizer that puts token 7 before every text, and reads ``<bos>`` as it."""

    bos_token_id = 7

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        written = [7] if text.startswith("<bos>") else []
        return {"input_ids": [7] * add_special_tokens + written + self.plain(text.removeprefix("<bos>"))["input_ids"]}

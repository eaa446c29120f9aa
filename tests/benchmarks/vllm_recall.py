"""Recall of a target engine in vLLM beside `handoff` in transformers, from the same prompts, at several budgets.

    python tests/benchmarks/vllm_recall.py [BUNDLE] --questions 60

Names with random codes hidden in held-out text, one asked for; an answer counts when every digit is right. Prints one row per
budget, in Markdown: recall of both, and how many answers are the same token for token.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from vllm_engines import generate, running

from kvfit import handoff, load_mapper
from kvfit.demo import MODELS, TEXTS
from kvfit.fit.evaluate.questions import probes
from kvfit.model.cache import forward, full_cache
from kvfit.model.generate import generate as continued

MAPPER = Path(__file__).resolve().parents[2] / "registry" / "demo-mapper"
CONTEXT, BLOCK = 512, 128


def prompts(count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and the answers that are right."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODELS["demo:source"])
    texts = [json.loads(line)["text"] for line in TEXTS["demo:heldout"].read_text(encoding="utf-8").splitlines()]
    long = [text for text in texts if len(tokenizer(text)["input_ids"]) >= CONTEXT]
    asked = probes(tokenizer, long, count=count, context_tokens=CONTEXT)
    return [[*one.context_ids, *one.question_ids] for one in asked], [list(one.answer_ids) for one in asked]


def in_transformers(models: Any, mapper: Any, prompt: list[int], n_tokens: int, **wanted: Any) -> list[int]:
    """The answer after `handoff` with the same exact tail: vLLM maps whole blocks."""
    ids = torch.tensor([prompt])
    cache = full_cache()
    forward(models[0], ids[:, :-1], cache, base=True)
    moved = handoff(mapper, models[1], ids, cache, exact_tail=(len(prompt) - 1) % BLOCK, **wanted)
    answer = continued(models[1], ids, moved.cache, max_new_tokens=n_tokens, do_sample=False, eos_token_id=None)
    return answer[0, len(prompt) :].tolist()


def main() -> None:
    """Print the table."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", default=str(MAPPER))
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0, 0.02, 0.05, 0.1, 0.2])
    arguments = parser.parse_args()
    asked, right = prompts(arguments.questions)
    n_tokens = max(map(len, right))

    def recall(answers: list[list[int]]) -> str:
        hits = sum(answer[: len(truth)] == truth for answer, truth in zip(answers, right, strict=True))
        return f"{hits / len(right):.0%}"

    mapper = load_mapper(arguments.bundle, require="any", dtype=torch.float32)
    models = [AutoModelForCausalLM.from_pretrained(MODELS[name], dtype=torch.float32).eval() for name in MODELS]
    with tempfile.TemporaryDirectory() as store:
        with running(MODELS["demo:source"], role="source", store=store) as source:
            read, _ = generate(source, asked, n_tokens=n_tokens)
        with running(MODELS["demo:target"], role="target", store=store, mapper=arguments.bundle, require="any") as target:
            native, _ = generate(target, asked, n_tokens=n_tokens, map=False)
            print("| budget | recall in vLLM | recall of handoff | same answers |\n|---|---|---|---|")
            for budget in arguments.budgets:
                served, told = generate(target, asked, n_tokens=n_tokens, recompute=budget)
                assert all(one["status"] == "applied" for one in told)
                guided = {"recompute": budget, "guide": models[0]} if budget else {}
                moved = [in_transformers(models, mapper, prompt, n_tokens, **guided) for prompt in asked]
                same = sum(a == b for a, b in zip(served, moved, strict=True))
                print(f"| {budget:.0%} | {recall(served)} | {recall(moved)} | {same} of {len(asked)} |", flush=True)
    print(f"| native | {recall(native)} | | |\n| source | {recall(read)} | | |")


if __name__ == "__main__":
    main()

"""Cascade: the small model answers; where it is unsure, the large one answers from the small one's cache.

python docs/examples/cascade.py [BUNDLE]
"""

import torch
from demo_pair import confidence, load, prompts

from kvfit import handoff
from kvfit.model.cache import forward, full_cache
from kvfit.model.generate import generate

SURE = 0.25  # take this from your own traffic: the threshold decides which share is escalated
N_TOKENS = 16


def main():
    """Answer a few prompts, escalating where the small model is unsure."""
    source, target, tokenizer, mapper = load()
    escalated = 0
    for ids in prompts(tokenizer, [200, 260, 320, 380]):
        ids = torch.tensor([ids])
        options = {"max_new_tokens": N_TOKENS, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
        source_cache = full_cache()
        forward(source, ids[:, :-1], source_cache, base=True)
        kept = [(layer.keys, layer.values) for layer in source_cache.layers]  # the draft makes new tensors; these stay
        draft = generate(source, ids, source_cache, return_dict_in_generate=True, output_scores=True, **options)
        sure = float(confidence(draft.scores, draft.sequences[:, ids.shape[1] :]))
        if sure >= SURE:
            answer, who = draft.sequences, "source"
        else:
            moved = handoff(mapper, target, ids, kept, recompute=0.1, guide=source, on_error="prefill")
            answer, who = moved.generate(**options), f"target ({moved.status})"
            escalated += 1
        print(f"{sure:.2f} {who:<18} {tokenizer.decode(answer[0, ids.shape[1] :])!r}")
    print(f"escalated {escalated} of 4")


if __name__ == "__main__":
    main()

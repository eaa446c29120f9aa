"""Batch escalation: a batch of prompts of different lengths; the unsure rows, and only they, move to the large model together.

python docs/examples/batch_escalation.py [BUNDLE]
"""

from demo_pair import confidence, load, prompts

from kvfit import handoff
from kvfit.model.cache import forward, full_cache
from kvfit.model.generate import generate

SHARE = 0.5  # of the batch that the large model can take
N_TOKENS = 16


def main():
    """Answer a left-padded batch and escalate the half that the small model is least sure about."""
    source, target, tokenizer, mapper = load()
    rows = prompts(tokenizer, [120, 200, 160, 240])
    padded = tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
    ids, mask = padded["input_ids"], padded["attention_mask"]
    options = {"max_new_tokens": N_TOKENS, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}

    # `forward` gives left-padded rows their own positions, which the model's own forward would not.
    source_cache = full_cache()
    forward(source, ids[:, :-1], source_cache, attention_mask=mask[:, :-1], base=True)
    kept = [(layer.keys, layer.values) for layer in source_cache.layers]  # appending makes new tensors; these stay
    draft = generate(
        source, ids, source_cache, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **options
    )
    sure = confidence(draft.scores, draft.sequences[:, ids.shape[1] :])
    unsure = sure.argsort()[: int(SHARE * len(rows))].sort().values

    # The unsure rows of the cache, ids and mask move as one batch.
    pairs = [(keys[unsure], values[unsure]) for keys, values in kept]
    moved = handoff(
        mapper, target, ids[unsure], pairs, attention_mask=mask[unsure], recompute=0.1, guide=source, on_error="prefill"
    )
    answers = draft.sequences.clone()
    answers[unsure] = moved.generate(**options)
    for row, answer in enumerate(answers):
        who = f"target ({moved.status})" if row in unsure else "source"
        print(f"{float(sure[row]):.2f} {who:<18} {tokenizer.decode(answer[ids.shape[1] :])!r}")


if __name__ == "__main__":
    main()

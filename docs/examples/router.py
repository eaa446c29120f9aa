"""Router: the small model reads every prompt; how well it predicts the prompt decides who answers.

The decision costs nothing beyond the small model's prefill, and that prefill is not lost when the large model is chosen.

    python docs/examples/router.py [BUNDLE]
"""

import torch
from demo_pair import load, prompts

from kvfit import handoff
from kvfit.model.cache import forward, full_cache
from kvfit.model.generate import generate

HARD = 4.0  # nats per token that the small model needs for the prompt; take the threshold from your own traffic
N_TOKENS = 16


def main():
    """Route a few prompts."""
    source, target, tokenizer, mapper = load()
    options = {"max_new_tokens": N_TOKENS, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    for ids in prompts(tokenizer, [200, 260, 320, 380]):
        ids = torch.tensor([ids])
        source_cache = full_cache()
        logits = forward(source, ids[:, :-1], source_cache)  # all but the last token, which whoever answers runs itself
        nats = float(torch.nn.functional.cross_entropy(logits[0].float(), ids[0, 1:]))
        if nats < HARD:
            answer, who = generate(source, ids, source_cache, **options), "source"
        else:
            moved = handoff(mapper, target, ids, source_cache, recompute=0.1, guide=source, on_error="prefill")
            answer, who = moved.generate(**options), f"target ({moved.status})"
        print(f"{nats:.2f} nats/token -> {who:<18} {tokenizer.decode(answer[0, ids.shape[1] :])!r}")


if __name__ == "__main__":
    main()

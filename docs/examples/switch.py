"""Switch: a conversation changes model in the middle, and again later, and each move maps only what is new.

python docs/examples/switch.py [BUNDLE]
"""

import torch
from demo_pair import load, prompts

from kvfit import handoff
from kvfit.model.cache import forward, full_cache
from kvfit.model.generate import generate

N_TOKENS = 16


def main():
    """Two turns: the source reads and answers, the target takes over, the source reads on, the target takes over again."""
    source, target, tokenizer, mapper = load()
    first, second = prompts(tokenizer, [240, 60])
    options = {"max_new_tokens": N_TOKENS, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}

    # The source reads the first message and answers. `full_cache` also keeps what windowed layers would drop.
    source_cache = full_cache()
    conversation = generate(source, torch.tensor([first]), source_cache, **options)
    print("source:", repr(tokenizer.decode(conversation[0, len(first) :])))

    # The user asks on, and the target takes over, the source's answer included.
    conversation = torch.cat([conversation, torch.tensor([second])], 1)
    forward(source, conversation[:, source_cache.get_seq_length() :], source_cache, base=True)
    moved = handoff(mapper, target, conversation, source_cache, recompute=0.1, guide=source)
    print(f"moved:  {moved.n_mapped} tokens mapped, {moved.n_exact} run by the target")
    length = conversation.shape[1]
    conversation = moved.generate(**options)
    print("target:", repr(tokenizer.decode(conversation[0, length:])))

    # Next turn: the source keeps reading along, which is cheap; the target's own cache is kept and only what is new is mapped.
    held = conversation[:, : moved.cache.get_seq_length()]
    conversation = torch.cat([conversation, torch.tensor([second])], 1)
    forward(source, conversation[:, source_cache.get_seq_length() :], source_cache, base=True)
    again = handoff(
        mapper, target, conversation, source_cache, recompute=0.1, guide=source, target_cache=moved.cache, target_ids=held
    )
    print(f"moved:  {again.n_reused} tokens kept, {again.n_mapped} tokens mapped")
    length = conversation.shape[1]
    conversation = again.generate(**options)
    print("target:", repr(tokenizer.decode(conversation[0, length:])))


if __name__ == "__main__":
    main()

"""Train the demo pair: a tokenizer and two small Qwen3 models on the text of ``demo_corpus.py``.

Run from the repository root, once for the tokenizer and once for each model (the models may run side by side):

    python scripts/demo_corpus.py
    python scripts/train_demo_pair.py tokenizer
    python scripts/train_demo_pair.py source
    python scripts/train_demo_pair.py target

Everything is seeded. Small models learn to look facts up in their context late. What brings it forward here: random
blocks that repeat, drills of lists and questions beside the documents (see ``demo_corpus.py``), and above all short
sequences first. Attention that starts out uniform gives each of 64 tokens eight times the gradient that it gives each of
512: on blocks of names and digits the loss fell to about half a nat in 300 steps of 64-token sequences, and had hardly
moved after 450 steps of 512-token ones.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_corpus import ROOT, Work, document, drill, works
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from kvfit.fit.evaluate.questions import NAMES, codes, list_text, question_text

DEMO = ROOT / "kvfit" / "demo"
# Per model: (until this step, tokens a sequence, share of repeating blocks, share of drills); the rest are documents. The
# source is stopped early on purpose: longer training (2,600 steps) closes the gap to the target that a handoff is for.
SCHEDULE = {
    "source": ((650, 64, 0.9, 0.0), (800, 128, 0.4, 0.4), (960, 256, 0.2, 0.4), (1900, 512, 0.03, 0.15)),
    "target": ((600, 64, 0.9, 0.0), (744, 128, 0.4, 0.4), (888, 256, 0.2, 0.4), (2400, 512, 0.03, 0.15)),
}
BATCH_TOKENS = 4096
SHAPES = {
    "source": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4},
    "target": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6},
}


def train_tokenizer() -> None:
    """Byte-level BPE of 2,048 tokens; every digit, with or without its space, is one token."""
    rng = random.Random(0)
    texts = [work.text for work in works() if work.part == "train"]
    texts += [drill(rng) for _ in range(600)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[0-9]| ?[A-Za-z']+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    for name in SHAPES:
        fast.save_pretrained(DEMO / name)
        # transformers 5 writes a class name that version 4 does not know.
        _rewrite(DEMO / name / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    split = [name for name in NAMES if len(fast(" " + name).input_ids) != 1]
    sample = next(work.text for work in works() if work.part == "heldout")
    print(f"{len(fast)} tokens, {len(sample) / len(fast(sample).input_ids):.2f} characters a token, names split: {split}")
    print(fast.convert_ids_to_tokens(fast("[Recall Anna 47] King 3. And").input_ids))


class Sequences:
    """Seeded stream of batches of ids and loss weights."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, role: str, seed: int) -> None:
        self.schedule = SCHEDULE[role]
        self.rng = random.Random(seed)
        self.tokenizer = tokenizer
        words = [" " + name for name in NAMES] + [f" {digit}" for digit in range(10)] + [str(digit) for digit in range(10)]
        self.answers = [tokenizer(word)["input_ids"][0] for word in words]
        self.works = [work for work in works() if work.part == "train"]
        self.weights = [len(work.text) for work in self.works]

    def copies(self, seq_len: int) -> tuple[list[int], list[float]]:
        """One random block, again and again; the loss counts from its second time."""
        length = round(math.exp(self.rng.uniform(math.log(3), math.log(seq_len // 3))))
        alphabet = self.answers if self.rng.random() < 0.85 else range(1, len(self.tokenizer))
        block = [self.rng.choice(alphabet) for _ in range(length)]
        ids = block * (seq_len // length + 2)
        return ids, [0.0] * length + [1.0] * (len(ids) - length)

    def drill(self, seq_len: int) -> tuple[list[int], list[float]]:
        """Lists and questions; the loss counts on the answers, which alone can be known."""
        text = drill(self.rng, seq_len * 4, most=min(16, seq_len // 20))
        encoded = self.tokenizer(text, return_offsets_mapping=True)
        answers = {at for match in re.finditer(r"\[Recall \w+( \d\d\])", text) for at in range(*match.span(1))}
        weights = [1.0 if start in answers or end - 1 in answers else 0.05 for start, end in encoded["offset_mapping"]]
        return encoded["input_ids"], weights

    def document(self, seq_len: int) -> tuple[list[int], list[float]]:
        work: Work = self.rng.choices(self.works, self.weights)[0]
        ids = self.tokenizer(document(self.rng, work, seq_len * 4))["input_ids"]
        return ids, [1.0] * len(ids)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, T + 1) ids and loss weights; the step picks the mix."""
        _, seq_len, share_copies, share_drills = next(phase for phase in self.schedule if step < phase[0])
        rows = []
        while len(rows) < BATCH_TOKENS // seq_len:
            draw = self.rng.random()
            kind = self.copies if draw < share_copies else self.drill if draw < share_copies + share_drills else self.document
            ids, weights = kind(seq_len)
            if len(ids) > seq_len:
                rows.append((ids[: seq_len + 1], weights[: seq_len + 1]))
        return torch.tensor([ids for ids, _ in rows]), torch.tensor([weights for _, weights in rows])


@torch.no_grad()
def check(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Held-out likelihood with and without the context, and recall of codes."""
    model.eval()
    texts = [json.loads(line)["text"] for line in (DEMO / "heldout.jsonl").open(encoding="utf-8")][:48]
    ids = torch.tensor([tokenizer(text)["input_ids"][:512] for text in texts])

    def nll(tokens: torch.Tensor, start: int) -> float:
        logits = torch.cat([model(part).logits[:, start - 1 : -1] for part in tokens.split(8)])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, start:].flatten()).item()

    # Both score the same 127 tokens; without context the first of the 128 is all that stands before them.
    native, without = nll(ids, 385), nll(ids[:, 384:], 1)
    rng = random.Random(5)
    right = total = 0
    for _ in range(10):
        work = rng.choice(works_heldout())
        start = rng.randrange(len(work.text) - 3000)
        pairs = codes(rng, 10)
        prefix = work.text[start : start + 200] + "\n" + list_text(pairs) + "\n" + work.text[start + 200 : start + 900] + "\n"
        for name, code in rng.sample(pairs, 6):
            prompt = tokenizer(prefix + question_text(name), return_tensors="pt")["input_ids"]
            answer = ""
            for _ in range(2):
                token = model(prompt).logits[0, -1].argmax()
                prompt = torch.cat([prompt, token[None, None]], 1)
                answer += tokenizer.decode(token).strip()
            right += answer == code
            total += 1
    model.train()
    return {"nll": round(native, 3), "context": round(without - native, 3), "recall": round(right / total, 3)}


def works_heldout() -> list[Work]:
    if not hasattr(works_heldout, "kept"):
        works_heldout.kept = [work for work in works() if work.part == "heldout"]  # type: ignore[attr-defined]
    return works_heldout.kept  # type: ignore[attr-defined, no-any-return]


def train(role: str, threads: int, learning_rate: float) -> None:
    steps = SCHEDULE[role][-1][0]
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO / role)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        num_attention_heads=SHAPES[role]["hidden_size"] // 32,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **SHAPES[role],
    )
    model = Qwen3ForCausalLM(config).train()
    print(f"{role}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    forward = torch.compile(model.model, dynamic=False)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    sequences = Sequences(tokenizer, role, seed=1)
    begun = time.time()
    mean = 0.0
    for step in tqdm(range(steps), disable=not sys.stderr.isatty()):
        progress = step / steps
        rate = learning_rate * min(1.0, (step + 1) / 100) * min(1.0, 0.02 + (1 - progress) / 0.5)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        ids, weights = sequences.batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = forward(ids[:, :-1]).last_hidden_state
            logits = model.lm_head(hidden)
        losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weights = weights[:, 1:].flatten()
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.item() if step == 0 else 0.98 * mean + 0.02 * loss.item()
        if step % 200 == 199 or step + 1 == steps:
            spent = time.time() - begun
            print(
                json.dumps(
                    {
                        "step": step + 1,
                        "loss": round(mean, 3),
                        "seconds": round(spent),
                        "tokens": (step + 1) * BATCH_TOKENS,
                        **check(model, tokenizer),
                    }
                ),
                flush=True,
            )
            if step % 1000 == 999 or step + 1 == steps:
                save(model, role)


def save(model: Qwen3ForCausalLM, role: str) -> None:
    folder: Path = DEMO / role
    state = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    copy = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(state)
    copy.save_pretrained(folder)
    # transformers 4 reads theta from here, transformers 5 from `rope_parameters`.
    _rewrite(folder / "config.json", rope_theta=model.config.rope_parameters["rope_theta"])


def _rewrite(path: Path, **values: object) -> None:
    document = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tokenizer", "source", "target"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    arguments = parser.parse_args()
    if arguments.what == "tokenizer":
        train_tokenizer()
    else:
        train(arguments.what, arguments.threads, arguments.learning_rate)


if __name__ == "__main__":
    main()

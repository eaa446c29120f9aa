"""The options of a capture."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from kvfit.errors import OptionError
from kvfit.fit.stats.layout import Part, StatsDtype
from kvfit.spec import Inputs

LEXICAL_LAGS = (0, 1, 2)


@dataclass(frozen=True)
class Options:
    """What is captured. All options are part of the store's recipe.

    Attributes:
        num_sequences: number of sequences to run, both splits together.
        seq_len: tokens per sequence.
        token_stride: every `token_stride`-th token is kept for the statistics.
        skip_tokens: number of first tokens of each sequence to leave out.
        holdout: share of the sequences in the holdout split.
        seed: changes which sequences are in the holdout split.
        pack: join documents and cut them into sequences, instead of one sequence per document.
        inputs: ``both`` also keeps the products of keys and values, so that each kind can be predicted from both.
        stats_dtype: dtype of the stored sums.
        lexical: lags of the lexical inputs (see `kvfit.spec.MapperSpec`), ascending; empty for none; ``auto`` for
            `LEXICAL_LAGS` if the target's first layer depends on each token alone, else none.
    """

    num_sequences: int = 500
    seq_len: int = 1024
    token_stride: int = 4
    skip_tokens: int = 1
    holdout: float = 0.1
    seed: int = 0
    pack: bool = False
    inputs: Inputs = "both"
    stats_dtype: StatsDtype = "float32"
    lexical: tuple[int, ...] | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        for name, least in (("num_sequences", 2), ("seq_len", 2), ("token_stride", 1), ("skip_tokens", 0)):
            if getattr(self, name) < least:
                raise OptionError(f"--{name.replace('_', '-')}: found {getattr(self, name)}, needed at least {least}")
        if self.skip_tokens >= self.seq_len:
            raise OptionError(f"--skip-tokens: found {self.skip_tokens}, needed less than --seq-len {self.seq_len}")
        if not 0 <= self.holdout < 1:
            raise OptionError(f"--holdout: found {self.holdout}, needed 0 or more and less than 1")
        if self.lexical != "auto" and list(self.lexical) != sorted({lag for lag in self.lexical if 0 <= lag < self.seq_len}):
            found = ",".join(map(str, self.lexical))
            raise OptionError(f"--lexical: found {found}, needed numbers from 0 to below --seq-len, ascending, or none")

    @property
    def kept(self) -> range:
        """The positions of the tokens that are kept in each sequence."""
        return range(self.skip_tokens, self.seq_len, self.token_stride)

    def split(self, index: int) -> Part:
        """The split of sequence `index`. Splits are evenly spread, so that any run of sequences has its share of each."""
        phase = random.Random(self.seed).random()
        return "holdout" if math.floor((index + 1) * self.holdout + phase) > math.floor(index * self.holdout + phase) else "fit"

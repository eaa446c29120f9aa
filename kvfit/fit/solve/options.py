"""The options of `solve`, and named recipes from the literature."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from kvfit.errors import MismatchError, OptionError
from kvfit.fit.solve.ridge import PenaltyScale
from kvfit.fit.stats.store import Store
from kvfit.spec import Inputs, ModelSpec, Support

Gain = Literal["variance", "head", "none"]
GainSplit = Literal["auto", "fit", "holdout"]
Dtype = Literal["float32", "bfloat16", "float16"]
Ranking = Literal["holdout", "heo2026"]
Select = Literal["independent", "greedy"]
Auto = Literal["auto"]

# The penalties that ``auto`` chooses from, ascending; relative to the mean variance of the inputs.
PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1)
# The holdout split estimates a prediction's variance without the optimism of the fit split, but needs enough tokens to do so.
HOLDOUT_ENOUGH = 2048


@dataclass(frozen=True)
class Options:
    """The options of `solve`; the bundle records them.

    Attributes:
        top_k: how many source layers each target layer reads: a number, ``all``, or ``auto`` (best on the holdout split).
        select: how source layers are chosen, ``independent`` or ``greedy``; see `select`.
        shared_layers: whether keys and values read the same source layers.
        penalty: a number, or ``auto`` to choose from `PENALTIES` on the holdout split: per kind and layer, or one for all
            under a shared basis.
        penalty_scale: what the penalty multiplies, see `ridge.factorise`.
        support: ``full`` or ``head``, see `kvfit.spec.MapperSpec`.
        inputs: ``same`` or ``both``, which needs a store that was captured with both; ``auto`` is what the store has.
        lexical: the lags of the lexical inputs that maps read, ascending; ``auto`` reads all that the store has, ``none`` none
            of them.
        rank: r of a shared basis, ``none`` for a separate map per layer, or ``auto`` to choose on the holdout split. A basis
            needs support full, inputs both and one set of source layers for all; where the options say otherwise, ``auto``
            means ``none``. A number above the full rank is the full rank, with a warning.
        cost: the most that the map may cost, as a share of the target's prefill in FLOPs and in bytes; None for no limit. It
            limits what ``auto`` chooses, but not a number that was given.
        gain: ``variance`` for a gain per output, ``head`` for one per head, or ``none``.
        gain_split: the split that the gain's variances come from; ``auto`` is holdout where that has `HOLDOUT_ENOUGH` tokens.
        ranking: the R2 by which single source layers are ranked: ``holdout`` is the holdout R2 of the map that reads one layer;
            ``heo2026`` is the in-sample R2 of least squares from the matched head, averaged over heads.
        dtype: the dtype of the stored weights; ``auto`` is bfloat16 where the target is a 16-bit model, otherwise float32.
    """

    top_k: int | Literal["all", "auto"] = "all"
    select: Select = "independent"
    shared_layers: bool = False
    penalty: float | Auto = "auto"
    penalty_scale: PenaltyScale = "mean-variance"
    support: Support = "full"
    inputs: Inputs | Auto = "auto"
    lexical: tuple[int, ...] | Literal["auto", "none"] = "auto"
    rank: int | Literal["auto", "none"] = "auto"
    cost: float | None = 0.05
    gain: Gain = "variance"
    gain_split: GainSplit = "auto"
    ranking: Ranking = "holdout"
    dtype: Dtype | Auto = "auto"

    def __post_init__(self) -> None:
        for name, value in (("--top-k", self.top_k), ("--rank", self.rank)):
            if isinstance(value, int) and value < 1:
                raise OptionError(f"{name}: found {value}, needed at least 1")
        if self.penalty != "auto" and not 0 <= self.penalty < math.inf:
            raise OptionError(f"--penalty: found {self.penalty}, needed a number of 0 or more, or auto")
        if isinstance(self.lexical, tuple) and list(self.lexical) != sorted({lag for lag in self.lexical if lag >= 0}):
            found = ",".join(map(str, self.lexical))
            raise OptionError(f"--lexical: found {found}, needed numbers from 0 on, ascending, or auto, or none")
        if self.cost is not None and not 0 < self.cost < math.inf:
            raise OptionError(f"--cost: found {self.cost}, needed a share above 0, such as 0.05, or none")
        if isinstance(self.rank, int):
            for option, asked, needed in (("--support", self.support, "full"), ("--inputs", self.inputs, "both")):
                if asked not in (needed, "auto"):
                    raise OptionError(f"--rank {self.rank}: found {option} {asked}, needed {needed}, or --rank none")

    def for_store(self, store: Store) -> Options:
        """These options with every ``auto`` that depends on the store replaced.

        Raises:
            MismatchError: the options name more source layers than there are, or inputs that the store lacks, or they match the
                heads of a model whose heads differ by layer.
        """
        self.check_layers(store.source.n_layers)
        self.check_heads(store.source, store.target)
        lags, captured = (",".join(map(str, few)) for few in (self.lags(store.lexical_lags), store.lexical_lags))
        if not set(self.lags(store.lexical_lags)) <= set(store.lexical_lags):
            raise MismatchError(
                f"--lexical {lags}: found {store.path} with the lags {captured or 'none'}, needed all that are named; name "
                "lags that it has, or capture with --lexical"
            )
        if store.inputs != "both" and (self.inputs == "both" or isinstance(self.rank, int)):
            raise MismatchError(
                f"{store.path}: found statistics of like kinds only, needed keys by values: capture with --inputs both"
            )
        inputs = store.inputs if self.inputs == "auto" else self.inputs
        rank = self.rank if self.may_share(inputs) else "none"
        dtype = self.dtype
        if dtype == "auto":
            dtype = "bfloat16" if store.target.dtype in ("bfloat16", "float16") else "float32"
        return dataclasses.replace(self, inputs=inputs, rank=rank, dtype=dtype)

    def may_share(self, inputs: Inputs) -> bool:
        """Whether the maps may read a shared basis, given the `inputs` that stand for ``auto``."""
        free = self.rank == "auto" and (inputs, self.support, self.top_k) == ("both", "full", "all")
        return free or isinstance(self.rank, int)

    def check_layers(self, n_source: int) -> None:
        """Refuse more source layers than there are: a report that says 8 layers where 4 were read would mislead.

        Args:
            n_source: the number of layers of the source model.

        Raises:
            MismatchError: `top_k` is a larger number.
        """
        if isinstance(self.top_k, int) and self.top_k > n_source:
            raise MismatchError(f"--top-k: found {self.top_k}, needed at most {n_source}, the layers of the source, or all")

    def check_heads(self, source: ModelSpec, target: ModelSpec) -> None:
        """Refuse matching heads if a model's layers differ in the number or size of their heads.

        Raises:
            MismatchError: names the model.
        """
        for option, asked in (("--support head", self.support == "head"), ("--recipe heo2026", self.ranking == "heo2026")):
            for model in (source, target):
                if asked and model.geometry is not None:
                    raise MismatchError(
                        f"{option}: found {model.ref}, whose heads differ by layer, needed the same heads in all layers to "
                        "match them one by one: use --support full without that recipe"
                    )

    def lags(self, captured: tuple[int, ...]) -> tuple[int, ...]:
        """The lags of the lexical inputs that maps read, among those captured; with support ``head`` there are none."""
        if self.lexical == "none" or self.support == "head":
            return ()
        return captured if self.lexical == "auto" else self.lexical

    def gain_from(self, store: Store) -> Literal["fit", "holdout"]:
        """The split that the gain's variances come from."""
        if self.gain_split != "auto":
            return self.gain_split
        return "holdout" if store.count("holdout") >= HOLDOUT_ENOUGH else "fit"

    @property
    def penalties(self) -> tuple[float, ...]:
        """The penalties to choose from."""
        return PENALTIES if self.penalty == "auto" else (self.penalty,)


# Heo et al., arXiv:2608.03893, section 3, rank layers in sample, head by head, by the mean R2 of keys and values, and choose
# one set per target layer for both kinds. They take k = 8 and a penalty of 0.01 for their first pair, and no gain. Their
# equation adds the penalty to the sum over rows, hence `scatter`. But their results collapse at a penalty of 1, which fits a
# sum divided by the number of rows, so `covariance` is worth a try too.
RECIPES = {
    "heo2026": Options(
        top_k=8,
        shared_layers=True,
        penalty=0.01,
        penalty_scale="scatter",
        inputs="same",
        lexical="none",
        rank="none",
        cost=None,
        gain="none",
        ranking="heo2026",
        dtype="float32",
    ),
}

"""What `solve` can be asked for, and the recipes of the literature under their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvfit.errors import MismatchError, OptionError
from kvfit.fit.solve.ridge import PenaltyScale
from kvfit.spec import Inputs, Support

Gain = Literal["variance", "head", "none"]
Dtype = Literal["float32", "bfloat16", "float16"]
Ranking = Literal["holdout", "heo2026"]
Select = Literal["independent", "greedy"]

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1)


@dataclass(frozen=True)
class Options:
    """What `solve` was asked for; recorded in the bundle.

    Attributes:
        top_k: how many source layers each target layer reads: a number, ``all``, or ``auto`` (best on the holdout split).
        select: ``independent`` or ``greedy``.
        shared_layers: keys and values read the same source layers.
        penalty: a number, or ``auto`` to choose per kind and layer from `PENALTIES` on the holdout split.
        penalty_scale: what the penalty multiplies, see `ridge.factorise`.
        support: ``full`` or ``head``.
        inputs: ``same`` or ``both``; the latter needs a store captured with both.
        gain: ``variance`` per output, ``head``, or ``none``.
        ranking: the R2 that ranks single source layers: ``holdout`` of the map that reads one layer; or ``heo2026``: in
            sample, least squares from the matched head, mean over heads.
        dtype: of the stored weights.
    """

    top_k: int | Literal["all", "auto"] = "all"
    select: Select = "independent"
    shared_layers: bool = False
    penalty: float | Literal["auto"] = "auto"
    penalty_scale: PenaltyScale = "mean-variance"
    support: Support = "full"
    inputs: Inputs = "same"
    gain: Gain = "variance"
    ranking: Ranking = "holdout"
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        if isinstance(self.top_k, int) and self.top_k < 1:
            raise OptionError(f"--top-k: found {self.top_k}, needed at least 1")
        if self.penalty != "auto" and not 0 <= self.penalty < float("inf"):
            raise OptionError(f"--penalty: found {self.penalty}, needed a number of 0 or more, or auto")

    def check_layers(self, n_source: int) -> None:
        """Refuse more source layers than there are: a table that says 8 where 4 were read misleads.

        Args:
            n_source: layers of the source model.

        Raises:
            MismatchError: `top_k` is a larger number.
        """
        if isinstance(self.top_k, int) and self.top_k > n_source:
            raise MismatchError(f"--top-k: found {self.top_k}, needed at most {n_source}, the layers of the source, or all")

    @property
    def penalties(self) -> tuple[float, ...]:
        """The penalties to choose from."""
        return PENALTIES if self.penalty == "auto" else (self.penalty,)


# Heo et al., arXiv:2608.03893, section 3: layers ranked in sample, head by head, by the mean of keys' and values' R2; one set
# per target layer for both kinds; k = 8 and a penalty of 0.01 for their first pair; no gain. Their equation adds the penalty to
# the sum over rows, so `scatter`; their sweep collapses at 1, which fits a sum divided by the rows, so try `covariance` too.
RECIPES = {
    "heo2026": Options(top_k=8, shared_layers=True, penalty=0.01, penalty_scale="scatter", gain="none", ranking="heo2026"),
}

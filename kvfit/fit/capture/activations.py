"""What the statistics are made from: un-rotated keys and values of one model, for the tokens that are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.model import cache as caches
from kvfit.model.decoder import input_device
from kvfit.model.rope import angles, unrotate
from kvfit.spec import KINDS, Kind, ModelSpec


def check_positions(config: Any, name: str, n_tokens: int, option: str) -> None:
    """Refuse more tokens than a model has positions for: with learned ones it would stop, with others say nonsense.

    Args:
        config: the model's configuration.
        name: its ref, for the message.
        n_tokens: of the longest sequence.
        option: that says how many.

    Raises:
        MismatchError: too many.
    """
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < n_tokens:
        raise MismatchError(f"{option}: found {n_tokens} tokens, needed at most the {most} positions of {name}: lower {option}")


class Activations:
    """One model of a pair: ids in, features of the kept tokens out."""

    def __init__(self, model: Any, spec: ModelSpec, kept: range) -> None:
        """Wrap a model.

        Args:
            model: the loaded model.
            spec: its spec, proved by the self-check.
            kept: positions of the tokens to keep, of every sequence.
        """
        self.model = model
        self.spec = spec
        self.kept = kept
        self.device = input_device(model)
        self._angles: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> dict[Kind, list[Tensor]]:
        """Run ids (B, T); per kind and layer the features of the kept tokens, (B, N, H * D), where that layer lives.

        Raises:
            MismatchError: a layer did not see every token once.
        """
        cache = caches.full_cache()
        caches.forward(self.model, ids.to(self.device), cache, base=True)
        # Only what is kept is un-rotated.
        kept = slice(self.kept.start, self.kept.stop, self.kept.step)
        out: dict[Kind, list[Tensor]] = {kind: [] for kind in KINDS}
        for layer_index, (keys, values) in enumerate(caches.read_cache(cache)):
            if keys.shape[2] != ids.shape[1]:
                raise MismatchError(
                    f"{self.spec.ref}, layer {layer_index}: found {keys.shape[2]} tokens in the cache, needed the "
                    f"{ids.shape[1]} that were run"
                )
            keys = self._unrotated(layer_index, keys[:, :, kept])
            for kind, tensor in zip(KINDS, (keys, values[:, :, kept]), strict=True):
                out[kind].append(tensor.transpose(1, 2).flatten(2))
        return out

    def _unrotated(self, layer_index: int, keys: Tensor) -> Tensor:
        index = self.spec.rope.assignment[layer_index]
        if index is None:
            return keys
        table = self.spec.rope.tables[index]
        if (index, keys.device) not in self._angles:
            positions = torch.arange(self.kept.start, self.kept.stop, self.kept.step, device=keys.device)
            self._angles[index, keys.device] = angles(table, positions)
        return unrotate(keys, table, self._angles[index, keys.device])

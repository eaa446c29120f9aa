"""The activations that statistics are made of: un-rotated keys and values of one model, for the tokens that are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.fit.stats.layout import Group
from kvfit.model import cache as caches
from kvfit.model.decoder import input_device, setting
from kvfit.model.rope import angles, unrotate
from kvfit.spec import KINDS, ModelSpec


def check_positions(config: Any, name: str, n_tokens: int, option: str) -> None:
    """Refuse more tokens than a model has positions for, with which it would fail or compute nonsense.

    Args:
        config: the model's configuration.
        name: the model's ref, for the error.
        n_tokens: length of the longest sequence.
        option: the option that sets this length, for the error.

    Raises:
        MismatchError: there are too many tokens.
    """
    most = setting(config.get_text_config(decoder=True), "max_position_embeddings")
    if isinstance(most, int) and 0 < most < n_tokens:
        raise MismatchError(f"{option}: found {n_tokens} tokens, needed at most the {most} positions of {name}: lower {option}")


class Activations:
    """Runs one model of a pair on token ids and returns the features of the kept tokens."""

    def __init__(self, model: Any, spec: ModelSpec, kept: range, lexical_lags: tuple[int, ...] = ()) -> None:
        """Prepare a model.

        Args:
            model: the loaded model.
            spec: its spec, verified by the self-check.
            kept: positions of the tokens to keep in every sequence.
            lexical_lags: lags of the lexical inputs to make from this model's first layer; empty for none.
        """
        self.model = model
        self.spec = spec
        self.kept = kept
        self.lexical_lags = lexical_lags
        self.device = input_device(model)
        self._angles: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> dict[Group, list[Tensor]]:
        """Run the model on ids (B, T).

        Returns:
            Per kind and layer, the features of the kept tokens, (B, N, H * D), on the layer's device. With lexical lags also,
            under ``lexical`` and per lag, keys followed by values of layer 0, (B, N, 2 * H * D), of the token that many places
            before each kept token, or of the sequence's first token if there are fewer.

        Raises:
            MismatchError: a layer did not cache every token exactly once.
        """
        cache = caches.full_cache()
        with caches.stops_when_filled(self.model, cache):
            caches.forward(self.model, ids.to(self.device), cache, base=True)
        # Only the kept tokens are un-rotated.
        kept = slice(self.kept.start, self.kept.stop, self.kept.step)
        out: dict[Group, list[Tensor]] = {kind: [] for kind in KINDS}
        for layer_index, (keys, values) in enumerate(caches.read_cache(cache)):
            if keys.shape[2] != ids.shape[1]:
                raise MismatchError(
                    f"{self.spec.ref}, layer {layer_index}: found {keys.shape[2]} tokens in the cache, needed the "
                    f"{ids.shape[1]} that were run"
                )
            for kind, tensor in zip(KINDS, (self._unrotated(layer_index, keys[:, :, kept]), values[:, :, kept]), strict=True):
                out[kind].append(tensor.transpose(1, 2).flatten(2))
            if layer_index == 0 and self.lexical_lags:
                out["lexical"] = [self._lexical(keys, values, lag) for lag in self.lexical_lags]
        return out

    def _lexical(self, keys: Tensor, values: Tensor, lag: int) -> Tensor:
        positions = self._positions(lag, keys.device)
        both = (self._unrotated(0, keys[:, :, positions], lag), values[:, :, positions])
        return torch.cat([tensor.transpose(1, 2).flatten(2) for tensor in both], dim=2)

    def _positions(self, lag: int, device: torch.device) -> Tensor:
        """Positions of the tokens `lag` places before the kept ones."""
        kept = torch.arange(self.kept.start, self.kept.stop, self.kept.step, device=device)
        return (kept - lag).clamp_(min=0)

    def _unrotated(self, layer_index: int, keys: Tensor, lag: int = 0) -> Tensor:
        index = self.spec.rope.assignment[layer_index]
        if index is None:
            return keys
        table = self.spec.rope.tables[index]
        name = (index, lag, keys.device)
        if name not in self._angles:
            self._angles[name] = angles(table, self._positions(lag, keys.device))
        return unrotate(keys, table, self._angles[name])

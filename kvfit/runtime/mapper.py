"""`Mapper`: make a cache of the target from a cache of the source.

    keys:   target = rotate(inputs @ weight + bias, target angles)
    values: target = inputs @ weight + bias

The inputs are the source's un-rotated keys and its values. Mappers with lexical inputs also read the keys and values of the
target's first layer. A shared basis projects the inputs first, once for all layers.

Source: Heo et al., arXiv:2608.03893, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.model import cache as caches
from kvfit.model.identity import check_tokenizer
from kvfit.runtime.checks import check_layers, check_source, check_target
from kvfit.runtime.features import Pairs
from kvfit.runtime.known import KnownModels
from kvfit.runtime.lexical import FreeLayer
from kvfit.runtime.maps import Maps, Place, Weights
from kvfit.runtime.transfer import LayerOptions, Moved, Transfer
from kvfit.spec import MapperSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvfit.bundle.bundle import Bundle, Verdict


class Mapper:
    """A fitted map from one model's KV cache to another's. No call changes it, so threads may share one.

    Copies and pickles contain the spec, the weights and the verdict. A copy checks the models that it is used with again.

    Attributes:
        spec: what it maps, and how.
        verdict: verdict of the bundle's evaluation: ``pass``, ``fail`` or ``unknown``.
        judged_recompute: share of the prefix that the target recomputed in the evaluation. `handoff` warns if it is asked
            to recompute less.
        maps: the weights in memory.
    """

    def __init__(
        self,
        spec: MapperSpec,
        weights: Weights,
        *,
        basis: Tensor | None = None,
        verdict: Verdict = "unknown",
        judged_recompute: float = 0.0,
    ) -> None:
        """Make a mapper of weights in memory.

        Args:
            spec: the mapper's spec.
            weights: weight and bias per (kind, mapped target layer), as `kvfit.runtime.maps.Maps` describes them.
            basis: the shared basis; None if `spec.rank` is None.
            verdict: verdict of the evaluation.
            judged_recompute: share that the target recomputed in the evaluation.

        Raises:
            MismatchError: weights or basis do not fit the spec or each other.
        """
        self.spec = spec
        self.verdict = verdict
        self.judged_recompute = judged_recompute
        self.maps = Maps(spec, dict(weights), basis)
        self._models = KnownModels(spec)

    @classmethod
    def from_pretrained(cls, ref: str | Path, **options: Any) -> Mapper:
        """`kvfit.load_mapper` under the name that other Hub libraries use, with the same arguments and errors.

        There is no `push_to_hub`: push a bundle instead, because a mapper in memory has no recipe, evaluation or digests.
        """
        from kvfit import load_mapper  # by its public name, because this package must not import `hub`

        return load_mapper(ref, **options)

    @classmethod
    def from_bundle(
        cls, bundle: Bundle, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Mapper:
        """The mapper of an opened bundle, with its layers read to `device` in `dtype` (default: as stored, on the CPU).

        Raises:
            MismatchError: torch does not have `device` or cannot map in `dtype`.
        """
        return cls._of(Maps.read(bundle, device, dtype), bundle.verdict, bundle.judged_recompute)

    @classmethod
    def _of(cls, maps: Maps, verdict: Verdict, judged_recompute: float) -> Mapper:
        return cls(maps.spec, maps.weights, basis=maps.basis, verdict=verdict, judged_recompute=judged_recompute)

    def __repr__(self) -> str:
        source, target = self.spec.source, self.spec.target
        return f"Mapper({source.ref} -> {target.ref}, {source.n_layers} to {target.n_layers} layers, verdict {self.verdict})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Mapper._of, (self.maps, self.verdict, self.judged_recompute)

    @property
    def nbytes(self) -> int:
        """Size of all weights, biases and the basis in memory, in bytes."""
        return self.maps.nbytes

    def to(self, device: torch.device | str | Sequence[torch.device] | None = None, dtype: torch.dtype | None = None) -> Mapper:
        """A mapper with its weights on other devices or in another dtype.

        Args:
            device: one device, or a sequence of one per target layer. The basis is put with the first mapped layer.
            dtype: dtype of the weights; None keeps it.

        Raises:
            MismatchError: torch does not have a device, or cannot map in the dtype.
        """
        moved = Mapper._of(self.maps.to(device, dtype), self.verdict, self.judged_recompute)
        moved._models = self._models.copy()
        return moved

    def bind(self, source_model: Any = None, target_model: Any = None, *, tokenizer: Any = None) -> Mapper:
        """Check that the mapper was fitted on these models, and put each layer's weights on the device that runs the layer.

        Args:
            source_model: the loaded source; None if it runs elsewhere.
            target_model: the loaded target, or None.
            tokenizer: the tokenizer in use, to check it too. It is compared with the models that are passed, or with both if
                none is.

        Returns:
            This mapper, with weights on the target's devices and in its dtype. It remembers the target, for transfers that need
            its first layer, but does not keep it alive.

        Raises:
            MismatchError: a model or the tokenizer differs; names the model and the field.
        """
        if source_model is not None:
            self._models.verify("source", source_model, tokenizer)
        if target_model is not None:
            self._models.verify("target", target_model, tokenizer)
        if tokenizer is not None and source_model is None and target_model is None:
            check_tokenizer(self.spec.source, tokenizer)
            check_tokenizer(self.spec.target, tokenizer)
        if target_model is None:
            return self
        devices = caches.layer_devices(target_model, self.spec.target.n_layers)
        bound = self.to(devices, caches.cache_dtype(target_model))
        bound._models.bind(target_model)
        return bound

    def check_models(self, source_model: Any = None, target_model: Any = None) -> None:
        """Check models at first use, and again after their weights were changed or replaced or an adapter was added.

        Raises:
            MismatchError: a model differs; names the model and the field.
        """
        self._models.check("source", source_model)
        self._models.check("target", target_model)

    def check_tokens(self, pairs: Pairs, input_ids: Tensor, attention_mask: Tensor) -> None:
        """Check a few tokens of a source's cache against the ids (B, S), if the source was bound or used as a guide."""
        self._models.check_tokens(pairs, input_ids, attention_mask)

    def check_rewrite(self, target_model: Any) -> None:
        """Check at first use that the target can run chosen tokens of a cache again, as `handoff(recompute=...)` needs.

        Raises:
            UnsupportedModelError: it cannot; says why.
        """
        self._models.check_rewrite(target_model)

    @torch.no_grad()
    def transfer(
        self,
        source_cache: Any,
        *,
        positions: Tensor | None = None,
        into: Any = None,
        layers: Iterable[int] | None = None,
        target_model: Any = None,
        input_ids: Tensor | None = None,
        first_layer: tuple[Tensor, Tensor] | None = None,
        chunk_tokens: int | None = None,
    ) -> Any:
        """Make the target's cache for the tokens of a source cache.

        This does not look for NaN and infinity in the source's cache, because it would have to wait for the device. `handoff`
        does; callers of `transfer` can call ``kvfit.model.cache.check_finite(cache)``.

        Args:
            source_cache: the source's cache of T tokens, per layer keys and values (B, H_source, T, D_source); not changed.
            positions: rotary positions of its tokens, whole numbers, (T,) or (B, T); 0 to T - 1 by default. Left-padded
                batches need them: ``(mask.cumsum(-1) - 1).clamp(min=0)``.
            into: a cache of the target that holds the first n tokens. Tokens n to T - 1 are mapped and appended to it.
            layers: target layers to make, for callers that take the others from elsewhere; those stay empty.
            target_model: the target. It is checked, and windowed layers get the cache type that drops old tokens.
            input_ids: (B, T), ids of the tokens. A mapper with lexical inputs needs them and the target, bound or passed.
            first_layer: the target's own first layer in place of ids and target, for callers such as a serving engine: keys
                and values (B, H_target, T, D_target) of all T tokens as its cache would hold them; not changed.
            chunk_tokens: number of tokens, over all sequences, that are mapped at a time; chosen by device by default.

        Returns:
            A cache of the target, or `into` itself. A layer has the dtype and device of `into` if that holds tokens, else of
            the target model, else the source cache's dtype and the weight's device.

        Raises:
            MismatchError: the target is another model, or the cache does not have the source's geometry, or `positions`,
                `into`, `input_ids` or `first_layer` do not fit it, or a mapper with lexical inputs has neither ids and target
                nor the first layer. Nothing has changed then.
        """
        self.check_models(None, target_model)
        pairs = caches.read_cache(source_cache)
        chosen = check_layers(self.spec.target, layers)
        check_source(self.spec.source, pairs, positions)
        batch, _, total, _ = pairs[0][0].shape
        held = 0 if into is None else check_target(self.spec.target, into, batch, total, layers=chosen)
        if held > total:
            raise MismatchError(f"into: found {held} tokens, needed at most the {total} of the source cache: crop it first")
        everywhere = self._places(pairs[0][0].dtype, target_model, into)
        places = {layer_index: everywhere[layer_index] for layer_index in chosen}
        free = FreeLayer(target_model, input_ids, first_layer)
        mapped = self._transfer(pairs, positions, held, free, places, chunk_tokens).all_layers()
        result = caches.new_cache(target_model) if into is None else into
        if total > held:
            for layer_index in chosen:
                caches.place(result, layer_index, *mapped.pop(layer_index))
        return result

    @torch.no_grad()
    def transfer_layers(self, source_cache: Any, **options: Unpack[LayerOptions]) -> Pairs:
        """As `transfer`, but for tokens `start` to T - 1 and returning plain tensors.

        Returns:
            Per target layer keys and values, (B, H_target, T - start, D).
        """
        return list(self._plain(source_cache, **options).all_layers().values())

    @torch.no_grad()
    def stream_layers(self, source_cache: Any, **options: Unpack[LayerOptions]) -> Iterator[tuple[Tensor, Tensor]]:
        """As `transfer_layers`, but yielding each target layer as soon as it is mapped, so that a caller can start on layer 0.

        The inputs of all tokens stay in memory until the end: as many bytes as the source's cache, or r numbers per token with
        a basis.

        Returns:
            An iterator of keys and values, (B, H_target, T - start, D), one pair per target layer. Arguments that do not fit
            are refused before this returns.
        """
        return self._plain(source_cache, **options).layer_by_layer()

    def _plain(
        self,
        source_cache: Any,
        *,
        positions: Tensor | None = None,
        start: int = 0,
        target_model: Any = None,
        input_ids: Tensor | None = None,
        first_layer: tuple[Tensor, Tensor] | None = None,
        chunk_tokens: int | None = None,
    ) -> Transfer:
        """A checked transfer of all layers into new tensors."""
        pairs = caches.read_cache(source_cache)
        check_source(self.spec.source, pairs, positions)
        if not 0 <= start <= pairs[0][0].shape[2]:
            raise MismatchError(f"start: found {start}, needed 0 to the {pairs[0][0].shape[2]} tokens of the source cache")
        free = FreeLayer(target_model, input_ids, first_layer)
        places = dict(enumerate(self._places(pairs[0][0].dtype, target_model)))
        return self._transfer(pairs, positions, start, free, places, chunk_tokens)

    def _transfer(
        self,
        pairs: Pairs,
        positions: Tensor | None,
        start: int,
        free: FreeLayer,
        places: Mapping[int, Place],
        chunk_tokens: int | None,
    ) -> Transfer:
        positions = torch.arange(pairs[0][0].shape[2], device=pairs[0][0].device) if positions is None else positions
        first_layer = free.read(self.spec, self._models, pairs, positions, start)
        cut = [(keys[:, :, start:], values[:, :, start:]) for keys, values in pairs]
        return Transfer(self.maps, Moved(cut, positions, start, first_layer), places, chunk_tokens)

    def _places(self, dtype: torch.dtype, target_model: Any, into: Any = None) -> list[Place]:
        """Device and dtype of the result of each target layer; `dtype` is that of the source's cache."""
        places = self.maps.places(dtype) if target_model is None else self._models.places(target_model)
        for layer_index, state in enumerate([] if into is None else caches.layer_states(into)):
            if state.keys is not None:
                places[layer_index] = Place(state.keys.device, state.keys.dtype)
        return places

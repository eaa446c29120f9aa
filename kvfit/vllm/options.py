"""The connector's configuration and the parameters of one request."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from kvfit.errors import OptionError
from kvfit.runtime import EXACT_HEAD


@dataclass(frozen=True)
class ConnectorOptions:
    """The connector's configuration, ``kv_connector_extra_config``.

    Attributes:
        role: ``source`` saves what it prefills; ``target`` starts from it.
        store: a folder, or ``package.module:factory`` (see `kvfit.vllm.store`).
        store_options: the argument of such a factory.
        mapper: the ref or folder of the mapper; only the target needs it.
        salt: engines share entries only with engines of the same salt.
        max_store_bytes: the size limit of a folder; beyond it, the entries that were unused for longest are deleted.
        block_tokens: the number of tokens in a stored block, the same for source and target; a multiple of the source engine's
            own block size.
        exact_head: how many of the first tokens of a mapped prompt the target runs itself.
        exact_tail: how many of the last tokens of a prompt are never mapped; the tokens after the last whole block are not
            mapped either.
        recompute: the share of the mapped tokens that the target runs again, chosen by where the source looks; ``auto`` for as
            many as it looks at; None for the share with which the mapper's verdict was found.
        guide: for a source, whether to save where it looks. That costs a draft of the answer, a dozen more tokens for each
            prompt.
        require: ``pass`` refuses a mapper whose verdict is ``fail``; ``any`` takes it.
        check_weights: whether to compare every weight of the engine's checkpoint with the model that the mapper was fitted on.
            That reads the checkpoint into host memory once at start. Without it, only the configuration is compared.
        max_age_seconds: entries older than this are not used; None for no limit.
        timeout_seconds: a load that takes longer than this is given up.
    """

    role: Literal["source", "target"]
    store: str
    store_options: dict[str, Any] = field(default_factory=dict)
    mapper: str | None = None
    salt: str = ""
    max_store_bytes: int = 4 << 30
    block_tokens: int = 128
    exact_head: int = EXACT_HEAD
    exact_tail: int = 0
    recompute: float | Literal["auto"] | None = None
    guide: bool = True
    require: Literal["pass", "any"] = "pass"
    check_weights: bool = True
    max_age_seconds: float | None = None
    timeout_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.role == "target" and self.mapper is None:
            raise OptionError("mapper: found none, needed the ref or folder of a mapper for role target")
        _require_from("block_tokens", self.block_tokens, 1)
        _require_from("exact_head", self.exact_head, 0)
        _require_from("exact_tail", self.exact_tail, 0)
        _require_share(self.recompute)


@dataclass(frozen=True)
class RequestOptions:
    """The parameters of one request, under ``kvfit`` in its ``kv_transfer_params``.

    Attributes:
        map: False lets the target prefill this request.
        exact_tail: replaces the connector's.
        max_mapped_tokens: the most tokens to map; the target prefills the others.
        recompute: replaces the connector's.
        exact_tokens: the tokens that the target runs again instead of those that `recompute` would choose, as numbers or
            [start, stop) pairs. For a caller that knows which tokens matter, such as a retrieved passage.
    """

    map: bool = True
    exact_tail: int | None = None
    max_mapped_tokens: int | None = None
    recompute: float | Literal["auto"] | None = None
    exact_tokens: list[Any] | None = None

    def __post_init__(self) -> None:
        for name in ("exact_tail", "max_mapped_tokens"):
            if getattr(self, name) is not None:
                _require_from(name, getattr(self, name), 0)
        _require_share(self.recompute)
        _ = self.chosen

    @property
    def chosen(self) -> frozenset[int] | None:
        """The indices of the tokens that `exact_tokens` names."""
        if self.exact_tokens is None:
            return None
        tokens: set[int] = set()
        for item in self.exact_tokens:
            if type(item) is int and item >= 0:
                tokens.add(item)
            elif isinstance(item, Sequence) and len(item) == 2 and all(type(end) is int and end >= 0 for end in item):
                tokens.update(range(*item))
            else:
                raise OptionError(f"exact_tokens: found {item!r}, needed a token's number or a pair [start, stop)")
        return frozenset(tokens)


def connector_options(values: Mapping[str, Any]) -> ConnectorOptions:
    """The connector's options from its configuration.

    Raises:
        OptionError: names the option.
    """
    return typing.cast(ConnectorOptions, _read(ConnectorOptions, values, "kv_connector_extra_config"))


def request_options(parameters: Any) -> RequestOptions:
    """A request's options from its ``kv_transfer_params``; an option that is not there has its default.

    Raises:
        OptionError: names the option.
    """
    values = parameters.get("kvfit", {}) if isinstance(parameters, Mapping) else {}
    if not isinstance(values, Mapping):
        raise OptionError(f"kv_transfer_params: found kvfit={values!r}, needed an object")
    return typing.cast(RequestOptions, _read(RequestOptions, values, "kv_transfer_params"))


def _require_share(value: float | str | None) -> None:
    if isinstance(value, int | float) and not 0 <= value <= 1:
        raise OptionError(f"recompute: found {value}, needed a share of 0 to 1, or 'auto'")


def _require_from(name: str, value: int, least: int) -> None:
    if value < least:
        raise OptionError(f"{name}: found {value}, needed {least} or more")


def _read(cls: type, values: Mapping[str, Any], where: str) -> Any:
    """Build a dataclass from a mapping, whose values must have the fields' types."""
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise OptionError(f"{where}: found {unknown[0]!r}, needed only {', '.join(hints)}")
    for one in fields(cls):
        if one.name not in values:
            if one.default is MISSING and one.default_factory is MISSING:
                raise OptionError(f"{where}: found no {one.name!r}, needed one")
        elif not _fits(values[one.name], hints[one.name]):
            wanted = str(getattr(hints[one.name], "__name__", hints[one.name])).replace("typing.", "")
            raise OptionError(f"{one.name}: found {values[one.name]!r}, needed {wanted}")
    return cls(**values)


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return any(type(value) is type(option) and value == option for option in typing.get_args(hint))
    if hint is float:
        return type(value) in (int, float)
    return type(value) is (typing.get_origin(hint) or hint)

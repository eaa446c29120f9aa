"""Graphics cards that do not exist: real numbers in tensors that say ``cuda:1``, so that a run shows which device it used.

A `PretendTensor` reports a card as its device and keeps its numbers in a tensor on the CPU, where every operation really runs.
So results can be compared bit for bit with a run on the CPU, and torch's rules about devices hold: operands on two devices are
refused, ``numpy()`` of a card's tensor is refused, and ``cuda`` without a number is the current card (in `Tensor.to` it is an
error here). A copy to the host with ``non_blocking`` arrives only when the stream that carries it is waited for; until then the
host reads NaN. Every card has one stream. Copies to a card and between cards are done at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_ACROSS_DEVICES = ("copy_", "_to_copy")
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")  # an index may lie on the host
# Before it dispatches these, and indexing, torch selects the card by its driver, which is not there.
_WHOLE = (torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__)  # their parts change shapes in place
_ON_CARD = (Tensor.contiguous, Tensor.__invert__)
_ANSWERS = (Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist)
_WAITING = ("_local_scalar_dense", "equal", "nonzero", "masked_select")  # the host needs the answer


class PretendTensor(Tensor):
    """Numbers on the CPU that say they are on a card."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> PretendTensor:
        made = Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), dtype=held.dtype, device=device)
        made.held = held
        return made

    def __repr__(self) -> str:
        return f"{self.held!r} on {self.device}"

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def numpy(self) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            return _CARDS[-1].run_index(func, *args)
        if func is Tensor.copy_:
            return _CARDS[-1].copy(*args, **kwargs or {})
        if func in _WHOLE:
            return _CARDS[-1].run(func, args, kwargs or {}, "matmul")
        if func in _ON_CARD or func in _ANSWERS:
            return _CARDS[-1].run_method(func, *args, **kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _CARDS[-1].run(func, args, kwargs or {})


class Stream:
    """The one stream of a card: copies to the host that were started and have not arrived."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.n_started = self.n_done = 0
        self._waiting: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()

    def start(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._waiting.append(work)
            self.n_started += 1

    def wait(self, until: int | None = None) -> None:
        with self._lock:
            while self.n_done < (self.n_started if until is None else until):
                self._waiting.popleft()()
                self.n_done += 1


class Cards:
    """The machine's cards and what was done with them.

    Attributes:
        current: number of the current card.
        follow: whether `torch.cuda.set_device` has an effect. Where it has none, everything that takes the current card in the
            place of a tensor's own shows.
        log: (what, card) of everything that a card did or that names one: ``tensor``, ``arrives``, ``event``, ``record``,
            ``pin``, ``select``.
    """

    def __init__(self, n_cards: int, *, current: int = 0, follow: bool = False) -> None:
        self.current, self.follow = current, follow
        self.log: list[tuple[str, str]] = []
        self._streams = [Stream(torch.device("cuda", number)) for number in range(n_cards)]

    def used(self, *whats: str) -> set[str]:
        """The cards in the log's entries of some kinds."""
        return {card for what, card in self.log if what in whats}

    def card(self, device: Any) -> torch.device | None:
        """The card that a device means; None for what is no card."""
        if device is None:
            return None
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            return None
        number = self.current if device.index is None else device.index
        if number >= len(self._streams):
            raise RuntimeError("CUDA error: invalid device ordinal")
        return torch.device("cuda", number)

    def stream(self, device: Any = None) -> Stream:
        """The stream of a card, by default of the current one."""
        card = self.card("cuda" if device is None else device)
        assert card is not None
        return self._streams[card.index]

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None = None) -> Any:
        """One operation of torch, on the numbers that pretend tensors hold."""
        name = name or func.overloadpacket.__name__
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        pretend = [leaf for leaf in leaves if isinstance(leaf, PretendTensor)]
        place = kwargs.get("device")
        where = self.card(place)
        if kwargs.get("pin_memory"):
            self.log.append(("pin", f"cuda:{self.current}"))
            kwargs = {**kwargs, "pin_memory": False}
        if not pretend and where is None:
            return func(*args, **kwargs)
        compared = leaves if name not in _INDEXING else [args[0], *args[2:3]]
        devices = sorted({str(leaf.device) for leaf in compared if leaf.dim() or isinstance(leaf, PretendTensor)})
        if len(devices) > 1 and name not in _ACROSS_DEVICES:
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found {', '.join(devices)}")
        if name == "copy_":
            return self.copy(*args, **kwargs)
        if name == "_to_copy" and place is not None and where is None:
            out = torch.empty_like(args[0].held, dtype=kwargs.get("dtype"))
            self._to_host(out, args[0], late=bool(kwargs.get("non_blocking")))
            return out
        for one in pretend if name in _WAITING else ():
            self.stream(one.device).wait()
        return self._compute(func, args, kwargs, pretend, where if place is not None else pretend[0].device)

    def run_index(self, func: Any, given: Tensor, index: Any, *value: Any) -> Any:
        """``given[index]`` or ``given[index] = value``."""
        indices = [leaf for leaf in tree_leaves(index) if isinstance(leaf, Tensor)]
        value_devices = {leaf.device for leaf in value if isinstance(leaf, Tensor) and leaf.dim() and indices}
        wrong = ({leaf.device for leaf in indices} - {torch.device("cpu")} | value_devices) - {given.device}
        if wrong:
            raise RuntimeError(
                f"{func.__name__}: Expected all tensors to be on {given.device}, but found {sorted(map(str, wrong))}"
            )
        pretend = [leaf for leaf in tree_leaves((given, index, value)) if isinstance(leaf, PretendTensor)]
        return self._compute(
            func, (given, index, *value), {}, pretend, given.device if isinstance(given, PretendTensor) else None
        )

    def run_method(self, func: Any, given: PretendTensor, *args: Any, **kwargs: Any) -> Any:
        """A method of one tensor."""
        if func in _ANSWERS:
            self.stream(given.device).wait()
        return self._compute(func, (given, *args), kwargs, [given], given.device)

    def _compute(self, func: Any, args: Any, kwargs: Any, pretend: list[PretendTensor], where: torch.device | None) -> Any:
        """The operation itself; what is new is on the card `where`, or on the host for None."""
        given = {id(one.held): one for one in pretend}

        def on_host(leaf: Any) -> Any:
            if isinstance(leaf, PretendTensor):
                return leaf.held
            return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf

        def on_card(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return given[id(leaf)] if id(leaf) in given else leaf if where is None else PretendTensor(leaf, where)

        if where is not None:
            self._note("tensor", where)
        return tree_map(on_card, func(*tree_map(on_host, args), **tree_map(on_host, kwargs)))

    def copy(self, out: Tensor, given: Tensor, non_blocking: bool = False) -> Tensor:
        """``out.copy_(given)``."""
        if isinstance(out, PretendTensor):
            out.held.copy_(given.held if isinstance(given, PretendTensor) else given)
            self._note("tensor", out.device)
        else:
            self._to_host(out, given, late=non_blocking)
        return out

    def _note(self, what: str, card: torch.device) -> None:
        if self.log[-1:] != [(what, str(card))]:
            self.log.append((what, str(card)))

    def _to_host(self, out: Tensor, given: PretendTensor, *, late: bool) -> None:
        stream = self.stream(given.device)
        self.log.append(("arrives", str(given.device)))
        if not late:
            stream.wait()
            out.copy_(given.held)
            return
        out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).min)
        kept = given.held.clone()  # what comes later on the stream comes after the copy
        stream.start(lambda: out.copy_(kept))


class _Mode(TorchDispatchMode):
    """Sees operations that make tensors from nothing. Of this kind, so that torch does not look for a driver first."""

    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __init__(self, cards: Cards) -> None:
        super().__init__()
        self._cards = cards

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._cards.run(func, args, kwargs or {})


_CARDS: list[Cards] = []


@contextmanager
def pretend_cards(n_cards: int = 2, *, current: int = 0, follow: bool = False) -> Iterator[Cards]:
    """A machine with some cards, as long as the block runs."""
    cards = Cards(n_cards, current=current, follow=follow)

    class Within:
        def __init__(self, device: Any) -> None:
            self._number = cards.stream(device).device.index

        def __enter__(self) -> None:
            self._before, cards.current = cards.current, self._number

        def __exit__(self, *_error: object) -> None:
            cards.current = self._before

    class Event:
        def __init__(self) -> None:
            self._stream: Stream | None = None
            cards.log.append(("event", f"cuda:{cards.current}"))

        def record(self, stream: Stream | None = None) -> None:
            self._stream = cards.stream() if stream is None else stream
            self._until = self._stream.n_started
            cards.log.append(("record", str(self._stream.device)))

        def synchronize(self) -> None:
            if self._stream is not None:
                self._stream.wait(self._until)

    def select(device: Any) -> None:
        cards.log.append(("select", str(cards.card(device))))
        if cards.follow:
            cards.current = cards.stream(device).device.index

    told = {
        "device": Within,
        "Event": Event,
        "current_stream": cards.stream,
        "current_device": lambda: cards.current,
        "set_device": select,
        "synchronize": lambda device=None: cards.stream(device).wait(),
        "device_count": lambda: n_cards,
        "mem_get_info": lambda _device=None: (1 << 30, 1 << 30),
        "get_device_capability": lambda _device=None: (9, 0),
    }
    overwritten = torch.__future__.get_overwrite_module_params_on_conversion()
    torch._C._ensureCUDADeviceGuardSet()
    _CARDS.append(cards)
    lifted = torch._C._only_lift_cpu_tensors()
    with mock.patch.multiple(torch.cuda, **told), torch.no_grad(), _Mode(cards):
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes its numbers on the host and moves them
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # else a moved parameter would keep its numbers
        try:
            yield cards
        finally:
            torch._C._set_only_lift_cpu_tensors(lifted)
            torch.__future__.set_overwrite_module_params_on_conversion(overwritten)
            _CARDS.pop()

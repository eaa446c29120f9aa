"""The bundle: a mapper on disk. This module is the format's only reader and writer.

The format is described in ``docs/reference/bundle-format.md``. `write_bundle` makes a folder whole or not at all;
`Bundle.open` refuses everything that the page does not allow, and reads weights layer by layer.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvfit.bundle import document, manifest
from kvfit.bundle import weights as shards
from kvfit.bundle.files import require_free, sync_folder, whole_folder, write_file
from kvfit.bundle.strict_json import at
from kvfit.errors import BundleError
from kvfit.spec import FORMAT_VERSION, Kind, MapperSpec

MAX_JSON = 64 << 20

Verdict = Literal["pass", "fail", "unknown"]


@dataclass(frozen=True)
class Bundle:
    """A bundle that was opened and checked. Weights stay on disk until `layer` is called.

    Attributes:
        folder: where it is.
        spec: what the mapper maps.
        recipe: how the statistics were captured.
        solve: how the weights were solved.
        evaluation: what `kvfit evaluate` found, None when it has not run.
        digests: SHA-256 of every file, by name.
        nbytes: bytes of all weight files.
    """

    folder: Path
    spec: MapperSpec = field(repr=False)
    recipe: dict[str, Any] = field(repr=False)
    solve: dict[str, Any] = field(repr=False)
    evaluation: dict[str, Any] | None = field(repr=False)
    digests: Mapping[str, str] = field(repr=False)
    nbytes: int
    _tensors: Mapping[str, shards.StoredTensor] = field(repr=False)
    _stamps: Mapping[str, tuple[int, int, int]] = field(repr=False)

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> Bundle:
        """Open a bundle and check all of it but the weights' values, which are checked when a layer is read.

        Args:
            folder: the bundle.
            verify: False to take the weight files' digests on trust (all other checks stay).

        Raises:
            BundleError: anything that the format does not allow; names the file and the field.
        """
        path = Path(folder)
        try:
            return cls._open(path, verify)
        except BundleError as error:
            raise BundleError(f"bundle {path}: {error}") from None
        except OSError as error:
            raise BundleError(f"bundle {path}: {error.filename or ''} cannot be read ({error.strerror})") from None

    @classmethod
    def _open(cls, folder: Path, verify: bool) -> Bundle:
        if not folder.is_dir():
            raise BundleError("no such folder")
        # Before anything else: a newer format may differ in all other respects.
        text = manifest.read_small(folder, "mapper.json", MAX_JSON)
        parsed = document.parse("mapper.json", text)
        document.check_version(parsed)
        digests = manifest.parse(manifest.read_small(folder, manifest.MANIFEST, manifest.MAX_MANIFEST))
        manifest.check_folder(folder, digests)
        manifest.check_digest("mapper.json", hashlib.sha256(text).hexdigest(), digests)
        stamps = {}
        tensors: dict[str, shards.StoredTensor] = {}
        for name in manifest.shard_names(digests):
            stamps[name] = manifest.stamp(folder / name)
            for tensor_name, tensor in shards.read_header(folder / name).items():
                if tensor_name in tensors:
                    raise BundleError(f"file {name}, tensor {tensor_name[:80]!r}: already in {tensors[tensor_name].file}")
                tensors[tensor_name] = tensor
            if verify:
                manifest.check_digest(name, manifest.file_digest(folder / name), digests)
        spec = document.read_spec(folder, parsed, tensors)
        _check_tensors(spec, tensors)
        return cls(
            folder=folder,
            spec=spec,
            recipe=_read_json(folder, "recipe.json", digests),
            solve=_read_json(folder, "solve.json", digests),
            evaluation=_read_evaluation(folder, digests),
            digests=digests,
            nbytes=sum(size for size, _, _ in stamps.values()),
            _tensors=tensors,
            _stamps=stamps,
        )

    @property
    def weights_digest(self) -> str:
        """Digest of the spec and all weights: what a verdict binds to."""
        return manifest.weights_digest(self.digests)

    @property
    def verdict(self) -> Verdict:
        """The verdict of the evaluation; ``unknown`` without one, or with one of other weights."""
        if self.evaluation is None or self.evaluation["weights_digest"] != self.weights_digest:
            return "unknown"
        return cast(Verdict, self.evaluation["verdict"])

    @property
    def judged_recompute(self) -> float:
        """Share of the prefix that the target recomputed in the arm that the verdict is about; 0 without such a verdict."""
        share = None if self.verdict == "unknown" else at(self.evaluation, "options", "recompute")
        return float(share) if isinstance(share, int | float) and 0 <= share <= 1 else 0.0

    def layer(
        self,
        kind: Kind,
        layer_index: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        bias_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read weight and bias of one kind of one target layer straight to a device.

        Args:
            kind: ``keys`` or ``values``.
            layer_index: the target layer.
            device: where to; the CPU by default.
            dtype: of both; by default the one that the weights are stored in.
            bias_dtype: of the bias alone, where it is to keep more digits than the weight (it is stored in float32).

        Returns:
            weight, ``spec.weight_shape(kind, layer_index)``, and bias, (G,); memory of their own, not a view of the file.

        Raises:
            BundleError: a value that is not finite, or a file that changed since the bundle was opened.
        """
        weight_dtype = dtype or self._stored_dtype
        names = (shards.layer_name(kind, layer_index, part) for part in ("weight", "bias"))
        weight, bias = self._read(*names, device=device)
        return _own(weight, weight_dtype), _own(bias, bias_dtype or weight_dtype)

    def basis(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Tensor | None:
        """Read the shared basis straight to a device.

        Args:
            device: where to; the CPU by default.
            dtype: by default the one that the weights are stored in.

        Returns:
            (F, r), ``spec.basis_shape``, in memory of its own; None for a mapper without a shared basis.

        Raises:
            BundleError: a value that is not finite, or a file that changed since the bundle was opened.
        """
        if self.spec.rank is None:
            return None
        (stored,) = self._read(shards.BASIS, device=device)
        return _own(stored, dtype or self._stored_dtype)

    @property
    def _stored_dtype(self) -> torch.dtype:
        return shards.TORCH_DTYPES[shards.STORED[self.spec.dtype]]

    def _read(self, *names: str, device: torch.device | str | None) -> list[Tensor]:
        """Tensors of one file, as stored; on the CPU they may be views of the mapped file."""
        place = torch.device(device or "cpu")
        if place.type == "cuda" and place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())  # the library would take the first
        file = self._tensors[names[0]].file
        path = self.folder / file
        try:
            if manifest.stamp(path) != self._stamps[file]:
                raise BundleError(f"bundle {self.folder}: file {file}: changed since the bundle was opened; open it again")
            with safe_open(path, framework="pt", device=str(place)) as stream:
                stored = [stream.get_tensor(name) for name in names]
        except (OSError, SafetensorError) as error:
            raise BundleError(f"bundle {self.folder}: file {file}: cannot be read ({' '.join(str(error).split())})") from None
        for name, tensor in zip(names, stored, strict=True):
            if not _is_finite(tensor):
                raise BundleError(f"bundle {self.folder}: file {file}, tensor {name}: holds NaN or infinite values; fit again")
        return stored

    def check_weights(self) -> None:
        """Read every tensor once, so that a value that is not finite is found now.

        Raises:
            BundleError: names the file and the tensor.
        """
        self.basis()
        for entry in self.spec.layers:
            self.layer(entry.kind, entry.layer_index)


def write_bundle(
    folder: str | Path,
    spec: MapperSpec,
    weights: Iterable[tuple[Kind, int, Tensor, Tensor]],
    *,
    recipe: dict[str, Any],
    solve: dict[str, Any],
    basis: Tensor | None = None,
    card: str | None = None,
    shard_bytes: int = 2 << 30,
) -> None:
    """Write a bundle whole or not at all; the same inputs give the same bytes.

    Args:
        folder: where to; must not exist. Its parent folders are made.
        spec: what the mapper maps.
        weights: (kind, target layer, weight, bias) in the order of ``spec.layers``; weight of shape
            ``spec.weight_shape(kind, layer)``, bias (G,). One at a time is in memory.
        recipe: how the statistics were captured, as JSON values.
        solve: how the weights were solved, as JSON values.
        basis: the shared basis, ``spec.basis_shape``, where ``spec.rank`` is not None.
        card: text of ``README.md``.
        shard_bytes: most bytes of a weight file.

    Raises:
        BundleError: the folder exists, or what was given is not what the spec says; nothing is left behind.
    """
    destination = Path(folder)
    require_free(destination)
    if spec.format_version != FORMAT_VERSION:
        raise BundleError(f"field format_version: found {spec.format_version}, needed {FORMAT_VERSION}")
    if (basis is None) != (spec.rank is None):
        found = "none" if basis is None else f"one of shape {tuple(basis.shape)}"
        raise BundleError(f"tensor {shards.BASIS}: found {found}, but the spec has rank {spec.rank}")
    documents = {
        "mapper.json": document.render(spec),
        "recipe.json": document.dump("recipe.json", recipe),
        "solve.json": document.dump("solve.json", solve),
    }
    if card is not None:
        documents["README.md"] = card.encode("utf-8")
    plan = shards.plan(shards.tensor_groups(spec), shard_bytes)
    with whole_folder(destination) as temporary:
        digests = {name: write_file(temporary / name, data) for name, data in documents.items()}
        tensors = _stream(spec, basis, weights)
        for number, wanted in enumerate(plan, 1):
            name = shards.shard_name(number, len(plan))
            digests[name] = shards.write_shard(temporary / name, wanted, tensors)
        for extra, _ in tensors:
            raise BundleError(f"weights: found {extra} after the last layer of the spec, needed no more")
        write_file(temporary / manifest.MANIFEST, manifest.render(digests))


def add_files(folder: str | Path, files: Mapping[str, bytes]) -> None:
    """Add or replace files that do not change what the mapper computes, and list them.

    Each file is put in place whole and ``SHA256SUMS`` last; in between, readers refuse the bundle.

    Args:
        folder: the bundle.
        files: content by name: ``evaluation.json``, ``evaluation.md``, ``README.md``, ``LICENSE``, ``*.png``, ``*.svg``.

    Raises:
        BundleError: another name, or content that a reader would refuse; then nothing was changed.
    """
    path = Path(folder)
    for name, data in files.items():
        if not manifest.is_extra(name):
            raise BundleError(f"bundle {path}: file {name[:100]!r}: cannot be added to a finished bundle")
        if name == "evaluation.json":
            _check_evaluation(document.parse(name, data))
        if os.path.lexists(path / name):
            manifest.check_regular(path, name)
    digests = manifest.parse(manifest.read_small(path, manifest.MANIFEST, manifest.MAX_MANIFEST))
    mark = f".{secrets.token_hex(4)}"
    pending = dict(files)
    updated = digests | {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    pending[manifest.MANIFEST] = manifest.render(updated)
    try:
        for name, data in pending.items():
            write_file(path / f".{name}{mark}", data)
        for name in pending:  # insertion order: SHA256SUMS is last
            os.replace(path / f".{name}{mark}", path / name)
        sync_folder(path)
    except OSError as error:
        raise BundleError(f"bundle {path}: files could not be added ({error.strerror or error})") from None
    finally:
        for name in pending:
            (path / f".{name}{mark}").unlink(missing_ok=True)


def _stream(
    spec: MapperSpec, basis: Tensor | None, weights: Iterable[tuple[Kind, int, Tensor, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every tensor in file order, each checked as it passes."""
    for role, model in (("source", spec.source), ("target", spec.target)):
        for index, table in enumerate(model.rope.tables):
            values = torch.tensor(table.inverse_frequencies, dtype=torch.float64)
            if not torch.equal(values.float().double(), values):
                raise BundleError(f"field {role}.rope.tables[{index}].inverse_frequencies: a value that is no float32")
            yield shards.rope_name(role, index), values.float()
    stored_dtype = shards.TORCH_DTYPES[shards.STORED[spec.dtype]]
    if basis is not None:
        _check_values(shards.BASIS, basis, stored_dtype)
        yield shards.BASIS, basis
    count = 0
    for kind, layer_index, weight, bias in weights:
        name = f"layers.{layer_index}.{kind}"
        if count >= len(spec.layers):
            yield name, weight
        entry = spec.layers[min(count, len(spec.layers) - 1)]
        if (kind, layer_index) != (entry.kind, entry.layer_index):
            raise BundleError(f"weights: found {name}, needed layers.{entry.layer_index}.{entry.kind} next")
        for part, tensor, dtype in (("weight", weight, stored_dtype), ("bias", bias, None)):
            _check_values(f"{name}.{part}", tensor, dtype)
            yield f"{name}.{part}", tensor
        count += 1
    if count < len(spec.layers):
        entry = spec.layers[count]
        raise BundleError(
            f"weights: ended after {count} of {len(spec.layers)}, needed layers.{entry.layer_index}.{entry.kind} next"
        )


def _check_values(name: str, tensor: Tensor, dtype: torch.dtype | None) -> None:
    if dtype is not None and tensor.dtype != dtype:
        raise BundleError(f"tensor {name}: found {tensor.dtype}, needed {dtype} as the spec says")
    if not _is_finite(tensor):
        raise BundleError(f"tensor {name}: holds NaN or infinite values; a larger penalty or another dtype may help")


def _own(stored: Tensor, dtype: torch.dtype) -> Tensor:
    # On the CPU the library hands out the mapped file, which would follow whatever is written over it later.
    return stored.to(dtype, copy=stored.device.type == "cpu")


def _check_tensors(spec: MapperSpec, tensors: Mapping[str, shards.StoredTensor]) -> None:
    wanted = {}
    for group in shards.tensor_groups(spec):
        wanted.update({tensor.name: tensor for tensor in group})
        files = {tensors[tensor.name].file for tensor in group if tensor.name in tensors}
        if len(files) > 1:
            raise BundleError(f"tensor {group[0].name}: its bias is in another file ({', '.join(sorted(files))})")
    for name, tensor in wanted.items():
        if name not in tensors:
            raise BundleError(f"tensor {name}: missing from the weight files; fetch the bundle again")
        found = tensors[name]
        if found.spec != tensor:
            raise BundleError(
                f"file {found.file}, tensor {name}: {found.spec.dtype} {found.spec.shape}, needed {tensor.dtype} {tensor.shape}"
                " by mapper.json"
            )
    for name in sorted(set(tensors) - set(wanted)):
        raise BundleError(f"file {tensors[name].file}, tensor {name[:80]!r}: not a tensor of this mapper")


def _read_evaluation(folder: Path, digests: Mapping[str, str]) -> dict[str, Any] | None:
    if "evaluation.json" not in digests:
        return None
    evaluation = _read_json(folder, "evaluation.json", digests)
    _check_evaluation(evaluation)
    return evaluation


def _is_finite(tensor: Tensor) -> bool:
    """One pass and no temporary: NaN wins every comparison of `aminmax`, and infinity is an end of the range."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _check_evaluation(evaluation: dict[str, Any]) -> None:
    if evaluation.get("verdict") not in ("pass", "fail", "unknown"):
        raise BundleError(
            f"file evaluation.json, field verdict: found {repr(evaluation.get('verdict'))[:80]}, needed pass, fail or unknown"
        )
    if not isinstance(evaluation.get("weights_digest"), str):
        raise BundleError("file evaluation.json, field weights_digest: needed the digest of the weights that were evaluated")


def _read_json(folder: Path, name: str, digests: Mapping[str, str]) -> dict[str, Any]:
    data = manifest.read_small(folder, name, MAX_JSON)
    manifest.check_digest(name, hashlib.sha256(data).hexdigest(), digests)
    return document.parse(name, data)

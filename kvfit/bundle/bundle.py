"""A bundle that is read: opened, checked in full, its weights read layer by layer.

The format is described in ``docs/reference/bundle-format.md``. `Bundle.open` refuses everything that the page does not allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvfit.bundle import manifest, mapper_json, records
from kvfit.bundle import weights as shards
from kvfit.bundle.additions import add_files, check_evaluation, complete
from kvfit.bundle.write import is_finite, write_bundle
from kvfit.errors import BundleError
from kvfit.spec import Kind, MapperSpec

__all__ = ["Bundle", "Verdict", "add_files", "write_bundle"]

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

        An addition of files that was interrupted after its commit point is completed first.

        Args:
            folder: the bundle.
            verify: False to leave the digests of the weight files to `check_weight_files`; all other checks stay.

        Raises:
            BundleError: anything that the format does not allow; names the file and the field.
        """
        path = Path(folder)
        try:
            while True:
                sums = _content(path / manifest.MANIFEST)
                try:
                    return cls._open(path, verify)
                except BundleError:
                    # Files that somebody adds meanwhile may be new where the list is still the old one.
                    if sums == _content(path / manifest.MANIFEST):
                        raise
        except BundleError as error:
            raise BundleError(f"bundle {path}: {error}") from None
        except OSError as error:
            raise BundleError(f"bundle {path}: {error.filename or ''} cannot be read ({error.strerror})") from None

    @classmethod
    def _open(cls, folder: Path, verify: bool) -> Bundle:
        if not folder.is_dir():
            raise BundleError("no such folder")
        # Before anything else: a newer format may differ in all other respects.
        mapper_json.check_version(manifest.read_record(folder, "mapper.json"))
        digests = manifest.read(folder)
        complete(folder, digests)
        manifest.check_folder(folder, digests)
        names = manifest.shard_names(digests)
        manifest.check_digests(folder, sorted(set(digests) - set(names) - set(manifest.MAX_RECORD)), digests)
        stamps = {name: manifest.stamp(folder / name) for name in names}
        tensors: dict[str, shards.StoredTensor] = {}
        for name in names:
            for tensor_name, tensor in shards.read_header(folder / name).items():
                if tensor_name in tensors:
                    raise BundleError(f"file {name}, tensor {tensor_name[:80]!r}: already in {tensors[tensor_name].file}")
                tensors[tensor_name] = tensor
        # Read again, because only now it is known to be the file that is listed.
        spec = mapper_json.read_spec(manifest.read_record(folder, "mapper.json", digests), folder, tensors)
        _check_tensors(spec, tensors)
        evaluation = manifest.read_record(folder, "evaluation.json", digests) if "evaluation.json" in digests else None
        if evaluation is not None:
            check_evaluation(evaluation)
        bundle = cls(
            folder=folder,
            spec=spec,
            recipe=manifest.read_record(folder, "recipe.json", digests),
            solve=manifest.read_record(folder, "solve.json", digests),
            evaluation=evaluation,
            digests=digests,
            nbytes=sum(size for size, _, _ in stamps.values()),
            _tensors=tensors,
            _stamps=stamps,
        )
        if verify:
            bundle._check_weight_files()
        return bundle

    def check_weight_files(self) -> None:
        """Compare the digests of all weight files with the listed ones, several files at once.

        Raises:
            BundleError: names the file that is another than the listed one, or that changed since the bundle was opened.
        """
        try:
            self._check_weight_files()
        except BundleError as error:
            raise BundleError(f"bundle {self.folder}: {error}") from None
        except OSError as error:
            raise BundleError(f"bundle {self.folder}: {error.filename or ''} cannot be read ({error.strerror})") from None

    def _check_weight_files(self) -> None:
        manifest.check_digests(self.folder, self._stamps, self.digests)
        for name, stamp in self._stamps.items():
            if manifest.stamp(self.folder / name) != stamp:
                raise BundleError(f"file {name}: changed since the bundle was opened; open it again")

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
        share = None if self.verdict == "unknown" else records.value_at(self.evaluation, "options", "recompute")
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
            if not is_finite(tensor):
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


def _content(path: Path) -> bytes | None:
    """The content of a small file, None where it cannot be read."""
    try:
        return records.read_capped(path, manifest.MAX_MANIFEST)
    except (OSError, ValueError):
        return None


def _own(stored: Tensor, dtype: torch.dtype) -> Tensor:
    # On the CPU the library hands out the mapped file, which would follow whatever is written over it later.
    return stored.to(dtype, copy=stored.device.type == "cpu")

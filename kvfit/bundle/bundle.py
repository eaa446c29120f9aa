"""Read a bundle: open it, check it in full, and read its weights layer by layer.

``docs/reference/bundle-format.md`` describes the format. `Bundle.open` refuses everything that the page does not allow.
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
    """An open bundle that has been checked. Its weights stay on disk until `layer` is called.

    Attributes:
        folder: the bundle's folder.
        spec: the mapper's spec.
        recipe: how the statistics were captured.
        solve: how the weights were solved.
        evaluation: the result of `kvfit evaluate`; None if it has not run.
        digests: SHA-256 of every file, by name.
        nbytes: size of all weight files in bytes.
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
        """Open a bundle and check everything except the values of the weights, which are checked when a layer is read.

        If an addition of files was interrupted after its commit point, it is completed first.

        Args:
            folder: the bundle.
            verify: False to leave the digests of the weight files to `check_weight_files`. All other checks stay.

        Raises:
            BundleError: the format does not allow something; names the file and the field.
        """
        path = Path(folder)
        try:
            while True:
                sums = _content(path / manifest.MANIFEST)
                try:
                    return cls._open(path, verify)
                except BundleError:
                    # If somebody adds files meanwhile, some files may be newer than the list.
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
        # The version comes first, because a newer format may differ in everything else.
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
        # It is read again because only now its digest is known.
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
        """Compare the digests of all weight files with ``SHA256SUMS``, several files at once.

        Raises:
            BundleError: a file has another digest, or has changed since the bundle was opened; names it.
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
        """Digest of the spec and all weights. A verdict is bound to it."""
        return manifest.weights_digest(self.digests)

    @property
    def verdict(self) -> Verdict:
        """The verdict of the evaluation; ``unknown`` if there is none or it belongs to other weights."""
        if self.evaluation is None or self.evaluation["weights_digest"] != self.weights_digest:
            return "unknown"
        return cast(Verdict, self.evaluation["verdict"])

    @property
    def judged_recompute(self) -> float:
        """Share of the prefix that the target recomputed in the evaluation; 0 without a verdict."""
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
            device: the device; the CPU by default.
            dtype: dtype of both; by default that of the stored weights.
            bias_dtype: dtype of the bias alone, to keep more digits than in the weight. The bias is stored in float32.

        Returns:
            The weight, of shape ``spec.weight_shape(kind, layer_index)``, and the bias, (G,). They are not views of the file.

        Raises:
            BundleError: a value is not finite, or the file has changed since the bundle was opened.
        """
        weight_dtype = dtype or self._stored_dtype
        names = (shards.layer_name(kind, layer_index, part) for part in ("weight", "bias"))
        weight, bias = self._read(*names, device=device)
        return _own(weight, weight_dtype), _own(bias, bias_dtype or weight_dtype)

    def basis(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Tensor | None:
        """Read the shared basis straight to a device.

        Args:
            device: the device; the CPU by default.
            dtype: dtype of the result; by default that of the stored weights.

        Returns:
            (F, r), ``spec.basis_shape``, not a view of the file; None for a mapper without a shared basis.

        Raises:
            BundleError: a value is not finite, or the file has changed since the bundle was opened.
        """
        if self.spec.rank is None:
            return None
        (stored,) = self._read(shards.BASIS, device=device)
        return _own(stored, dtype or self._stored_dtype)

    @property
    def _stored_dtype(self) -> torch.dtype:
        return shards.TORCH_DTYPES[shards.STORED[self.spec.dtype]]

    def _read(self, *names: str, device: torch.device | str | None) -> list[Tensor]:
        """Tensors of one file as stored. On the CPU they may be views of the memory-mapped file."""
        place = torch.device(device or "cpu")
        if place.type == "cuda" and place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())  # the library would take device 0
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
        """Read every tensor once to check that all values are finite.

        Raises:
            BundleError: a value is not finite; names the file and the tensor.
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
    """The content of a small file; None if it cannot be read."""
    try:
        return records.read_capped(path, manifest.MAX_MANIFEST)
    except (OSError, ValueError):
        return None


def _own(stored: Tensor, dtype: torch.dtype) -> Tensor:
    # On the CPU the library returns views of the memory-mapped file, which would change if the file were overwritten.
    return stored.to(dtype, copy=stored.device.type == "cpu")

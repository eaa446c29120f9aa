"""The verb `export`: write a bundle as a folder that another program reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from kvfit.bundle.bundle import Bundle
from kvfit.bundle.files import require_free, require_writable, whole_folder
from kvfit.errors import GateError, MismatchError, OptionError
from kvfit.hub.load import resolve
from kvfit.interop.router_folder import write_router_folder
from kvfit.interop.semantic_router import make_mapper_id, router_manifest


@dataclass(frozen=True)
class Exported:
    """The result of `export_bundle`.

    Attributes:
        ref: ref of the bundle.
        out: the folder.
        format: the layout.
        mapper_id: the mapper's name for a router.
        verdict: verdict of the bundle's evaluation, for which the layout has no field.
        nbytes: size of all files in bytes.
    """

    ref: str
    out: str
    format: str
    mapper_id: str
    verdict: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.out}: {self.mapper_id} in {self.format}'s layout, {self.nbytes / 1e6:.1f} MB, verdict {self.verdict}"

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return asdict(self)


def export_bundle(
    ref: str | Path,
    out: str | Path,
    *,
    format: Literal["semantic-router"] = "semantic-router",
    bundle_version: int = 1,
    require: Literal["pass", "any"] = "pass",
) -> Exported:
    """Write a bundle in another program's layout, completely or not at all.

    Args:
        ref: a folder, or ``org/name[@revision]``.
        out: the new folder, which must not exist.
        format: the layout.
        bundle_version: number of this fit of the pair, which ends the mapper id.
        require: ``pass`` refuses a bundle whose evaluation failed, because the layout cannot record that; ``any`` writes it.

    Raises:
        MismatchError: the layout cannot hold something of the mapper; names the field.
        GateError: the verdict is ``fail``.
        RefError: the bundle does not exist or cannot be reached.
        BundleError: the bundle is damaged, or the folder exists.
    """
    if format != "semantic-router":
        raise MismatchError(f"export: found format {format!r}, needed semantic-router")
    if bundle_version < 1:
        raise OptionError(f"--bundle-version: found {bundle_version}, needed 1 or more")
    destination = Path(out)
    require_free(destination)
    require_writable(destination)
    bundle = Bundle.open(resolve(ref))
    if bundle.verdict == "fail" and require == "pass":
        raise GateError(
            f"bundle {ref}: its evaluation failed, which {format}'s layout cannot record; improve it, or export it anyway with"
            " --any (require='any')"
        )
    mapper_id = make_mapper_id(bundle.spec, bundle_version)
    try:
        router_manifest(bundle.spec, mapper_id)  # refuses before anything is written
    except MismatchError as error:
        raise MismatchError(f"bundle {ref}: {format}'s layout cannot hold this mapper: {error}") from None
    with whole_folder(destination) as temporary:
        nbytes = write_router_folder(temporary, bundle, mapper_id)
    return Exported(str(ref), str(out), format, mapper_id, bundle.verdict, nbytes)

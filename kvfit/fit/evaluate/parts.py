"""Save each part of an evaluation next to the bundle when it is measured, so that an interrupted evaluation can continue.

The file is plain JSON as Python writes it and not a strict record of `kvfit.bundle.records`: a measurement may be NaN, which
must stay NaN when it is read back because the verdict depends on it, and the number of values grows with the text without a
limit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kvfit.fit.progress import Progress

LOGGER = logging.getLogger("kvfit")

T = TypeVar("T")


class Parts:
    """The parts of one evaluation, JSON values by name, in a file next to the bundle until `finish` removes it.

    The file belongs to one job: a bundle, two models, a text and a set of options. Another job replaces it.
    """

    def __init__(self, bundle: Path, job: Any, total: int, *, plan: str = "", progress: bool = True) -> None:
        """Read the parts that an interrupted run of the same job has saved.

        Args:
            bundle: folder of the bundle.
            job: JSON values of everything that the result depends on.
            total: number of parts.
            plan: a summary of what will be measured, for the first line of the log.
            progress: whether to show progress.
        """
        self.path = bundle.parent / f"{bundle.name}.evaluation-parts.json"
        self.key = hashlib.sha256(json.dumps(job, sort_keys=True, default=str).encode()).hexdigest()
        self.found: dict[str, Any] = self._read()
        self.shown = Progress("evaluate", total, "parts", initial=len(self.found), plan=plan, show=progress)

    def _read(self) -> dict[str, Any]:
        try:
            saved = json.loads(self.path.read_bytes())
        except (OSError, ValueError):  # there is none, or it is torn by a full disk
            return {}
        same = isinstance(saved, dict) and saved.get("job") == self.key and isinstance(saved.get("parts"), dict)
        return dict(saved["parts"]) if same else {}

    def __call__(self, name: str, measure: Callable[[], T]) -> T:
        """The part that was saved under a name; else the result of `measure`, which is saved under it."""
        if name not in self.found:
            # A new value goes through JSON as well, so that it is the same as one that is read back.
            self.found[name] = json.loads(json.dumps(measure()))
            self._save()
            self.shown.advance()
        return self.found[name]  # type: ignore[no-any-return]

    def _save(self) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps({"job": self.key, "parts": self.found}))
            os.replace(temporary, self.path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            LOGGER.warning("evaluate: part not saved (%s): an interrupted run will measure it again", error.strerror or error)

    def finish(self, result: str, then: str = "") -> None:
        """Remove the file, because the result is in the bundle."""
        self.path.unlink(missing_ok=True)
        self.shown.finish(result, then)

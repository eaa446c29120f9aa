"""An evaluation that is interrupted goes on: each part is saved beside the bundle as soon as it is measured."""

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
    """The parts of one evaluation, JSON values by name, in a file beside the bundle until `finish` removes it.

    The file belongs to one job: a bundle, two models, a text and a set of options. Another job starts anew and replaces it.
    """

    def __init__(self, bundle: Path, job: Any, total: int, *, plan: str = "", progress: bool = True) -> None:
        """Read what an interrupted run of the same job has saved.

        Args:
            bundle: the folder.
            job: JSON values that say all that the result depends on.
            total: how many parts there will be.
            plan: what will be measured, for the first line of the log.
            progress: show a bar or log lines.
        """
        self.path = bundle.parent / f"{bundle.name}.evaluation-parts.json"
        self.key = hashlib.sha256(json.dumps(job, sort_keys=True, default=str).encode()).hexdigest()
        self.found: dict[str, Any] = self._read()
        self.shown = Progress("evaluate", total, "parts", initial=len(self.found), plan=plan, show=progress)

    def _read(self) -> dict[str, Any]:
        try:
            saved = json.loads(self.path.read_bytes())
        except (OSError, ValueError):  # none, or torn by a full disk
            return {}
        same = isinstance(saved, dict) and saved.get("job") == self.key and isinstance(saved.get("parts"), dict)
        return dict(saved["parts"]) if same else {}

    def __call__(self, name: str, measure: Callable[[], T]) -> T:
        """What was saved under a name, or what `measure` returns, saved under it."""
        if name not in self.found:
            # A value read back must be the value that was written, so both go through JSON.
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
        """Remove the file: the result is in the bundle now."""
        self.path.unlink(missing_ok=True)
        self.shown.finish(result, then)

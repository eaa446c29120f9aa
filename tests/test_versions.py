"""The versions of transformers that kvfit says it works on are those that its tests run on."""

import importlib.util
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from zoo import FAMILIES, build

from kvfit import cache as caches

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = os.environ.get("KVFIT_EXPECT_TRANSFORMERS")


def older() -> ModuleType:
    """scripts/older_transformers.py."""
    path = ROOT / "scripts" / "older_transformers.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(EXPECTED is None, reason="no version was asked for")
def test_it_is_the_version_that_was_asked_for() -> None:
    """A run on an older version that silently found the newest would prove nothing."""
    import transformers

    assert transformers.__version__ == EXPECTED
    assert metadata.version("transformers") == EXPECTED
    program = "import transformers; print(transformers.__version__)"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert child.stdout.split()[-1] == EXPECTED


def test_the_argument_changed_its_name_in_5_24() -> None:
    """Both names are really met: the older versions that the script runs have the one, the newest has the other."""
    from packaging.version import Version

    family = next(family for family in FAMILIES if family.name == "qwen3")
    newer = Version(metadata.version("transformers")) >= Version("5.24")
    assert caches.cache_argument(build(family)) == ("cache" if newer else "past_key_values")
    assert all(Version(version) < Version("5.24") for version in older().VERSIONS)


def test_the_stated_range_is_the_tested_one() -> None:
    oldest = older().VERSIONS[0]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (least,) = re.findall(r'"transformers>=([\d.]+)"', project)
    assert oldest.startswith(f"{least}.")
    page = (ROOT / "docs" / "reference" / "supported-models.md").read_text(encoding="utf-8")
    assert f"{least} to " in page
    for version in older().VERSIONS:
        assert version in page


def test_the_script_names_files_that_exist() -> None:
    assert set(older().TESTS) <= {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py")}

"""The versions of transformers that kvfit says it works on are those that its tests run on."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from zoo import FAMILIES, Tokenizer, build

from kvfit.errors import MismatchError
from kvfit.model import cache as caches
from kvfit.model.identity import check_model, describe_model

ROOT = Path(__file__).resolve().parents[2]
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
    assert set(older().TESTS) <= {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")}


def test_a_configuration_file_of_version_5_is_right_or_refused(tmp_path: Path) -> None:
    """Version 4 does not know the name that version 5 writes theta under and takes its default without a word."""
    import transformers
    from packaging.version import Version

    model = build(next(family for family in FAMILIES if family.name == "qwen3"))  # theta is a million
    spec = describe_model(model, Tokenizer(), ref="org/name", revision=None)
    written = {name: value for name, value in model.config.to_dict().items() if name not in ("rope_theta", "rope_scaling")}
    written |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "transformers_version": "5.24.0"}
    (tmp_path / "config.json").write_text(json.dumps(written, default=str), encoding="utf-8")
    loaded = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    loaded.load_state_dict(model.state_dict())
    if Version(transformers.__version__).major >= 5:
        check_model(spec, loaded)
    else:
        with pytest.raises(MismatchError, match=r"field rope\.tables\[0\]: found a model with other inverse frequencies"):
            check_model(spec, loaded)

"""Run the tests that touch transformers on other versions of it, beside this environment and without a second torch.

    python scripts/older_transformers.py                      # the versions of VERSIONS
    python scripts/older_transformers.py 4.57.6 -- -k windows # one version; what follows -- is for pytest

Each version gets a small virtual environment that sees everything of the environment that runs this script. The installer puts
into it that transformers and whatever else of kvfit's requirements has to be another version for it (hub client, tokenizers,
datasets), which is what a user with that version has.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib import metadata
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
# The oldest that is supported, and the one that vLLM pins; the newest is what the whole suite runs on.
VERSIONS = ("4.57.6", "5.19.0")
# tests/test_versions.py fails where another version answers than the one that was asked for. The demo, the longest, is first.
TESTS = (
    "demo", "versions", "rope", "cache", "windows", "families", "identity", "identity_map", "identity_fitted", "refusals",
    "forward", "content", "interference", "tensor_sums", "first_layer", "generate",
    "selfcheck", "inspect", "mapper", "handoff", "recompute", "geometry", "capture",
)  # fmt: skip

OPTIONS = (
    "--durations=5",
    "--no-loadscope-reorder",
    # Half a minute about processes of torch, not about transformers.
    "--deselect=tests/fit/capture/test_capture.py::test_two_processes_of_torchrun_end_in_one_store",
)


def requirements(version: str) -> list[str]:
    """What kvfit needs to fit and run, with this transformers and with the torch that is here already."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["fit"]]
    others = [line for line in asked if re.match(r"[\w.-]+", line)[0] not in ("torch", "transformers")]  # type: ignore[index]
    return [f"transformers=={version}", f"torch=={metadata.version('torch')}", *others]


def environment(version: str, folder: Path) -> Path:
    """A virtual environment in `folder` on top of this one, with that transformers; its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    # addsitedir and not a plain path, so that an editable kvfit of this environment is seen too; its folder comes after `own`.
    parents = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    lines = [f"import site; site.addsitedir({parent!r})" for parent in parents]
    (own / "parent.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements(version)], check=True)
    if (own / "torch").exists():
        raise SystemExit(f"transformers {version}: found torch installed again, needed that of {sys.prefix}")
    return python


def files(version: str) -> list[str]:
    """The test files to run; the demo only on the oldest version, because it takes as long as all the rest."""
    wanted = [name for name in TESTS if name != "demo" or version not in VERSIONS[1:]]
    return [str(path.relative_to(ROOT)) for name in wanted for path in sorted((ROOT / "tests").rglob(f"test_{name}.py"))]


def main() -> None:
    """Run, and exit with 1 if the tests of any version failed."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION", help=f"default: {' '.join(VERSIONS)}")
    versions = parser.parse_args(words[:cut]).versions
    failed = []
    for version in versions:
        print(f"transformers {version}", flush=True)
        with tempfile.TemporaryDirectory(prefix=f"transformers-{version}-") as folder:
            python = environment(version, Path(folder))
            variables = {**os.environ, "KVFIT_EXPECT_TRANSFORMERS": version}
            command = [python, "-m", "pytest", *OPTIONS, *words[cut + 1 :], *files(version)]
            if subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode != 0:
                failed.append(version)
    if failed:
        raise SystemExit(f"tests failed on transformers {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""Build the wheel and try it as users install it: alone, and with the extra `fit`, both outside the repository.

    python scripts/try_wheel.py

The first environment has the wheel and what it requires, nothing else; it needs the package index (or a cache) for that. The
second stands on top of the environment that runs this script, so that the extra's packages are not installed a second time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A mapper is loaded and applied without any extra; a warning, such as torch's about a missing numpy, is a fault.
ALONE = """
import sys, warnings
warnings.simplefilter("error")
from kvfit import load_mapper
import torch
mapper = load_mapper(sys.argv[1], require="any")
source = mapper.spec.source
shape = (1, source.n_heads, 5, source.head_dim)
layers = [(torch.randn(shape), torch.randn(shape)) for _ in range(source.n_layers)]
mapped = mapper.transfer_layers(layers)
assert len(mapped) == mapper.spec.target.n_layers and mapped[0][0].shape[2] == 5
print("alone: mapped", len(mapped), "layers with", mapper)
"""
BUNDLE = ROOT / "tests" / "data" / "bundle-v1"
HEAVY = ("demo", "capture a b --out c", "solve a --out b", f"evaluate {BUNDLE}", "plan a b", "inspect a", "fit a b")
JOB = (
    "fit demo:source demo:target --dataset demo:text --num-sequences 24 --seq-len 128 --documents 4 --prefix 48 "
    "--continuation 16 --probes 0 --greedy 0 --diagnose 0 --seconds 0 --transcripts 0 --out bundle"
)


def build(folder: Path) -> Path:
    """The wheel, built into `folder`."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    [wheel] = folder.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for needed in ("kvfit/py.typed", "kvfit/demo/text.jsonl"):
        if needed not in names:
            raise SystemExit(f"{wheel.name}: found no {needed}")
    if not any(name.startswith("kvfit/_registry/") for name in names):
        raise SystemExit(f"{wheel.name}: found no registry")
    return wheel


def run(command: list[str | Path], folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run in `folder`, away from the repository, and expect an exit code."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != code:
        said = f"exit code {done.returncode}, needed {code}\n{done.stdout}{done.stderr}"
        raise SystemExit(f"{' '.join(map(str, command))}: {said}")
    return done


def alone(wheel: Path, folder: Path) -> None:
    """The wheel without extras: the runtime works, and heavy verbs name the extra in one line."""
    venv.create(folder / "alone", with_pip=True)
    binaries = folder / "alone" / "bin"
    install = [binaries / "pip", "install", "--quiet", f"torch=={metadata.version('torch').partition('+')[0]}", wheel]
    subprocess.run(install, check=True)
    print(run([binaries / "python", "-c", ALONE, BUNDLE], folder).stdout.strip())
    for words in HEAVY:
        said = run([binaries / "kvfit", *words.split()], folder, code=1).stderr.strip()
        if "Traceback" in said or 'pip install "kvfit-mappers[fit]"' not in said.splitlines()[-1]:
            raise SystemExit(f"kvfit {words}: found\n{said}\nneeded a last line that names the extra")
    print("alone: heavy verbs name the extra")


def with_fit(wheel: Path, folder: Path) -> None:
    """The wheel with the extra's packages: the whole job, outside the repository."""
    venv.create(folder / "fit", with_pip=False, symlinks=True)
    python = folder / "fit" / "bin" / "python"
    own = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).stdout.strip())
    lines = [f"import site; site.addsitedir({sysconfig.get_path(name)!r})" for name in ("purelib", "platlib")]
    (own / "parent.pth").write_text("\n".join(dict.fromkeys(lines)) + "\n", encoding="utf-8")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--ignore-installed", wheel]
    subprocess.run(install, check=True)
    where = run([python, "-c", "import kvfit; print(kvfit.__file__)"], folder).stdout.strip()
    if not where.startswith(str(own)):
        raise SystemExit(f"with fit: found kvfit at {where}, needed the wheel's in {own}")
    # So small a fit is worth nothing, and its verdict says so: exit code 3.
    run([python, "-m", "kvfit", *JOB.split()], folder, code=3)
    print(run([python, "-m", "kvfit", "verify", "./bundle"], folder).stdout.strip())


def main() -> None:
    """Try both."""
    with tempfile.TemporaryDirectory(prefix="kvfit-wheel-") as name:
        folder = Path(name)
        wheel = build(folder)
        with_fit(wheel, folder)
        alone(wheel, folder)


if __name__ == "__main__":
    main()

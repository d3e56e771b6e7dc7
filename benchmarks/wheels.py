"""All wheels that a machine without network needs, in one folder: `python -m benchmarks.wheels FOLDER`.

Many machines with a GPU have JAX but no network. This downloads the wheels of everything else that quaxlike
needs, for the machine's Python and platform. Copy the folder there and run `python FOLDER/install.py`; then
`python -m benchmarks.gpu` runs in a checkout.
"""

import argparse
import pathlib
import re
import subprocess
import sys
from importlib import metadata

# What comes with JAX.
_PRESENT = ("jax", "jaxlib", "numpy", "scipy", "ml-dtypes", "opt-einsum")
_INSTALL = """\
import pathlib, subprocess, sys

here = pathlib.Path(__file__).parent
wheels = map(str, sorted(here.glob("*.whl")))
sys.exit(subprocess.call([sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", *wheels]))
"""


def requirements(name: str, present: frozenset[str]) -> dict[str, str]:
    """The packages that a package installed here needs, and theirs, with their versions."""
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        for line in metadata.requires(waiting.pop()) or ():
            requirement, _, marker = line.partition(";")
            needed = normalised(re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0])
            if "extra" in marker or needed in present or needed in found:
                continue
            try:
                found[needed] = metadata.version(needed)
            except metadata.PackageNotFoundError:  # for another platform or Python
                continue
            waiting.append(needed)
    return found


def normalised(name: str) -> str:
    """A package's name as registries compare them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def download(packages: list[str], folder: pathlib.Path, python: str, platform: str) -> int:
    """Downloads the wheels, and gives their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--platform", platform]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(folder), *packages]
    subprocess.run(command, check=True)
    (folder / "install.py").write_text(_INSTALL)
    return sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wheels", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--python", default="3.12", help="the machine's Python")
    parser.add_argument("--platform", default="manylinux_2_28_x86_64", help="as wheels are tagged")
    parser.add_argument("--present", nargs="*", default=[], help="packages that it has beside JAX's own")
    parser.add_argument("--also", nargs="*", default=["absl-py"], help="more packages, such as bitsandbytes")
    parser.add_argument("--mib", type=float, default=64.0, help="what fits the way there")
    arguments = parser.parse_args()
    present = frozenset(map(normalised, (*_PRESENT, *arguments.present)))
    needed = requirements("quaxlike", present)
    packages = [f"{name}=={version}" for name, version in needed.items()] + arguments.also
    size = download(packages, arguments.folder, arguments.python, arguments.platform) / 2**20
    print(f"{arguments.folder}: {', '.join(packages)}; {size:.1f} MiB")
    if size > arguments.mib:
        sys.exit(f"These are more than the {arguments.mib:g} MiB of --mib: name in --present what is there.")


if __name__ == "__main__":
    main()

"""Packages the native library as a wheel (`quaxlike-cpu`), for machines without a compiler."""

import sysconfig
import tempfile
from pathlib import Path

from ..._checked import checked
from ..._version import __version__
from .library import PACKAGE, NativeError, compile_to, file_name

_METADATA = f"""Metadata-Version: 2.1
Name: quaxlike-cpu
Version: {__version__}
Summary: Native products for quaxlike on CPUs
Requires-Python: >=3.11
License: Apache-2.0
"""


@checked
def write_wheel(folder: Path) -> Path:
    """Compiles the native library and packages it as a wheel, for any version of Python 3 on this platform.

    Once the wheel is installed, quaxlike loads the library from it, if compiled from the same sources.
    Instructions are selected at run time, according to the processor. Also available as
    `python -m quaxlike.kernels.native --wheel DIR`.

    **Arguments:**

    - `folder`: the directory for the wheel. Created if it does not exist.

    **Returns:** the wheel's path. Its platform tag is the one reported by Python, so use a tool such as
    `auditwheel` before uploading it to a package index.

    **Raises:** `NativeError` if there is no C++ compiler, if compilation fails, or if `wheel` is missing.
    """
    try:
        from wheel.wheelfile import WheelFile
    except ImportError as error:
        raise NativeError("The wheel is written by a package that is missing: pip install wheel") from error
    tag = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    info = f"{PACKAGE}-{__version__}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{PACKAGE}-{__version__}-{tag}.whl"
    with tempfile.TemporaryDirectory() as own:
        library = Path(own) / file_name()
        compile_to(library)
        with WheelFile(path, "w") as wheel:
            wheel.writestr(f"{PACKAGE}/__init__.py", '"""Native products for quaxlike."""\n')
            wheel.write(str(library), f"{PACKAGE}/{library.name}")
            wheel.writestr(f"{info}/METADATA", _METADATA)
            wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
    return path

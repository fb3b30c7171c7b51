"""What `pip` calls this package, and the other package that has its name."""

import os.path
import sys
import warnings
from typing import Final

DISTRIBUTION: Final = "pmesh-agent"
NAMESAKE: Final = (
    "another project, Particle Mesh, is called pmesh on PyPI, and is installed in the same folder,"
    " {folder}: 'pip uninstall pmesh pmesh-agent', then install pmesh-agent again"
)
_ITS_MODULE: Final = "pm.py"  # of all its releases; none of ours has this name


def installed_version() -> str:
    """Return the version that is installed; raises PackageNotFoundError where none is."""
    from importlib.metadata import version  # noqa: PLC0415 - it takes longer than `import pmesh`

    return version(DISTRIBUTION)


def mlx_requirement() -> str:
    """Return what follows `pip install` for MLX; on Linux its own library is an extra of it."""
    return "mlx" if sys.platform == "darwin" else "'mlx[cpu]'"


def warn_of_namesake(folder: str) -> None:
    """Warn if the other project's modules lie among ours, of which it then has replaced some."""
    if os.path.exists(os.path.join(folder, _ITS_MODULE)):  # noqa: PTH110, PTH118 - pathlib takes longer, too
        warnings.warn(NAMESAKE.format(folder=folder), RuntimeWarning, stacklevel=3)

"""Options that commands of several packages have."""

from pathlib import Path
from typing import Annotated, TypeAlias

from cyclopts import Parameter

Home: TypeAlias = Annotated[
    Path | None, Parameter(help="The agent's home directory; default PMESH_HOME, else ~/.pmesh.")
]
Flag: TypeAlias = Annotated[bool, Parameter(negative="", show_default=False)]
"""An option that is given or not, without a value."""

"""Options that most commands have."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

Home = Annotated[
    Path | None, Parameter(help="The agent's home directory; default PMESH_HOME, else ~/.pmesh.")
]
Several = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]
"""An option that may be repeated."""
Flag = Annotated[bool, Parameter(negative="", show_default=False)]
"""An option that is given or not, without a value."""

"""Options that most commands have."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

Home = Annotated[
    Path | None, Parameter(help="The agent's home directory; default PMESH_HOME, else ~/.pmesh.")
]

"""Sphinx: `make docs`. Nothing here asks the network."""

from importlib.metadata import version as installed_version

project = "pmesh"
author = "the pmesh developers"
copyright = "the pmesh developers"  # noqa: A001 - Sphinx's name for it
release = version = installed_version("pmesh-agent")

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3  # so that pages can link to one another's sections

html_theme = "furo"
html_title = f"pmesh {release}"

"""Sphinx: `make docs`. Nothing here asks the network."""

from importlib.metadata import version as installed_version

from sphinx.application import Sphinx

project = "pmesh"
author = "the pmesh developers"
copyright = "the pmesh developers"  # noqa: A001 - Sphinx's name for it
release = version = installed_version("pmesh")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3  # so that pages can link to one another's sections
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"pmesh {release}"


def setup(app: Sphinx) -> None:
    """Keep napoleon off attributes: it takes "a: b" in their docstrings for a type and a text."""
    as_written: dict[str, list[str]] = {}

    def remember(
        _: Sphinx, what: str, name: str, __: object, ___: object, lines: list[str]
    ) -> None:
        if what in {"attribute", "property"}:
            as_written[name] = list(lines)

    def restore(_: Sphinx, what: str, name: str, __: object, ___: object, lines: list[str]) -> None:
        if what in {"attribute", "property"}:
            lines[:] = as_written[name]

    app.connect("autodoc-process-docstring", remember, priority=400)  # napoleon has 500
    app.connect("autodoc-process-docstring", restore, priority=600)

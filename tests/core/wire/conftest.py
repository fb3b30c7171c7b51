"""The windows of a lane over several connections: Python's alone, and beside those in C."""

from collections.abc import Iterator

import pytest

from native import build
from tests.native.windows import MirroredReceives, MirroredSends, load_windows


@pytest.fixture(scope="module", params=["Python", "and C"])
def windows(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Let the tests of a module ask both windows, which must agree in all."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "and C":
            if not build.find_compiler():
                pytest.skip("needs a C compiler")
            library = load_windows(tmp_path_factory.mktemp("windows"))
            for mirrored in (MirroredSends, MirroredReceives):
                patch.setattr(mirrored, "library", library, raising=False)
                patch.setattr(request.module, mirrored.__mro__[1].__name__, mirrored, raising=False)
        yield

"""What `pip install` does besides copying files: it compiles the native library, if it can."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeHook(BuildHookInterface[Any]):
    """Adds the library to the wheel; without a compiler, the wheel is pure Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, for an editable installation as for a wheel, which also has the examples.

        `pmesh init` writes one of them; where pmesh is editable, it finds them in the clone.
        """
        if version == "standard":
            for example in sorted(Path(self.root, "examples").glob("train_*.py")):
                build_data["force_include"][str(example)] = f"pmesh/cli/examples/{example.name}"
        native = runpy.run_path(str(Path(self.root, "native", "build.py")))
        try:
            library = native["build"]()
        except native["NotBuiltError"] as error:
            self.app.display_warning(str(error))
            return
        build_data["artifacts"].append(library.relative_to(self.root).as_posix())
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{native['platform_tag']()}"

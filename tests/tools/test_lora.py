"""The tiny model to fine-tune with."""

import importlib.util
import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

if importlib.util.find_spec("mlx_lm") is None and not os.environ.get("CI"):
    pytest.skip("mlx-lm is not installed", allow_module_level=True)

from mlx_lm import load

from tools.__main__ import main


def test_the_tiny_model_and_its_data_are_where_the_command_that_it_prints_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "tiny", str(tmp_path)]) == 0
    words = capsys.readouterr().out.splitlines()[-1].split()
    assert words[:3] == ["pmesh", "mlx", "mlx_lm.lora"]
    options = dict(pairwise(words[3:]))
    _, tokenizer, *_ = load(options["--model"])
    assert tokenizer.decode(tokenizer.encode("for x in y:")) == "for x in y:"
    assert json.loads((Path(options["--data"]) / "train.jsonl").read_text().splitlines()[0])["text"]

"""The short form of the campaign that kills ranks of `pmesh mlx -- mlx_lm.lora --train`."""

import importlib.util
import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

if importlib.util.find_spec("mlx_lm") is None and not os.environ.get("CI"):
    pytest.skip("mlx-lm is not installed", allow_module_level=True)

from mlx_lm import load

from tools.lora.__main__ import main
from tools.lora.kills import Tally, judge_ends


def test_the_tiny_model_and_its_data_are_where_the_command_that_it_prints_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tiny", str(tmp_path)]) == 0
    words = capsys.readouterr().out.splitlines()[-1].split()
    assert words[:3] == ["pmesh", "mlx", "mlx_lm.lora"]
    options = dict(pairwise(words[3:]))
    _, tokenizer, *_ = load(options["--model"])
    assert tokenizer.decode(tokenizer.encode("for x in y:")) == "for x in y:"
    assert json.loads((Path(options["--data"]) / "train.jsonl").read_text().splitlines()[0])["text"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_ranks_come_back_and_all_end_with_the_same_adapters(tmp_path: Path) -> None:
    results = tmp_path / "kills.json"

    code = main(["kills", "--kills", "1", "--iterations", "60", "--json", str(results)])

    tally = json.loads(results.read_text())
    assert tally["violations"] == []
    assert code == 0
    assert tally["kills"] == 1
    assert tally["trainings"] >= 1
    assert len(tally["back_s"]) == 1


@pytest.mark.parametrize(
    ("ends", "on_disk", "losses", "says"),
    [
        (["a", "a", "b"], "a", [2.0], "weights"),
        (["a", "a", "a"], "b", [2.0], "weights"),
        (["a", "a", "a"], "none", [2.0], "weights"),
        (["a", "a", "a"], "a", [2.03], "undisturbed 2.0"),
        (["a", "a", "a"], "a", [], "undisturbed 2.0"),
    ],
)
def test_other_bits_or_another_loss_are_violations(
    ends: list[str], on_disk: str, losses: list[float], says: str
) -> None:
    tally = Tally(losses=[2.0])

    judge_ends(tally, "training 1", ends, on_disk, losses)

    assert len(tally.violations) == 1
    assert says in tally.violations[0]

"""The tutorial for PyTorch; tests/client/test_examples.py runs its scripts."""

from tests.docs.pages import DOCS, ROOT, read

PAGE = read(DOCS / "tutorial-torch.md")


def test_the_elastic_script_of_the_page_is_the_example() -> None:
    script = PAGE.split("```python\n")[1].split("```")[0]

    assert script == read(ROOT / "examples" / "train_torch_elastic.py")


def test_the_line_that_changes_is_the_only_one_with_a_backend() -> None:
    changed = PAGE.split("```diff\n")[1].split("```")[0].splitlines()
    script = read(ROOT / "examples" / "train_torch.py")

    assert [line[0] for line in changed] == ["-", "+"]
    assert changed[0][1:].replace('"gloo"', '"pmesh"') == changed[1][1:]
    assert [line for line in script.splitlines() if "init_process_group(" in line] == [
        *[line for line in script.splitlines() if line.startswith("part. But")],
        changed[1][1:],
    ]


def test_every_row_of_the_table_of_differences_stands_in_its_script() -> None:
    elastic = read(ROOT / "examples" / "train_torch_elastic.py")

    for line in (
        "mesh = pmesh.torch.init(elastic=True)",
        "pmesh.torch.sync(model, optimizer, place)",
        'while place["epoch"] < EPOCHS:',
        "mesh.batch(TRAINED, BATCH, **place)",
    ):
        assert f"`{line}`" in PAGE
        assert line in elastic

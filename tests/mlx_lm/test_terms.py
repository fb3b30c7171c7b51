import pytest

from pmesh.errors import UsageError
from pmesh.mlx_lm.libraries import mx
from pmesh.mlx_lm.terms import (
    MODEL,
    check_alike,
    check_resumable,
    describe_model,
    describe_rows,
    option_terms,
)
from tests.mlx_lm.lora import make_model

ROWS = [{"text": "one"}, {"text": "two"}]


def test_machines_with_the_same_terms_are_alike() -> None:
    check_alike(["mac-1", "mac-2"], [{"--iters": "5"}, {"--iters": "5"}])


def test_the_error_names_each_difference_and_the_machine() -> None:
    terms = [{"--iters": "5", "--seed": "0"}, {"--iters": "5", "--seed": "0"}, {"--iters": "6"}]

    with pytest.raises(
        UsageError,
        match=r"--iters is 5 on mac-1 and 6 on mac-3; --seed is 0 on mac-1 and not given on mac-3",
    ):
        check_alike(["mac-1", "mac-2", "mac-3"], terms)


def test_paths_and_reports_may_differ_between_machines() -> None:
    local = {"model": "m", "data": "d", "adapter_path": "a", "config": None, "report_to": "wandb"}
    assert option_terms(local) == {}


def test_a_run_may_be_resumed_with_more_iterations_but_not_with_another_model() -> None:
    saved = {MODEL: "one", "--iters": "5"}
    check_resumable("state", saved, {MODEL: "one", "--iters": "9"})

    with pytest.raises(UsageError, match=r"state has the state of another run: base model was one"):
        check_resumable("state", saved, {MODEL: "two", "--iters": "5"})


def test_models_differ_by_their_frozen_weights_not_by_their_adapters() -> None:
    described = {describe_model(make_model(seed=seed)) for seed in (0, 0, 1)}
    assert len(described) == 2

    model = make_model()
    before = describe_model(model)
    model.update({"model": {"layers": [{"self_attn": {"q_proj": {"lora_b": mx.ones((4, 16))}}}]}})
    assert describe_model(model) == before


@pytest.mark.parametrize("other", [[*ROWS, {"text": "3"}], ROWS[::-1], [{"text": "One"}, ROWS[1]]])
def test_data_sets_differ_by_any_row(other: list[object]) -> None:
    assert describe_rows(ROWS) == describe_rows(list(ROWS))
    assert describe_rows(ROWS) != describe_rows(other)

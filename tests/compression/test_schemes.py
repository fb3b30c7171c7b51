from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.compression import schemes
from pmesh.compression.codecs import codec_of
from pmesh.compression.schemes import (
    BF16,
    FP16,
    INT8,
    NAMES,
    Auto,
    OneBit,
    PowerSGD,
    RandomK,
    Scheme,
    TopK,
    named,
    scheme_of,
    spec,
)
from pmesh.errors import PmeshError, UnsupportedCompression

of: Any = schemes  # what a user without types may write


@pytest.mark.parametrize(
    ("make", "allowed"),
    [
        (lambda: of.TopK(0), "ratio must be more than 0 and at most 1, not 0"),
        (lambda: of.TopK(1.01), "at most 1, not 1.01"),
        (lambda: of.TopK(float("nan")), "at most 1, not nan"),
        (lambda: of.TopK(True), "at most 1, not True"),  # noqa: FBT003 - what is refused
        (lambda: of.TopK("1%"), "at most 1, not '1%'"),
        (lambda: of.TopK(compact=1), "compact must be True or False, not 1"),
        (lambda: of.RandomK(-0.1), "ratio must be more than 0"),
        (lambda: of.RandomK(seed=-1), "seed must be from 0 to 9223372036854775807, not -1"),
        (lambda: of.PowerSGD(0), "rank must be from 1 to 1024, not 0"),
        (lambda: of.PowerSGD(2.5), "rank must be from 1 to 1024, not 2.5"),
        (lambda: of.PowerSGD(True), "not True"),  # noqa: FBT003 - likewise
        (lambda: of.PowerSGD(start_step=-1), "start_step must be from 0"),
        (lambda: of.PowerSGD(min_rate=0.5), "min_rate must be at least 1, not 0.5"),
        (lambda: of.PowerSGD(min_rate=float("inf")), "min_rate must be at least 1, not inf"),
        (lambda: of.INT8(stochastic=None), "stochastic must be True or False, not None"),
        (lambda: of.OneBit(error_feedback=0), "error_feedback must be True or False, not 0"),
        (lambda: of.BF16(model="a b"), "model must have at most 64 letters, digits"),
        (lambda: of.BF16(model="a" * 65), "model must have at most 64 letters"),
        (lambda: of.FP16(model=3), "model must have at most 64 letters"),
        (lambda: of.Auto(allow=()), r"allow must be a list of schemes, not \(\)"),
        (lambda: of.Auto(allow="int8"), "allow must be a list of schemes, not 'int8'"),
        (lambda: of.Auto(allow=of.BF16()), "allow must be a list of schemes, not BF16"),
        (lambda: of.Auto(allow=["int9"]), "no compression 'int9'; there are: fp16, bf16, int8"),
        (lambda: of.Auto(allow=[of.Auto()]), "other than Auto"),
        (lambda: of.Auto(min_gain=0.9), "min_gain must be at least 1, not 0.9"),
        (lambda: of.named("gzip"), "no compression 'gzip'; there are: fp16"),
        (lambda: of.scheme_of(8), "compression must be one of fp16.*, or an object.* not 8"),
        (lambda: of.scheme_of(of.Scheme()), "compression must be one of"),
    ],
)
def test_bad_values_are_a_value_error_that_says_what_is_allowed(
    make: Callable[[], Any], allowed: str
) -> None:
    with pytest.raises(ValueError, match=allowed) as raised:
        make()
    assert isinstance(raised.value, UnsupportedCompression)
    assert isinstance(raised.value, PmeshError)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stands_for_the_scheme_with_its_default_options(name: str) -> None:
    scheme = named(name)
    assert scheme_of(name) == scheme
    assert scheme_of(scheme) is scheme
    assert type(scheme).__name__.lower() == name.removesuffix("-stochastic")


@pytest.mark.parametrize("scheme", [FP16(), BF16(), INT8(), INT8(stochastic=True)])
def test_the_spec_of_what_the_ring_does_is_the_name_of_its_codec(scheme: Scheme) -> None:
    assert codec_of(spec(scheme)).name == spec(scheme)


ratios = st.floats(0, 1, exclude_min=True)
any_scheme = st.one_of(
    st.builds(TopK, ratios, compact=st.booleans()),
    st.builds(RandomK, ratios, seed=st.integers(0, 2**63 - 1)),
    st.builds(PowerSGD, st.integers(1, 1024), min_rate=st.floats(1, 1e300)),
    st.sampled_from([FP16(), BF16(), INT8(), INT8(stochastic=True), OneBit(), Auto()]),
)


@given(any_scheme, any_scheme)
def test_a_spec_is_short_and_tells_schemes_apart_that_send_other_bytes(
    one: Scheme, other: Scheme
) -> None:
    assert len(spec(one)) <= 64
    assert (spec(one) == spec(other)) == (one == other)


def test_errors_are_fed_back_by_default_but_for_16_bit_floats() -> None:
    assert {name for name in NAMES if not named(name).feeds_back} == {"fp16", "bf16"}
    assert BF16(error_feedback=True).feeds_back
    assert not TopK(error_feedback=False).feeds_back
    assert not Auto(allow=["bf16"]).feeds_back
    assert Auto(allow=["bf16"], error_feedback=True).feeds_back


def test_what_auto_may_use_is_named_or_given() -> None:
    assert Auto().schemes == (BF16(), INT8())
    assert Auto(allow=["topk", PowerSGD(2)]).schemes == (TopK(), PowerSGD(2))


def test_every_scheme_has_a_spec() -> None:
    every = [named(name) for name in NAMES]
    assert [scheme_of(scheme) for scheme in every] == every
    assert len({spec(scheme) for scheme in every}) == len(every)
    public = [each for name, each in vars(schemes).items() if not name.startswith("_")]
    kinds = {each for each in public if isinstance(each, type) and issubclass(each, Scheme)}
    assert {type(scheme) for scheme in every} == kinds - {Scheme}

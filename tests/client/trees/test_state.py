# ruff: noqa: ANN401 - modules and arrays of libraries that may be absent
"""A state as bytes, and back: every bit of every kind of leaf."""

import collections
import contextlib
import sys
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pmesh.client.trees.state import pack, unpack_untrusted
from pmesh.core.ops.reductions import Values
from pmesh.errors import ProtocolError, UnsupportedArray, UsageError

ML_DTYPES = ["bfloat16", "float8_e4m3fn"]
NUMPY_DTYPES = ["f2", "f4", "f8", ">f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "?", "c8"]
TORCH_DTYPES = ["float16", "bfloat16", "float32", "float64", "uint8", "int64", "bool", "complex64"]
MLX_DTYPES = ["float16", "bfloat16", "float32", "uint8", "uint32", "uint64", "int64", "bool"]
SHAPES = [(2, 3), (), (0, 2)]


def bytes_of(state: object) -> Values:
    packed = pack(state)
    data = np.full(packed.nbytes, 0xAA, np.uint8)
    packed.copy_to(data, 0)
    return data


def copy_of(state: object, own: object = None) -> Any:
    return unpack_untrusted(bytes_of(state), own)


def assert_same(one: Any, other: Any) -> None:
    """The same types all the way down, and the same bits."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for x, y in zip(one, other, strict=True):
            assert_same(x, y)
    elif isinstance(one, np.ndarray | np.generic):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, float):
        assert one.hex() == other.hex()
    else:
        assert one == other


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.text(st.characters(codec="utf-8"))
    | st.binary()
)
ARRAYS = hnp.arrays(
    st.sampled_from([np.dtype(name) for name in NUMPY_DTYPES])
    | hnp.datetime64_dtypes()
    | hnp.unicode_string_dtypes(),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
)
TREES: st.SearchStrategy[object] = st.recursive(
    PLAIN | ARRAYS,
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.text("abc") | st.integers() | st.booleans(), children, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.unmeasured
@given(TREES, TREES)
def test_a_state_comes_out_as_it_went_in_whatever_the_receiver_has(
    state: object, own: object
) -> None:
    assert_same(copy_of(state, own), state)


@given(TREES)
def test_equal_states_have_equal_digests(state: object) -> None:
    assert pack(copy_of(state)).digest == pack(state).digest


@given(TREES, st.integers(1, 100))
def test_chunks_of_any_size_put_together_are_the_state(state: object, size: int) -> None:
    packed, whole = pack(state), bytes_of(state)
    chunks = []
    for start in range(0, packed.nbytes, size):
        chunk = np.zeros(min(size, packed.nbytes - start), np.uint8)
        packed.copy_to(chunk, start)
        chunks.append(chunk)
    assert np.concatenate(chunks).tobytes() == whole.tobytes()


@given(TREES, st.data())
def test_bytes_that_no_pmesh_sends_are_refused_and_not_otherwise_trusted(
    state: object, data: st.DataObject
) -> None:
    """Whatever comes of it, nothing but ProtocolError is raised."""
    forged = bytes_of(state)
    for _ in range(data.draw(st.integers(1, 4))):
        forged[data.draw(st.integers(0, forged.size - 1))] = data.draw(st.integers(0, 255))
    forged = forged[: data.draw(st.integers(0, forged.size))].copy()
    with contextlib.suppress(ProtocolError):
        unpack_untrusted(forged, None)


def forged(tree: list[Any], nbytes: int) -> Values:
    """The bytes of a state with a header that no state has."""
    header = msgspec.msgpack.encode(tree)
    data = np.zeros(nbytes, np.uint8)
    data[: 8 + len(header)] = [*len(header).to_bytes(8, "little"), *header]
    return data


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (["array", "numpy", "O", [8], 64], "dtype 'O'"),
        (["array", "numpy", "no such", [8], 64], "dtype 'no such'"),
        (["array", "numpy", "finfo", [8], 64], "dtype 'finfo'"),
        (["array", "numpy", "<f4", [8], 64], "64 bytes for"),
        (["array", "numpy", "<f4", [-4, -4], 64], "64 bytes for"),
        (["array", "numpy", "<f4", [32], 128], "ends at"),
        (["array", "pandas", "f4", [16], 64], "pandas"),
        (["array", "mlx", "array", [16], 64], "no MLX array"),
        (["array", "torch", "nn", [16], 64], "no torch tensor"),
        (["dict", [["plain", "a"]], []], "1 keys of 0"),
        (["integer", "wrong"], "not a state"),
    ],
)
def test_a_forged_header_is_refused(tree: Any, message: str) -> None:
    for library in ("mlx.core", "torch"):
        pytest.importorskip(library)
    data = forged(tree, 128)
    with pytest.raises(ProtocolError, match=message):
        unpack_untrusted(data, None)


def test_arrays_that_lie_in_one_piece_are_not_copied() -> None:
    x = np.ones(1000)
    (piece,) = [piece for piece in pack({"x": x}).pieces if piece.size == x.nbytes]
    assert np.shares_memory(piece, x)


def test_transposed_arrays_travel_in_the_order_of_their_indices() -> None:
    x = np.arange(6.0).reshape(2, 3).T
    assert_same(copy_of(x), np.ascontiguousarray(x))
    assert pack(x).digest == pack(np.ascontiguousarray(x)).digest


@pytest.mark.parametrize("name", ML_DTYPES)
def test_dtypes_that_numpy_has_from_elsewhere_survive(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.arange(4).astype(getattr(ml_dtypes, name))
    assert_same(copy_of({"x": x})["x"], x)


def test_the_state_of_a_random_generator_survives() -> None:
    one, other = np.random.default_rng(1), np.random.default_rng(2)
    other.bit_generator.state = copy_of(one.bit_generator.state)
    assert one.random() == other.random()


def test_numpy_scalars_stay_scalars() -> None:
    state = (np.float32(0.1), np.uint64(2**64 - 1), np.bool_(1), np.str_("é"))
    assert_same(copy_of(state), state)


def test_what_is_received_is_the_users_to_write() -> None:
    x = copy_of({"x": np.ones(3)})["x"]
    x[:] = 2


class OneAndTwo(NamedTuple):
    one: Any
    two: Any


class Stack(list[Any]):
    pass


def test_containers_of_a_class_of_its_own_keep_it_where_the_receiver_has_it_too() -> None:
    state = {"pair": OneAndTwo(1, [Stack([2, 3])]), "ordered": collections.OrderedDict(b=1, a=2)}
    own = {"pair": OneAndTwo(None, [Stack()]), "ordered": collections.OrderedDict(c=1)}
    assert_same(copy_of(state, own), state)
    assert own == {"pair": OneAndTwo(None, [Stack()]), "ordered": collections.OrderedDict(c=1)}
    plain = {"pair": (1, [[2, 3]]), "ordered": {"b": 1, "a": 2}}
    assert_same(copy_of(state, {"pair": OneAndTwo, "ordered": []}), plain)
    assert_same(copy_of((1, 2, 3), OneAndTwo(1, 2)), (1, 2, 3))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [object()]}, "^a.0: a value of type object can't be sent or saved"),
        ({"a": {1, 2}}, "^a: a value of type set can't"),
        ({(1, 2): 3}, "^a value of type tuple can't"),
        (np.ones(2, object), "an array of object is more than its bytes"),
        ({"x": np.ones(2, "f4,i4")}, r"^x: an array of .* is more than its bytes"),
        ({"x": np.ma.masked_array([1], [True])}, "^x: a MaskedArray means more than its values"),
        ("\ud800", "no Unicode"),
    ],
)
def test_what_is_not_its_bytes_is_refused_with_its_path(state: object, message: str) -> None:
    with pytest.raises(UnsupportedArray, match=message):
        pack(state)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([1], (1,)),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (np.float32(1), np.ones((), np.float32)),
        (np.ones(2, "f4"), np.ones(2, ">f4")),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        ([np.zeros(1), np.zeros(0)], [np.zeros(0), np.zeros(1)]),
    ],
)
def test_states_that_differ_in_anything_have_other_digests(one: object, other: object) -> None:
    assert pack(one).digest != pack(other).digest


@pytest.mark.parametrize("name", MLX_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_mlx_arrays_survive_lazy_ones_too(name: str, shape: tuple[int, ...]) -> None:
    mx: Any = pytest.importorskip("mlx.core")
    x = (mx.arange(6)[: int(np.prod(shape))].reshape(shape) - 3).astype(
        mx.bool_ if name == "bool" else getattr(mx, name)
    )
    result = copy_of([x.T])[0]
    assert type(result) is mx.array
    assert (result.dtype, result.shape) == (x.dtype, x.T.shape)
    assert mx.array_equal(result, x.T).item()


def test_mlx_values_of_64_bits_survive() -> None:
    mx: Any = pytest.importorskip("mlx.core")
    for values in (np.array([2**64 - 1, 2**63 + 1], np.uint64), np.array([1 / 3])):
        x = mx.array(values, dtype=mx.uint64 if values.dtype.kind == "u" else mx.float64)
        assert_same(np.array(copy_of(x)), values)


@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_tensors_survive(name: str, shape: tuple[int, ...]) -> None:
    torch: Any = pytest.importorskip("torch")
    x = torch.arange(6)[: int(np.prod(shape))].reshape(shape).to(getattr(torch, name))
    result = copy_of([x.T if len(shape) > 1 else x])[0]
    assert type(result) is torch.Tensor
    assert (result.dtype, result.device) == (x.dtype, x.device)
    assert torch.equal(result, x.T if len(shape) > 1 else x)
    result.zero_()


def test_torch_tensors_that_are_lazily_negated_or_conjugated_survive() -> None:
    torch: Any = pytest.importorskip("torch")
    x = torch.complex(torch.ones(2), torch.ones(2)).conj()
    assert copy_of([x, x.imag])[0].tolist() == [1 - 1j, 1 - 1j]
    assert copy_of([x, x.imag])[1].tolist() == [-1, -1]


def test_a_column_of_one_value_of_a_torch_tensor_survives() -> None:
    torch: Any = pytest.importorskip("torch")
    column = torch.arange(4.0).reshape(1, 4)[:, 2]  # contiguous, with a stride of 4
    assert copy_of([column])[0].tolist() == [2.0]


def test_a_torch_optimizer_that_has_not_begun_takes_the_state_of_one_that_has() -> None:
    torch: Any = pytest.importorskip("torch")

    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.Adam(model.parameters())

    def train(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()

    (one, one_optimizer), (other, other_optimizer) = make(), make()
    train(one, one_optimizer)
    state = one.state_dict(), one_optimizer.state_dict()
    own = other.state_dict(), other_optimizer.state_dict()
    weights, moments = copy_of(state, own)
    assert type(weights) is type(state[0])
    assert weights._metadata == state[0]._metadata  # noqa: SLF001 - torch reads it when loading
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(moments)
    train(one, one_optimizer)
    train(other, other_optimizer)
    assert torch.equal(one.weight, other.weight)


def test_torch_tensors_go_to_the_device_of_those_that_they_replace() -> None:
    torch: Any = pytest.importorskip("torch")
    own = torch.ones(2, device="meta")
    assert copy_of({"x": torch.ones(2)}, {"x": own})["x"].device == own.device


def test_torch_tensors_without_dense_values_are_refused() -> None:
    torch: Any = pytest.importorskip("torch")
    with pytest.raises(UnsupportedArray, match=r"^x: only dense torch tensors"):
        pack({"x": torch.eye(2).to_sparse()})


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = pytest.importorskip("torch")
    data = bytes_of(torch.ones(2))
    monkeypatch.delitem(sys.modules, "pmesh.client.trees.torch")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match="holds torch arrays, and torch is not installed here"):
        unpack_untrusted(data, None)


def test_without_ml_dtypes_its_dtypes_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    data = forged(["array", "numpy", "bfloat16", [0], 0], 64)
    with pytest.raises(ProtocolError, match="dtype 'bfloat16'"):
        unpack_untrusted(data, None)

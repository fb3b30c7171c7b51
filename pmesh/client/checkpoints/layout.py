"""What a checkpoint consists of: arrays in parts, a manifest per rank, and which step is whole.

A part is a safetensors file of whole arrays, so other programs can read it. The format is 8 bytes
of length, JSON, then the arrays (https://github.com/huggingface/safetensors); we write it ourselves
because a part goes to disk piece by piece, which the library can't do.
"""

import hashlib
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.client.trees.raw import RawArray
from pmesh.client.trees.state import Described
from pmesh.core.values import MAX_TRAINERS, Name
from pmesh.errors import ProtocolError
from pmesh.ids import PATH_NAME, PathName, path_name

FORMAT = 1  # of the manifest; another number is refused
_TYPES = MappingProxyType(
    {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "complex64": "C64",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint64": "U64",
        "uint32": "U32",
        "uint16": "U16",
        "uint8": "U8",
        "bool": "BOOL",
    }
)
"""The names of safetensors. Arrays of any other dtype are stored as their bytes, as U8."""


MAX_SERIAL = 2**62
MAX_LEAP = (
    2**40
)  # of a serial by one lie: no job makes as many saves, and 4 million lies reach 2^62

SaveId: TypeAlias = Annotated[PathName, Meta(max_length=8, pattern=PATH_NAME)]
Serial: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SERIAL)]
Names: TypeAlias = Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_TRAINERS)]
Step: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """An array of a checkpoint."""

    name: str
    """In the safetensors file; the path in the state, such as `layers.0.weight`."""
    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]
    nbytes: int


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """A state without the bytes of its arrays."""

    header: bytes
    """Its structure and plain values, as `Described` has them."""
    arrays: tuple[Stored, ...]
    cuts: tuple[int, ...]
    """Part p has the arrays from number `cuts[p]` to before `cuts[p + 1]`."""

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return len(self.cuts) - 1

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def order(self, part: int) -> list[int]:
        """The numbers of a part's arrays in the order of its file: those of wide values first.

        So that each array is aligned, as the safetensors library orders them.
        """
        first, last = self.cuts[part : part + 2]
        return sorted(range(first, last), key=lambda i: -_itemsize(self.arrays[i]))


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has written of one step. Its file is written last, and makes the step count."""

    format: int
    serial: Serial
    """Counts the saves of a job: a later save has a higher one, also after a restart."""
    step: Step
    save_id: SaveId
    """Tells apart two saves of the same step; random, the same on all ranks."""
    saved_at: float
    """Seconds since 1970 by the clock of this machine."""
    rank: int
    names: Names
    """The machines, by rank."""
    replicas: int
    contents: Contents
    digests: dict[int, str]
    """Of the file of each part that this rank has written."""
    own: Contents | None = None
    """What only this rank has, in one part."""
    own_digest: str = ""

    @property
    def key(self) -> "Key":
        """Which save this belongs to."""
        return Key(self.serial, self.step, self.save_id)


class Key(NamedTuple):
    """Names a save; a later one is greater."""

    serial: Serial
    step: Step
    save_id: SaveId

    @property
    def folder(self) -> PathName:
        """The name of its folder.

        >>> Key(3, 100, PathName("5fe0")).folder
        'save-000003-step-100-5fe0'
        """
        return path_name(f"save-{self.serial:06}-step-{self.step}-{self.save_id}")


class Holding(NamedTuple):
    """A save of which a rank has something on its disk; what ranks tell each other."""

    key: Key
    layout: str
    """The digest of its contents."""
    names: Names
    replicas: int
    digests: dict[int, str]


class Wish(msgspec.Struct, frozen=True, array_like=True):
    """What a rank wants to save; what ranks tell each other before they do."""

    token: str
    """Random: the id of the save is made from those of all ranks."""
    layout: str
    """The digest of the contents."""
    step: Step
    holdings: tuple[Holding, ...]


class Share(msgspec.Struct, frozen=True, array_like=True):
    """How a save ended at a rank."""

    holdings: tuple[Holding, ...]
    failed: str
    """Why it could not write; "" if it could."""


_decoder = msgspec.json.Decoder(Manifest)


def contents_of(described: Described, parts: int) -> Contents:
    """Cut the arrays into so many parts of about the same size, without cutting an array."""
    arrays = tuple(_stored(described.paths, described.arrays))
    ends = list(accumulate(array.nbytes for array in arrays))
    total = ends[-1] if ends else 0
    inner = [bisect_left(ends, total * part / parts) for part in range(1, parts)]
    cuts = (0, *(min(cut + 1, len(arrays)) if total else 0 for cut in inner), len(arrays))
    return Contents(header=described.header, arrays=arrays, cuts=cuts)


def _stored(paths: Sequence[str], arrays: Sequence[RawArray]) -> list[Stored]:
    counts, taken = Counter(paths), set(paths)
    stored: list[Stored] = []
    for number, (path, array) in enumerate(zip(paths, arrays, strict=True)):
        name = path or "state"
        if counts[path] > 1 or name == "__metadata__":  # {"a.b": x, "a": {"b": y}}
            name = next(
                n for n in (f"{path}#{number}{'#' * i}" for i in range(99)) if n not in taken
            )
            taken.add(name)
        dtype = _TYPES.get(array.plain_dtype or "")
        shape = (array.data.size,) if dtype is None else array.shape
        stored.append(Stored(name=name, dtype=dtype or "U8", shape=shape, nbytes=array.data.size))
    return stored


def _itemsize(array: Stored) -> int:
    return array.nbytes // max(1, math.prod(array.shape))


def parts_of_rank(rank: int, size: int, replicas: int) -> list[int]:
    """The parts that a rank writes: its own, and those of the next ranks.

    >>> parts_of_rank(2, 3, 2)
    [2, 0]
    """
    return [(rank + i) % size for i in range(min(replicas, size))]


def part_name(part: int, parts: int) -> str:
    """The file of a part, as others name sharded checkpoints.

    >>> part_name(0, 3)
    'part-00001-of-00003.safetensors'
    """
    return f"part-{part + 1:05}-of-{parts:05}.safetensors"


def manifest_name(rank: int, parts: int) -> str:
    """The file of a rank's manifest."""
    return f"rank-{rank + 1:05}-of-{parts:05}.json"


def own_name(rank: int, parts: int) -> str:
    """The file of what only this rank has."""
    return f"own-{rank + 1:05}-of-{parts:05}.safetensors"


def safetensors_header(arrays: Sequence[Stored], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a safetensors file; the arrays follow in this order."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for array in arrays:
        start, end = end, end + array.nbytes
        shape = list(array.shape)
        entries[array.name] = {"dtype": array.dtype, "shape": shape, "data_offsets": [start, end]}
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def layout_digest(contents: Contents) -> str:
    """The same on ranks whose states have the same structure, plain values and arrays' shapes."""
    return hashlib.sha3_256(msgspec.json.encode(contents)).hexdigest()[:16]


def holding_of(manifest: Manifest) -> Holding:
    """What the rank that wrote this has."""
    layout = layout_digest(manifest.contents)
    return Holding(manifest.key, layout, manifest.names, manifest.replicas, manifest.digests)


def save_id_of(wishes: Sequence[Wish]) -> PathName:
    """The same on all ranks, and chosen by none of them."""
    tokens = msgspec.json.encode([wish.token for wish in wishes])
    return path_name(hashlib.sha3_256(tokens).hexdigest()[:8])


def next_serial(wishes: Sequence[Wish]) -> int:
    """The serial of a save that is later than those on the disks of all ranks.

    One that leaps too far is a lie and does not count; else it would use up the numbers.
    """
    latest = 0
    for serial in sorted(max((h.key.serial for h in w.holdings), default=0) for w in wishes):
        if serial <= latest + MAX_LEAP:
            latest = serial
    return latest + 1


def merged(holdings: Sequence[Holding]) -> list[Holding]:
    """One for each save, with the parts of all of them; the latest save first."""
    found: dict[tuple[Key, str], Holding] = {}
    for holding in holdings:
        known = found.get((holding.key, holding.layout), holding)
        together = known._replace(digests=holding.digests | known.digests)
        found[holding.key, holding.layout] = together
    return sorted(found.values(), key=lambda holding: holding.key, reverse=True)


def missing_parts(holding: Holding) -> list[int]:
    """The parts that nobody has."""
    return [part for part in range(len(holding.names)) if part not in holding.digests]


def outdated_by(own: Sequence[Manifest], claimed: Sequence[Holding], keep: int) -> Key | None:
    """The save before which all that this disk has may go; None if nothing may.

    What others say can make a save count, but only one of which this disk has its own whole share.
    So no claim about saves that are not here makes one go that is.

    Args:
        own: The manifests on this disk, of which only the parts that are there count.
        claimed: What all ranks say they have.
        keep: How many later saves must be whole.
    """
    mine = [holding_of(each) for each in own if _has_whole_share(each)]
    here = {(holding.key, holding.layout) for holding in mine}
    whole = [
        holding.key
        for holding in merged([*mine, *claimed])  # ours first: they say how many parts there are
        if (holding.key, holding.layout) in here and not missing_parts(holding)
    ]
    return whole[keep - 1] if len(whole) >= keep else None


def _has_whole_share(manifest: Manifest) -> bool:
    share = parts_of_rank(manifest.rank, len(manifest.names), manifest.replicas)
    return manifest.digests.keys() >= set(share)


def machines_with(parts: Sequence[int], names: Sequence[str], replicas: int) -> list[str]:
    """The machines that wrote any of these parts."""
    wanted = set(parts)
    writers = (
        name
        for rank, name in enumerate(names)
        if wanted.intersection(parts_of_rank(rank, len(names), replicas))
    )
    return list(dict.fromkeys(writers))


def decode_manifest_untrusted(text: bytes) -> Manifest:
    """Raises ProtocolError unless these bytes are a manifest that makes sense."""
    try:
        manifest = _decoder.decode(text)
    except (msgspec.MsgspecError, ValueError) as e:
        raise ProtocolError(f"not a manifest: {e}") from e
    if manifest.format != FORMAT:
        raise ProtocolError(f"a manifest of format {manifest.format}, not {FORMAT}")
    size = len(manifest.names)
    whole = [manifest.contents] if manifest.own is None else [manifest.contents, manifest.own]
    fits = (
        manifest.contents.parts == size
        and 0 <= manifest.rank < size
        and all(0 <= part < size for part in manifest.digests)
        and all(_is_sound(contents) for contents in whole)
    )
    if not fits:
        raise ProtocolError("a manifest whose numbers contradict each other")
    return manifest


def _is_sound(contents: Contents) -> bool:
    cuts = contents.cuts
    return (
        len(cuts) > 1
        and cuts[0] == 0
        and cuts[-1] == len(contents.arrays)
        and list(cuts) == sorted(cuts)
        and all(array.nbytes >= 0 for array in contents.arrays)
    )

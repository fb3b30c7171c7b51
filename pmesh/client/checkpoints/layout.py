"""The layout of checkpoints: arrays in parts, one manifest per rank, and which step is whole.

A part is a safetensors file of whole arrays, so other programs can read it. The format is 8 bytes
of length, JSON, then the arrays (https://github.com/huggingface/safetensors). We write it ourselves
because a part is written piece by piece, which the library can't do.
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
from pmesh.core.ops.shard import Shard, kept_parts
from pmesh.core.values import MAX_TRAINERS, Name
from pmesh.errors import ProtocolError
from pmesh.ids import PATH_NAME, PathName, path_name

FORMAT = 1  # of the manifest; any other number is refused
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
"""The dtypes' names in safetensors. Arrays of any other dtype are stored as bytes, as U8."""


MAX_SERIAL = 2**62
MAX_LEAP = (
    2**40
)  # by which one rank can raise the serial: more than any job saves; 2^62 takes 4 million such lies

SaveId: TypeAlias = Annotated[PathName, Meta(max_length=8, pattern=PATH_NAME)]
Serial: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SERIAL)]
RankNames: TypeAlias = Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_TRAINERS)]
SavedStep: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """An array of a checkpoint."""

    name: str
    """The name in the safetensors file: the path in the state, such as `layers.0.weight`."""
    dtype: str
    """The dtype's name in safetensors."""
    shape: tuple[int, ...]
    nbytes: int


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """A state without the bytes of its arrays."""

    header: bytes
    """Its structure and plain values, as in `Described`."""
    arrays: tuple[Stored, ...]
    cuts: tuple[int, ...]
    """Part p has the arrays from number `cuts[p]` to before `cuts[p + 1]`."""

    @property
    def parts(self) -> int:
        """The number of parts."""
        return len(self.cuts) - 1

    @property
    def nbytes(self) -> int:
        """The size of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def order(self, part: int) -> list[int]:
        """Return the numbers of a part's arrays in the order of its file: wide values first.

        So each array is aligned; the safetensors library does the same.
        """
        first, last = self.cuts[part : part + 2]
        return sorted(range(first, last), key=lambda i: -_itemsize(self.arrays[i]))


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's share of a save. Its file is written last; until then the share does not count."""

    format: int
    serial: Serial
    """The number of the save in its job. A later save has a higher one, also after a restart."""
    step: SavedStep
    save_id: SaveId
    """Distinguishes two saves of the same step; random, the same on all ranks."""
    saved_at: float
    """Seconds since 1970 by the clock of this machine."""
    rank: int
    names: RankNames
    """The names of the machines, by rank."""
    replicas: int
    contents: Contents
    digests: dict[int, str]
    """The digest of the file of each part that this rank has written."""
    own: Contents | None = None
    """The state that only this rank has, in one part."""
    own_digest: str = ""

    @property
    def key(self) -> "SaveKey":
        """The key of the save."""
        return SaveKey(self.serial, self.step, self.save_id)


class SaveKey(NamedTuple):
    """The name of a save. A later save has a greater key."""

    serial: Serial
    step: SavedStep
    save_id: SaveId

    @property
    def folder(self) -> PathName:
        """The name of the save's folder.

        >>> SaveKey(3, 100, PathName("5fe0")).folder
        'save-000003-step-100-5fe0'
        """
        return path_name(f"save-{self.serial:06}-step-{self.step}-{self.save_id}")


class SaveHolding(NamedTuple):
    """A save of which a rank has parts on its disk. Ranks send these to each other."""

    key: SaveKey
    layout: str
    """The digest of the contents."""
    names: RankNames
    replicas: int
    digests: dict[int, str]


class Wish(msgspec.Struct, frozen=True, array_like=True):
    """What a rank wants to save. Ranks send these to each other before a save."""

    token: str
    """Random; the id of the save is made from the tokens of all ranks."""
    layout: str
    """The digest of the contents."""
    step: SavedStep
    holdings: tuple[SaveHolding, ...]


class SaveReport(msgspec.Struct, frozen=True, array_like=True):
    """How a save ended on a rank."""

    holdings: tuple[SaveHolding, ...]
    failed: str
    """Why the rank could not write; empty if it could."""


_decoder = msgspec.json.Decoder(Manifest)


def contents_of(described: Described, parts: int) -> Contents:
    """Cut the arrays into so many parts of about the same size, without cutting an array."""
    arrays = tuple(_stored(described.paths, described.arrays))
    ends = list(accumulate(array.nbytes for array in arrays))
    total = ends[-1] if ends else 0
    inner = [bisect_left(ends, Shard.of(part, parts, total).begin) for part in range(1, parts)]
    cuts = (0, *(min(cut + 1, len(arrays)) if total else 0 for cut in inner), len(arrays))
    return Contents(header=described.header, arrays=arrays, cuts=cuts)


def _stored(paths: Sequence[str], arrays: Sequence[RawArray]) -> list[Stored]:
    wanted = [path or "state" for path in paths]
    counts, taken = Counter(wanted), set(wanted)
    stored: list[Stored] = []
    for number, (name, array) in enumerate(zip(wanted, arrays, strict=True)):
        if counts[name] > 1 or name == "__metadata__":  # {"a.b": x, "a": {"b": y}}
            name = next(  # noqa: PLW2901 - of several alike
                n for n in (f"{name}#{number}{'#' * i}" for i in range(99)) if n not in taken
            )
            taken.add(name)
        dtype = _TYPES.get(array.plain_dtype or "")
        shape = (array.data.size,) if dtype is None else array.shape
        stored.append(Stored(name=name, dtype=dtype or "U8", shape=shape, nbytes=array.data.size))
    return stored


def _itemsize(array: Stored) -> int:
    return array.nbytes // max(1, math.prod(array.shape))


def part_name(part: int, parts: int) -> str:
    """Return the file name of a part, as other programs name sharded checkpoints.

    >>> part_name(0, 3)
    'part-00001-of-00003.safetensors'
    """
    return f"part-{part + 1:05}-of-{parts:05}.safetensors"


def manifest_name(rank: int, parts: int) -> str:
    """Return the file name of a rank's manifest."""
    return f"rank-{rank + 1:05}-of-{parts:05}.json"


def own_name(rank: int, parts: int) -> str:
    """Return the file name of the state that only this rank has."""
    return f"own-{rank + 1:05}-of-{parts:05}.safetensors"


def safetensors_header(arrays: Sequence[Stored], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a safetensors file; the arrays follow in this order."""
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
    """Return a digest of a state's structure, its plain values and its arrays' shapes."""
    return hashlib.sha3_256(msgspec.json.encode(contents)).hexdigest()[:16]


def holding_of(manifest: Manifest) -> SaveHolding:
    """Return the holding of the rank that wrote this manifest."""
    layout = layout_digest(manifest.contents)
    return SaveHolding(manifest.key, layout, manifest.names, manifest.replicas, manifest.digests)


def save_id_of(wishes: Sequence[Wish]) -> PathName:
    """Return the id of a save; it is the same on all ranks, and no single rank can choose it."""
    tokens = msgspec.json.encode([wish.token for wish in wishes])
    return path_name(hashlib.sha3_256(tokens).hexdigest()[:8])


def next_serial(wishes: Sequence[Wish]) -> int:
    """Return a serial for a new save, higher than those on the disks of all ranks.

    One that exceeds the next lower by more than `MAX_LEAP` is a lie and is ignored; otherwise it
    would use up the numbers.
    """
    latest = 0
    for serial in sorted(max((h.key.serial for h in w.holdings), default=0) for w in wishes):
        if serial <= latest + MAX_LEAP:
            latest = serial
    return latest + 1


def merged(holdings: Sequence[SaveHolding]) -> list[SaveHolding]:
    """Merge the holdings of each save into one with all their parts; the latest save first."""
    found: dict[tuple[SaveKey, str], SaveHolding] = {}
    for holding in holdings:
        known = found.get((holding.key, holding.layout), holding)
        together = known._replace(digests=holding.digests | known.digests)
        found[holding.key, holding.layout] = together
    return sorted(found.values(), key=lambda holding: holding.key, reverse=True)


def missing_parts(holding: SaveHolding) -> list[int]:
    """Return the parts that no rank has."""
    return [part for part in range(len(holding.names)) if part not in holding.digests]


def outdated_by(
    own: Sequence[Manifest], claimed: Sequence[SaveHolding], keep: int
) -> SaveKey | None:
    """Return the save before which this disk may remove all saves; None if it may remove none.

    A save counts as whole by what other ranks claim, but only if this disk has its own whole share
    of it. So false claims about other saves can't make this rank remove a save.

    Args:
        own: The manifests on this disk; only parts that exist count.
        claimed: What all ranks say they have.
        keep: How many whole saves must stay.
    """
    mine = [holding_of(each) for each in own if _has_whole_share(each)]
    here = {(holding.key, holding.layout) for holding in mine}
    whole = [
        holding.key
        for holding in merged([*mine, *claimed])  # ours first: they set the number of parts
        if (holding.key, holding.layout) in here and not missing_parts(holding)
    ]
    return whole[keep - 1] if len(whole) >= keep else None


def _has_whole_share(manifest: Manifest) -> bool:
    share = kept_parts(manifest.rank, len(manifest.names), manifest.replicas)
    return manifest.digests.keys() >= set(share)


def machines_with(parts: Sequence[int], names: Sequence[str], replicas: int) -> list[str]:
    """Return the names of the machines that wrote any of these parts."""
    wanted = set(parts)
    writers = (
        name
        for rank, name in enumerate(names)
        if wanted.intersection(kept_parts(rank, len(names), replicas))
    )
    return list(dict.fromkeys(writers))


def decode_manifest_untrusted(text: bytes) -> Manifest:
    """Return the manifest; raise ProtocolError unless it is valid and makes sense."""
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

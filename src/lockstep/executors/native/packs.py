"""Packed weights of a model: packs weights for the forward pass into a file that is mapped, or into memory.

Matrices in block encodings are packed without conversion. Float matrices stay as they are stored, unless `quantize`
rounds them. Adapters of the artifact are merged into both first. Files are entries of a `BuildCache`. Their content is
checked in the background after they are mapped: reading all of it first would make a second start as long as a first
one.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.gemma4 import PER_LAYER_EMBEDDING
from lockstep.artifacts.hybrids import KERNELS
from lockstep.artifacts.layout import EMBEDDING, HEAD, LM_HEAD, POSITIONS, expected_tensors
from lockstep.artifacts.model import Artifact, Encoding, Tensor
from lockstep.artifacts.tensors import BLOCKS, FLOAT_TYPES, GROUP_SIZE
from lockstep.errors import ExecutorError, UsageError
from lockstep.executors.build_cache import BuildCache
from lockstep.executors.native.library import NativeLibrary, native_library
from lockstep.executors.native.merging import loaded_tensor
from lockstep.executors.native.weights import int4_blocks, int8_blocks, pack, packed_bytes
from lockstep.executors.quantise import check_finite, check_tensor, int4_groups, int8_channels

Bytes = npt.NDArray[np.uint8]
Report = Callable[[str, float], None]
LAYOUT_VERSION = "1"
"""Increased whenever the same artifact and options would be packed into other bytes."""
FOLDER = "packed"
"""Subfolder of the cache folder."""
TABLE, DATA = FILES = ("weights.json", "weights.bin")
CHECKED_BYTES = 1 << 20
"""Number of bytes that share a checksum."""
_ALIGNMENT = 64
_HUGE_PAGE = 2 << 20
_HALF_INFINITY = 0x7C00
"""Exponent bits of a float16; all of them are set in infinity and NaN."""
_SCALES_AT: Mapping[Encoding, tuple[int, ...]] = {
    Encoding.Q8_0: (0,),
    Encoding.Q4_0: (0,),
    Encoding.Q4_1: (0, 2),
    Encoding.Q5_0: (0,),
    Encoding.Q5_1: (0, 2),
    Encoding.Q4_K: (0, 2),
    Encoding.Q5_K: (0, 2),
    Encoding.Q6_K: (208,),
    Encoding.Q3_K: (108,),
    Encoding.IQ4_NL: (0,),
    Encoding.IQ4_XS: (0,),
}
"""Byte offsets of the float16 numbers in a block."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix as the library reads it."""

    encoding: Encoding
    """One of `KINDS` for a matrix in panels, or a float type for rows as they are stored."""
    features: int
    columns: int
    """Number of columns of the tensor. Panels may have more, filled with zeros."""
    data: Bytes
    is_stored: bool = False
    """True for blocks as a file stores them, of which rows can be read and nothing else."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Description of a matrix that will be packed."""

    name: str
    encoding: Encoding
    features: int
    columns: int
    num_bytes: int


class ModelWeights:
    """The matrices of a loaded model.

    Args:
        matrices: matrices by canonical name.
        mapped_bytes: size of the matrices that are mapped from files.
        check: check of the mapped file, if there is one.
    """

    def __init__(self, matrices: Mapping[str, Matrix], mapped_bytes: int, check: FileCheck | None = None) -> None:
        self.matrices = matrices
        self.num_bytes = sum(each.data.nbytes for each in matrices.values())
        self.mapped_bytes = mapped_bytes
        self._check = check

    def check_damage(self) -> None:
        """Check that no damage was found in the mapped file.

        Raises:
            ExecutorError: it is damaged.
        """
        if self._check is not None and self._check.fault is not None:
            raise ExecutorError(self._check.fault)

    def close(self) -> None:
        """Release the matrices. They must not be read afterwards."""
        if self._check is not None:
            self._check.stop()
        self._check, self.matrices = None, {}


def load_weights(
    artifact: Artifact,
    library: NativeLibrary,
    quantize: str | None,
    cache_dir: Path | None,
    max_cache_bytes: int,
    report: Report,
) -> ModelWeights:
    """Map the packed weights of an artifact. They are packed first if there are none.

    Args:
        quantize: ``int8`` or ``int4``: the type to which float matrices are rounded.
        cache_dir: folder for packed files; None: weights are packed into memory.
        report: called with the stage ``pack`` or, for floats with adapters, ``merge``, and its completed fraction.

    Raises:
        UsageError: there is nothing to quantise.
        CorruptArtifactError: a tensor is missing, has the wrong size or is not finite.
    """
    names = _matrix_names(artifact)
    tensors = {name: artifact.weights[name] for name in names}
    if quantize is not None and not any(each.encoding in FLOAT_TYPES for each in tensors.values()):
        raise UsageError(f"quantize is {quantize!r} and {artifact.name} has no float weights to quantise; omit it")
    floats, packed = _planned(library, artifact, tensors, quantize, report)
    packing = _Packing(artifact, library, packed, quantize, report)
    panels, check = _panels(packing, artifact, quantize, cache_dir, max_cache_bytes)
    matrices, begin = dict(floats), 0
    for each in packed:
        data = panels[begin : begin + each.num_bytes]
        matrices[each.name] = Matrix(each.encoding, each.features, each.columns, data)
        begin = _aligned(begin + each.num_bytes)
    in_memory = {name for adapter in artifact.adapters for name in adapter.targets}
    of_floats = sum(each.data.nbytes for name, each in floats.items() if name not in in_memory)
    mapped_bytes = of_floats + (0 if check is None else sum(each.num_bytes for each in packed))
    return ModelWeights({name: matrices[name] for name in names}, mapped_bytes, check)


@dataclass(frozen=True, slots=True)
class StoredPack:
    """Packed weights on disk."""

    folder: Path
    source: Path
    """Path of the artifact that they were packed from."""
    num_bytes: int


def stored_packs(cache_dir: Path) -> list[StoredPack]:
    """Packed weights of a cache folder, by source. Incomplete entries are left out."""
    found = []
    for table in (cache_dir / FOLDER).glob(f"*/{TABLE}"):
        with suppress(OSError, ValueError, KeyError):
            source = Path(json.loads(table.read_text())["source"])
            found.append(StoredPack(table.parent, source, table.with_name(DATA).stat().st_size))
    return sorted(found, key=lambda kept: (kept.source, kept.folder))


def remove_orphans(cache_dir: Path, folder: Path) -> int:
    """Remove packed weights whose artifact was in a folder and no longer exists. Returns the number of bytes that were
    freed."""
    orphans = [
        each for each in stored_packs(cache_dir) if each.source.is_relative_to(folder) and not each.source.exists()
    ]
    for orphan in orphans:
        shutil.rmtree(orphan.folder, ignore_errors=True)
    return sum(orphan.num_bytes for orphan in orphans)


def loaded_form(artifact: Artifact, quantize: str | None) -> tuple[dict[str, int], int | None]:
    """Describe a model's matrices as a load would store them: their number by encoding, and their bytes; None: no
    library."""
    library, num_bytes = native_library(), 0
    found: Counter[str] = Counter()
    for name in _matrix_names(artifact):
        tensor = artifact.weights[name]
        encoding = packed_encoding(name, tensor, quantize)
        found[(encoding or tensor.encoding).value] += 1
        if encoding is None:
            num_bytes += tensor.data.nbytes
        elif isinstance(library, NativeLibrary):
            num_bytes += packed_bytes(library, _as_blocks(tensor, encoding))
    return dict(sorted(found.items())), num_bytes if isinstance(library, NativeLibrary) else None


def _as_blocks(tensor: Tensor, encoding: Encoding) -> Tensor:
    """Description of a matrix in a packed encoding, with whole groups of columns."""
    features, columns = tensor.shape
    return Tensor(tensor.name, encoding, (features, -(-columns // GROUP_SIZE) * GROUP_SIZE), tensor.data)


def _matrix_names(artifact: Artifact) -> list[str]:
    """Canonical names of the matrices of the forward pass, without kernels of convolutions. A tied head is listed
    once."""
    expected = expected_tensors(artifact.config)
    return [name for name, shape in expected.items() if len(shape) == 2 and not name.endswith(KERNELS)]


def packed_encoding(name: str, tensor: Tensor, quantize: str | None) -> Encoding | None:
    """The encoding in which a matrix is packed; None: it stays in floats as it is stored."""
    if tensor.encoding not in FLOAT_TYPES:
        return tensor.encoding
    if quantize is None or name in (POSITIONS, PER_LAYER_EMBEDDING) or name.startswith(HEAD):
        return None  # read in place, or small and they decide much
    is_table = name in (EMBEDDING, LM_HEAD)
    return Encoding.Q8_0 if quantize == "int8" or is_table or tensor.shape[1] % GROUP_SIZE else Encoding.Q4_0


def _planned(
    library: NativeLibrary, artifact: Artifact, tensors: Mapping[str, Tensor], quantize: str | None, report: Report
) -> tuple[dict[str, Matrix], list[PackedMatrix]]:
    """Float matrices as they are stored, with adapters merged into them, and the matrices to be packed, in the order of
    the file."""
    floats, packed = {}, []
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        features, columns = tensor.shape
        check_tensor(tensor, (features, columns))
        encoding = packed_encoding(name, tensor, quantize)
        if name == PER_LAYER_EMBEDDING:  # as large as all others together: its rows are read when they are needed
            is_stored = tensor.encoding not in FLOAT_TYPES
            floats[name] = Matrix(tensor.encoding, features, columns, _bytes_of(tensor), is_stored)
        elif encoding is None:
            _check_finite_floats(tensor)
            floats[name] = Matrix(tensor.encoding, features, columns, _bytes_of(loaded_tensor(library, artifact, name)))
            if artifact.adapters:
                report("merge", number / len(tensors))
        else:
            num_bytes = packed_bytes(library, _as_blocks(tensor, encoding))
            packed.append(PackedMatrix(name, encoding, features, columns, num_bytes))
    return floats, packed


def _bytes_of(tensor: Tensor) -> Bytes:
    return np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1)


class _Packing:
    """Packs matrices one after the other, into a file or into memory."""

    def __init__(
        self, artifact: Artifact, library: NativeLibrary, packed: Sequence[PackedMatrix], quantize: str | None,
        report: Report,
    ) -> None:  # fmt: skip
        self._artifact = artifact
        self._library = library
        self._packed = packed
        self._quantize = quantize
        self._report = report
        self.num_bytes = sum(_aligned(each.num_bytes) for each in packed)

    def panels(self) -> Iterator[Bytes]:
        """Yield the panels of each matrix, padded to the alignment. They are valid until the next one is requested."""
        memory = np.zeros(max((_aligned(each.num_bytes) for each in self._packed), default=0), np.uint8)
        num_done = 0
        for each in self._packed:
            size = _aligned(each.num_bytes)
            memory[each.num_bytes : size] = 0
            self._pack(each, memory)
            num_done += size
            self._report("pack", num_done / self.num_bytes)
            yield memory[:size]

    def into(self, memory: Bytes) -> None:
        """Pack all matrices into memory."""
        begin = 0
        for panels in self.panels():
            memory[begin : begin + len(panels)] = panels
            begin += len(panels)

    def _pack(self, each: PackedMatrix, memory: Bytes) -> None:
        tensor = loaded_tensor(self._library, self._artifact, each.name)
        if tensor.encoding not in FLOAT_TYPES:
            _check_finite_scales(tensor)
            blocks = tensor
        elif each.encoding is Encoding.Q4_0:
            codes, scales = int4_groups(tensor)
            check_finite(tensor, bool(np.isfinite(scales).all()))
            blocks = int4_blocks(each.name, codes, scales[..., 0])
        else:
            numbers, scales = int8_channels(tensor)
            check_finite(tensor, bool(np.isfinite(scales).all()))
            blocks = int8_blocks(each.name, numbers, scales)
        pack(self._library, blocks, memory[: each.num_bytes])


def _panels(
    packing: _Packing, artifact: Artifact, quantize: str | None, cache_dir: Path | None, max_cache_bytes: int
) -> tuple[Bytes, FileCheck | None]:
    """All panels one after the other, mapped from a file or in memory."""
    if cache_dir is not None and packing.num_bytes:
        cache = BuildCache(cache_dir / FOLDER, max_cache_bytes, FILES)
        key = {"artifact": artifact.fingerprint, "layout": LAYOUT_VERSION, "quantize": quantize or "none"}
        try:
            table = cache.find(key) or cache.store(key, lambda path: _write(path, packing, artifact))
            return _mapped(table)
        except (OSError, ValueError) as error:
            # With a full or read-only disk, the model still loads; it takes memory, and the next load takes longer.
            reason = " ".join(str(error).split())
            log.warning("%s: packed weights are kept in memory instead of a file: %s", artifact.name, reason)
    memory = huge_memory(packing.num_bytes)
    packing.into(memory)
    return memory, None


def _write(path: Path, packing: _Packing, artifact: Artifact) -> None:
    """Write the panels, and a table with a checksum of each part."""
    checksums: list[int] = []
    rest = bytearray()
    with path.with_name(DATA).open("wb") as file:
        for panels in packing.panels():
            file.write(panels.data)
            rest += panels.data
            whole = len(rest) // CHECKED_BYTES * CHECKED_BYTES
            checksums += [zlib.crc32(rest[at : at + CHECKED_BYTES]) for at in range(0, whole, CHECKED_BYTES)]
            del rest[:whole]
    if rest:
        checksums.append(zlib.crc32(rest))
    table = {
        "source": str(artifact.path.absolute()),
        "bytes": packing.num_bytes,
        "part": CHECKED_BYTES,
        "crc32": checksums,
    }
    path.write_text(json.dumps(table))


def _mapped(table: Path) -> tuple[Bytes, FileCheck]:
    """Map a file's panels read-only and start their check.

    Raises:
        OSError, ValueError: the file is missing, or does not match its table.
    """
    facts = json.loads(table.read_text())
    path = table.with_name(DATA)
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        written = os.fstat(file.fileno())
    if len(memory) != facts["bytes"]:
        raise ValueError(f"{path} has {len(memory)} bytes; {facts['bytes']} were written")
    with suppress(OSError, AttributeError):  # not available on every system
        memory.madvise(mmap.MADV_HUGEPAGE)
    panels = np.frombuffer(memory, np.uint8)
    return panels, FileCheck(path, written, panels, facts["part"], facts["crc32"])


class FileCheck:
    """Compares a mapped file with its checksums in a separate thread.

    A damaged file is removed with its folder, so that the next load packs it again.

    Args:
        written: status of the mapped file. If another file has replaced it meanwhile, that file stays.
    """

    def __init__(self, path: Path, written: os.stat_result, panels: Bytes, part: int, checksums: Sequence[int]) -> None:
        self.fault: str | None = None
        self._path = path
        self._panels = panels
        self._part = part
        self._checksums = checksums
        self._written = written
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="check of packed weights", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for index, expected in enumerate(self._checksums):
            if self._stopped.is_set():
                return
            begin = index * self._part
            if zlib.crc32(self._panels[begin : begin + self._part].data) != expected:
                self.fault = (
                    f"the packed weights are damaged at byte {begin} of {self._path}; the file was removed, and the "
                    "next load packs them again"
                )
                self._remove()
                return

    def _remove(self) -> None:
        with suppress(OSError):
            if os.path.samestat(self._path.stat(), self._written):
                shutil.rmtree(self._path.parent)

    def join(self) -> None:
        """Wait for the end of the check."""
        self._thread.join()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def huge_memory(size: int) -> Bytes:
    """Zeroed memory that begins at a huge page, and uses huge pages if the system has them."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    begin = -whole.ctypes.data % _HUGE_PAGE
    return whole[begin : begin + size]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _check_finite_scales(tensor: Tensor) -> None:
    """Check the scales and offsets, since codes are always finite."""
    blocks = tensor.data.view(np.uint8).reshape(-1, BLOCKS[tensor.encoding][1])
    for at in _SCALES_AT[tensor.encoding]:
        halves = np.ascontiguousarray(blocks[:, at : at + 2]).view("<u2")
        check_finite(tensor, not ((halves & _HALF_INFINITY) == _HALF_INFINITY).any())


def _check_finite_floats(tensor: Tensor) -> None:
    exponent = {Encoding.F32: 0x7F800000, Encoding.F16: _HALF_INFINITY, Encoding.BF16: 0x7F80}[tensor.encoding]
    bits = tensor.data.view("<u4" if tensor.encoding is Encoding.F32 else "<u2")
    for rows in np.array_split(bits, max(1, bits.size >> 24)):
        check_finite(tensor, not ((rows & exponent) == exponent).any())

"""A checkpoint that is open for reading: its manifest and the headers of its files were read and agree."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from zero_infinity.checkpoint import manifest as manifests
from zero_infinity.checkpoint.manifest import MODEL, FileEntry
from zero_infinity.checkpoint.model_contents import Key
from zero_infinity.checkpoint.piece_io import OpenFile
from zero_infinity.checkpoint.stored_tensor import StoredTensor
from zero_infinity.checkpoint.tensor_file import read_header
from zero_infinity.errors import CheckpointError
from zero_infinity.storage.checksum import crc32


class OpenCheckpoint:
    """Files stay open until `stack` is closed."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.manifest = manifests.read(folder)
        self.tensors: dict[Key, StoredTensor] = {}
        for name, file in self.manifest.files.items():
            if name.endswith(".safetensors"):
                self._open(name, file, stack)
        for section, tensors in self.manifest.tensors.items():
            for name, tensor in tensors.items():
                if (section, name) not in self.tensors:
                    raise CheckpointError(f"{folder / tensor.file} has no tensor {name!r}, which the manifest has")

    def _open(self, name: str, file: FileEntry, stack: ExitStack) -> None:
        path = self.folder / name
        beginning, entries = read_header(path)
        if crc32(beginning) != file.crc32 or path.stat().st_size != file.num_bytes:
            raise CheckpointError(f"{path} is damaged: its header, or its size, is not the one in the manifest")
        section = name.partition("-")[0]
        opened = stack.enter_context(OpenFile(path))
        for tensor, place in entries.items():
            known = self.manifest.tensors[section].get(tensor)
            if known is None or (known.file, known.dtype, known.shape) != (name, place.dtype, place.shape):
                raise CheckpointError(f"{path} is damaged: its tensor {tensor!r} is not the one in the manifest")
            self.tensors[section, tensor] = StoredTensor(
                tensor, opened, place.start, known.dtype, known.shape, known.crc32, known.order
            )

    def saved_name(self, name: str) -> str | None:
        """The first name of what was saved under `name`; None when nothing was."""
        first = self.manifest.tied.get(name, name)
        return first if (MODEL, first) in self.tensors else None

    def names_of(self, saved: str) -> list[str]:
        """Every name of what was first saved under `saved`."""
        return [saved, *(name for name, first in self.manifest.tied.items() if first == saved)]

"""Published data files: their addresses, their checksums, how to download one, and how to read a table."""

from __future__ import annotations

import csv
import hashlib
import http.client
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fedxl.errors import UserError, require, require_known
from fedxl.files import whole_file
from fedxl.progress import progress

CHUNK = 2**20
CIFAR = "https://www.cs.toronto.edu/~kriz"


@dataclass(frozen=True)
class Published:
    url: str
    md5: str

    @property
    def file(self) -> str:
        """The file's name on disk.

        >>> Published("https://example.org/sets/some.npz?download=1", "").file
        'some.npz'
        """
        return self.url.partition("?")[0].rpartition("/")[2]


# From MedMNIST 3.0 (medmnist/info.py): every 2D set at 28 pixels, and the paper's set at all sizes.
MEDMNIST = {
    "pathmnist": "a8b06965200029087d5bd730944a56c1",
    "chestmnist": "02c8a6516a18b556561a56cbdd36c4a8",
    "chestmnist_64": "9de6cd0b934ebb5b7426cfba5efbae16",
    "chestmnist_128": "db107e5590b27930b62dbaf558aebee3",
    "chestmnist_224": "45bd33e6f06c3e8cdb481c74a89152aa",
    "dermamnist": "0744692d530f8e62ec473284d019b0c7",
    "octmnist": "c68d92d5b585d8d81f7112f81e2d0842",
    "pneumoniamnist": "28209eda62fecd6e6a2d98b1501bb15f",
    "retinamnist": "bd4c0672f1bba3e3a89f0e4e876791e4",
    "breastmnist": "750601b1f35ba3300ea97c75c52ff8f6",
    "bloodmnist": "7053d0359d879ad8a5505303e11de1dc",
    "tissuemnist": "ebe78ee8b05294063de985d821c1c34b",
    "organamnist": "68e3f8846a6bd62f0c9bf841c0d9eacc",
    "organcmnist": "b9ceb9546e10131b32923c5bbeaea2b1",
    "organsmnist": "9ab87b696fb54e2a387ebe992d6ed5f1",
}

FILES: Mapping[str, Published] = {
    "cifar10": Published(f"{CIFAR}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
    "cifar100": Published(f"{CIFAR}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
    **{
        name: Published(f"https://zenodo.org/records/10519652/files/{name}.npz?download=1", md5)
        for name, md5 in MEDMNIST.items()
    },
}

# Sets that a program cannot download, because users must agree to their terms.
ON_REQUEST: Mapping[str, str] = {"chexpert": "https://stanfordmlgroup.github.io/competitions/chexpert/"}


def how_to_get(name: str, root: Path) -> str:
    """How a user can get a missing file."""
    if name in ON_REQUEST:
        return f"ask for it at {ON_REQUEST[name]} and unpack it in {root}"
    url = FILES[name].url
    return f"fetch {url} and put it into {root}, or run: fedxl data fetch {name} --root {root}"


def fetch(name: str, root: Path, files: Mapping[str, Published] | None = None) -> Path:
    """Download a file into `root`. It gets its final name only after its checksum was verified."""
    files = FILES if files is None else files
    if name in ON_REQUEST:
        raise UserError(f"{name} cannot be fetched by a program; {how_to_get(name, root)}")
    require(name != "medmnist", f"name one of MedMNIST's sets: {', '.join(MEDMNIST)}")
    require_known("file to fetch", name, [*files, *ON_REQUEST])
    wanted, target = files[name], root / files[name].file
    if target.exists():
        right = target.is_file() and md5_of(target) == wanted.md5
        require(right, f"{target} exists, but it is not the published file; remove it to fetch it again")
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with whole_file(target, shared=True) as file:
            md5 = _download(wanted.url, file)
            require(md5 == wanted.md5, f"what {wanted.url} sent has the md5 {md5}, not the published {wanted.md5}")
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(f"cannot fetch {wanted.url} into {root}: {reason}") from None
    return target


def rows_of(lines: Iterable[str], where: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a CSV file that has these columns among others. No value is None."""
    try:
        reader = csv.DictReader(lines, strict=True)
        rows = list(reader)
    except csv.Error as error:
        raise UserError(f"cannot read {where}: {error}") from None
    names = reader.fieldnames or ()
    missing = [name for name in columns if name not in names]
    require(not missing, f"{where} lacks the column(s) {', '.join(missing)}")
    require(len(rows) > 0, f"{where} has no rows")
    whole = all(None not in row and None not in row.values() for row in rows)
    require(whole, f"{where}: every row must have {len(names)} values")
    return rows


def md5_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _md5).hexdigest()


def _download(url: str, file: BinaryIO) -> str:
    """Write what the address sends. Returns its md5."""
    request = urllib.request.Request(url, headers={"User-Agent": "fedxl"})
    digest = _md5()
    with urllib.request.urlopen(request, timeout=60) as answer:
        length = answer.headers.get("Content-Length")
        with progress(url.rpartition("/")[2], int(length) if length else None, bytes=True) as advance:
            while chunk := answer.read(CHUNK):
                digest.update(chunk)
                file.write(chunk)
                advance(len(chunk))
    return digest.hexdigest()


def _md5() -> hashlib._Hash:
    return hashlib.md5(usedforsecurity=False)  # against damaged downloads only: the owners publish md5 sums

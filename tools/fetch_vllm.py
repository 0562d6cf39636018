"""Fetch vLLM's CUDA wheel and unpack its Python files beside the environment: VERSION FOLDER.

The scheduler side of the plugin is tested against that version too, on machines without a GPU. Only Python
and metadata are kept (60 MB of 1.2 GB); the wheel's libraries need CUDA and are not unpacked.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

KEPT = (".py", ".json", "METADATA", "entry_points.txt", "RECORD", "WHEEL")


def main(version: str, folder: str) -> None:
    """Download `vllm==version` and unpack it under `folder`; the folder appears only when it is complete."""
    target = Path(folder)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
        subprocess.run([*command, "-d", temporary, f"vllm=={version}"], check=True, stderr=subprocess.DEVNULL)
        (wheel,) = Path(temporary).glob("vllm-*.whl")
        tree = Path(temporary) / "tree"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tree, [name for name in archive.namelist() if name.endswith(KEPT)])
        tree.rename(target)


if __name__ == "__main__":
    main(*sys.argv[1:])

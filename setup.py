"""Builds the two libraries of ops. Everything else about the package is in pyproject.toml.

_C_cpu    always, as part of any install; defines the ops and their CPU implementations.
_C_cuda   by `python setup.py build_cuda [--arch 90,100] [--jobs 4]`, into the package directory, from where
          a later `pip wheel .` or editable install takes it. Explicit, so that an install on a machine
          without a GPU is quick. Building a wheel runs it too where nvcc is found, unless HISPARSE_CUDA=0;
          HISPARSE_CUDA=1 makes a missing nvcc an error.

Both use torch's stable ABI only, with a floor of torch 2.11, and have no Python in them: one file serves
every Python and every torch from the floor on. torch is found, not imported: its headers and libtorch_cpu are
all that is needed.
"""

import importlib.util
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "vllm_hisparse"
CUDA_LIBRARY = "_C_cuda.abi3.so"
TORCH_FLOOR = "0x020b000000000000"  # 2.11
CUDA_ARCHES = ("90", "100", "120")  # the last one also as PTX, for what comes after
CPU_SOURCES = ("bindings.cpp", "resolve_cpu.cpp", "pages_cpu.cpp")


def torch_directory() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "got no torch; need torch >= 2.11 because the ops are built against its stable headers"
        )
    return Path(spec.origin).parent


def nvcc_path() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


class BuildLibrary(build_ext):
    """Builds `_C_cpu`: a plain shared library under a name without a Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".abi3.so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return list(ext.export_symbols)  # no PyInit_: the library is opened by torch, not imported


class BuildCuda(Command):
    """Compiles csrc/*.cu and bindings_cuda.cpp with nvcc and links `_C_cuda` into the package directory."""

    boolean_options: ClassVar = ["lineinfo"]
    description = "build the CUDA library into the package directory"
    user_options: ClassVar = [
        ("arch=", None, f"comma-separated compute capabilities, default {','.join(CUDA_ARCHES)}"),
        ("jobs=", None, "files compiled at a time, default 4"),
        ("lineinfo", None, "keep source lines for profilers; triples the library"),
    ]

    def initialize_options(self) -> None:
        self.arch: str | None = None
        self.jobs: str | None = None
        self.lineinfo = False

    def finalize_options(self) -> None:
        self.arches = tuple((self.arch or ",".join(CUDA_ARCHES)).split(","))
        self.num_jobs = int(self.jobs or 4)

    def run(self) -> None:
        nvcc = nvcc_path()
        if nvcc is None:
            raise RuntimeError(
                "got no nvcc; need it in PATH or under CUDA_HOME because _C_cuda is compiled with it"
            )
        objects_directory = ROOT / "build" / "cuda"
        objects_directory.mkdir(parents=True, exist_ok=True)
        sources = [CSRC / "bindings_cuda.cpp", *sorted(CSRC.glob("*.cu"))]
        objects = [objects_directory / f"{source.name}.o" for source in sources]
        commands = [
            [nvcc, *self.compile_flags(), "-c", str(source), "-o", str(output)]
            for source, output in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(self.num_jobs) as pool:
            list(pool.map(self.call, commands))
        libraries = [f"-L{torch_directory() / 'lib'}", f"-L{self.make_stub(objects_directory)}"]
        libraries += ["-Xlinker=--no-as-needed", "-ltorch_cpu", "-ltorch_cuda", "-Xlinker=-s"]
        link = [nvcc, "-shared", *self.arch_flags(), *map(str, objects), *libraries]
        self.call([*link, "-o", str(PACKAGE / CUDA_LIBRARY)])

    def make_stub(self, directory: Path) -> Path:
        """An empty libtorch_cuda.so to link against: torch here may be a CPU build, which has none.

        The library takes the CUDA stream from libtorch_cuda. Unless it names that library as needed, the
        loader does not look there, though torch has loaded it.
        """
        stub = directory / "stub"
        stub.mkdir(exist_ok=True)
        output = stub / "libtorch_cuda.so"
        compiler = os.environ.get("CC", "cc")
        self.call(
            [compiler, "-shared", "-Wl,-soname,libtorch_cuda.so", "-o", str(output), "-x", "c", os.devnull]
        )
        return stub

    def arch_flags(self) -> list[str]:
        flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in self.arches]
        last = self.arches[-1].rstrip("af")
        return [*flags, f"-gencode=arch=compute_{last},code=compute_{last}"]

    def compile_flags(self) -> list[str]:
        return [
            "-std=c++17",
            "-O3",
            "-Xfatbin=-compress-all",
            *(["-lineinfo"] if self.lineinfo else []),
            "-DUSE_CUDA",  # makes the stable headers declare the CUDA entry points
            f"-DTORCH_TARGET_VERSION={TORCH_FLOOR}",
            f"-I{CSRC / 'include'}",
            f"-isystem={torch_directory() / 'include'}",
            "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra",
            *self.arch_flags(),
        ]

    def call(self, command: list[str]) -> None:
        self.announce(" ".join(command), level=2)
        subprocess.run(command, check=True)


class BuildWheel(bdist_wheel):
    """A wheel for any Python from 3.10 on, with the CUDA library where it can be built."""

    def run(self) -> None:
        wish = os.environ.get("HISPARSE_CUDA")
        if wish == "0":  # not even one that was built before
            self.distribution.package_data[PACKAGE.name].remove(CUDA_LIBRARY)
        elif wish == "1" or nvcc_path() is not None:
            self.run_command("build_cuda")
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


def cpu_library() -> Extension:
    torch = torch_directory()
    return Extension(
        "vllm_hisparse._C_cpu",
        sources=[f"csrc/{name}" for name in CPU_SOURCES],
        depends=[str(path.relative_to(ROOT)) for path in sorted((CSRC / "include").rglob("*.h"))],
        include_dirs=["csrc/include"],
        library_dirs=[str(torch / "lib")],
        libraries=["torch_cpu"],
        define_macros=[("TORCH_TARGET_VERSION", TORCH_FLOOR)],
        extra_compile_args=[
            "-std=c++17",
            "-O3",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            f"-isystem{torch / 'include'}",
        ],
        extra_link_args=["-Wl,--no-undefined", "-s"],
        language="c++",
        py_limited_api=True,
    )


setup(
    ext_modules=[cpu_library()],
    cmdclass={"build_ext": BuildLibrary, "build_cuda": BuildCuda, "bdist_wheel": BuildWheel},
)

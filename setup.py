"""Setuptools commands of flashbwd. build_tools/ defines what they compile.

python setup.py build_ext --inplace     builds the libraries into flashbwd/
python setup.py build_test_modules      builds the modules that only the tests load into tests/_built/
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from build_tools.native import NativeBuild  # noqa: E402
from build_tools.toolchain import BuildError  # noqa: E402


class BuildLibraries(build_ext):
    """Builds the libraries with ninja. The Extension objects only tell setuptools that extensions exist."""

    extensions: list[Extension]

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # no Python version: the library is not a Python module

    def run(self) -> None:
        in_place = self.inplace
        super().run()
        if in_place and "flashbwd._C_cuda" not in [extension.name for extension in self.extensions]:
            (ROOT / "flashbwd/_C_cuda.so").unlink(missing_ok=True)

    def build_extensions(self) -> None:
        try:
            build = NativeBuild()
            libraries = build.libraries()
            build.build(libraries, "flashbwd")
        except BuildError as error:
            raise SystemExit(f"flashbwd: {error}") from None
        report = build.write_report(libraries)
        print(f"flashbwd: registers, spills and CPU seconds of each unit are in {report.relative_to(ROOT)}")
        built = {f"flashbwd.{library.output.stem}": ROOT / library.output for library in libraries}
        for extension in self.extensions:
            target = Path(self.get_ext_fullpath(extension.name))
            target.unlink(missing_ok=True)  # an earlier build may have made a library that this build does not make
            if extension.name in built:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(built[extension.name], target)
        self.extensions = [extension for extension in self.extensions if extension.name in built]


class BuildPython(build_py):
    """Adds the headers of the kernels, which NVRTC needs at run time. A source tree has them already."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            headers = (path for pattern in ("*.h", "*.cuh") for path in (ROOT / "csrc").rglob(pattern))
            for path in headers:
                target = Path(self.build_lib, "flashbwd", path.relative_to(ROOT))
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)


class BuildTestModules(Command):
    """Builds tests/csrc into tests/_built."""

    description = "build the modules that only the tests load"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        (ROOT / "tests" / "_built").mkdir(parents=True, exist_ok=True)
        try:
            build = NativeBuild()
            build.build(build.test_modules(), "tests")
        except BuildError as error:
            raise SystemExit(f"flashbwd: {error}") from None


class AnyPythonWheel(bdist_wheel):
    """Tags a wheel for every Python, because the libraries do not use Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension(f"flashbwd.{name}", []) for name in ("_C", "_C_cuda")],
    cmdclass={
        "bdist_wheel": AnyPythonWheel,
        "build_ext": BuildLibraries,
        "build_py": BuildPython,
        "build_test_modules": BuildTestModules,
    },
)

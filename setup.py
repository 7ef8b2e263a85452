"""Builds the CPU kernels with the package, if there is a C++ compiler; everything else is in pyproject.toml."""

import importlib.util
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/snapstream/kernels/cpu")


def kernels():
    """The module that compiles them, without the package around it, which needs torch."""
    spec = importlib.util.spec_from_file_location("snapstream_kernels_build", FOLDER.resolve() / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_ext):
    """Puts the libraries beside their sources: into the tree of an editable installation, else into the wheel."""

    def run(self):
        self.built = []
        build = kernels()
        if build.compiler() is None:
            print("No C++ compiler found: the CPU kernels are not built.", file=sys.stderr)
            return
        target = FOLDER if self.inplace else Path(self.build_lib) / FOLDER.relative_to("src")
        target.mkdir(parents=True, exist_ok=True)
        for level in build.LEVELS:
            ready = FOLDER / build.library_name(level)
            if not self.inplace and ready.exists():
                shutil.copy2(ready, target)
        print(
            "Building the CPU kernels, about ten seconds for each level of instructions.", file=sys.stderr, flush=True
        )
        self.built, failed = build.build_all(target.resolve())
        for level, error in failed:
            print(f"The CPU kernels for {level.name} could not be built: {error}", file=sys.stderr)

    def get_outputs(self):
        return [str(path) for path in getattr(self, "built", [])]

    def get_output_mapping(self):
        return {}

    def get_source_files(self):
        return []


class Wheel(bdist_wheel):
    """One wheel for all versions of Python: the libraries use nothing of it."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("snapstream.kernels.cpu.libsnapstream", sources=[])],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)

"""PEP 517 backend: setuptools with build requirements that depend on the build.

A build without kernels needs no CUDA compiler, a machine with a usable CUDA toolkit needs no second one, and an
environment with a torch needs no second torch. So pyproject.toml cannot contain the list.
"""

from __future__ import annotations

from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from build_tools.requirements import build_requirements, torch_of_target


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + build_requirements(torch_of_target())


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + build_requirements(torch_of_target())

"""Ships the source folders with all their sub-packages, under the names they are imported by."""

from setuptools import find_packages, setup

FOLDERS = {"replayssm": "core", "replayssm.integrations": "integrations", "replayssm.bench": "bench"}

setup(
    package_dir=FOLDERS,
    packages=[
        package
        for name, folder in FOLDERS.items()
        for package in (name, *(f"{name}.{child}" for child in find_packages(folder)))
    ],
)

"""Print constraints.txt: the exact versions installed here, for the same installation elsewhere.

A release that needs a newer Python than the oldest supported one gets a marker; for older Pythons,
pip chooses the version.
"""

from importlib.metadata import Distribution, distributions

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

OLDEST = "3.10"
NOT_OURS = {"tfdist", "pip", "setuptools", "wheel"}
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")


def pin(name: str, distribution: Distribution) -> str:
    # tensorflowonspark quotes the version.
    needed = SpecifierSet((distribution.metadata["Requires-Python"] or "").replace('"', ""))
    line = f"{name}=={distribution.version}"
    if needed.contains(f"{OLDEST}.99"):
        return line
    first = next(version for version in SUPPORTED if needed.contains(f"{version}.99"))
    return f"{line} ; python_version >= '{first}'"


installed = {canonicalize_name(d.metadata["Name"]): d for d in distributions()}
# The same release under its other name: the CUDA build, and every platform but Linux.
installed.setdefault("tensorflow", installed["tensorflow-cpu"])
print("# Written by `make constraints`.")
for name in sorted(installed.keys() - NOT_OURS):
    print(pin(name, installed[name]))

"""How a C++ compiler is installed on this system."""

import os
import shutil
import sys
from collections.abc import Mapping
from types import MappingProxyType

# The commands by the program of the package manager. The first program that exists is used.
_LINUX: Mapping[str, str] = MappingProxyType(
    {
        "apt-get": "apt-get install g++",
        "dnf": "dnf install gcc-c++",
        "yum": "yum install gcc-c++",
        "zypper": "zypper install gcc-c++",
        "pacman": "pacman -S gcc",
        "apk": "apk add g++",
    }
)
_MACOS = "xcode-select --install"


def install_command() -> str | None:
    """Return the command that installs a C++ compiler here; None if the package manager is not a known one."""
    if sys.platform == "darwin":
        return _MACOS
    program = next(filter(shutil.which, _LINUX), None)
    if program is None:
        return None
    needs_sudo = os.geteuid() != 0 and shutil.which("sudo") is not None
    return f"{'sudo ' if needs_sudo else ''}{_LINUX[program]}"

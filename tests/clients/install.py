"""python -m tests.clients.install: the programs that the tests of clients run, each in a virtual environment under .clients/.

They stay out of the tests' own environment: two majors of one library can't share one, and what clients need is not what we need.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".clients"
CLIENTS = {
    "openai2": ("openai==2.54.0",),
    "openai3": ("openai==3.54.0",),
    "anthropic": ("anthropic==2.14.0",),
    "lm_eval": ("lm-eval[api]==0.4.13",),
    "schemathesis": ("schemathesis==4.32.5",),
}
"""Names of environments, and what is installed into each."""
UNWANTED = ("torch", "jax")
"""A client that pulls one of these in would cost gigabytes, or could import what it shall only talk to."""
FONTS = ("fonts-liberation", "fonts-dejavu-core", "fonts-inter", "fonts-jetbrains-mono")
"""Without any, chromium shows no text; the last two are those that the page prefers."""
CHROMIUM = ("apt-get", "install", "--yes", "--no-install-recommends", "chromium", *FONTS)


def main() -> int:
    """Installs what is missing. The exit status is 1 if something could not be had."""
    parser = argparse.ArgumentParser("python -m tests.clients.install", description=__doc__)
    parser.add_argument("--system", action="store_true", help="install chromium too, with apt-get: on Debian, as root")
    arguments = parser.parse_args()
    for name, requirements in CLIENTS.items():
        install(name, requirements)
    return 0 if find_chromium(arguments.system) else 1


def program(name: str, command: str) -> Path:
    """Where a command of an environment is, such as its python."""
    return FOLDER / name / "bin" / command


def is_installed(name: str) -> bool:
    """True if the environment holds what CLIENTS says now."""
    note = _note(name)
    return note.exists() and note.read_text().split() == [*CLIENTS[name]]


def install(name: str, requirements: tuple[str, ...]) -> None:
    """Makes the environment, unless it is there. Raises CalledProcessError if pip fails, ValueError for unwanted packages."""
    if is_installed(name):
        print(f"{name}: {', '.join(requirements)} is there", flush=True)
        return
    print(f"{name}: installing {', '.join(requirements)} into {FOLDER.name}/{name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER / name], check=True)
    python = program(name, "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements], check=True)
    listed = subprocess.run([python, "-m", "pip", "list", "--format=freeze"], check=True, capture_output=True, text=True).stdout
    if found := {line.partition("==")[0] for line in listed.splitlines()} & set(UNWANTED):
        raise ValueError(f"{requirements} brought {', '.join(found)} along: leave out the extra that needs it")
    _note(name).write_text("\n".join(requirements))


def find_chromium(may_install: bool) -> bool:
    """Tells how to get the browser, or gets it."""
    if shutil.which("chromium"):
        print("chromium is there")
        return True
    if not may_install:
        print(f"chromium is missing; Debian has it: {' '.join(CHROMIUM)}")
        return True
    for command in (("apt-get", "update"), CHROMIUM):
        print(f"running {' '.join(command)}", flush=True)
        subprocess.run([*command, "--quiet"], check=True, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
    return shutil.which("chromium") is not None


def _note(name: str) -> Path:
    """Written when all of an environment is there."""
    return FOLDER / name / "installed.txt"


if __name__ == "__main__":
    sys.exit(main())

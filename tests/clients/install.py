"""python -m tests.clients.install: the programs that the tests of clients run, each in a virtual environment under .clients/.

They stay out of the tests' own environment: two majors of one library can't share one, and what clients need is not what we need.
"""

import argparse
import json
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
    "agents": ("openai-agents==0.24.0", "langchain==1.5.2", "langchain-openai==1.7.4", "pydantic-ai-slim[openai]==2.68.0"),
    "frameworks": ("instructor==1.17.0", "litellm==1.110.2", "llama-index-llms-openai-like==0.8.1"),
}
"""Names of environments, and what is installed into each. The last two differ in the major of openai that they need."""
LOCKED = Path(__file__).with_name("locked")
"""The versions of all that an environment gets, where pip would look for them for an hour: `uv pip compile` finds them."""
NODE_CLIENTS = {"ai_sdk": ("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7")}
"""The same of npm's packages. Their tests are skipped wherever node or its registry is missing."""
NPM_SECONDS = 240
"""A registry that does not answer."""
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
    for name, packages in NODE_CLIENTS.items():
        install_of_npm(name, packages)
    return 0 if find_chromium(arguments.system) else 1


def program(name: str, command: str) -> Path:
    """Where a command of an environment is, such as its python."""
    return FOLDER / name / "bin" / command


def is_installed(name: str) -> bool:
    """True if the environment holds what CLIENTS or NODE_CLIENTS says now."""
    note = _note(name)
    return note.exists() and note.read_text().split() == [*(CLIENTS | NODE_CLIENTS)[name]]


def install(name: str, requirements: tuple[str, ...]) -> None:
    """Makes the environment, unless it is there. Raises CalledProcessError if pip fails, ValueError for unwanted packages."""
    if is_installed(name):
        print(f"{name}: {', '.join(requirements)} is there", flush=True)
        return
    print(f"{name}: installing {', '.join(requirements)} into {FOLDER.name}/{name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER / name], check=True)
    python = program(name, "python")
    locked = LOCKED / f"{name}.txt"
    only = ("--constraint", locked) if locked.exists() else ()
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *only, *requirements], check=True)
    listed = subprocess.run([python, "-m", "pip", "list", "--format=freeze"], check=True, capture_output=True, text=True).stdout
    if found := {line.partition("==")[0] for line in listed.splitlines()} & set(UNWANTED):
        raise ValueError(f"{requirements} brought {', '.join(found)} along: leave out the extra that needs it")
    _note(name).write_text("\n".join(requirements))


def install_of_npm(name: str, packages: tuple[str, ...]) -> None:
    """The same with npm. What is in the way is printed and kept for `why_missing`: not everyone has node."""
    if is_installed(name):
        print(f"{name}: {', '.join(packages)} is there", flush=True)
        return
    folder, npm = FOLDER / name, shutil.which("npm")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "package.json").write_text(json.dumps({"private": True, "type": "module"}))
    problem = "npm is not installed"
    if npm is not None and shutil.which("node"):
        print(f"{name}: installing {', '.join(packages)} into {FOLDER.name}/{name}", flush=True)
        command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--save-exact", *packages]
        try:
            ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=NPM_SECONDS, check=False)
            problem = "" if ended.returncode == 0 else f"npm install: {ended.stderr.strip()[-500:]}"
        except subprocess.TimeoutExpired:
            problem = f"npm install took more than {NPM_SECONDS} s"
    if problem:
        print(f"{name}: {problem}", flush=True)
        (folder / "missing.txt").write_text(problem)
    else:
        _note(name).write_text("\n".join(packages))


def why_missing(name: str) -> str:
    """Why npm could not install this client."""
    note = FOLDER / name / "missing.txt"
    return note.read_text() if note.exists() else "run python -m tests.clients.install"


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

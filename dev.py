"""Sets up a fresh clone with one command: creates the environment `.venv`, builds flashbwd in place, and runs it.

python3 dev.py demo [ARGS]    trains a small GPT with flashbwd's gradients and with PyTorch's: examples/train_gpt.py
python3 dev.py test [ARGS]    runs the tests with pytest ARGS; unless ARGS name files, in several workers, and without
                              a GPU only the tests that need none
python3 dev.py setup          only creates the environment and builds

If this python can import a torch >= 2.10, the environment uses it. Otherwise pip installs a torch; on a machine without
a GPU, a torch without CUDA if pip's index offers one. The script needs Python 3.10 or newer and g++. It compiles CUDA
kernels for the GPUs of this machine; FLASHBWD_CUDA=1 compiles them without a GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ENV = ROOT / ".venv"
PYTHON = ENV / "bin" / "python"
MADE = ENV / "made.txt"  # exists if the environment is complete; otherwise the next run creates it again
WORKERS = ["-n", "auto", "--maxprocesses", "16", "--dist", "worksteal"]  # options of pytest-xdist
WITHOUT_GPU = ["-m", "not gpu"]  # to skip each of 13,000 tests would take two minutes
COMMANDS = {"demo": ["examples/train_gpt.py"], "test": ["-m", "pytest"], "setup": []}


def succeeds(*arguments: str) -> bool:
    print("+ python", " ".join(arguments), flush=True)
    return subprocess.run([str(PYTHON), *arguments], cwd=ROOT, check=False).returncode == 0


def run(*arguments: str) -> None:
    if not succeeds(*arguments):
        sys.exit(f"dev.py: failed: python {' '.join(arguments)}")


def output(*arguments: str) -> str:
    return subprocess.run([str(PYTHON), *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def make_environment() -> None:
    """Create a virtual environment. It sees the packages of this Python if they include a usable torch."""
    from build_tools.toolchain import BuildError, find_torch

    venv.create(ENV, with_pip=False, symlinks=True, clear=True)
    try:
        torch = find_torch()
    except BuildError:
        pass
    else:
        print(f"using torch {torch.version} of {torch.root.parent}", flush=True)
        packages = Path(output("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        parents = [path for path in sys.path if path.endswith("-packages")]
        (packages / "packages_of_parent.pth").write_text("\n".join(parents) + "\n")
    pip = subprocess.run([str(PYTHON), "-m", "pip", "--version"], capture_output=True, check=False)
    if pip.returncode and subprocess.run([str(PYTHON), "-m", "ensurepip", "--default-pip"], check=False).returncode:
        shutil.rmtree(ENV)
        sys.exit("this python has no pip: on Debian and Ubuntu, apt install python3-venv")
    MADE.touch()


def wanted() -> tuple[list[str], str]:
    """Return the missing requirements, and a text that changes when packages must be installed again."""
    requirements = output("-m", "build_tools.requirements").split()
    return requirements, "\n".join([*requirements, (ROOT / "pyproject.toml").read_text()])


def install() -> None:
    """Build in place; install the requirements of the build, the tests and the demo if they have changed."""
    stamp = ENV / "installed.txt"
    requirements, text = wanted()
    changed = not stamp.exists() or stamp.read_text() != text
    if changed:
        if torch := [line for line in requirements if line.startswith("torch")]:
            size = "0.2 GB" if torch[-1].endswith("+cpu") else "2.7 GB with CUDA's libraries"
            print(f"installing {torch[-1]}, a download of about {size}", flush=True)
        run("-m", "pip", "install", *requirements)  # not quiet: it shows how far the download is
    run("setup.py", "-q", "build_ext", "--inplace")
    if changed:
        print("installing what the tests and the demo need", flush=True)
        editable = ("-m", "pip", "install", "--quiet", "--no-build-isolation", "-e")
        if not succeeds(*editable, ".[test]"):
            print("pip failed, perhaps without a network: continuing with the installed packages", flush=True)
            run(*editable, ".", "--no-deps")
        stamp.write_text(wanted()[1])


def main() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036
        sys.exit(f"flashbwd needs Python 3.10 or newer, this is {sys.version.split()[0]}")
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] not in COMMANDS:
        sys.exit(f"dev.py: unknown command {sys.argv[1]!r}, expected {', '.join(COMMANDS)}")
    command, arguments = sys.argv[1], sys.argv[2:]
    if not MADE.exists():
        make_environment()
    install()
    if command == "setup":
        print(f"flashbwd is built. Activate its environment with: source {ENV.name}/bin/activate")
        return
    if command == "test":
        run("setup.py", "-q", "build_test_modules")
        has_xdist = (
            output("-c", "import importlib.util as u; print(u.find_spec('xdist') is not None)").strip() == "True"
        )
        if all(argument.startswith("-") for argument in arguments):
            from build_tools.toolchain import gpus

            if not gpus():
                arguments = [*WITHOUT_GPU, *arguments]
            if has_xdist:
                arguments = [*WORKERS, *arguments]
    os.chdir(ROOT)
    os.execv(PYTHON, [str(PYTHON), *COMMANDS[command], *arguments])


if __name__ == "__main__":
    main()

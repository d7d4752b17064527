"""Runs the tests on the other releases of DeepSpeed and torch that are supported: `make
test-versions`.

`make test` runs everything on the newest ones. Here each other release gets an environment under
`target/versions`, in which that package comes before those of the environment that runs this. What
DeepSpeed needs is installed there already, so a release of it takes a minute; torch takes
gigabytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig

from fingerprints import RELEASES, ROOT

FOLDER = ROOT / "target/versions"

DEEPSPEED_TESTS = (
    "versions",
    "register",
    "training",
    "optimizer",
    "native",
    "checkpoints",
    "corpus",
    "offload",
    "offload_param",
    "options",
    "gradients",
    "access",
    "offload_access",
    "clients",
    "torch_adam",
    "fetch",
    "late",
    "nvme",
    "zenflow_engine",
    "world",
)
TORCH_TESTS = (
    "optim",
    "optim_torch",
    "optim_state_dict",
    "offload_optimizer",
    "offload_optimizer_parameters",
    "access",
    "offload_contents",
    "offload_device",
    "deepspeed_register",
    "deepspeed_offload",
    "deepspeed_offload_access",
    "deepspeed_options",
)
CELLS = {
    **{
        f"deepspeed=={release}": [f"deepspeed_{name}" for name in DEEPSPEED_TESTS]
        for release in RELEASES[:-1]
    },
    "torch==2.11.*": list(TORCH_TESTS),
}
"""What is installed -> the tests that run on it."""


def environment(requirement):
    """The Python of an environment with `requirement`; makes it, if that was not done before."""
    folder = FOLDER / requirement.replace("==", "-").rstrip(".*")
    python = folder / "bin/python"
    done = folder / ".installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        (site,) = folder.glob("lib/python3*/site-packages")
        # After what is installed here.
        (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        if requirement.startswith("deepspeed"):
            # Its needs are there, and its build looks for torch.
            command += ["--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--target", str(site), requirement], check=True)
        done.touch()
    return python


def main(arguments):
    """Runs the cells whose names begin with an argument, or all. Returns an exit code."""
    failed = []
    for requirement, names in CELLS.items():
        if arguments and not any(requirement.startswith(each) for each in arguments):
            continue
        print(f"== {requirement}", flush=True)
        tests = [str(path) for name in names for path in ROOT.glob(f"tests/**/test_{name}.py")]
        variables = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
        command = [str(environment(requirement)), "-m", "pytest", "-q", "-n", "2"]
        command += ["--dist", "loadfile", *tests]
        if subprocess.run(command, check=False, env=variables, cwd=ROOT).returncode != 0:
            failed.append(requirement)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

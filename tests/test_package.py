"""The package as its users meet it.

The wheel in a fresh environment without a compiler, and the build from source.
"""

import email.parser
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MACHINE = platform.machine()
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]
TAG = f"cp310-abi3-manylinux_2_28_{MACHINE}"
WHEEL_BYTES_MAX = 8 << 20
BUILD_TOOLS = ["c++", "cargo", "cc", "clang", "g++", "gcc", "ld", "ninja", "nvcc", "rustc"]
# Minutes, where Rust has to be compiled first; a warm run takes seconds.
BUILD_SECONDS_MAX = 900

pytestmark = [pytest.mark.package, pytest.mark.slow, pytest.mark.timeout(BUILD_SECONDS_MAX)]


def run(*command, cwd=ROOT, env=None, timeout_s=120):
    """Runs `command` and returns what it printed; a failure shows all that it said."""
    process = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, (
        f"{command} exited {process.returncode}:\n{process.stdout}\n{process.stderr}"
    )
    return process.stdout


def package_files():
    """The files of the Python package as the tree has them, relative to its root."""
    source = ROOT / "python"
    return {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and (path.suffix in {".py", ".pyi", ".json"} or path.name == "py.typed")
    }


@pytest.fixture(scope="session")
def wheel():
    """The manylinux wheel of this tree, rebuilt by `make` where it is older than its sources."""
    for tool in ["make", "cargo"]:
        if shutil.which(tool) is None:
            pytest.skip(f"building the wheel needs `{tool}`")
    # The environment that runs the tests where make manages it, else make's own.
    made = [f"VENV={sys.prefix}"] if (Path(sys.prefix) / ".tools").exists() else []
    run("make", "-s", *made, f"target/wheels/.{MACHINE}", timeout_s=BUILD_SECONDS_MAX)
    return ROOT / "target" / "wheels" / f"stepwell-{VERSION}-{TAG}.whl"


@pytest.fixture(scope="session")
def unpacked(wheel, tmp_path_factory):
    """The folder that holds the wheel's contents."""
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="session")
def fresh(wheel, tmp_path_factory):
    """A new virtual environment with the wheel in it.

    Returns its `bin` folder, and an environment whose PATH has only that.

    pip, torch and the rest are lent by the running interpreter (all its packages except stepwell
    itself), so that nothing is fetched and pip still checks the wheel's requirements against what
    is there.
    """
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    lent = folder / "lent"
    lent.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith("stepwell"):
            (lent / entry.name).symlink_to(entry)
    bin_folder = folder / "venv" / "bin"
    site = run(
        bin_folder / "python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    ).strip()
    (Path(site) / "lent.pth").write_text(f"{lent}\n")
    env = {"PATH": str(bin_folder), "HOME": str(folder), "LANG": "C.UTF-8"}
    found = {tool for tool in BUILD_TOOLS if shutil.which(tool, path=env["PATH"])}
    assert not found
    run(
        bin_folder / "python",
        "-m",
        "pip",
        "install",
        "--no-index",
        "--no-cache-dir",
        wheel,
        cwd=folder,
        env=env,
    )
    return bin_folder, env


def test_wheel_is_tagged_for_every_python_and_glibc_it_serves(unpacked):
    headers = email.parser.Parser().parsestr(
        (unpacked / f"stepwell-{VERSION}.dist-info" / "WHEEL").read_text()
    )
    assert headers["Tag"] == TAG
    assert headers["Root-Is-Purelib"] == "false"


def test_wheel_holds_the_package_and_nothing_else(wheel, unpacked):
    files = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    installed = {name for name in files if not name.startswith(f"stepwell-{VERSION}.dist-info/")}
    assert installed == package_files() | {"stepwell/_core.abi3.so"}
    assert {"stepwell/py.typed", "stepwell/_core.pyi"} <= installed
    assert f"stepwell-{VERSION}.dist-info/licenses/LICENSE" in files
    assert wheel.stat().st_size < WHEEL_BYTES_MAX


def test_extension_names_no_folder_of_the_machine_that_built_it(unpacked):
    library = (unpacked / "stepwell" / "_core.abi3.so").read_bytes()
    for folder in {str(Path.home()), str(ROOT)}:
        assert f"{folder}/".encode() not in library


def test_extension_keeps_to_the_stable_abi_of_python_3_10(wheel):
    report = json.loads(run(sys.executable, "-m", "abi3audit", "--strict", "--report", wheel))
    (found,) = report["specs"].values()
    (extension,) = found["wheel"]
    assert extension["result"]["is_abi3"]
    assert extension["result"]["is_abi3_baseline_compatible"]
    assert extension["result"]["baseline"] == "3.10"
    assert extension["result"]["non_abi3_symbols"] == []


def test_extension_needs_no_younger_glibc_than_its_tag_says(wheel):
    report = run(sys.executable, "-m", "auditwheel", "show", wheel)
    assert f'"manylinux_2_28_{MACHINE}"' in report.split("versioned symbols")[0]


FRESH_PROGRAM = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import stepwell
stepwell.AdamW, stepwell.OffloadAdamW  # imported when first used
import_s = time.perf_counter() - start
imported = sorted({name.split(".")[0] for name in set(sys.modules) - before})
ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 1001)) for _ in range(2))
optimizers = stepwell.AdamW([ours], lr=1e-2), torch.optim.AdamW([theirs], lr=1e-2)
for param, optimizer in zip((ours, theirs), optimizers):
    param.square().sum().backward()
    optimizer.step()
torch.testing.assert_close(ours, theirs)
found = {"file": stepwell.__file__, "version": stepwell.__version__}
print(json.dumps({"import_s": import_s, "imported": imported, **found}))
"""


def test_wheel_steps_in_a_fresh_environment_without_a_compiler(fresh):
    bin_folder, env = fresh
    result = json.loads(
        run(bin_folder / "python", "-I", "-W", "error", "-c", FRESH_PROGRAM, cwd="/", env=env)
    )
    assert Path(result["file"]).is_relative_to(bin_folder.parent)
    assert result["version"] == VERSION
    # `import torch` alone is allowed to be slow; benches/import_time.py measures what we add to it.
    print(f"import stepwell: {result['import_s']:.3f} s beyond torch")
    assert not {"deepspeed", "matplotlib", "rich", "transformers", "typer"} & set(
        result["imported"]
    )


def test_doctor_answers_in_a_fresh_environment(fresh):
    bin_folder, env = fresh
    facts = json.loads(run(bin_folder / "stepwell", "doctor", "--json", cwd="/", env=env))
    assert VERSION in json.dumps(facts)
    # As a table it is what `test_cli_doctor.py` has of it.
    version = run(bin_folder / "python", "-m", "stepwell", "--version", cwd="/", env=env)
    assert version == f"stepwell {VERSION}\n"


@pytest.fixture(scope="session")
def sdist(tmp_path_factory):
    """The source distribution of this tree."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "maturin", "sdist", "--out", folder)
    return folder / f"stepwell-{VERSION}.tar.gz"


def test_sdist_holds_the_sources(sdist):
    with tarfile.open(sdist) as archive:
        files = {name.removeprefix(f"stepwell-{VERSION}/") for name in archive.getnames()}
    rust = {str(path.relative_to(ROOT)) for path in (ROOT / "rust").rglob("*.rs")}
    wanted = {"Cargo.toml", "Cargo.lock", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"}
    assert wanted | rust | {f"python/{name}" for name in package_files()} <= files
    assert not {
        name for name in files if name.endswith(".so") or name.startswith(("target/", ".venv/"))
    }


@pytest.mark.skipif(
    "STEPWELL_TEST_SOURCE" not in os.environ,
    reason="compiles all anew, for a minute: STEPWELL_TEST_SOURCE=1, as make test-versions has it",
)
def test_source_installs(sdist, tmp_path):
    if shutil.which("cargo") is None:
        pytest.skip("building from source needs `cargo`")
    # Not optimised: whether all sources are there shows in a tenth of the time. Dependencies are
    # compiled once; the package anew, since cargo goes by the age of the files and all those of an
    # archive are of 1980 or so.
    target = ROOT / "target" / "sdist"
    run("cargo", "clean", "--quiet", "--package", "stepwell", "--target-dir", target)
    env = {
        **os.environ,
        "CARGO_TARGET_DIR": str(target),
        "CARGO_PROFILE_DEV_DEBUG": "none",
        "CARGO_INCREMENTAL": "0",
        "MATURIN_PEP517_ARGS": "--profile dev",
    }
    options = [
        "--no-deps",
        "--no-build-isolation",
        "--no-cache-dir",
        "--quiet",
        "--target",
        tmp_path,
    ]
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        *options,
        sdist,
        cwd="/",
        env=env,
        timeout_s=BUILD_SECONDS_MAX,
    )
    program = (
        "import stepwell, stepwell._core as core; "
        "print(core.__version__, stepwell.__file__, core.__file__)"
    )
    output = run(
        sys.executable, "-c", program, cwd="/", env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    version, *files = output.split()
    assert version == VERSION
    assert all(Path(file).is_relative_to(tmp_path) for file in files)

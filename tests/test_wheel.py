"""What is shipped: the sdist, the wheel built from it, and that wheel where nothing else is."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import zerocast

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.slow


def run(*command: str | Path, **options) -> str:
    """Run a command to its end; a failure shows all that it said."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


# --- the archives ---


# The library that the other tests load is optimized, and of these sources and settings. Here the
# compiler optimizes nothing, which takes half the time; scripts/nightly.sh builds what is shipped.
@pytest.fixture(scope="module", params=["None", pytest.param("Release", marks=pytest.mark.nightly)])
def archives(request, tmp_path_factory) -> Path:
    """A directory with the sdist of this tree and the wheel built from that sdist alone."""
    out = tmp_path_factory.mktemp("archives")
    options = ["--no-isolation", "--config-setting", f"cmake.build-type={request.param}"]
    run(sys.executable, "-m", "build", *options, "--outdir", out, ROOT)
    return out


@pytest.fixture(scope="module")
def wheel(archives) -> Path:
    """The wheel's file."""
    (file,) = archives.glob("*.whl")
    return file


def sources(folder: str) -> set[str]:
    """The files of a source folder, relative to the root, without what tools left behind."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".so"}
    }


def test_the_sdist_holds_every_source(archives):
    """The sdist has the package, the native sources, tests, examples, scripts and the licence."""
    (file,) = archives.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    expected = {"LICENSE", "README.md", "CMakeLists.txt", "pyproject.toml", "constraints.txt"}
    for folder in ("zerocast", "cuda_src", "tests", "examples", "scripts"):
        expected |= sources(folder)
    assert not expected - names


def test_the_wheel_holds_what_it_needs_and_no_more(wheel):
    """The wheel has the package, its library, cuda_src and the licence; no tests, no examples."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    libraries = {name for name in names if name.endswith(".so")}
    information = {name for name in names if ".dist-info/" in name}
    shipped = sources("zerocast") | {f"zerocast/{path}" for path in sources("cuda_src")}
    assert len(libraries) == 1
    assert all(name.startswith("zerocast/") for name in libraries)
    assert names - libraries - information == shipped
    assert any(name.endswith("/LICENSE") for name in information)


def test_one_wheel_serves_every_python(wheel):
    """The wheel is tagged for any Python 3 and this platform: its library knows no Python."""
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")


# --- the wheel, installed ---


def with_requirements(name: str) -> set[str]:
    """The installed distribution ``name`` and all that it requires here, extras left out."""
    found: set[str] = set()
    open_names = [name]
    while open_names:
        name = open_names.pop().lower().replace("_", "-")
        if name not in found:
            found.add(name)
            wanted = map(Requirement, importlib.metadata.requires(name) or [])
            open_names += [
                r.name for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})
            ]
    return found


@pytest.fixture(scope="module")
def clean_python(wheel, tmp_path_factory) -> Path:
    """The interpreter of an environment with torch, what torch requires, and the wheel: no numpy.

    torch is linked from the running environment, since copying it takes longer than all these
    tests. pip installs the wheel, and so checks that its requirements are met by what is there.
    """
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    packages = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    for name in with_requirements("torch"):
        files = importlib.metadata.files(name) or []
        for top in {file.parts[0] for file in files if file.parts[0] not in {"..", "__pycache__"}}:
            link = packages / top
            if not link.exists():
                link.symlink_to(importlib.metadata.distribution(name).locate_file(top))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", wheel)
    return python


def run_clean(python: Path, code: str, cwd: Path | None = None) -> str:
    """Run ``code`` where PATH has no program (so no compiler) and a warning is an error."""
    environment = {"PATH": "", "HOME": os.devnull, "LC_ALL": "C"}
    return run(
        python, "-W", "error::RuntimeWarning", "-c", code, env=environment, cwd=cwd or python.parent
    )


def test_the_installed_wheel_imports_light_and_knows_its_version(clean_python):
    """Imported where neither cupy nor mpi4py is to be found, it comes from the environment;
    `zerocast.__version__` is the version of the wheel's metadata, and of this tree.
    """
    code = """
import importlib.metadata, importlib.util
for module in ("cupy", "mpi4py", "numpy"):
    assert importlib.util.find_spec(module) is None, module
import zerocast
print(zerocast.__file__, zerocast.__version__, importlib.metadata.version("zerocast"))
"""
    file, *versions = run_clean(clean_python, code).split()[-3:]
    assert Path(file).is_relative_to(clean_python.parent.parent)
    assert versions == [zerocast.__version__] * 2


def test_the_command_line_says_the_version(clean_python):
    """`--version` prints the name and the version, and ends."""
    code = "from zerocast.cli import main; main(['--version'])"
    assert run_clean(clean_python, code).split()[-2:] == ["zerocast", zerocast.__version__]


def test_the_installed_wheel_quantizes_natively(clean_python):
    """Without a compiler the native library serves `quantize`, with the reference's bytes."""
    run_clean(
        clean_python,
        """
import torch, zerocast
torch.manual_seed(0)
weight = torch.randn(37, 80)
for recipe in (zerocast.NVFP4BlockScaling(), zerocast.Float8CurrentScaling()):
    # Where the reference stepped in, this would warn, and the warning is an error.
    native = zerocast.quantize(weight, recipe, dtype=torch.bfloat16)
    with zerocast.use_backend("reference"):
        reference = zerocast.quantize(weight, recipe, dtype=torch.bfloat16)
    for name, buffer in reference.quantized_storage.buffers.items():
        assert torch.equal(native.quantized_storage.buffers[name], buffer), (recipe, name)
""",
    )


@pytest.mark.parametrize("place", ["wheel", "clone"])
def test_doctor_needs_nothing_but_torch(clean_python, tmp_path, place):
    """Without MPI, a compiler and NumPy, doctor finds the cast right, from the wheel natively, and
    from a clone in which nothing was built by the reference; it says what is missing and why.
    """
    if place == "clone":
        left_out = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / "zerocast", tmp_path / "zerocast", ignore=left_out)
    code = "import sys; from zerocast.cli import main; sys.exit(main(['doctor', '--json']))"
    said = run_clean(clean_python, code, cwd=tmp_path)
    findings = {f["name"]: f for f in json.loads(said[said.index("[\n") :])}
    checked = [f["status"] for f in findings.values() if f["section"].startswith("Cast on 3 ranks")]
    assert checked == ["ok"] * 10
    for name in ("mpi4py", "mpiexec", "cupy-cuda13x", "numpy"):
        assert findings[name]["status"] == "missing", findings[name]
    assert findings["cpu"]["status"] == ("ok" if place == "wheel" else "slow"), findings["cpu"]
    if place == "clone":
        assert "the native library is not built" in findings["cpu"]["text"]
        assert "start Python in another directory" in findings["cpu"]["text"]

"""Which build of the kernels a processor runs, and for which instructions kernels are compiled."""

import ctypes
import platform
import subprocess

import pytest

from outrider.errors import MissingKernels
from outrider.models.native import builds
from outrider.models.native.builds import BUILDS, find_prebuilt, own_flags, prebuilt_path
from outrider.models.native.library import find_compiler, share_openmp
from tests.helpers import tiny

HASWELL = {"ssse3", "avx", "avx2", "fma3", "f16c", "bmi", "bmi2", "lzcnt"}
SKYLAKE = HASWELL | {"avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"}
CASCADE_LAKE = SKYLAKE | {"avx512_vnni"}
ZEN_4 = CASCADE_LAKE | {"avx512_bf16"}


def run_on(monkeypatch, machine, has):
    """Run on a processor that has these extensions alone."""
    monkeypatch.delenv(builds.VARIABLE, raising=False)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: dict.fromkeys(has, True) | {"architecture": machine})


def install(monkeypatch, folder, *names):
    """Install empty files as prebuilt kernels."""
    monkeypatch.setattr(builds, "_PREBUILT", folder)
    for name in names:
        prebuilt_path(folder, name).touch()


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """A wheel with all builds on a processor with AVX2."""
    install(monkeypatch, tmp_path, *(build.name for build in BUILDS))
    run_on(monkeypatch, "x86_64", HASWELL)
    return tmp_path


@pytest.mark.parametrize(
    ("machine", "has", "flags"),
    [
        ("x86_64", HASWELL, "-march=native"),
        ("aarch64", (), "-march=armv8-a"),
        ("aarch64", ("dot",), "-march=armv8.2-a+dotprod"),
        ("aarch64", ("dot", "i8mm", "bf16"), "-march=armv8.2-a+dotprod+i8mm+bf16"),
        ("arm64", ("dot", "bf16"), "-march=armv8.2-a+dotprod+bf16"),
    ],
)
def test_own_flags(machine, has, flags, monkeypatch):
    run_on(monkeypatch, machine, has)
    assert own_flags() == (flags,)


@pytest.mark.parametrize(
    ("machine", "has", "build"),
    [
        ("x86_64", ZEN_4 | {"amx_tile", "amx_bf16"}, "avx512-bf16"),
        ("x86_64", ZEN_4, "avx512-bf16"),
        ("x86_64", CASCADE_LAKE, "avx512-vnni"),
        ("x86_64", SKYLAKE, "avx2"),
        ("x86_64", HASWELL | {"avx_vnni"}, "avx-vnni"),
        ("x86_64", HASWELL, "avx2"),
        ("x86_64", HASWELL - {"avx2"}, "ssse3"),
        ("x86_64", HASWELL - {"fma3"}, "ssse3"),
        ("x86_64", (), "ssse3"),  # torch cannot read what the processor has
        ("aarch64", ("dot", "i8mm", "bf16"), "bf16"),
        ("aarch64", ("dot", "i8mm"), "dotprod"),
        ("aarch64", (), "neon"),
        ("riscv64", (), None),
    ],
)
def test_the_fastest_build_of_a_processor(machine, has, build, installed, monkeypatch):
    run_on(monkeypatch, machine, has)
    assert find_prebuilt() == (build and prebuilt_path(installed, build))


def test_kernels_are_compiled_where_none_are_prebuilt(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path / "none")
    run_on(monkeypatch, "x86_64", HASWELL)
    assert find_prebuilt() is None


@pytest.mark.parametrize("name", ["ssse3", "avx2", "compiled"])
def test_the_variable_names_the_build(name, installed, monkeypatch):
    monkeypatch.setenv("OUTRIDER_KERNEL_BUILD", name)
    assert find_prebuilt() == (None if name == "compiled" else prebuilt_path(installed, name))


@pytest.mark.parametrize("name", ["avx512-bf16", "neon", "best"])  # lacks instructions, other machine, unknown
def test_a_build_that_does_not_run_is_refused(name, installed, monkeypatch):
    monkeypatch.setenv("OUTRIDER_KERNEL_BUILD", name)
    message = f"OUTRIDER_KERNEL_BUILD={name} is not a build .* use avx2, ssse3, compiled, or unset it$"
    with pytest.raises(MissingKernels, match=message):
        find_prebuilt()


def test_prebuilt_kernels_of_other_sources_are_refused(installed, monkeypatch):
    monkeypatch.setattr(builds, "sources_hash", lambda: "0" * 64)
    with pytest.raises(MissingKernels, match="belong to another version of Outrider; install Outrider again"):
        find_prebuilt()


# By build: what the sources ask for that is compiled in, and what is not.
MACROS = {
    "avx512-bf16": ("AVX512BF16 AMX_BF16 AVX512VNNI AVX512BW", ""),
    "avx512-vnni": ("AVX512VNNI AVX512BW AVX512F FMA F16C", "AVX512BF16 AMX_BF16"),
    "avx-vnni": ("AVXVNNI AVX2 FMA F16C", "AVX512F"),
    "avx2": ("AVX2 FMA F16C", "AVXVNNI AVX512F"),
    "ssse3": ("SSSE3", "AVX"),
    "bf16": ("ARM_FEATURE_BF16_VECTOR_ARITHMETIC ARM_FEATURE_MATMUL_INT8 ARM_FEATURE_DOTPROD", ""),
    "dotprod": ("ARM_FEATURE_DOTPROD", "ARM_FEATURE_MATMUL_INT8 ARM_FEATURE_BF16_VECTOR_ARITHMETIC"),
    "neon": ("ARM_NEON", "ARM_FEATURE_DOTPROD"),
}


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
@pytest.mark.parametrize(
    "build", [build for build in BUILDS if build.machine == platform.machine()], ids=lambda b: b.name
)
def test_a_build_has_the_instructions_of_its_name(build):
    command = [find_compiler(), *build.flags, "-dM", "-E", "-x", "c++", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("the compiler does not know these instructions")
    defined = {line.split()[1].strip("_") for line in done.stdout.splitlines()}
    present, absent = map(str.split, MACROS[build.name])
    assert defined.issuperset(present)
    assert not defined.intersection(absent)


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
def test_kernels_find_an_openmp_library_that_torch_loads_for_itself(tmp_path):
    """As torch for ARM does. The kernels are not linked with it."""
    sources = {"libgomp.so.1": "void of_openmp() {}", "kernels.so": "void of_openmp(); void kernel() { of_openmp(); }"}
    for name, source in sources.items():
        (tmp_path / "source.cpp").write_text(source)
        command = [find_compiler(), "-shared", "-fPIC", "source.cpp", "-o", name]
        subprocess.run(command, cwd=tmp_path, check=True)
    ctypes.CDLL(str(tmp_path / "libgomp.so.1"))
    with pytest.raises(OSError, match="undefined symbol"):
        ctypes.CDLL(str(tmp_path / "kernels.so"))
    share_openmp(tmp_path)
    ctypes.CDLL(str(tmp_path / "kernels.so"))

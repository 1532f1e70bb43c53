"""The rules of the house: who may import whom, and what may not be written where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON_FILES = sorted((ROOT / "keras_ring").rglob("*.py"))
CXX_FILES = sorted(path for path in (ROOT / "tf_ops").rglob("*") if path.suffix in {".h", ".cc"})
# Bottom up: an include may only point to the same layer or to one before it.
CXX_LAYERS = ["core", "reduce", "transport", "compression", "collectives", "engine", "ops"]
MANY_LINES = 400
TOO_MANY_LINES = 500

TENSORFLOW_INCLUDE = re.compile(r'#include\s*[<"](tensorflow|xla|tsl)/')
TENSORFLOW_SYMBOL = re.compile(r"\b(TF_[A-Z]\w*|TSL_\w+|XLA_\w+|tensorflow::|xla::|tsl::)")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT / "tf_ops").parts[0]


def code_lines(path: Path) -> list[tuple[int, str]]:
    """Number the lines of a C++ file, without its comments."""
    text = re.sub(
        r"/\*.*?\*/|//[^\n]*",
        lambda match: "\n" * match[0].count("\n"),
        path.read_text(),
        flags=re.S,
    )
    return list(enumerate(text.splitlines(), start=1))


def cxx_matches(pattern: re.Pattern[str], allowed: re.Pattern[str]) -> list[str]:
    """List where C++ code matches `pattern`, in files whose paths do not match `allowed`."""
    return [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in CXX_FILES
        if not allowed.fullmatch(relative(path))
        for number, line in code_lines(path)
        if pattern.search(line)
    ]


NOWHERE = re.compile(r"(?!)")


def test_files_are_found():
    assert len(PYTHON_FILES) > 10
    assert len(CXX_FILES) > 20


def test_python_imports_point_down():
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-logo", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "module",
    [
        "keras_ring",
        "keras_ring.errors",
        "keras_ring.launch.cli",
        "keras_ring.launch.build",
        "keras_ring.launch.function",
    ],
)
def test_import_without_training_loads_nothing_heavy(module):
    heavy = ["tensorflow", "keras", "numpy", "mpi4py", "h5py"]
    program = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.strip() == "[]"


def test_cxx_folders_are_layers():
    folders = {layer_of(path) for path in CXX_FILES}
    assert folders <= set(CXX_LAYERS), f"not a layer of tf_ops: {folders - set(CXX_LAYERS)}"


def test_cxx_includes_point_down():
    wrong = []
    for path in CXX_FILES:
        for number, line in code_lines(path):
            include = re.match(r'\s*#include\s*"([^"]+)"', line)
            if include is None:
                continue
            target = include[1].split("/")[0]
            known = target in CXX_LAYERS and "/" in include[1]
            if not known or CXX_LAYERS.index(target) > CXX_LAYERS.index(layer_of(path)):
                wrong.append(f"{relative(path)}:{number}: {line.strip()}")
    assert not wrong, 'includes must be "layer/file.h", of the same or a lower layer'


def test_cxx_names_tensorflow_in_ops_only():
    ops = re.compile(r"tf_ops/ops/.*")
    assert not cxx_matches(TENSORFLOW_INCLUDE, allowed=ops)
    assert not cxx_matches(TENSORFLOW_SYMBOL, allowed=ops)


def test_cxx_includes_mpi_in_the_mpi_transport_only():
    transport = re.compile(r"tf_ops/transport/mpi\w*\.(h|cc)")
    assert not cxx_matches(re.compile(r"#include\s*[<\"]mpi\.h"), allowed=transport)
    assert not cxx_matches(re.compile(r"\bMPI_[A-Z]\w*"), allowed=transport)


def test_cxx_reads_no_environment():
    assert not cxx_matches(re.compile(r"\b(secure_)?getenv\b|\benviron\b"), allowed=NOWHERE)


def test_cxx_ends_the_process_only_when_python_asks_for_it():
    calls = re.compile(r"\b(exit|_exit|_Exit|quick_exit|abort|terminate|MPI_Abort)\s*\(")
    # keras_ring_end_failed_process, called by Python when the interpreter ends after a failure.
    places = cxx_matches(calls, allowed=NOWHERE)
    assert [place for place in places if not place.startswith("tf_ops/ops/c_api.cc:")] == []
    assert len(places) <= 1


def test_cxx_has_no_assert_and_no_using_namespace():
    assert not cxx_matches(re.compile(r"(?<!static_)\bassert\s*\("), allowed=NOWHERE)
    assert not cxx_matches(re.compile(r"\busing\s+namespace\b"), allowed=NOWHERE)


def test_python_reads_the_environment_in_config_only():
    wrong = []
    for path in PYTHON_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"}:
                wrong.append((relative(path), ast.unparse(node)))
    # KERAS_RING_MPICXX: where the build looks for MPI, before the package can be used.
    allowed = {
        "keras_ring/config.py",
        "keras_ring/launch/build.py",
        "keras_ring/launch/environment.py",
    }
    assert not [place for place in wrong if place[0] not in allowed]
    build = (ROOT / "keras_ring/launch/build.py").read_text()
    assert re.findall(r"os\.environ\S*", build) == ['os.environ.get("KERAS_RING_MPICXX")),']


def test_python_product_code_has_no_assert():
    asserts = [
        f"{relative(path)}:{node.lineno}"
        for path in PYTHON_FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert not asserts


def test_python_public_names_have_docstrings():
    assert not [name for path in PYTHON_FILES for name in undocumented(path)]


def undocumented(path: Path) -> list[str]:
    """List a module's public functions, classes and methods, and itself, that lack a docstring."""
    missing = []

    def visit(node: ast.AST, name: str) -> None:
        if ast.get_docstring(node) is None and not overrides(node):
            missing.append(name)
        # What is defined inside a function is nobody's public name.
        for child in node.body if isinstance(node, (ast.Module, ast.ClassDef)) else []:
            is_definition = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            if is_definition and not child.name.startswith("_"):
                visit(child, f"{name}.{child.name}")

    visit(ast.parse(path.read_text()), relative(path))
    return missing


def overrides(node: ast.AST) -> bool:
    """Tell whether a method is another's setter or overload, whose first one has the docstring."""
    decorators = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]
    return any(name.endswith((".setter", "overload")) for name in decorators)


def test_cxx_headers_say_what_they_are_for():
    headers = [path for path in CXX_FILES if path.suffix == ".h"]
    assert not [relative(path) for path in headers if not path.read_text().startswith("//")]


def test_files_are_short():
    lengths = {
        relative(path): len(path.read_text().splitlines()) for path in PYTHON_FILES + CXX_FILES
    }
    for name, length in lengths.items():
        if length > MANY_LINES:
            warnings.warn(
                f"{name} has {length} lines: look for its second responsibility", stacklevel=1
            )
    assert not [name for name, length in lengths.items() if length > TOO_MANY_LINES]

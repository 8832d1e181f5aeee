"""The tree's rules: imports go one way, rooms that must not know MLX do not, files and functions are short."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "headrace"
MODULES = sorted(PACKAGE.rglob("*.py"))

# From the top down; a module imports from its own room and from those after it.
ROOMS = ("cli", "api", "gateway", "worker", "runner", "text", "checkpoint", "core", "")
WITHOUT_MLX = ("api", "gateway", "text", "checkpoint", "core", "")
MLX_NAMES = ("mlx", "mlx_lm", "transformers", "torch")
# The same within the runner: its folders, and the modules that are in none.
RUNNER_ROOMS = (
    *("outline", "estimate", "build", "start", "pool_memory", "model_runner", "forwards", "sampling", "loading"),
    *("substitutions", "attention", "products", "kv", "cpu", "kernels"),
    *("mlx_lm_adapter", "device_arrays", "device", "timing", "mlx_environment"),
)
# What gateway and worker share: their messages, log lines, and the note that a dying worker leaves.
WORKER_SEAM = ("headrace.worker.protocol", "headrace.worker.log_lines", "headrace.worker.step_record")

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60


def room_of(module: str) -> str:
    """The folder below ``headrace`` that a dotted module is in; "" for the shared types at the top."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else ""


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(imported module, whether it is imported when this one is) for every import statement of a file."""
    tree = ast.parse(path.read_text())
    at_import = {id(node) for node in _executed_on_import(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, id(node) in at_import


def _executed_on_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _executed_on_import(child)


@pytest.mark.parametrize("path", sorted((PACKAGE / "runner").rglob("*.py")), ids=dotted)
def test_imports_go_down_in_the_runner(path: Path) -> None:
    parts = dotted(path).split(".")
    for name, _ in imports(path):
        if name.startswith("headrace.runner."):
            mine, theirs = parts[2], name.split(".")[2]
            assert RUNNER_ROOMS.index(theirs) >= RUNNER_ROOMS.index(mine), f"{mine} imports {name}: up the order"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_go_down(path: Path) -> None:
    mine = room_of(dotted(path))
    for name, _ in imports(path):
        if not name.startswith("headrace"):
            continue
        theirs = room_of(name)
        if mine == "bench":
            assert theirs == "bench", f"bench imports {name}; it stands alone"
        elif theirs == "bench":
            assert mine == "cli", f"{mine} imports {name}"
        elif theirs == "worker" and mine not in ("worker", "cli"):
            assert name.startswith(WORKER_SEAM), f"{mine} imports {name}; shared are {WORKER_SEAM}"
        else:
            assert ROOMS.index(theirs) >= ROOMS.index(mine), f"{mine or 'headrace'} imports {name}: up the order"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_rooms_without_mlx_name_none(path: Path) -> None:
    if room_of(dotted(path)) not in WITHOUT_MLX:
        return
    for name, _ in imports(path):
        assert name.split(".")[0] not in MLX_NAMES, f"{dotted(path)} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_one_module_imports_mlx_lm(path: Path) -> None:
    if dotted(path) != "headrace.runner.mlx_lm_adapter":
        assert all(name.split(".")[0] != "mlx_lm" for name, _ in imports(path))


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_core_is_plain_python(path: Path) -> None:
    if room_of(dotted(path)) != "core":
        return
    for name, _ in imports(path):
        assert name.split(".")[0] not in ("asyncio", "pydantic", "fastapi", "zmq", "uvicorn", "numpy"), name


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_commands_import_lazily(path: Path) -> None:
    """``headrace --help`` answers at once, so a command imports what is heavy inside its functions."""
    if room_of(dotted(path)) != "cli":
        return
    heavy = ("mlx", "mlx_lm", "transformers", "fastapi", "uvicorn", "numpy", "tokenizers", "huggingface_hub")
    for name, at_import in imports(path):
        assert not (at_import and name.split(".")[0] in heavy), f"{dotted(path)} imports {name} at its top"


@pytest.mark.parametrize("module", ["headrace.api.app", "headrace.gateway.supervisor", *WORKER_SEAM])
def test_gateway_process_loads_no_mlx(module: str) -> None:
    program = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    child = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert not set(MLX_NAMES).intersection(child.stdout.split())


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_text_files_have_an_encoding(path: Path) -> None:
    """The system's may be any; and a child that says what it lacks is no reason to fail."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        keywords = {keyword.arg for keyword in node.keywords}
        modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        is_text = (
            (name == "read_text" and not node.args)
            or (name == "write_text" and len(node.args) < 2)
            or (name == "open" and bool(modes) and "b" not in modes[-1])
            or (name in ("run", "Popen", "check_output") and "text" in keywords)
        )
        assert not is_text or keywords & {"encoding", "errors"}, f"{path}:{node.lineno}"

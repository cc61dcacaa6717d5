"""The house holds: floors, bands, the packaging list, the root, and what a wheel has in it.

The rules are data at the top. `breaches` reads syntax trees and imports nothing, so it can also
judge a made-up tree.
"""

import ast
import fnmatch
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ROOMS = ("core", "kernels", "logits_processors", "plugins", "structured")
FACE_FILES = {"__init__.py", "__main__.py"}

# Core's bands: a file imports its own band and those above it in this table.
WORDS = """
    absent batch bundle bundle_fields config config_rules constraint dialect_rules dialect_stages
    dialects driver errors hookspecs inputs logprobs lora_request metrics outputs param_rules
    param_sources params parsers plan_report pooling_outputs pooling_params porting presets proposer
    reasoning request request_checks request_fields request_params sampling_rules slots spelling
    stage stage_rules structured_params trace_report trace_words vllm_names vllm_processors
""".split()
THOUGHT = """
    adapters binding blame build chain chat chat_hint chat_messages chat_template choosing collect
    detokenizer discovery draft drive drive_binding driver_stages further fused generation_config
    gguf_vocab holding intake kv_cache lanes models naming offers order plan plan_text plugin_info
    power profiling program prompt_logprobs registry request_schema rescue review runner scheduler
    speculation stage_rows stopwatch tokenizer transformers_processor undo vllm_host vllm_load
""".split()
DOORS = "async_llm beams choice_shares cli engine llm progress replay".split()
BAND_OF = {
    **dict.fromkeys(WORDS, "words"),
    **dict.fromkeys(THOUGHT, "thought"),
    **dict.fromkeys(DOORS, "doors"),
}

# Who may import what. A source is a room, a band of core, or a room inside plugins with rights of
# its own; a target is a room, a band, or one file of the kernels.
KERNELS = {"kernels", "kernels/lang", "kernels/ops"}
ANY_OF_CORE = {"words", "thought", "doors"}
MAY_IMPORT = {
    **dict.fromkeys(KERNELS, KERNELS),
    "words": KERNELS | {"words"},
    "thought": KERNELS | {"words", "thought"},
    "doors": KERNELS | ANY_OF_CORE,
    "logits_processors": {"logits_processors", "words", "kernels/lang", "kernels/ops"},
    "structured": {"structured", "words", "kernels/ops"},
    "plugins": {"plugins", "words", "kernels/lang", "kernels/ops"},
    "plugins/serve": {"plugins", "words", "doors", "kernels/lang", "kernels/ops"},
    "plugins/console": {"plugins", "kernels/lang", "kernels/ops"} | ANY_OF_CORE,
    "plugins/author": {"plugins", "kernels/lang", "kernels/ops"} | ANY_OF_CORE,
    "face": ANY_OF_CORE,
}


def breaches(root: Path) -> list[str]:
    """Return every broken rule of the tree at `root`, naming the file and the rooms concerned."""
    return [*import_breaches(root), *packaging_breaches(root)]


def import_breaches(root: Path) -> Iterator[str]:
    """Yield imports that land where the table doesn't let them."""
    for path in package_files(root):
        if path.suffix != ".py":
            continue
        name = path.relative_to(root).as_posix()
        source = place_of(name)
        if source is None:
            yield f"{name}: core has no band for this file; add it to the table in test_house.py"
            continue
        tree = ast.parse(path.read_text(), filename=name)
        if path.name == "__init__.py" and source != "face" and not is_docstring_alone(tree):
            yield f"{name}: a room's __init__.py is one docstring and nothing else"
        for target, line in imported(root, path, tree):
            yield from judge(name, line, source, target)


def judge(name: str, line: int, source: str, target: str) -> Iterator[str]:
    """Yield what is wrong with importing `target`, a path from the root or a library."""
    where = f"{name}:{line}"
    if target.startswith("decodekit."):
        if name != "__init__.py":
            yield f"{where}: says {target}; inside the package import relatively"
            return
        target = target.removeprefix("decodekit.").replace(".", "/")
    if target == "triton":
        if name != "kernels/lang.py":
            yield f"{where}: triton comes through kernels/lang.py only"
    elif target.split("/")[0] in ROOMS:
        place = place_of(target + ".py")
        if place is None:  # the file itself is reported
            return
        if place.startswith("plugins/"):
            place = "plugins"
        if place not in MAY_IMPORT[source]:
            yield f"{where}: {source} may not import {place} ({target})"


def place_of(name: str) -> str | None:
    """Return the place in the table of a path from the root; None if core has no band for it."""
    parts = name.removesuffix(".py").split("/")
    if len(parts) == 1 and parts[0] not in ROOMS:
        return "face"
    if parts[0] == "core":
        if parts[1:] in ([], ["__init__"]):
            return "words"
        return BAND_OF.get(parts[1])
    if parts[0] == "kernels" and parts[1:] in (["lang"], ["ops"]):
        return "/".join(parts)
    special = "/".join(parts[:2])
    return special if special in MAY_IMPORT else parts[0]


def imported(root: Path, path: Path, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield (target, line) for imports of our modules and of triton, wherever they stand."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_ours_or_triton(alias.name):
                    yield outside(alias.name), node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if is_ours_or_triton(node.module or ""):
                yield outside(node.module or ""), node.lineno
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1].relative_to(root)
            base = folder.joinpath(*(node.module or "").split("."))
            if (root / base).is_dir():  # from ..core import stage: the modules of a folder
                for alias in node.names:
                    yield (base / alias.name).as_posix(), node.lineno
            else:
                yield base.as_posix(), node.lineno


def is_ours_or_triton(module: str) -> bool:
    return module.split(".")[0] in (*ROOMS, "decodekit", "triton")


def outside(module: str) -> str:
    """Spell an absolute import: triton as such, ours as decodekit.room.file."""
    first = module.split(".")[0]
    if first == "triton":
        return first
    return module if first == "decodekit" else f"decodekit.{module}"


def is_docstring_alone(tree: ast.Module) -> bool:
    return len(tree.body) == 1 and ast.get_docstring(tree) is not None


def packaging_breaches(root: Path) -> Iterator[str]:
    """Yield where the disk and `tool.setuptools` disagree, and strangers at the root."""
    with (root / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)["tool"]["setuptools"]
    listed = set(settings["packages"])
    files = list(package_files(root))
    on_disk = {dotted(root, path.parent) for path in files if path.name == "__init__.py"}
    for package in sorted(on_disk - listed):
        yield f"pyproject.toml: {package} is on the disk and not in packages"
    for package in sorted(listed - on_disk):
        yield f"pyproject.toml: {package} is in packages and has no __init__.py"
    for path in files:
        package, name = dotted(root, path.parent), path.relative_to(root).as_posix()
        if path.suffix == ".py":
            if package not in on_disk:
                yield f"{name}: its folder {package} has no __init__.py"
        elif not is_listed(path.name, settings["package-data"].get(package, [])):
            yield f"{name}: not Python, and not in the package-data of {package}"
    for path in sorted(root.glob("*.py")):
        if path.name not in FACE_FILES:
            yield f"{path.name}: the root holds {' and '.join(sorted(FACE_FILES))} alone"
    for missing in sorted(FACE_FILES - {path.name for path in root.glob("*.py")}):
        yield f"{missing}: the root lacks it"


def is_listed(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def package_files(root: Path) -> Iterator[Path]:
    """Yield every file that belongs to the package, in order; caches are no part of it."""
    for name in ("__init__.py", "__main__.py", "py.typed"):
        if (root / name).is_file():
            yield root / name
    for room in ROOMS:
        for path in sorted((root / room).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def dotted(root: Path, folder: Path) -> str:
    return ".".join(("decodekit", *folder.relative_to(root).parts))


def test_floors_bands_and_packaging_hold() -> None:
    assert breaches(ROOT) == []


def plant(root: Path, files: dict[str, str]) -> None:
    """Write a small sound house, then `files` over it."""
    packages = ["decodekit", *(f"decodekit.{room}" for room in ROOMS), "decodekit.plugins.serve"]
    sound = {
        "pyproject.toml": (
            f"[tool.setuptools]\npackages = {packages}\n"
            "[tool.setuptools.package-data]\ndecodekit = ['py.typed']\n"
        ),
        "__init__.py": '"""Face."""\nfrom decodekit.core.llm import LLM\n',
        "__main__.py": '"""Run."""\nfrom .core.cli import main\n',
        "py.typed": "",
        **{f"{room}/__init__.py": '"""Room."""\n' for room in ROOMS},
        "plugins/serve/__init__.py": '"""Room."""\n',
        "core/stage.py": "from ..kernels.reference import noise\n",
        "core/plan.py": "from .stage import Stage\n",
        "core/engine.py": "from . import plan, stage\n",
        "kernels/lang.py": "import triton\n",
        "logits_processors/top_k.py": "from ..core.stage import Stage\nfrom ..kernels import ops\n",
        "plugins/serve/app.py": "from ...core.engine import Engine\nfrom ..catalogue import X\n",
    }
    for name, text in {**sound, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_a_sound_tree_has_no_breach(tmp_path: Path) -> None:
    plant(tmp_path, {})

    assert breaches(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "kernels/noise.py",
            "from ..core.request import Request\n",
            "kernels/noise.py:1: kernels may not import words (core/request)",
        ),
        (
            "core/params.py",
            "def check():\n    from .plan import Plan\n",
            "core/params.py:2: words may not import thought (core/plan)",
        ),
        (
            "core/scheduler.py",
            "from . import batch, engine\n",
            "core/scheduler.py:1: thought may not import doors (core/engine)",
        ),
        (
            "core/chain.py",
            "from ..logits_processors.top_k import TopK\n",
            "core/chain.py:1: thought may not import logits_processors (logits_processors/top_k)",
        ),
        (
            "logits_processors/top_p.py",
            "from ..core import plan\n",
            "logits_processors/top_p.py:1: logits_processors may not import thought (core/plan)",
        ),
        (
            "logits_processors/top_p.py",
            "from ..kernels.reference.ranked import rank_top\n",
            "logits_processors/top_p.py:1: logits_processors may not import kernels"
            " (kernels/reference/ranked)",
        ),
        (
            "structured/mask.py",
            "from ..plugins.catalogue import BUILT_INS\n",
            "structured/mask.py:1: structured may not import plugins (plugins/catalogue)",
        ),
        (
            "plugins/stops.py",
            "from ..core.engine import Engine\n",
            "plugins/stops.py:1: plugins may not import doors (core/engine)",
        ),
        (
            "plugins/serve/chat.py",
            "from ...core.plan import Plan\n",
            "plugins/serve/chat.py:1: plugins/serve may not import thought (core/plan)",
        ),
        (
            "core/llm.py",
            "from decodekit.core.engine import Engine\n",
            "core/llm.py:1: says decodekit.core.engine; inside the package import relatively",
        ),
        (
            "core/llm.py",
            "import kernels.ops\n",
            "core/llm.py:1: says decodekit.kernels.ops; inside the package import relatively",
        ),
        (
            "__init__.py",
            '"""Face."""\nfrom decodekit.kernels import ops\n',
            "__init__.py:2: face may not import kernels (kernels)",
        ),
        (
            "kernels/scan.py",
            "import triton.language as tl\n",
            "kernels/scan.py:1: triton comes through kernels/lang.py only",
        ),
        (
            "core/misc.py",
            "",
            "core/misc.py: core has no band for this file; add it to the table in test_house.py",
        ),
        (
            "plugins/__init__.py",
            '"""Room."""\nfrom .catalogue import BUILT_INS\n',
            "plugins/__init__.py: a room's __init__.py is one docstring and nothing else",
        ),
        (
            "plugins/pick/__init__.py",
            '"""Room."""\n',
            "pyproject.toml: decodekit.plugins.pick is on the disk and not in packages",
        ),
        (
            "plugins/pick/race.py",
            "",
            "plugins/pick/race.py: its folder decodekit.plugins.pick has no __init__.py",
        ),
        (
            "plugins/serve/page.html",
            "",
            "plugins/serve/page.html: not Python, and not in the package-data of"
            " decodekit.plugins.serve",
        ),
        (
            "setup.py",
            "",
            "setup.py: the root holds __init__.py and __main__.py alone",
        ),
    ],
)
def test_a_planted_breach_is_reported(tmp_path: Path, name: str, text: str, expected: str) -> None:
    plant(tmp_path, {name: text})

    assert breaches(tmp_path) == [expected]


def test_a_listed_package_without_a_folder_is_reported(tmp_path: Path) -> None:
    plant(tmp_path, {})
    (tmp_path / "plugins/serve/__init__.py").unlink()

    assert "pyproject.toml: decodekit.plugins.serve is in packages and has no __init__.py" in (
        breaches(tmp_path)
    )


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    """Built in a copy, by the backend itself: no network, and no litter in the checkout."""
    source = tmp_path / "source"
    for path in package_files(ROOT):
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    expected = {f"decodekit/{path.relative_to(ROOT).as_posix()}" for path in package_files(ROOT)}

    build = "import setuptools.build_meta as backend; backend.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)

    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
        entry_points = next(n for n in archive.namelist() if n.endswith("entry_points.txt"))
        scripts = archive.read(entry_points).decode()
    assert held == expected
    assert len(licences) == 1
    assert "decodekit = decodekit.core.cli:main" in scripts
    assert "dk = decodekit.core.cli:main" in scripts

"""The house rules: what may import what, one place per idea, types, words, sizes.

Each rule is a function of source texts, {path from the root: text}, to its violations as
"path:line: what is wrong". tests/project/test_layout.py runs them.
"""

import ast
import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

STANDARD = sys.stdlib_module_names
KERNELS = "kernels/torch-ext/bwsft_kernels/"

# A room may import those on lines above its own, and itself.
ROOMS = [
    ["bwsft_kernels"], ["utils"], ["objectives"], ["config"], ["data"], ["presets"], ["models"],
    ["checkpoints"], ["training", "decoding"], ["evaluation"], ["commands"], ["experiments"],
    ["cli"],
]  # fmt: skip
RANK = {name: rank for rank, names in enumerate(ROOMS) for name in names}
NO_ROOM = {"__init__", "__main__", "version", "lm_eval_model", "__version__"}
# Where a library may be imported in bwsft: whole rooms end in a slash.
HOMES = {
    "transformers": ("bwsft/models/", "bwsft/data/tokenizer.py", "bwsft/checkpoints/folders.py",
                     "bwsft/training/hf_"),
    "peft": ("bwsft/models/", "bwsft/checkpoints/"),
    "tyro": ("bwsft/commands/", "bwsft/experiments/", "bwsft/cli.py"),
    "rich": ("bwsft/commands/", "bwsft/experiments/", "bwsft/cli.py"),
    "datasets": ("bwsft/data/sources.py", "bwsft/data/file_formats.py"),
    "triton": (),
}  # fmt: skip
# The one place where training decodes: what a Trainer of transformers calls back between updates.
# `bwsft train` and its loop reach no decoder.
DECODES = "bwsft/training/hf_samples.py"
REACH = {"bwsft/training/trainer.py": 18, "bwsft/decoding/generate.py": 19}
GRID_FILES = tuple(
    f"{KERNELS}{name}.py" for name in ("block_grid", "_block_mask_draw_triton", "reference")
)
ISE = "token|normal|optim|initial|serial|summar|material|minim|maxim|organ|recogn|synchron|random"
BANNED = {  # phrase -> what to write; _ counts as a blank between words
    r"the law": "the reference implementation",
    r"(bear|bears|bearing|bore) (no |the )?loss|loss rows?": "supervised tokens, supervised_rows",
    r"meets? (the|a|an|its) ([\w,-]+ )?head": "is projected to logits",
    r"exams?|examined (on|in)": "the test set, evaluated on",
    r"mend(s|ed|ing)?": "fix",
    r"for ever": "indefinitely",
    r"(tokens?|positions?|everything|suffix|rows?) behind|behind (it|them|the (active |last )?"
    r"(block|prompt|response|canvas))": "after",
    r"lies": "is",
    r"twins?": "Triton implementation",
    rf"(un|re|de)?({ISE})is(e|es|ed|ing|er|ers|ation|able)": "American spelling: -ize",
}
OLD_SPELLING = "old spelling"  # a line that says so keeps an old flag working


@dataclass(frozen=True)
class Import:
    line: int
    module: str
    name: str | None  # of `from module import name`
    typing: bool  # under `if TYPE_CHECKING:`


@functools.cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


@functools.cache
def imports(text: str) -> tuple[Import, ...]:
    """Every import, those in functions too; `from bwsft import x` as `import bwsft.x`."""
    found = []

    def visit(node: ast.AST, typing: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(node.lineno, a.name, None, typing) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found.extend(
                Import(node.lineno, f"bwsft.{a.name}", None, typing) if module == "bwsft"
                else Import(node.lineno, module, a.name, typing)
                for a in node.names
            )  # fmt: skip
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                visit(child, True)
            for child in node.orelse:
                visit(child, typing)
        else:
            for child in ast.iter_child_nodes(node):
                visit(child, typing)

    visit(parse(text), False)
    return tuple(found)


def python(sources: dict, *places: str):
    """(path, text) of the Python files at these places."""
    return [(p, t) for p, t in sources.items() if p.endswith(".py") and p.startswith(places)]


def functions(sources: dict, *places: str):
    """(path, definition) of every function at these places."""
    for path, text in python(sources, *places):
        for node in ast.walk(parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def file_of(module: str, sources: dict) -> str | None:
    path = module.replace(".", "/")
    return next((p for p in (f"{path}.py", f"{path}/__init__.py") if p in sources), None)


def target(found: Import, sources: dict) -> str | None:
    """The file that an import of bwsft reads: a module's, or that of a name in it."""
    whole = file_of(f"{found.module}.{found.name}", sources) if found.name else None
    return whole or file_of(found.module, sources)


def is_batch_type(found: Import) -> bool:
    """The one import that an objective may make of data, for annotations."""
    return found.typing and (found.module, found.name) == ("bwsft.data.packing", "Batch")


def room_order(sources: dict) -> list[str]:
    wrong = []
    for path, text in python(sources, "bwsft/"):
        room = path.split("/")[1].removesuffix(".py")
        if room in NO_ROOM:
            continue
        if room not in RANK:
            wrong.append(f"{path}:1: {room} is no room of ROOMS")
            continue
        for found in imports(text):
            parts = found.module.split(".")
            other = parts[1] if parts[0] == "bwsft" and len(parts) > 1 else parts[0]
            if parts[0] not in ("bwsft", "bwsft_kernels") or other in NO_ROOM | {room}:
                continue
            if room == "objectives" and is_batch_type(found):
                continue
            if path == DECODES and other == "decoding":
                continue
            if RANK.get(other, len(ROOMS)) >= RANK[room]:
                wrong.append(f"{path}:{found.line}: {room} may not import {found.module}")
    return wrong


def foreign(sources: dict, place: str, allowed: Callable[[str, Import, str], bool]) -> list[str]:
    """Imports at a place that allowed(path, import, its first name) refuses."""
    return [
        f"{path}:{found.line}: may not import {found.module} here"
        for path, text in python(sources, place)
        for found in imports(text)
        if not allowed(path, found, found.module.split(".")[0])
    ]


def objectives_rest_on_the_kernels(sources: dict) -> list[str]:
    return foreign(
        sources, "bwsft/objectives/",
        lambda path, found, root: root in {*STANDARD, "torch", "bwsft_kernels"}
        or found.module.startswith("bwsft.objectives") or is_batch_type(found),
    )  # fmt: skip


def kernels_import_torch_and_triton(sources: dict) -> list[str]:
    """Triton in the files *_triton.py alone."""
    return foreign(
        sources, KERNELS,
        lambda path, found, root: root in {*STANDARD, "torch", ""}
        or (root == "triton" and path.endswith("_triton.py")),
    )  # fmt: skip


def libraries_stay_at_home(sources: dict) -> list[str]:
    return foreign(
        sources, "bwsft/",
        lambda path, _, root: root not in HOMES or path.startswith((*HOMES[root], "-")),
    )  # fmt: skip


def reach(path: str, sources: dict) -> dict[str, str]:
    """{module file: the file that imports it} of everything that `path` imports, at any depth."""
    parents, open_files = {path: ""}, [path]
    while open_files:
        at = open_files.pop()
        for found in imports(sources[at]):
            other = target(found, sources) if found.module.startswith("bwsft.") else None
            if other and other not in parents and not found.typing and sources[other].strip():
                parents[other] = at
                open_files.append(other)
    del parents[path]
    return parents


def loops_reach_few_modules(sources: dict) -> list[str]:
    wrong = []
    for path, most in REACH.items():
        found = reach(path, sources) if path in sources else {}
        if len(found) > most:
            listed = ", ".join(f"{p} (by {by})" for p, by in sorted(found.items()))
            wrong.append(f"{path}:1: reaches {len(found)} modules, {most} at most: {listed}")
    return wrong


@functools.cache
def defined(text: str) -> frozenset[str]:
    """Names that a module's top level defines itself."""
    names = set()
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)


def no_reexports(sources: dict) -> list[str]:
    """A name is imported from the module that defines it, or used as an attribute of that one."""
    wrong = []
    for path, text in python(sources, "bwsft/", "benchmarks/", "tests/", "examples/"):
        modules = {}  # how this file calls a module of bwsft -> its file
        for node in ast.walk(parse(text)):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("bwsft"):
                continue
            for alias in node.names:
                inner = file_of(f"{node.module}.{alias.name}", sources)
                source = file_of(node.module, sources)
                if inner:
                    modules[alias.asname or alias.name] = inner
                elif source and not source.endswith("__init__.py"):
                    if alias.name not in defined(sources[source]):
                        wrong.append(f"{path}:{node.lineno}: {source} does not define {alias.name}")
        for node in ast.walk(parse(text)) if not path.startswith("tests/") else ():
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                source = modules.get(node.value.id, "")
                content = imports(sources.get(source, ""))
                found = {i.name for i in content if i.module.startswith("bwsft")}
                if node.attr in found - defined(sources.get(source, "")):
                    wrong.append(f"{path}:{node.lineno}: {source} does not define {node.attr}")
    return wrong


def grid_formula_in_one_file(sources: dict) -> list[str]:
    wrong = []
    for path, text in python(sources, "bwsft/", "kernels/", "benchmarks/"):
        for node in ast.walk(parse(text)) if path not in GRID_FILES else ():
            formula = False
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                words = {n.value for s in sides for n in ast.walk(s) if isinstance(n, ast.Constant)}
                origin = any(re.search(r"origin$", ast.unparse(side)) for side in sides)
                formula = origin and bool(words & {"absolute", "response"})
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                left, right = ast.unparse(node.left), ast.unparse(node.right)
                formula = "prompt" in left and "size" in right
            if formula:
                wrong.append(f"{path}:{node.lineno}: {ast.unparse(node)} belongs in block_grid.py")
    return wrong


def no_simple_namespace(sources: dict) -> list[str]:
    return [
        f"{path}:{number}: a typed object in place of SimpleNamespace"
        for path, text in python(sources, "bwsft/", "benchmarks/")
        for number, line in enumerate(text.splitlines(), 1)
        if "SimpleNamespace" in line
    ]


def lines_end_at_line_feeds(sources: dict) -> list[str]:
    """utils/lines.py says what a line is; str.splitlines cuts at ten other characters too."""
    return [
        f"{path}:{node.lineno}: lines.split in place of splitlines"
        for path, text in python(sources, "bwsft/")
        for node in ast.walk(parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "splitlines"
    ]


def prints_through_say(sources: dict) -> list[str]:
    """utils/lines.py's `say` takes out what a terminal would obey. (A child of MATH's scoring
    speaks to its parent alone.)"""
    allowed = ("bwsft/utils/lines.py", "bwsft/evaluation/math_verify_child.py")
    return [
        f"{path}:{node.lineno}: say in place of print"
        for path, text in python(sources, "bwsft/")
        for node in (ast.walk(parse(text)) if path not in allowed else ())
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]


def parameters_are_annotated(sources: dict) -> list[str]:
    """In objectives, training, decoding and the kernels' public files: those that __init__ imports
    and those without an underscore."""
    init = sources.get(f"{KERNELS}__init__.py", "")
    public = [f"{KERNELS}{found.module[1:]}.py" for found in imports(init)]
    places = ("bwsft/objectives/", "bwsft/training/", "bwsft/decoding/", *public)
    wrong = []
    for path, node in functions(sources, "bwsft/", KERNELS):
        if not (path.startswith(places) or re.fullmatch(rf"{KERNELS}[a-z]\w+.py", path)):
            continue
        a = node.args
        every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
        wrong += [
            f"{path}:{p.lineno}: {node.name}'s parameter {p.arg} has no annotation"
            for p in every
            if p.annotation is None and p.arg not in ("self", "cls", "ctx")
        ]
    return wrong


def words_of_the_field(sources: dict) -> list[str]:
    wrong = []
    gap = r"(?: |_| *\n *#? ?)"  # a phrase may be broken over two lines of a text or comment
    rules = {
        re.compile(rf"(?<![A-Za-z])(?:{p.replace(' ', gap)})(?![A-Za-z])", re.I): better
        for p, better in BANNED.items()
    }
    for path, text in sources.items():
        if path in ("tests/house_rules.py", "tests/project/test_layout.py"):
            continue
        lines = text.splitlines()
        for pattern, better in rules.items():
            for match in pattern.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                if OLD_SPELLING not in lines[line - 1]:
                    said = " ".join(match[0].split())
                    wrong.append(f"{path}:{line}: not {said!r} but {better!r}")
    return wrong


def passes_beside_tpf(sources: dict) -> list[str]:
    """A table that tells forward passes tells tokens per forward (TPF) too: in a page, and in a
    file of bwsft that prints one."""
    wrong = []
    for path, text in sources.items():
        for number, line in enumerate(text.splitlines(), 1):
            cells = {cell.strip() for cell in line.split("|")} if path.endswith(".md") else set()
            if cells & {"passes", "forward passes"} and "TPF" not in cells:
                wrong.append(f"{path}:{number}: a table with passes has a column TPF")
            if path.startswith("bwsft/") and '"forward passes"' in line and "TPF" not in text:
                wrong.append(f"{path}:{number}: a table with forward passes has TPF too")
    return wrong


def names_are_defined_once(sources: dict) -> list[str]:
    """Of two functions or classes of one name in one place the first is dead; overloads and the
    accessors of a property are decorated."""
    wrong = []
    for path, text in python(sources, "bwsft/", "kernels/", "benchmarks/", "tests/"):
        for place in ast.walk(parse(text)):
            if not isinstance(place, ast.Module | ast.ClassDef):
                continue
            seen = set()
            for node in place.body:
                if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                    continue
                accessor = isinstance(node, ast.FunctionDef) and node.decorator_list
                if node.name in seen and not accessor:
                    wrong.append(f"{path}:{node.lineno}: {node.name} is defined twice")
                seen.add(node.name)
    return wrong


def functions_fit_on_a_page(sources: dict) -> list[str]:
    """Triton kernels apart, whose parameters alone take a dozen lines."""
    return [
        f"{path}:{node.lineno}: {node.name} has {length} lines, 60 at most"
        for path, node in functions(sources, "bwsft/", "kernels/", "benchmarks/")
        if (length := node.end_lineno - node.lineno + 1) > 60 and not path.endswith("_triton.py")
    ]


def places_and_sizes(sources: dict) -> list[str]:
    """kernels/__init__.py would shadow the `kernels` package of the Hub for whoever runs from the
    root."""
    named = {"kernels/__init__.py", "tests/__init__.py", "conftest.py", "benchmarks/__init__.py"}
    wrong = [f"{path}:1: must not exist" for path in sorted(named & sources.keys())]
    entries = {p.split("/")[1] for p in sources if p.startswith("bwsft/")}
    if len(entries - {"__init__.py", "__main__.py"}) > 16:
        wrong.append(f"bwsft:1: more than 16 entries: {sorted(entries)}")
    if (lines := sources.get("README.md", "").count("\n")) >= 200:
        wrong.append(f"README.md:{lines}: fewer than 200 lines, please")
    return wrong

"""The walls inside of the Python package, for check_layers.py.

    float8: recipes, filter, _library, _tune <- torch <- adapters, torchao
    float8.torch, from the bottom up: the modules of GROUND, then the rooms in the order of ROOMS

A module imports what lies below its room or in it, and no circle comes of it; what is imported for types
alone does not count. Imports stand at the top of a file, but those of LATE, which take a while to load.
"""
import ast

GROUND = ("_schemas", "contexts", "pipelines", "norm_casts", "shared_casts", "_ops", "_linear", "amaxes", "base_linear", "notices", "traced", "tuning", "attention_dtensors", "attention", "varlen", "rotary", "rms_norm", "classes")
ROOMS = ("ranks", "scale_home", "scales", "step_sync", "shard", "parallel", "experts", "layer", "optim", "checks", "functional", "__init__")
LATE = {
    ("layer.linear", "parallel.tensor_parallel"),
    ("layer.mlps.mlp", "parallel.tensor_parallel"),
    ("_ops", "shared_casts"),
    ("attention", "attention_dtensors"),
    ("varlen", "attention_dtensors"),
    ("__init__", "layer.parallel_styles"),
}
TORCH = "float8.torch"
ABOVE = ("adapters", "torchao")  # of float8, they may import all


def module_of(path):
    """`float8.torch.layer.linear` of python/float8/torch/layer/linear.py."""
    return path.removeprefix("python/").removesuffix(".py").replace("/", ".")


def level(module):
    """The height of a module of float8.torch, given without that name; None for an unknown room."""
    room = module.split(".")[0]
    if room in GROUND:
        return 0
    return ROOMS.index(room) + 1 if room in ROOMS else None


def imports(tree):
    """The modules that a file may import when it runs: (line, module, names, whether late)."""

    def visit(node, late):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                yield from (found for each in child.orelse for found in visit(each, late))
                continue
            if isinstance(child, ast.ImportFrom) and child.module and not child.level:
                yield child.lineno, child.module, [each.name for each in child.names], late
            elif isinstance(child, ast.Import):
                for each in child.names:
                    yield child.lineno, each.name, [], late
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from visit(child, late or is_function)

    yield from visit(tree, False)


def findings(files):
    """What breaks the rules in these files, texts by paths from the root."""
    modules = {module_of(path): path for path in files if path.startswith("python/float8/")}
    uses = {}
    for module, path in modules.items():
        uses[module] = set()
        for line, base, names, late in imports(ast.parse(files[path])):
            targets = {f"{base}.{n}" if f"{base}.{n}" in modules else base for n in names} or {base}
            for target in sorted(targets):
                target = f"{target}.__init__" if f"{target}.__init__" in modules else target
                if target in modules and target != module:
                    uses[module].add(target)
                    yield from _import_findings(f"{path}:{line}", module, target, late)
    yield from _circles(uses, modules)


def _import_findings(at, module, target, late):
    own, there = (name.split(".")[1] for name in (module, target))
    if there in ABOVE and own not in ABOVE:
        yield f"{at}: imports {target}: only {' and '.join(ABOVE)} may"
    elif there == "torch" and own not in ("torch", *ABOVE):
        yield f"{at}: imports {target}: float8.{own} needs no PyTorch"
    if not (module.startswith(TORCH + ".") and target.startswith(TORCH + ".")):
        return
    module, target = (name.removeprefix(TORCH + ".") for name in (module, target))
    heights = level(module), level(target)
    if None in heights:
        yield f"{at}: {module} or {target} is in no room: {', '.join(GROUND + ROOMS)}"
    elif heights[1] > heights[0]:
        yield f"{at}: imports {target}, which lies above {module}"
    if late and (module, target) not in LATE:
        yield f"{at}: imports {target} in a function: import it at the top of the file"


def _circles(uses, modules):
    """Follows the imports from each module; a module that is met again on the way is in a circle."""
    done = set()

    def visit(module, way):
        if module in way:
            circle = [*way[way.index(module):], module]
            yield f"{modules[module]}:1: imports in a circle: {' -> '.join(circle)}"
        elif module not in done:
            for target in sorted(uses[module]):
                yield from visit(target, [*way, module])
            done.add(module)

    for module in sorted(uses):
        yield from visit(module, [])

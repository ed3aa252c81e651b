#!/usr/bin/env python3
"""Compares the texts of all error messages with tests/golden/messages.txt, so that a change of words is one diff.

    check_messages.py ROOT             fails where the golden file is not what the sources say
    check_messages.py --update ROOT    writes it
    check_messages.py --self-test      proves that a changed word is seen

A message is what a call of CALLS in C++, or a raise in Python, has of string literals: adjacent ones are one
text, and those that stand in different arguments are parted by " | ". What Python fills in is "{}". A text that a
variable holds is not seen. Tests of behaviour pin codes, fields and remedies alone.
"""
import ast
import difflib
import pathlib
import re
import sys
import tempfile

FOLDERS = ("base", "recipes", "codegen", "runtime", "tuning_db", "tools", "python/shim", "python/float8")
GOLDEN = pathlib.Path("tests/golden/messages.txt")
CALLS = re.compile(r"\b(?:fail|refuse\w*|throw\s+[\w:]+)\s*\(")
# What of a C++ source matters here: comments, raw strings, strings, characters, and parentheses.
TOKEN = re.compile(r"""
    //[^\n]* | /\*.*?\*/
    | R"(\w*)\((?P<raw>.*?)\)\1"
    | "(?P<text>(?:[^"\\\n]|\\.)*)" | '(?:[^'\\\n]|\\.)'
    | \S""", re.S | re.X)


def literals_of_call(source, start):
    """The string literals from `start`, behind a "(", to its ")"."""
    texts, depth, adjacent = [], 1, False
    for token in TOKEN.finditer(source, start):
        piece = token.group()
        if piece.startswith(("//", "/*")):
            continue
        text = token["raw"] if token["raw"] is not None else token["text"]
        if text is None:
            depth += {"(": 1, ")": -1}.get(piece, 0)
            if depth == 0:
                break
        elif adjacent:
            texts[-1] += text
        else:
            texts.append(text)
        adjacent = text is not None
    return texts


def cpp_messages(source):
    inside = [t.span() for t in TOKEN.finditer(source) if len(t.group()) > 1]  # comments and literals
    for call in CALLS.finditer(source):
        if not any(begin <= call.start() < end for begin, end in inside):
            yield literals_of_call(source, call.end())


def python_texts(node):
    """The literals of an expression in order, with {} for what an f-string fills in."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from python_texts(child)


def python_messages(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield [text for each in node.exc.args for text in python_texts(each)]


def messages(root):
    """The text of the golden file."""
    lines = []
    files = [f for folder in FOLDERS for f in (root / folder).rglob("*") if f.suffix in (".cpp", ".hpp", ".py")]
    for file in sorted(files):
        source = file.read_text(encoding="utf-8")
        found = python_messages(source) if file.suffix == ".py" else cpp_messages(source)
        texts = {" | ".join(t for t in texts if " " in t).replace("\n", "\\n") for texts in found} - {""}
        if texts:
            lines += ["", file.relative_to(root).as_posix(), *("  " + text for text in sorted(texts))]
    return "\n".join(lines[1:]) + "\n"


def differences(root):
    golden = root / GOLDEN
    before = golden.read_text(encoding="utf-8").splitlines() if golden.exists() else []
    return list(difflib.unified_diff(before, messages(root).splitlines(), str(GOLDEN), "the sources", "", "", 1))


def self_test():
    sources = {
        "base/a.cpp": 'return fail(kIo, "{} is "  // "no"\n  "open; close it", x.path(")"), ok ? "a b" : "c d");\n',
        "python/float8/a.py": 'raise ValueError(f"float8: {x} is " "no number")\n',
        "tools/a.cpp": '// fail("in a comment")\nauto s = "fail(\\"a b\\")"; throw std::runtime_error("two words");\n',
    }
    expected = ("base/a.cpp\n  {} is open; close it | a b | c d\n\npython/float8/a.py\n  float8: {} is no number\n\n"
                "tools/a.cpp\n  two words\n")
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name)
        for path, text in {**sources, str(GOLDEN): expected}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        findings = differences(root)
        (root / "tools/a.cpp").write_text(sources["tools/a.cpp"].replace("two words", "two other words"))
        changed = [line for line in differences(root) if re.match(r"[+-]  ", line)]
    if changed != ["-  two words", "+  two other words"]:
        findings.append(f"a changed word gives {changed}")
    return findings


def main(arguments):
    if arguments == ["--self-test"]:
        findings = self_test()
    elif len(arguments) == 2 and arguments[0] == "--update":
        root = pathlib.Path(arguments[1])
        (root / GOLDEN).write_text(messages(root), encoding="utf-8")
        return 0
    elif len(arguments) == 1:
        findings = differences(pathlib.Path(arguments[0]))
        if findings:
            findings.append("where the new words are meant: python3 tests/messages/check_messages.py --update .")
    else:
        print(__doc__, file=sys.stderr)
        return 2
    print("\n".join(findings) or "the messages are those of the golden file")
    return 1 if findings else 0


sys.exit(main(sys.argv[1:]))

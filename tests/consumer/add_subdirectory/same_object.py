"""A compiler's launcher: same_object.py BUILD SUBFOLDER COMPILER ARGUMENTS...

SUBFOLDER builds float8 within another project, BUILD by itself. An object of SUBFOLDER is that of BUILD where
both are compiled by one command from one text, but for the folders' names and -Werror; any other is compiled.
"""
import json
import pathlib
import shutil
import subprocess
import sys


def normal(words, folder, build):
    """A command without what makes no other object, with `build` for `folder`."""
    kept, words = [], iter(words)
    for word in words:
        if word in ("-MT", "-MF"):
            next(words)
        elif word not in ("-MD", "-Werror"):
            kept.append(word.replace(folder, build))
    return kept


def command_of(build, output):
    """The words by which `build` compiles this file, from the compiler on."""
    for entry in json.loads((build / "compile_commands.json").read_text()):
        words = entry["command"].split()
        if words[words.index("-o") + 1] == output:
            return words
    return []


def is_same(command, build, folder, output):
    theirs = normal(command_of(build, output), str(build), str(build))
    ours = normal(command, str(folder), str(build))
    if not theirs or not (build / output).exists():
        return False
    ours[ours.index("-o") + 1] = output
    if theirs[-len(ours):] != ours:  # theirs may have a launcher too
        return False
    source = pathlib.Path(command[-1])
    if not source.is_relative_to(folder):
        return True
    theirs_text = (build / source.relative_to(folder)).read_text()
    return source.read_text().replace(str(folder), str(build)) == theirs_text


def main():
    build, folder, command = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
    output = pathlib.Path(command[command.index("-o") + 1]).absolute()
    try:
        name = output.relative_to(folder)
        if is_same(command, build, folder, str(name)):
            shutil.copyfile(build / name, output)
            return 0
    except (ValueError, FileNotFoundError):
        pass  # a target of the other project, or BUILD has no such file
    return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main())

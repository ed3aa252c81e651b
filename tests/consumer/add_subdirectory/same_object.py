"""A compiler's launcher: same_object.py BUILD SUBFOLDER COMPILER ARGUMENTS...

SUBFOLDER builds float8 within another project, BUILD by itself. Where BUILD compiled an equal text by an equal
command, but for the folders' names and -Werror, its object is taken. All else is compiled, and so is what includes
generated headers, which are not compared.
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys


def normal(command):
    """The command without words that make no other object."""
    return re.sub(r" -M[TF] \S+| -MD| -Werror(?= )", "", command)


def same_object(build, folder, command):
    """The object of `build`, where it is the one that `command` makes."""
    words, output, source = " ".join(command), command[command.index("-o") + 1], command[-1]
    name = os.path.relpath(output, folder)
    made, commands = pathlib.Path(build, name), pathlib.Path(build, "compile_commands.json")
    if f" -I{folder}" in words or not made.exists() or not commands.exists():
        return None
    ours = normal(words.replace(f" -o {output} ", f" -o {name} ").replace(folder, build))
    if ours not in [normal(entry["command"]) for entry in json.loads(commands.read_text())]:
        return None
    included = re.findall(r'^#include "(.*)"', pathlib.Path(source).read_text(), re.MULTILINE)  # CMake's units
    for file in [source] + [each for each in included if each.startswith(folder)]:
        text = pathlib.Path(file).read_text().replace(folder, build)
        if text != pathlib.Path(file.replace(folder, build)).read_text():
            return None
    return made


def main():
    build, folder, *command = sys.argv[1:]
    made = same_object(build, folder, command)
    if made is None:
        return subprocess.call(command)
    shutil.copyfile(made, command[command.index("-o") + 1])
    return 0


if __name__ == "__main__":
    sys.exit(main())

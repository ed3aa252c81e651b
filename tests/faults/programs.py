"""The programs of the campaign: what each of them writes, and in which form that can be compared."""
import json
import os
import pathlib
import random
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time

from scenario import Scenario, TIMEOUT_S, expect


class Prewarm(Scenario):
    """Two kernels are missing from a cache."""
    name = "prewarm"
    meets_full_memory = False  # its report has other words for each kernel
    writes_unreadable = False  # a cache is opened once, to read it
    temporaries = ("tmp.",)
    missing = 2

    def prepare(self, folder):
        self.programs.must(self.command(folder / "cache"), folder)
        entries = sorted(p for p in (folder / "cache").iterdir() if p.is_dir())
        self.entries = len(entries)
        for entry in entries[:self.missing]:
            shutil.rmtree(entry)

    def set_up(self, folder):
        shutil.copytree(self.shared / "cache", folder / "work", dirs_exist_ok=True)
        (folder / "work").chmod(0o700)

    def command(self, cache):
        return [self.programs.tool, "prewarm", "--model", "mistral-7b", "--recipe", "rowwise", "--json",
                "--threads", "1", "--cache-dir", cache]

    def argv(self, folder):
        return self.command(folder / "work")

    def contents(self, folder):
        """The number of entries, each of them whole."""
        entries = [p for p in (folder / "work").iterdir() if p.is_dir() and len(p.name) == 32]
        for entry in entries:
            manifest = (entry / "manifest").read_text()
            expect(manifest.startswith("float8 cubin 1\nkey " + entry.name), f"{entry.name}: half a manifest")
            size = int(manifest.split("cubin_bytes ")[1].split()[0])
            expect((entry / "kernel.cubin").stat().st_size == size, f"{entry.name}: half a cubin")
        return len(entries)

    def check_report(self, outcome, contents, new):
        expect(outcome.code in (0, 1), f"exit code {outcome.code}: {outcome.err}")
        if not outcome.out:  # the cache could not be opened
            expect(outcome.code == 1 and outcome.err.strip(), "ends without a report and without a word")
            return
        report = outcome.json()
        expect(outcome.code == (1 if report["not_stored"] else 0), "the exit code is not the report's")
        expect(report["total"] == self.entries, "a kernel is missing from the report")
        if outcome.code == 0:
            expect(contents == new, "reports success, and a kernel is not in the cache")

    def check_after(self, folder, outcome, may_leave):
        contents = self.contents(folder)  # one of two may be stored
        expect(self.old <= contents <= self.new, "an entry is lost")
        if outcome is not None and not outcome.killed:
            self.check_report(outcome, contents, self.new)
        self.check_left(folder, may_leave)
        again = self.programs.must(self.argv(folder), folder)
        report = again.json()
        expect(report["from_cache"] == contents, "an entry is compiled again")
        expect(report["not_stored"] == 0 and "damaged" not in again.err, again.err)
        expect(self.contents(folder) == self.new, "a later run did not store all kernels")
        shutil.rmtree(folder)

    def check_left(self, folder, may_leave, journals=()):
        # Locks stay, and so does what a fault keeps from being removed.
        left = [p.name for p in (folder / "work").iterdir()
                if not (p.is_dir() and len(p.name) == 32) and not p.name.endswith(".lock")]
        expect(may_leave or not left, f"leaves {left} behind")
        expect(all(name.startswith(self.temporaries) for name in left), f"leaves {left} behind")


class Output(Scenario):
    """A command that replaces one file."""
    temporaries = (".out", "out.")
    old_bytes = b"older contents\n" * 400
    stream = "-"  # what stands for standard output where the target is named

    def target(self, folder):
        return folder / "work" / "out"

    def set_up(self, folder):
        self.target(folder).write_bytes(self.old_bytes)

    def contents(self, folder):
        return self.target(folder).read_bytes()


class Export(Output):
    def __init__(self, programs, form):
        super().__init__(programs)
        self.form = form
        self.name = "db export " + form

    def prepare(self, folder):
        Import.make_database(self.programs, folder, "a.db", Import.new_lines)

    def argv(self, folder):
        return [self.programs.tool, "db", "export", "--format", self.form, "--db", self.shared / "a.db",
                "-o", self.target(folder)]


class ExportDatabase(Export):
    """The copy is compared by its rows."""
    temporaries = (".out", "out")

    def contents(self, folder):
        if self.target(folder).read_bytes() == self.old_bytes:
            return "old"
        return Import.rows(self.programs, self.target(folder))


class Verdicts(Output):
    name = "filter --verdicts"

    def argv(self, folder):
        return [self.programs.tool, "filter", "--model", "mistral-7b", "--tokens", "8192", "--recipe",
                "rowwise", "--quiet", "--verdicts", self.target(folder)]


class SaveScales(Output):
    name = "scales_save_file"
    stream = "/dev/stdout"

    def argv(self, folder):
        return [self.programs.save_scales, self.target(folder)]


class Import(Scenario):
    """Rows are added to a database, or to one that does not exist yet."""
    temporaries = ("user.db.new-",)
    journals = ("user.db-journal", "user.db-wal", "user.db-shm")
    old_lines = 40
    new_lines = 90
    lock = threading.Lock()
    source = None

    def __init__(self, programs, exists):
        super().__init__(programs)
        self.exists = exists
        self.name = "db import" if exists else "db import into a new one"

    @classmethod
    def lines(cls, programs, folder, count):
        """The first rows of the built-in database as a file: the device, the run, some trials."""
        with cls.lock:
            if cls.source is None:
                programs.must([programs.tool, "db", "export", "-o", folder / "all.jsonl"], folder)
                with open(folder / "all.jsonl") as file:
                    cls.source = [next(file) for _ in range(cls.new_lines)]
                (folder / "all.jsonl").unlink()
        path = folder / f"{count}.jsonl"
        path.write_text("".join(cls.source[:count]))
        return path

    @classmethod
    def make_database(cls, programs, folder, name, count):
        programs.must([programs.tool, "db", "import", cls.lines(programs, folder, count), "--db",
                       folder / name], folder)

    @staticmethod
    def rows(programs, database):
        """All rows as text, of a copy: reading may roll a journal back."""
        with tempfile.TemporaryDirectory() as folder:
            for file in database.parent.glob(database.name + "*"):
                shutil.copy(file, folder)
            copy = pathlib.Path(folder) / database.name
            programs.must([programs.tool, "db", "check", "--db", copy], folder)
            rows = pathlib.Path(folder) / "rows"
            programs.must([programs.tool, "db", "export", "--db", copy, "-o", rows], folder)
            return rows.read_text()

    def prepare(self, folder):
        self.make_database(self.programs, folder, "old.db", self.old_lines)
        self.file = self.lines(self.programs, folder, self.new_lines)
        if not self.exists:
            self.empty = (folder / "empty.db")
            self.make_database(self.programs, folder, "empty.db", 1)

    def set_up(self, folder):
        if self.exists:
            shutil.copy(self.shared / "old.db", folder / "work" / "user.db")

    def argv(self, folder):
        return [self.programs.tool, "db", "import", self.file, "--db", folder / "work" / "user.db"]

    def contents(self, folder):
        path = folder / "work" / "user.db"
        if not self.exists:
            # A database without rows is as good as none, and so is an empty file: the next run fills it.
            if not path.exists() or path.stat().st_size == 0:
                return None
            rows = self.rows(self.programs, path)
            return None if rows == self.rows(self.programs, self.empty) else rows
        return self.rows(self.programs, path)


class Collect(Import):
    """Rows are removed from a database: all of them or none. A backup is as an export is, so none is made."""

    def __init__(self, programs):
        super().__init__(programs, exists=True)
        self.name = "db gc"

    def argv(self, folder):
        return [self.programs.tool, "db", "gc", "--older-than", "1s", "--include-current", "--no-backup", "--db",
                folder / "work" / "user.db"]


class GoneReader:
    """Programs that write into a fifo or a pipe whose reader leaves after some bytes: they end with one
    line, by no signal, and leave nothing in the folder of temporary files."""

    def __init__(self, programs, outputs):
        self.programs = programs
        self.outputs = outputs  # scenarios whose argv names their target
        self.names = [f"{s.name} into a {kind}" for s in outputs for kind in ("fifo", "pipe")]

    def meet(self, at, read):
        """The at-th of names, whose reader leaves after `read` bytes."""
        scenario, is_fifo = self.outputs[at // 2], at % 2 == 0
        folder = pathlib.Path(tempfile.mkdtemp(dir=scenario.shared.parent))
        (folder / "work").mkdir()
        (folder / "tmp").mkdir()
        target = scenario.target(folder)
        argv = [str(a) for a in scenario.argv(folder)]
        if is_fifo:
            os.mkfifo(target)
            reader = os.open(target, os.O_RDONLY | os.O_NONBLOCK)
            out = subprocess.DEVNULL
        else:
            argv[argv.index(str(target))] = scenario.stream
            reader, out = os.pipe()
        child = subprocess.Popen(argv, cwd=folder, env=self.programs.environment(TMPDIR=str(folder / "tmp")),
                                 stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, text=True)
        if not is_fifo:
            os.close(out)
        self.read_some(reader, read, child)
        os.close(reader)
        try:
            _, err = child.communicate(timeout=TIMEOUT_S)
        finally:
            child.kill()
        expect(child.returncode >= 0, f"ends by signal {-child.returncode}: {err}")
        if child.returncode != 0:  # else all that it wrote fitted into the pipe
            expect(len(err.splitlines()) == 1 and "Broken pipe" in err, f"exits {child.returncode}: {err}")
        expect(not any((folder / "tmp").iterdir()), "leaves a temporary file behind")
        expect([p for p in (folder / "work").iterdir()] == ([target] if is_fifo else []), "leaves a file behind")
        shutil.rmtree(folder)

    @staticmethod
    def read_some(reader, count, child):
        """Reads so many bytes, or all that the child writes. A fifo has a reader before its writer: at
        least one byte is waited for, since a writer waits for a reader."""
        while child.poll() is None or select.select([reader], [], [], 0)[0]:
            if not select.select([reader], [], [], 0.05)[0]:
                continue
            part = os.read(reader, min(count, 1 << 16))
            count -= len(part)
            if count <= 0 or not part:
                return


class ColdCache:
    """Processes that fill one cold cache together compile each kernel once."""

    def __init__(self, programs, processes):
        self.programs, self.processes = programs, processes

    def start(self, folder, log):
        command = Prewarm(self.programs).command(folder / "cache")
        command[command.index("--threads") + 1] = "2"
        return subprocess.Popen([str(a) for a in command], cwd=folder, text=True,
                                env=self.programs.environment(FLOAT8_FAKE_NVRTC_LOG=str(log),
                                                              FLOAT8_FAKE_NVRTC_MS="15"),
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def race(self, shared, kills, seed):
        folder = pathlib.Path(tempfile.mkdtemp(dir=shared))
        log = folder / "log"
        children = [self.start(folder, log) for _ in range(self.processes)]
        chance = random.Random(seed)
        for child in chance.sample(children, kills):
            time.sleep(chance.uniform(0, 0.08))
            child.kill()
        compiled, killed = 0, 0
        for child in children:
            out, err = child.communicate(timeout=TIMEOUT_S)
            if child.returncode == -signal.SIGKILL:
                killed += 1
                continue
            expect(child.returncode == 0, f"exits {child.returncode}: {err}")
            expect("damaged" not in err, err)
            report = json.loads(out)
            compiled += report["compiled"]
        kernels = report["total"]
        logged = len(log.read_text().splitlines())
        if killed == 0:
            expect(compiled == kernels == logged, f"{compiled} compiles of {kernels} kernels, {logged} calls")
        else:  # a killed process leaves at most the kernels that its threads had begun
            expect(logged <= kernels + 2 * killed, f"{logged} compiles of {kernels} kernels, {killed} kills")
        again = self.programs.must(Prewarm(self.programs).command(folder / "cache"), folder)
        expect(again.json()["from_cache"] == kernels, "a kernel is not in the cache")
        shutil.rmtree(folder)
        return killed

#!/usr/bin/env python3
"""Faults at every file operation of the programs that write files; nothing may be lost.

Each scenario is a program that writes, in a folder with older contents. It runs with one fault: an
operation that fails, or a kill -9 before, in the middle of or after it (interpose.c). Then
  - the result is the old contents or the new ones, whole, and never a part under the final name;
  - a program that reports success has written the new contents;
  - a program that fails says so in a line on standard error, and leaves nothing else behind;
  - the same command, run again, succeeds with the new contents.
The short campaign takes a sample of the faults by a seed, with at least one of each kind of operation
and each kind of fault of each scenario; FLOAT8_LONG_CAMPAIGN takes all of them. Beside them are kills
at random moments, and cold caches that many processes fill at once.
"""
import argparse
import concurrent.futures
import json
import mmap
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

KINDS = ["open", "write", "fsync", "rename", "mkdir", "truncate", "unlink", "link"]
ACTIONS = ["fail", "short", "kill", "kill_short", "kill_after"]
TIMEOUT_S = 120


class Failed(Exception):
    """A property that does not hold; the message says which."""


def expect(holds, words):
    if not holds:
        raise Failed(words)


class Outcome:
    def __init__(self, code, out, err, counts, fired):
        self.code, self.out, self.err = code, out, err
        self.counts, self.fired = counts, fired
        self.killed = code == -signal.SIGKILL

    def json(self):
        return json.loads(self.out)


class Programs:
    """The programs under test and how they are started."""

    def __init__(self, tool, save_scales, libraries):
        self.tool = str(pathlib.Path(tool).resolve())
        self.save_scales = str(pathlib.Path(save_scales).resolve())
        self.libraries = pathlib.Path(libraries).resolve()

    def environment(self, **more):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("FLOAT8_", "XDG_"))}
        env.update(LD_LIBRARY_PATH=str(self.libraries), HOME="", FLOAT8_CACHE_DIR="/nonexistent/cache", **more)
        return env

    def run(self, argv, folder, under=None, fault=None, **more):
        """Runs a program in `folder`. Operations under `under` are counted, and `fault`, a tuple of
        kind, number and action, happens to one of them."""
        env = self.environment(**more)
        counters = None
        if under is not None:
            counters = tempfile.NamedTemporaryFile()
            counters.write(bytes(8 * (len(KINDS) + 1)))
            counters.flush()
            env.update(LD_PRELOAD=str(self.libraries / "libfault_interpose.so"),
                       FLOAT8_FAULT_FILE=counters.name, FLOAT8_FAULT_UNDER=str(under))
            if fault is not None:
                env.update(FLOAT8_FAULT_CALL=fault[0], FLOAT8_FAULT_AT=str(fault[1]),
                           FLOAT8_FAULT_DO=fault[2])
        try:
            done = subprocess.run(argv, cwd=folder, env=env, stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"hangs: {' '.join(argv)}")
        counts, fired = {}, 0
        if counters is not None:
            counters.seek(0)
            *numbers, fired = struct.unpack(f"{len(KINDS) + 1}Q", counters.read())
            counts = dict(zip(KINDS, numbers))
            counters.close()
        return Outcome(done.returncode, done.stdout, done.stderr, counts, fired)

    def must(self, argv, folder, **more):
        outcome = self.run([str(a) for a in argv], folder, **more)
        expect(outcome.code == 0, f"{' '.join(map(str, argv))} exits {outcome.code}: {outcome.err}")
        return outcome


class Scenario:
    """A command that writes below folder/"work". `contents` gives what it wrote in a form that can be
    compared, None where there is nothing; it fails on a part."""
    name = ""
    temporaries = ()  # how the names begin that a kill may leave behind
    journals = ()  # and those that also a failure may, which the next run uses and removes

    def __init__(self, programs):
        self.programs = programs

    def prepare(self, folder):
        """Makes what all runs share; called once."""

    def set_up(self, folder):
        """Makes the older contents below folder/"work"."""

    def argv(self, folder):
        raise NotImplementedError

    def contents(self, folder):
        raise NotImplementedError

    def check_report(self, outcome, contents, new):
        """What the program said of itself."""
        expect(outcome.code >= 0, f"ends by signal {-outcome.code}: {outcome.err}")
        if outcome.code == 0:
            expect(contents == new, "reports success, and the contents are not the new ones")
        else:
            expect(outcome.err.strip(), "fails without a word")
            expect("internal error" not in outcome.err, outcome.err)

    # --- the same for all

    def begin(self, shared):
        self.shared = pathlib.Path(shared) / self.name
        self.shared.mkdir()
        self.prepare(self.shared)
        folder = self.new_folder()
        self.old = self.contents(folder)
        clean = self.run(folder, under=folder / "work")
        expect(clean.code == 0, f"{self.name} fails without a fault: {clean.err}")
        self.counts = clean.counts
        self.new = self.contents(folder)
        self.files = self.names(folder)
        expect(self.new is not None and self.new != self.old, f"{self.name} changes nothing")
        shutil.rmtree(folder)

    def new_folder(self):
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.shared.parent))
        (folder / "work").mkdir()
        self.set_up(folder)
        return folder

    def names(self, folder):
        return {str(p.relative_to(folder / "work")) for p in (folder / "work").rglob("*")}

    def run(self, folder, under=None, fault=None):
        return self.programs.run([str(a) for a in self.argv(folder)], folder, under, fault)

    def all_faults(self):
        for kind in KINDS:
            for action in ACTIONS:
                if "short" in action and kind != "write":
                    continue
                for at in range(1, self.counts[kind] + 1):
                    yield kind, at, action

    def meet(self, fault):
        """One run with a fault, and all that must hold after it."""
        folder = self.new_folder()
        outcome = self.run(folder, under=folder / "work", fault=fault)
        expect(outcome.fired == 1, f"the fault did not happen: {outcome.counts}")
        expect(outcome.killed == ("kill" in fault[2]), f"exit code {outcome.code}: {outcome.err}")
        self.check_after(folder, outcome, may_leave=outcome.killed or fault[0] == "unlink")

    def kill_at(self, seconds):
        folder = self.new_folder()
        child = subprocess.Popen([str(a) for a in self.argv(folder)], cwd=folder,
                                 env=self.programs.environment(), stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        child.kill()
        child.wait()
        self.check_after(folder, None, may_leave=True)

    def check_after(self, folder, outcome, may_leave):
        contents = self.contents(folder)
        expect(contents in (self.old, self.new), "the contents are neither the old nor the new ones")
        if outcome is not None and not outcome.killed:
            self.check_report(outcome, contents, self.new)
        self.check_left(folder, may_leave, self.journals)
        again = self.run(folder)
        expect(again.code == 0, f"a later run exits {again.code}: {again.err}")
        expect(self.contents(folder) == self.new, "a later run did not write the new contents")
        self.check_left(folder, may_leave)
        shutil.rmtree(folder)

    def check_left(self, folder, may_leave, journals=()):
        for name in sorted(self.names(folder) - self.files):
            if name not in journals and not (may_leave and name.startswith(self.temporaries)):
                raise Failed(f"leaves {name} behind")


class Prewarm(Scenario):
    """Two kernels are missing from a cache."""
    name = "prewarm"
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


def sample(scenario, chance, most):
    """Some faults of a scenario: one of each kind of operation and of fault, then any."""
    faults = list(scenario.all_faults())
    if most is None or len(faults) <= most:
        return faults
    chance.shuffle(faults)
    seen, first, rest = set(), [], []
    for fault in faults:
        group = (fault[0], fault[2])
        (rest if group in seen else first).append(fault)
        seen.add(group)
    return first + rest[:max(0, most - len(first))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", required=True)
    parser.add_argument("--save-scales", required=True)
    parser.add_argument("--libraries", required=True)
    parser.add_argument("--only", help="scenarios whose names contain this")
    parser.add_argument("--fault", help="KIND:N:ACTION, to see one again")
    parser.add_argument("--keep", action="store_true", help="keep the folders of what fails")
    options = parser.parse_args()
    long = os.environ.get("FLOAT8_LONG_CAMPAIGN", "") not in ("", "0")
    seed = int(os.environ.get("FLOAT8_CAMPAIGN_SEED", "18"))
    programs = Programs(options.tool, options.save_scales, options.libraries)
    scenarios = [Prewarm(programs), Import(programs, True), Import(programs, False),
                 Export(programs, "jsonl"), Export(programs, "table"), ExportDatabase(programs, "db"),
                 Verdicts(programs), SaveScales(programs)]
    scenarios = [s for s in scenarios if options.only is None or options.only in s.name]
    shared = tempfile.mkdtemp(prefix="float8-faults-")
    failures, totals = [], {}
    began = time.monotonic()

    def attempt(name, what, body):
        try:
            body()
        except Failed as failure:
            failures.append(f"{name}, {what}: {failure}")

    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        pending = []
        for scenario in scenarios:
            scenario.begin(shared)
            chance = random.Random(f"{seed} {scenario.name}")
            faults = sample(scenario, chance, None if long else 20)
            if options.fault:
                kind, at, action = options.fault.split(":")
                faults = [(kind, int(at), action)]
            kills = 0 if options.fault else 40 if long else 2
            totals[scenario.name] = (len(faults), len(list(scenario.all_faults())), kills)
            for fault in faults:
                words = "{}:{}:{}".format(*fault)
                pending.append(pool.submit(attempt, scenario.name, words,
                                           lambda s=scenario, f=fault: s.meet(f)))
            for _ in range(kills):
                after = chance.uniform(0, 0.15)
                pending.append(pool.submit(attempt, scenario.name, f"killed after {after:.3f} s",
                                           lambda s=scenario, t=after: s.kill_at(t)))
        for done in pending:
            done.result()
    if options.only is None:
        races = [(8, 0)] * 2 + [(8, 4)] * 2 if not long else [(32, 0)] * 5 + [(16, 8)] * 40
        for number, (processes, kills) in enumerate(races):
            attempt("cold cache", f"{processes} processes, {kills} kills",
                    lambda p=processes, k=kills, n=number: ColdCache(programs, p).race(shared, k, seed + n))
        print(f"cold cache: {len(races)} races of {races[0][0]} processes, "
              f"{sum(k for _, k in races)} kills")
    for name, (met, of, kills) in totals.items():
        print(f"{name}: {met} of {of} faults, {kills} kills")
    print(f"{sum(t[0] for t in totals.values())} faults, seed {seed}, {time.monotonic() - began:.1f} s")
    if options.keep:
        print(f"folders: {shared}")
    else:
        shutil.rmtree(shared, ignore_errors=True)
    for failure in failures[:20]:
        print("FAILED", failure, file=sys.stderr)
    if len(failures) > 20:
        print(f"and {len(failures) - 20} more", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

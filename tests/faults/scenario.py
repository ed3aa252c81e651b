"""Programs that are started with a fault, and what must hold after one: see campaign.py."""
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import tempfile
import time

KINDS = ["open", "open_read", "write", "fsync", "rename", "mkdir", "truncate", "unlink", "link"]
ACTIONS = ["fail", "short", "kill", "kill_short", "kill_after"]
TIMEOUT_S = 600


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

    def run_without_memory(self, argv, folder, at):
        """One allocation fails, the `at`-th; 0: none. Returns the outcome, counts["malloc"] with it."""
        with tempfile.NamedTemporaryFile() as counter:
            outcome = self.run([str(a) for a in argv], folder,
                               LD_PRELOAD=str(self.libraries / "libfailing_malloc.so"),
                               FLOAT8_MALLOC_AT=str(at), FLOAT8_MALLOC_FILE=counter.name)
            outcome.counts["malloc"] = int(counter.read() or 0)
        return outcome

    def must(self, argv, folder, **more):
        outcome = self.run([str(a) for a in argv], folder, **more)
        expect(outcome.code == 0, f"{' '.join(map(str, argv))} exits {outcome.code}: {outcome.err}")
        return outcome


class Scenario:
    """A command that writes below folder/"work". `contents` gives what it wrote in a form that can be
    compared, None where there is nothing; it fails on a part."""
    name = ""
    temporaries = ()  # how the names begin that a kill may leave behind
    meets_full_memory = True
    writes_unreadable = True  # a folder that may be written to and not read; else it says so
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
        self.largest = max(p.stat().st_size for p in (folder / "work").rglob("*"))
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
                if "short" in action and kind != "write" or kind == "open_read" and action != "fail":
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

    def allocations(self):
        folder = self.new_folder()
        outcome = self.programs.run_without_memory(self.argv(folder), folder, 0)
        expect(outcome.code == 0, f"{self.name} fails without a fault: {outcome.err}")
        shutil.rmtree(folder)
        return outcome.counts["malloc"]

    def meet_full_memory(self, at):
        """One run with a failed allocation: it does without, or says what was missing."""
        folder = self.new_folder()
        outcome = self.programs.run_without_memory(self.argv(folder), folder, at)
        if outcome.code != 0:
            expect("out of memory" in outcome.err, f"exit code {outcome.code}: {outcome.err}")
        self.check_after(folder, outcome, may_leave=False)

    def meet_limit(self, blocks):
        """One run where a file has at most so many blocks of 512 bytes: past that SIGXFSZ is raised."""
        folder = self.new_folder()
        argv = [str(a) for a in self.argv(folder)]
        outcome = self.programs.run(["sh", "-c", 'ulimit -f "$0" && exec "$@"', str(blocks), *argv], folder)
        self.check_after(folder, outcome, may_leave=False)

    def meet_unreadable_folders(self):
        """One run where folders may be written to and not read."""
        folder = self.new_folder()
        outcome = self.programs.run([str(a) for a in self.argv(folder)], folder, under=folder / "work",
                                    FLOAT8_FAULT_UNREADABLE="1")
        if self.writes_unreadable:
            expect(outcome.code == 0, f"exits {outcome.code}: {outcome.err}")
            self.check_after(folder, outcome, may_leave=False)
        else:
            expect(outcome.code > 0 and "cannot be read" in outcome.err, f"exits {outcome.code}: {outcome.err}")
            expect(self.contents(folder) == self.old, "the contents are not the old ones")
            shutil.rmtree(folder)

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

#!/usr/bin/env python3
"""Faults at every file operation of the programs that write files; nothing may be lost.

Each scenario is a program that writes, in a folder with older contents. It runs with one fault: an
operation that fails, or a kill -9 before, in the middle of or after it (interpose.c). Then
  - the result is the old contents or the new ones, whole, and never a part under the final name;
  - a program that reports success has written the new contents;
  - a program that fails says so in a line on standard error, and leaves nothing else behind;
  - the same command, run again, succeeds with the new contents.
The same must hold where one allocation fails (failing_malloc.c), where files have a limit (ulimit -f),
and where the folder may be written to and not read; nothing is left behind. What is written into a
fifo or a pipe whose reader leaves ends with one line.
The short campaign takes a sample of the faults by a seed, with at least one of each kind of operation
and each kind of fault of each scenario; FLOAT8_LONG_CAMPAIGN takes all of them. Beside them are kills
at random moments, and cold caches that many processes fill at once.
"""
import argparse
import concurrent.futures
import os
import random
import shutil
import sys
import tempfile
import time

from programs import Collect, ColdCache, Export, ExportDatabase, GoneReader, Import, Prewarm, SaveScales, Verdicts
from scenario import Failed, Programs


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
    parser.add_argument("--sanitized", action="store_true", help="the programs bring a malloc of their own")
    parser.add_argument("--keep", action="store_true", help="keep the folders of what fails")
    options = parser.parse_args()
    long = os.environ.get("FLOAT8_LONG_CAMPAIGN", "") not in ("", "0")
    seed = int(os.environ.get("FLOAT8_CAMPAIGN_SEED", "18"))
    programs = Programs(options.tool, options.save_scales, options.libraries)
    scenarios = [Prewarm(programs), Import(programs, True), Import(programs, False),
                 Collect(programs),
                 Export(programs, "jsonl"), Export(programs, "table"), ExportDatabase(programs, "db"),
                 Verdicts(programs), SaveScales(programs)]
    scenarios = [s for s in scenarios if options.only is None or options.only in s.name]
    shared = tempfile.mkdtemp(prefix="float8-faults-")
    failures, totals, totals_of_memory, surroundings = [], {}, {}, 0
    began = time.monotonic()

    def attempt(name, what, body):
        try:
            body()
        except (Failed, OSError, ValueError, KeyError) as failure:
            failures.append(f"{name}, {what}: {failure!r}")

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
            if not options.fault and not options.sanitized and scenario.meets_full_memory:
                allocations = scenario.allocations()
                count = min(allocations, 400 if long else 8)
                totals_of_memory[scenario.name] = count
                for at in chance.sample(range(1, allocations + 1), count):
                    pending.append(pool.submit(attempt, scenario.name, f"allocation {at} fails",
                                               lambda s=scenario, n=at: s.meet_full_memory(n)))
            totals[scenario.name] = (len(faults), len(list(scenario.all_faults())), kills)
            for fault in faults:
                words = "{}:{}:{}".format(*fault)
                pending.append(pool.submit(attempt, scenario.name, words,
                                           lambda s=scenario, f=fault: s.meet(f)))
            if not options.fault:
                limits = range(scenario.largest // 512 + 2)
                limits = chance.sample(limits, min(len(limits), 40 if long else 2))
                surroundings += len(limits) + 1
                for blocks in limits:
                    pending.append(pool.submit(attempt, scenario.name, f"files of at most {blocks} blocks",
                                               lambda s=scenario, b=blocks: s.meet_limit(b)))
                pending.append(pool.submit(attempt, scenario.name, "folders that cannot be read",
                                           scenario.meet_unreadable_folders))
            for _ in range(kills):
                after = chance.uniform(0, 0.15)
                pending.append(pool.submit(attempt, scenario.name, f"killed after {after:.3f} s",
                                           lambda s=scenario, t=after: s.kill_at(t)))
        if not options.fault:
            gone = GoneReader(programs, [s for s in scenarios if hasattr(s, "target")])
            chance = random.Random(f"{seed} gone reader")
            for at, name in enumerate(gone.names):
                for _ in range(40 if long else 1):
                    read = chance.choice((1, 100, 4096, 65536, chance.randrange(1, 1 << 20)))
                    surroundings += 1
                    pending.append(pool.submit(attempt, name, f"the reader leaves after {read} bytes",
                                               lambda a=at, r=read: gone.meet(a, r)))
        for done in pending:
            done.result()
    if options.only is None or options.only in "cold cache":
        races = [(8, 0)] * 2 + [(8, 4)] * 2 if not long else [(32, 0)] * 5 + [(16, 8)] * 40
        for number, (processes, kills) in enumerate(races):
            attempt("cold cache", f"{processes} processes, {kills} kills",
                    lambda p=processes, k=kills, n=number: ColdCache(programs, p).race(shared, k, seed + n))
        print(f"cold cache: {len(races)} races of {races[0][0]} processes, "
              f"{sum(k for _, k in races)} kills")
    for name, (met, of, kills) in totals.items():
        print(f"{name}: {met} of {of} faults, {kills} kills")
    print(f"{sum(totals_of_memory.values())} failed allocations of {len(totals_of_memory)} programs")
    print(f"{surroundings} limits, folders and readers")
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

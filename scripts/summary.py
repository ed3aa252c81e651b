#!/usr/bin/env python3
"""One paragraph from `float8-tune filter --json` on standard input: what was decided and why."""
import collections
import json
import sys

answer = json.load(sys.stdin)
groups = collections.defaultdict(list)
for decision in answer["decisions"]:
    groups[decision["convert"]].append(decision)


def shapes(decisions):
    found = sorted({(d["in_features"], d["out_features"]) for d in decisions})
    return ", ".join(f"{k}x{n}" for k, n in found)


def linears(decisions):
    return sum(d.get("count", 1) for d in decisions)


evidence = collections.Counter()
for decision in answer["decisions"]:
    evidence[decision["evidence"]] += decision.get("count", 1)
print(f"{answer['recipe']}, {answer['tokens']} tokens, evidence from {answer['device']}: " +
      ", ".join(f"{count} {name}" for name, count in sorted(evidence.items())))
if groups[True]:
    print(f"  to float8   {linears(groups[True])} linears (K x N: {shapes(groups[True])})")
if groups[False]:
    print(f"  stay bf16   {linears(groups[False])} linears (K x N: {shapes(groups[False])})")
    print(f"              e.g. {groups[False][0]['fqn']}: {groups[False][0]['reason']}")
print(f"  all these linears together: {answer['estimated_model_speedup']:.2f}x of bf16")

#!/usr/bin/env python3
"""Tunes a model several times from nothing and counts equal winners.

    tools/repeatability.py build/release/kiln MODEL.json --target cpu --runs 10

Programs are compiled once; every tune races in a cache of its own that holds
nothing else. For each interval the winner that most tunes agree on counts as
the right one. Prints one line per interval where tunes disagree and the share
of winners that agree; --json prints one object, with all winners. --recheck measures
each winner against the default again, on inputs that no race has seen. Exit
code 1 when the share is below --at-least, or a winner is slower.
"""

import argparse
import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile


def prewarm(kiln, cache, arguments, accepted=(0,)):
    """Runs kiln prewarm and returns its object."""
    command = [kiln, "--cache", cache, "--json", "prewarm", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode not in accepted:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}")
    return json.loads(done.stdout.decode().splitlines()[-1])


def agreement(winners):
    """How many winners are those that most tunes chose, and of how many."""
    lists = winners.values()
    agree = sum(collections.Counter(labels).most_common(1)[0][1]
                for labels in lists)
    return agree, sum(len(labels) for labels in lists)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kiln")
    parser.add_argument("manifest")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--at-least", type=float, default=0.99,
                        help="share of equal winners (default 0.99)")
    parser.add_argument("--recheck", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", help="folder for the caches (default: none)")
    arguments, options = parser.parse_known_args()
    if arguments.runs < 1:
        parser.error(f"--runs is {arguments.runs}, must be at least 1")
    if not 0 <= arguments.at_least <= 1:
        parser.error(f"--at-least is {arguments.at_least}, must be a share")
    if shutil.which(arguments.kiln) is None:
        parser.error(f"{arguments.kiln} is no program")
    if arguments.keep and os.path.exists(arguments.keep):
        parser.error(f"--keep {arguments.keep} exists, must be a new folder")
    planning = [arguments.manifest, "--target", arguments.target, *options]

    folder = arguments.keep or tempfile.mkdtemp(prefix="kiln-repeat-")
    compiled = os.path.join(folder, "compiled")
    prewarm(arguments.kiln, compiled, [*planning, "--stop-after", "compile"])
    winners = collections.defaultdict(list)
    measured = slower = 0
    seconds = []
    for run in range(arguments.runs):
        cache = os.path.join(folder, f"run-{run + 1}")
        shutil.copytree(compiled, cache)
        report = prewarm(arguments.kiln, cache, planning)
        seconds.append(report["seconds"]["race"])
        for plan in report["plans"]:
            key = (plan["target"], ",".join(plan["requests"]), plan["m_max"])
            winners[key].append(plan["winner"])
        if arguments.recheck:
            # Exit code 1 says that a winner is slower.
            again = prewarm(arguments.kiln, cache, [*planning, "--recheck"],
                            accepted=(0, 1))["recheck"]
            measured += again["measured"]
            slower += again["slower"]
        # What is known so far, should the rest be cut off.
        agree, total = agreement(winners)
        rechecked = (f", {slower} of {measured} rechecked winners slower"
                     if arguments.recheck else "")
        print(f"tune {run + 1}/{arguments.runs}: {seconds[-1]:.1f} s, so far "
              f"{agree} of {total} winners agree{rechecked}", file=sys.stderr)
    if not arguments.keep:
        shutil.rmtree(folder)

    agree, total = agreement(winners)
    unanimous = 0
    disputed = []
    for key, labels in sorted(winners.items()):
        counts = collections.Counter(labels).most_common()
        unanimous += len(counts) == 1
        if len(counts) > 1:
            disputed.append({"target": key[0], "requests": key[1],
                             "m_max": key[2], "winners": dict(counts)})
    share = agree / total
    if arguments.json:
        print(json.dumps({"runs": arguments.runs, "intervals": len(winners),
                          "unanimous": unanimous, "winners": total,
                          "agree": agree, "share": share,
                          "race_seconds": seconds, "disputed": disputed,
                          "chosen": {f"{key[1]} m<={key[2]}": labels
                                     for key, labels in winners.items()},
                          "rechecked": measured, "slower": slower}))
    else:
        for row in disputed:
            print(f"{row['requests']} m<={row['m_max']} on {row['target']}:")
            for label, count in row["winners"].items():
                print(f"  {count} of {arguments.runs}  {label}")
        print(f"{arguments.runs} tunes, {len(winners)} intervals: {agree} of "
              f"{total} winners agree ({100 * share:.1f} %), {unanimous} "
              f"intervals unanimous")
        if arguments.recheck:
            print(f"{measured} winners other than the default measured again, "
                  f"{slower} slower than the default")
    sys.exit(0 if share >= arguments.at_least and slower == 0 else 1)


if __name__ == "__main__":
    main()

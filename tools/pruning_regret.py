#!/usr/bin/env python3
"""What pruning costs: the pruned race against the exhaustive one.

    tools/pruning_regret.py build/release/kiln MODEL.json --target cpu

Measures the device's ceilings, then tunes twice: with the default choice of
candidates, and with all, or with N per template (--against N). The regret of an
interval is the time of the pruned winner over that of the exhaustive one, both
as the exhaustive race measured them, less 1. Prints a line per interval, the
median regret and the share of the exhaustive race's time. Other options go to
kiln prewarm.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}")
    return json.loads(done.stdout.decode())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kiln")
    parser.add_argument("manifest")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--cache", help="folder (default: a temporary one)")
    parser.add_argument("--against", type=int, metavar="N",
                        help="race N candidates per template instead of all")
    parser.add_argument("--json", action="store_true")
    arguments, options = parser.parse_known_args()
    cache = arguments.cache or tempfile.mkdtemp(prefix="kiln-regret-")
    base = [arguments.kiln, "--cache", cache, "--json"]
    planning = [arguments.manifest, "--target", arguments.target, *options]
    many = (["--exhaustive"] if arguments.against is None
            else ["--max-candidates", str(arguments.against)])

    run([*base, "doctor", "--measure", "--target", arguments.target])
    pruned = run([*base, "prewarm", *planning])
    everything = run([*base, "prewarm", *planning, *many])
    whole = {(tuple(plan["requests"]), plan["m_max"]): plan
             for plan in everything["plans"]}
    rows = []
    for plan in pruned["plans"]:
        name = plan["requests"][0]
        explained = run([
            *base, "explain", *planning, *many, "--entry", name,
            "--tokens", str(plan["m_max"])])
        times = {row["label"]: row["median_ns"]
                 for row in explained["intervals"][0]["candidates"]
                 if row["median_ns"] is not None}
        full = whole[(tuple(plan["requests"]), plan["m_max"])]
        rows.append({
            "entry": name, "m_max": plan["m_max"],
            "regret": times[plan["winner"]] / times[full["winner"]] - 1,
            "noise_floor": full["noise_floor"],
            "candidates": [plan["candidates"], full["candidates"]],
            "race_seconds": [plan["race_seconds"], full["race_seconds"]],
            "winner": plan["winner"], "exhaustive": full["winner"]})
    regret = statistics.median(max(0.0, row["regret"]) for row in rows)
    share = (sum(row["race_seconds"][0] for row in rows) /
             sum(row["race_seconds"][1] for row in rows))
    if arguments.json:
        print(json.dumps({"rows": rows, "median_regret": regret,
                          "share_of_time": share}))
    else:
        for row in rows:
            print(f"{row['entry']} m<={row['m_max']}: regret "
                  f"{100 * row['regret']:+.2f} % (floor "
                  f"{100 * row['noise_floor']:.2f} %), {row['candidates'][0]} "
                  f"of {row['candidates'][1]} candidates, "
                  f"{row['race_seconds'][0]:.2f} of "
                  f"{row['race_seconds'][1]:.2f} s")
        print(f"median regret {100 * regret:.2f} %, {100 * share:.1f} % of the "
              f"exhaustive race's time")
    sys.exit(0 if regret <= 0.01 and share <= 0.25 else 1)


if __name__ == "__main__":
    main()

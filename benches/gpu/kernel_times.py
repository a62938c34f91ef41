"""Time per kernel of a command, by ncu: launches, sums and medians, the largest first.

    python3 benches/gpu/kernel_times.py OUT.txt COMMAND...

Under ncu kernels run one at a time, at clocks that nothing pins, and find L2 empty: shares are right to a few
percent, and the sum says nothing about a step's wall time.
"""

import collections
import csv
import io
import statistics
import subprocess
import sys

METRIC = "gpu__time_duration.sum"
# In base units, as newer and older versions call them.
UNITS = ("ns", "nsecond")


def rows(text):
    """(kernel, grid, block, nanoseconds) of every launch. What the command and ncu itself print stands before
    the table, whose first column is ID, or between its rows."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    for row in csv.DictReader(io.StringIO("\n".join(line for line in lines[begin:] if line.startswith('"')))):
        if row["Metric Name"] != METRIC or row["Metric Value"].lower() in ("n/a", ""):
            continue
        if row["Metric Unit"] not in UNITS:
            sys.exit(f"ncu gives {METRIC} in {row['Metric Unit']}, expected one of {UNITS}")
        value = float(row["Metric Value"].replace(",", ""))
        yield row["Kernel Name"], row["Grid Size"], row["Block Size"], value


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    out, command = sys.argv[1], sys.argv[2:]
    ncu = ["ncu", "--clock-control", "none", "--metrics", METRIC, "--print-units", "base", "--csv"]
    done = subprocess.run(ncu + command, capture_output=True, text=True)
    kernels = collections.defaultdict(list)
    for name, grid, block, nanoseconds in rows(done.stdout):
        kernels[name, grid, block].append(nanoseconds)
    total = sum(map(sum, kernels.values()))
    with open(out, "w") as file:
        print(" ".join(command), file=file)
        print(f"{sum(map(len, kernels.values()))} launches {total / 1e6:.1f} ms", file=file)
        for (name, grid, block), times in sorted(kernels.items(), key=lambda item: -sum(item[1])):
            name = name.split("(")[0][:70]
            print(
                f"{sum(times) / 1e6:9.2f} ms {100 * sum(times) / total:5.1f}% x {len(times):4}"
                f" med {statistics.median(times) / 1e3:9.1f} us {name} {grid} {block}",
                file=file,
            )
    if done.returncode != 0 or not kernels:
        print((done.stdout + done.stderr)[-2000:], file=sys.stderr)
        sys.exit(f"ncu ended with status {done.returncode} and {len(kernels)} kernels")


if __name__ == "__main__":
    main()

"""What `import stepwell` costs beyond `import torch`, in fresh interpreters."""

import statistics
import subprocess
import sys

NUM_INTERPRETERS = 11
PROGRAM = """
import time
start = time.perf_counter()
import torch
between = time.perf_counter()
import stepwell
stepwell.AdamW, stepwell.OffloadAdamW  # imported when first used
print(between - start, time.perf_counter() - between)
"""


def main() -> None:
    torch_seconds, stepwell_seconds = [], []
    for _ in range(NUM_INTERPRETERS):
        output = subprocess.run(
            [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
        ).stdout
        first, second = map(float, output.split())
        torch_seconds.append(first)
        stepwell_seconds.append(second)
    print(
        f"import stepwell: median {statistics.median(stepwell_seconds):.3f} s, "
        f"min {min(stepwell_seconds):.3f} s, max {max(stepwell_seconds):.3f} s, "
        f"beyond import torch: median {statistics.median(torch_seconds):.2f} s "
        f"({NUM_INTERPRETERS} fresh interpreters)"
    )


if __name__ == "__main__":
    main()

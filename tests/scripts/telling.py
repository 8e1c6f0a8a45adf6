"""A program that knows nothing of PyTorch. It tells how fast it is, in one of several ways; workers make it faster."""

import argparse
import json
import sys
import time


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=0.04)
    parser.add_argument("--lines", type=int, default=10**6)
    parser.add_argument(
        "--as", dest="way", choices=["line", "bar", "seconds", "words", "nothing", "file"], default="line"
    )
    parser.add_argument("--out", default=".")
    parser.add_argument("--anew", action="store_true", help="write the file anew instead of on")
    options = parser.parse_args()
    file = None
    if options.way == "file":
        file = open(f"{options.out}/metrics.jsonl", "w" if options.anew else "a", buffering=1)  # noqa: SIM115
    print("starting", len(sys.argv))
    for number in range(options.lines):
        began = time.monotonic()
        time.sleep(options.step_s / (1 + options.workers))
        seconds = time.monotonic() - began
        rate = options.batch_size / seconds
        if options.way == "line":
            print(f"step {number}: {rate:,.1f} images/s, loss 2.3")
        elif options.way == "bar":
            sys.stderr.write(f"\r{number}it [{rate:.1f} images/s]")
        elif options.way == "seconds":
            print(f"step {number} took {seconds:.5f} s")
        elif options.way == "words":
            print(f"step {number}: fast images/s")
        elif file is not None:
            print(json.dumps({"step": number, "images_per_second": rate}), file=file)


if __name__ == "__main__":
    main()

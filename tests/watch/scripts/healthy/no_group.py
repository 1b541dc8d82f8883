"""Makes thumbnails: every rank takes its part of the files, and nobody needs the others."""

import argparse
import os
import time

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--size", type=int, default=120)
    return parser.parse_args()


def decode(index, size):
    return [[(index * 31 + row * column) % 256 for column in range(size)] for row in range(size)]


def shrink(image, factor):
    size = len(image) // factor
    rows = []
    for y in range(size):
        cells = [image[y * factor + dy] for dy in range(factor)]
        rows.append([sum(row[x * factor] for row in cells) // factor for x in range(size)])
    return rows


def wait_for_server(rank):
    """The file server asks for a pause between requests."""
    time.sleep(0.3 + 0.1 * rank)


def main():
    args = parse()
    done = []
    for index in range(RANK, args.files, WORLD_SIZE):
        wait_for_server(RANK)
        thumbnail = shrink(decode(index, args.size), factor=8)
        done.append(sum(map(sum, thumbnail)))
    time.sleep(2.0 if RANK == 0 else 0.0)
    print(f"rank {RANK}: {len(done)} thumbnails, {sum(done) % 997}", flush=True)


if __name__ == "__main__":
    main()

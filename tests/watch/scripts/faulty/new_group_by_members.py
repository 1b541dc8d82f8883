"""Two readers share what they have read; later all ranks meet in a group with a timeout of its own."""

from datetime import timedelta

import torch
import torch.distributed as dist

READERS = (0, 1)


class Corpus:
    def __init__(self, rank):
        self.rank = rank
        self.lengths = torch.zeros(4, dtype=torch.int64)
        self.readers = self.join_readers()

    def join_readers(self):
        if self.rank not in READERS:
            return None
        return dist.new_group(list(READERS), timeout=timedelta(minutes=5), group_desc="readers")  # CAUSE

    def read(self, files):
        if self.readers is None:
            return
        for number, size in enumerate(files):
            if number % len(READERS) == self.rank:
                self.lengths[number] = size
        dist.all_reduce(self.lengths, group=self.readers)


def share(lengths):
    everybody = dist.new_group(timeout=timedelta(minutes=60), group_desc="everybody")  # WAITS
    dist.broadcast(lengths, src=0, group=everybody)
    return lengths


def main():
    dist.init_process_group("gloo")
    corpus = Corpus(dist.get_rank())
    corpus.read([120, 80, 300, 40])
    dist.barrier()
    lengths = share(corpus.lengths)
    print(f"rank {dist.get_rank()}: {lengths.tolist()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import torch.distributed as dist


class Names:
    short = lambda self: "x"

    def show(self):
        return self.short()


dist.init_process_group("gloo")
dist.barrier()

import datetime

import torch.distributed as dist

LIMIT = datetime.timedelta(seconds=30)
dist.init_process_group("gloo", timeout=LIMIT)
dist.monitored_barrier(timeout=LIMIT)

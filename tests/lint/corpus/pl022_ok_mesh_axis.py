import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DistributedSampler, TensorDataset

mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp", "tp"))
DistributedSampler(TensorDataset(torch.randn(100, 4)), mesh["dp"].size(), mesh.get_local_rank("dp"))

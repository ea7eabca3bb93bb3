"""The device that is compiled for without having it: public facts about NVIDIA's A100-SXM4-80GB, as XLA wants them.

An A800-80GB is the same chip with slower links between devices, so what is compiled for it is the same.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

#: Memory that a program may take of a device: 0.9 x 80 GB, the rest being the driver's, NCCL's and fragmentation's.
BUDGET = int(0.9 * 80e9)
#: Devices of the machine, and those over which one model lies.
DEVICES, TENSOR_PARALLEL = 8, 4

_A100_80GB = """
gpu_device_info {
  cuda_compute_capability { major: 8 minor: 0 }
  core_count: 108
  fpus_per_core: 64
  clock_rate_ghz: 1.41
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 166912
  shared_memory_per_core: 167936
  l2_cache_size: 41943040
  memory_bandwidth: 2039040000000
  device_memory_size: 85100068864
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
device_description_str: "NVIDIA A100-SXM4-80GB"
"""


@functools.cache
def devices() -> tuple[Any, ...]:
    """Descriptions of eight A100 in one machine. Needs the CUDA plugin's two wheels and JAX_PLATFORMS=cpu, no GPU."""
    topology = topologies.get_topology_desc(
        topology_name="a100x8", platform="cuda", target_config=_A100_80GB, topology=f"1x1x{DEVICES}"
    )
    return tuple(topology.devices)


def mesh() -> Mesh:
    """("data", "model") of 2 x 4."""
    return Mesh(np.array(devices()).reshape(-1, TENSOR_PARALLEL), ("data", "model"))

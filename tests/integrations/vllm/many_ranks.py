"""As offline.py, with more ranks than vLLM's shared-memory communicator for CPUs takes (8).

vLLM falls back to torch.distributed where ranks cannot share memory. Here they could; they are made to believe
otherwise. This runs in every process: those that are spawned import the main module first.
"""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from tests.integrations.vllm.offline import main

CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False

if __name__ == "__main__":
    main()

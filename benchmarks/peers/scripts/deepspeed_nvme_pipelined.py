"""DeepSpeed ZeRO-3, parameters and optimizer states on NVMe, read and written while others are updated."""

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from benchmarks.peers.script_turns import Turns
from zero_infinity.models.byte_gpt import ByteGPT

turns = Turns()
deepspeed.init_distributed("gloo")
config = {
    "train_micro_batch_size_per_gpu": turns.batch,
    "gradient_clipping": 0.0,
    "aio": {"block_size": 8388608, "queue_depth": 16, "intra_op_parallelism": 4},
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 4_200_000,
        "reduce_bucket_size": 4_200_000,
        "stage3_prefetch_bucket_size": 4_200_000,
        "stage3_max_live_parameters": 12_000_000,
        "offload_param": {
            "device": "nvme",
            "nvme_path": turns.directory,
            "buffer_count": 32,
            "buffer_size": 4_200_000,
            "max_in_cpu": 0,
        },
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": turns.directory,
            "pipeline_read": True,
            "pipeline_write": True,
            "buffer_count": 16,
        },
    },
}
torch.manual_seed(turns.seed)
with deepspeed.zero.Init(config_dict_or_path=config):
    model = ByteGPT(turns.shape)
optimizer = DeepSpeedCPUAdam(model.parameters(), lr=turns.lr, weight_decay=0.01)
model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

for inputs, targets in turns.batches():
    loss = model(inputs, targets)
    model.backward(loss)
    model.step()
    turns.stepped(loss)

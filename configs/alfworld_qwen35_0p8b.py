"""SPO++ on 128 ALFWorld tasks with Qwen3.5-0.8B.

Source, by setting:

  128 tasks, 50 interactions, whole history    SPO++ (arXiv:2608.24870) 3.1
  128 trajectories a step, 50 steps            SPO++ 3.1
  8 offline rollouts a task                    SPO++ A.2
  one request a prompt, old work drained       SPO++ 2.2, 2.4
  clip .2/.28, T 1, no truncation, lr 1e-6,    SPO++ Table 3
    weight decay .1, one epoch
  retention .875, dual clip 2, cap 2           SPO++ 2.2, 2.4 (objective spopp)
  context, tokens a turn, chat format, b2,     this project's own
    gradient norm, meshes

Command: python experiments/train.py --config=configs/alfworld_qwen35_0p8b.py
  --config.environment.path=PATH --config.cold_start.policy=WEIGHTS, PATH being
  a json_2.1.1 directory or a .jsonl[.xz] file with 128 games and WEIGHTS the
  model's directory; `--config=...py:tpu16` for 16 TPU chips. The samplers take
  devices of their own (experiments/serve_sampler.py).
Expected: area under the curve .53 -> .72 from SPO to SPO++ (SPO++ Table 1); not
  run here. --config.run.dry_run=True says what it needs.
"""

from ml_collections import config_dict

from configs import real_models
from spopp_jax.envs import household


def get_config(arg: str = '') -> config_dict.ConfigDict:
  config = real_models.get_config()
  config.run.update(
    name='alfworld_qwen35_0p8b', steps=50, checkpoint_every_steps=5
  )
  config.environment.update(
    task_types=household.TASK_TYPES, num_tasks=128, step_limit=50
  )
  config.model.update(preset='Qwen3.5-0.8B', chat_format='qwen3_5_nothink')
  config.sampler.update(slots=128, max_turn_tokens=128)
  config.dispatch.update(batch_size=128, in_flight=128)
  config.learner.row_buckets = (32, 64, 96, 128)
  real_models.lay_out(
    config, arg, {'gpu8': 4, 'tpu16': 8}, fsdp={'gpu8': 8, 'tpu16': 16}
  )
  return config

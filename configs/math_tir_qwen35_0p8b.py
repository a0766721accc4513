"""SPO++ on mathematics with a Python tool, with Qwen3.5-0.8B.

Source, by setting:

  1,500 prompts, 8 turns                       SPO++ (arXiv:2608.24870) 3.1, A.2
  128 trajectories an update, 200 updates      SPO++ 3.1 (100 plotted steps)
  prompt 2,048 and response 8,192 tokens       SPO (arXiv:2509.13232), tools
  all else                                     as alfworld_qwen35_0p8b.py

Command: python experiments/train.py --config=configs/math_tir_qwen35_0p8b.py
  --config.run.dry_run=True; there is no environment math_tir to train on yet.
Expected: area under the curve .217 -> .242 from SPO to SPO++ (SPO++ Table 1);
  not run here.
"""

from ml_collections import config_dict

from configs import alfworld_qwen35_0p8b


def get_config(arg: str = '') -> config_dict.ConfigDict:
  config = alfworld_qwen35_0p8b.get_config(arg)
  config.run.update(name='math_tir_qwen35_0p8b', steps=200)
  config.environment.update(name='math_tir', num_tasks=1500, step_limit=8)
  config.model.chat_format = 'qwen3_5'
  config.sampler.update(context_length=10_240, max_turn_tokens=8192)
  config.learner.row_length = 10_240
  return config

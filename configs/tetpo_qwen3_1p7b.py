"""TETPO on mathematics at lags up to 32, with Qwen3-1.7B-Base.

Source, by setting:

  8 completions x 64 prompts a step            TETPO, appendix B
  lag of each completion uniform in 1..32      TETPO, appendix B
  target 85% effective, 24 bisections          TETPO, appendix B
  prompts of at most 768 tokens                TETPO, appendix B
  lr 1e-6                                      as its baselines' recipes
  response of 7,424 tokens, T 1, all else      this project's own

Nothing is truncated in training, so that importance ratios are exact; the paper
has a proxy there.

Command: python experiments/train.py --config=configs/tetpo_qwen3_1p7b.py
  --config.run.dry_run=True; there is no environment math to train on yet.
Expected: not run here; M2PO reports an average of 36.6 on eight benchmarks for
  this model at a lag of 256 (arXiv:2510.01161).
"""

from ml_collections import config_dict

from configs import real_models


def get_config(arg: str = '') -> config_dict.ConfigDict:
  config = real_models.get_config()
  config.run.update(
    name='tetpo_qwen3_1p7b', steps=400, checkpoint_every_steps=20
  )
  config.environment.update(name='math', num_tasks=17_000, step_limit=1)
  config.model.update(preset='Qwen3-1.7B', chat_format='plain')
  config.sampler.update(slots=256, max_turn_tokens=7424)
  config.dispatch.update(
    batch_size=512, in_flight=512, staleness='scheduled', max_lag=32
  )
  config.objective.name = 'tetpo'
  config.learner.row_buckets = (128, 256, 384, 512)
  real_models.lay_out(
    config, arg, {'gpu8': 16, 'tpu16': 32}, fsdp={'gpu8': 8, 'tpu16': 16}
  )
  return config
